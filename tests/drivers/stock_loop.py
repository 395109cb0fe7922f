"""A loop of Megatron's own schedule, reduction and step: the reference for an example loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launcher import fork
from nursery import Nursery
from unicron.events.spec.model import Axes

LOOP = "\nwith adopt("
SEED, STAGE_SEEDS_APART = 1234, 100
MOMENTS = ("exp_avg", "exp_avg_sq")


def run(nursery: Nursery, example: Path, words: Sequence[str], axes: Axes) -> dict[str, Any]:
    """Train the example without Unicron; return the state, with the names of a checkpoint."""
    head, _ = example.read_text().split(LOOP)
    script, out = example.with_name("stock.py"), example.with_name("stock")
    out.mkdir()
    script.write_text(
        f"{head}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from stock_loop import train\n"
        "train(build, sample, forward, iterations=asked.iterations, rows=ROWS, sequence=SEQUENCE,\n"
        f"      num=asked.micro_batches, tp={axes.tp}, pp={axes.pp}, out={str(out)!r})\n"
    )
    num = axes.tp * axes.pp
    for code, log in fork(nursery, script, words, num):
        assert code == 0, log
    return _whole([torch.load(out / f"{rank}.pt") for rank in range(num)], axes)


def train(
    build: Callable[..., Any],
    sample: Callable[..., Any],
    forward: Callable[..., Any],
    *,
    iterations: int,
    num: int,
    rows: int,
    sequence: int,
    tp: int,
    pp: int,
    out: str,
) -> None:
    """Train `num` micro-batches in each iteration; save this rank's part of the state in `out`."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import moe_utils
    from unicron.workers.training.model import cpu_device

    cpu_device.prepare_device()
    cpu_device.install_stand_ins()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    seed = SEED + STAGE_SEEDS_APART * groups.pp.rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    ddps, optimizer, scheduler = build(groups, Axes(tp=tp, pp=pp), rank)
    ddps[0].config.finalize_model_grads_func = finalize_model_grads
    ddps[0].config.grad_scale_func = optimizer.scale_loss

    def forward_step(items: Iterator[Any], ddp: Any) -> Any:
        output, loss_of = forward(ddp, next(items))

        def summed(losses: Any) -> Any:
            loss, num_tokens = loss_of(losses)
            return loss, torch.tensor(num_tokens, dtype=torch.int), (loss.item(), num_tokens)

        return output, summed

    losses: list[float] = []
    auxiliary: dict[str, float] = {}
    for iteration in range(iterations):
        for ddp in ddps:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        moe_utils.clear_aux_losses_tracker()
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=(sample(iteration, item) for item in range(num)),
            model=ddps,
            num_microbatches=num,
            seq_length=sequence,
            micro_batch_size=rows,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(num * rows)
        if sums:
            losses.append(sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums))
        moe_utils.reduce_aux_losses_tracker_across_ranks()
        auxiliary = {
            name: entry["values"].double().mean().item() / num
            for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()
        }
    torch.save(
        {"losses": losses, "auxiliary": auxiliary, "tensors": _tensors(ddps, optimizer)},
        Path(out, f"{rank}.pt"),
    )
    dist.destroy_process_group()
    sys.stdout.flush()


def _tensors(ddps: Sequence[Any], optimizer: Any) -> dict[str, tuple[torch.Tensor, int]]:
    """This rank's tensors by name, each with the dim over which it is tensor-parallel, or -1."""
    from unicron.workers.training.model.random_draws import global_name

    moments: dict[Any, Any] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        moments |= part.optimizer.state
    found: dict[str, tuple[torch.Tensor, int]] = {}
    for ddp in ddps:
        module = getattr(ddp.module, "module", ddp.module)  # without Float16Module
        for name, param in module.named_parameters():
            dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else -1
            whole = global_name(module, name)
            found[f"model.{whole}"] = param.detach(), dim
            main = getattr(param, "main_param", None)
            if main is not None:
                found[f"master.{whole}"] = main, dim
            for moment in MOMENTS:
                of_one = moments[param if main is None else main]
                found[f"optimizer.{moment}.{whole}"] = of_one[moment], dim
        for name, buffer in module.named_buffers():  # also some that are no state
            found[f"buffer.{global_name(module, name)}"] = buffer, -1
    return found


def _whole(parts: Sequence[Mapping[str, Any]], axes: Axes) -> dict[str, Any]:
    """The whole state, from the parts of the ranks: tensor-parallel ranks are neighbours."""
    state: dict[str, Any] = {
        "numbers.losses": parts[-1]["losses"],
        "numbers.adam_step": len(parts[-1]["losses"]),
        # Each tensor-parallel rank has its own z-loss, of its part of the sequence.
        "numbers.auxiliary_losses": {
            name: sum(part["auxiliary"][name] for part in parts) / len(parts)
            for name in parts[0]["auxiliary"]
        },
    }
    for first in range(0, len(parts), axes.tp):
        for name, (tensor, dim) in parts[first]["tensors"].items():
            pieces = [part["tensors"][name][0] for part in parts[first : first + axes.tp]]
            state[name] = tensor if dim < 0 else torch.cat(pieces, dim)
    return state

"""The reference run: a task trained undisturbed by a plain Megatron loop, in one process.

`python tests/drivers/reference.py --spec FILE.json --out DIR [--iterations N]
[--order K] [--keep N ...]`, or `--compare CKPT ... --to CKPT ...`.

It shares with a rank only the model, the data and the random draws. Everything that could hide an
error of the recovery is Megatron's own: the parallel state, the forward-backward schedule and the
gradient finalisation. FILE is a job spec as JSON. With `--iterations` the optimizer schedule is
still that of the whole task. The differences between the orders of summation (`--order`) are the
noise: two equal trainings may differ by that much. The output is JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace
from unicron.events.errors import UsageError
from unicron.events.spec.job import Train, parse
from unicron.events.spec.parallelism import Parallel

if TYPE_CHECKING:
    from unicron.workers.training.model.text_data import Text
    from unicron.workers.training.model.trainee import TrainingModel


NOISE_TIMES_MAX = 3
"""The result of `tolerance`, in units of the largest measured noise."""
ROUNDING_RATIO = 2.0**-23
"""Relative resolution of float32. Noise that is measured a few times can be smaller by chance."""
NUM_ORDERS = 3


class Difference(Struct, frozen=True, kw_only=True):
    """The largest differences between two trainings. Parameters are their fp32 masters, if any.

    `param_rel` is |a - b| / |b| of all parameters as one vector: a tensor whose true gradient is
    zero (the bias of the keys) is only noise. `optimizer_rel` is the larger of the same ratios of
    Adam's moments; infinite if the numbers of optimizer steps differ.
    """

    num_losses: int
    loss_rel: float
    param_rel: float
    optimizer_rel: float


def orders(num: int, num_orders: int = NUM_ORDERS) -> list[list[int]]:
    """The orders to sum `num` micro-batches in: ascending, descending, the others shuffled."""
    up, shuffles = list(range(num)), random.Random(num)
    return [up, up[::-1], *(shuffles.sample(up, num) for _ in range(num_orders - 2))]


def tolerance(noises: Sequence[float]) -> float:
    """The largest difference that counts as equal, from the noises between orders of summation; NaN
    if one is not finite. No difference is below NaN."""
    if not all(map(math.isfinite, noises)):
        return math.nan
    return NOISE_TIMES_MAX * max(ROUNDING_RATIO, *noises)


def state_folder(out: Path, iteration: int) -> Path:
    """Where `train_undisturbed` saves the state after `iteration` iterations, if in `keep`."""
    return out / f"iter-{iteration}"


def train_undisturbed(
    train: Train,
    out: Path,
    *,
    order: Sequence[int] | None = None,
    tell: Callable[[int, float], None] | None = None,
    num_iterations: int | None = None,
    keep: Collection[int] = (),
    watch: Callable[[TrainingModel], None] = lambda trainee: None,
) -> None:
    """Train; the final state goes to `out`/final. `order`: of the micro-batches in a sum. `keep`:
    the numbers of iterations after which the state also goes to `state_folder`. `watch` is given
    the model before its first iteration."""
    import torch.distributed as dist
    from unicron.workers.training.model import cpu_device

    with cpu_device.uncompiled():
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from unicron.workers.training.checkpoint import checkpoint
        from unicron.workers.training.dependencies import private_megatron
        from unicron.workers.training.model import text_data
        from unicron.workers.training.process.history import History

    trainee = _built(train)
    watch(trainee)
    words = text_data.load(train.data, train.model.sequence)
    items = list(order if order is not None else range(train.num_micro_batches))
    assert sorted(items) == list(range(train.num_micro_batches))
    history = History()
    num_iterations = train.iterations if num_iterations is None else num_iterations

    def add_up(iteration: int) -> list[tuple[float, int]]:
        trainee.clear()
        sums: list[tuple[float, int]] = get_forward_backward_func()(
            forward_step_func=partial(_forward, trainee, words),
            data_iterator=iter([(iteration, item) for item in items]),
            model=trainee.ddps,
            num_microbatches=len(items),
            seq_length=train.model.sequence,
            micro_batch_size=train.batch.micro,
            forward_only=False,
        )
        return sums

    for iteration in range(num_iterations):
        if trainee.exact is not None:
            sums = _step_exactly(trainee, partial(add_up, iteration))
        else:
            sums = add_up(iteration)
            stepped, _, _ = trainee.optimizer.step()
            if stepped:
                trainee.scheduler.step(train.batch.global_)
        loss = _loss(train, sums)
        history.add(iteration, loss, 0.0)
        if tell is not None:
            tell(iteration, loss)
        if iteration + 1 in keep:
            checkpoint.save(str(state_folder(out, iteration + 1)), trainee, iteration + 1, history)
    shutil.rmtree(out / "final", ignore_errors=True)
    checkpoint.save(str(out / "final"), trainee, num_iterations, history)
    private_megatron.clear_globals()
    dist.destroy_process_group()


def _built(train: Train) -> TrainingModel:
    """The model in a world of this process, with Megatron's own reduction and division."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from unicron.workers.training.model import cpu_device
    from unicron.workers.training.model import trainee as model

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = cpu_device.prepare_device()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    # One process has nothing to overlap, so it uses Megatron's plain reduction for every spec.
    trainee = model.build(
        replace(train, overlap=False, bucket_params=0, parallel=Parallel()), device
    )
    trainee.ddps[0].config.finalize_model_grads_func = finalize_model_grads
    trainee.ddps[0].config.grad_scale_func = trainee.optimizer.scale_loss
    # If this is False, Megatron's schedule divides the loss sum of each micro-batch by its number
    # of tokens and by the number of micro-batches, as in Megatron's own training loop.
    trainee.ddps[0].config.calculate_per_token_loss = train.loss == "per_token"
    return trainee


class Unwatched:
    """A Watch of a reduction that nothing ends."""

    def bucket_begins(self, bucket: int) -> None:
        return

    def bucket_ends(self, bucket: int) -> None:
        return

    def mirror_begins(self) -> None:
        return

    def tied_begins(self) -> None:
        return

    def check(self) -> None:
        return


def _step_exactly(
    trainee: TrainingModel, add_up: Callable[[], list[tuple[float, int]]]
) -> list[tuple[float, int]]:
    """An iteration with exact sums, in one process and undisturbed: what `add_up` returns."""
    from types import SimpleNamespace

    import torch.distributed as dist
    from unicron.workers.training.communicators.operations import Operations
    from unicron.workers.training.model.megatron_exact import MegatronExactGradients
    from unicron.workers.training.model.megatron_step import scale_of, step
    from unicron.workers.training.model.step_barrier import norm_square_of

    assert trainee.exact is not None
    world: Any = SimpleNamespace(dp_cp=dist.group.WORLD, tp=dist.group.WORLD, embd=dist.group.WORLD)
    reduction = MegatronExactGradients(trainee, trainee.exact)
    trainee.ddps[0].config.finalize_model_grads_func = None
    redone = 0
    while True:
        trainee.exact.begin(scale_of(trainee.optimizer), redone)
        sums = add_up()
        reduction.reduce(Operations(world), Unwatched())
        found = reduction.barrier()
        if not found.num_overflows:
            break
        redone += 1
    step(
        trainee,
        sum(number for _, number in sums),
        lambda event: None,
        norm_square=norm_square_of(found.limbs),
        found_inf=found.num_not_finite > 0,
    )
    if not found.num_not_finite:
        reduction.stepped()
    return sums


def _forward(
    trainee: TrainingModel, words: Text, iterator: Iterator[tuple[int, int]], ddp: Any
) -> tuple[Any, Any]:
    """The forward_step of Megatron's schedule: a micro-batch's losses, and their sum function."""
    import torch

    iteration, item = next(iterator)
    train = trainee.train
    trainee.draw.at(iteration, item)
    tokens = words.sample(
        train.seed, iteration, item, rows=train.batch.micro, sequence=train.model.sequence
    ).to(trainee.device)
    mask = (tokens[:, :-1] != 0).float()

    def summed(losses: torch.Tensor) -> tuple[Any, Any, tuple[float, int]]:
        loss, num_tokens = (losses.float() * mask).sum(), mask.sum().to(torch.int)
        return loss, num_tokens, (loss.item(), int(num_tokens.item()))

    return trainee.forward(ddp, tokens), summed


def _loss(train: Train, sums: Sequence[tuple[float, int]]) -> float:
    """The loss of an iteration, from the loss sum and the token count of each micro-batch."""
    if train.loss == "per_token":
        return math.fsum(part for part, _ in sums) / max(sum(number for _, number in sums), 1)
    import torch

    # In float32, as the loss that is differentiated.
    return math.fsum(
        (torch.tensor(part) / max(number, 1) / len(sums)).item() for part, number in sums
    )


def compare(one: Path | str, other: Path | str) -> Difference:
    """Compare two checkpoints, read with nothing but torch. `other` is the reference."""
    return difference(read(one), read(other))


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> Difference:
    """Compare two states, as `read` returns them. `theirs` is the reference."""
    losses = list(zip(mine["numbers.losses"], theirs["numbers.losses"], strict=True))
    kind = "master." if any(name.startswith("master.") for name in theirs) else "model."
    moments = [_gap(mine, theirs, f"optimizer.{moment}.") for moment in ("exp_avg", "exp_avg_sq")]
    steps = mine["numbers.adam_step"], theirs["numbers.adam_step"]
    return Difference(
        num_losses=len(losses),
        loss_rel=_most([_ratio(abs(a - b), abs(b)) for a, b in losses]),
        param_rel=_gap(mine, theirs, kind),
        optimizer_rel=_most(moments) if steps[0] == steps[1] else math.inf,
    )


def _gap(mine: dict[str, Any], theirs: dict[str, Any], kind: str) -> float:
    """The relative difference of all tensors of a kind, as one vector."""
    gaps, norms = [0.0], [1e-300]
    for name, wanted in theirs.items():
        if name.startswith(kind):
            # A sharded optimizer stores the moments of a parameter flat.
            gap = (mine[name].reshape(wanted.shape) - wanted).double()
            gaps.append(gap.square().sum().item())
            norms.append(wanted.double().square().sum().item())
    return math.sqrt(math.fsum(gaps) / math.fsum(norms))


def read(folder: Path | str) -> dict[str, Any]:
    """Read all tensors and numbers of a checkpoint (a folder or a URL). Needs no model."""
    from stored_tensors import whole_tensor
    from unicron.workers.training.checkpoint.stored_state import StoredState

    stored = StoredState(str(folder))
    return {
        key: whole_tensor(stored, key) if key in stored.kinds else stored.value(key)
        for key in stored.keys
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same bits; times differ."""
    import torch

    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if not name.startswith("numbers.step_s")
        and not (
            torch.equal(value, other[name])
            if isinstance(value, torch.Tensor)
            else value == other[name]
        )
    ]


def _ratio(gap: float, whole: float) -> float:
    """The relative gap; a loss without tokens is 0, and every gap from 0 is infinite."""
    if whole:
        return gap / whole
    return math.inf if gap else 0.0


def _most(values: Sequence[float]) -> float:
    """The largest value; infinite if one is NaN."""
    return math.inf if any(math.isnan(value) for value in values) else max(values, default=0.0)


def main() -> None:
    """Train if a spec is given, and compare checkpoints if some are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, help="a job spec as JSON: train it")
    parser.add_argument("--out", type=Path, help="where the final state goes, in final/")
    parser.add_argument("--iterations", type=int, metavar="N", help="stop after so many")
    parser.add_argument(
        "--order",
        type=int,
        default=0,
        choices=range(NUM_ORDERS),
        help="sum micro-batches up (0, the default), down (1) or shuffled (2)",
    )
    parser.add_argument(
        "--keep",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help="save the state after N iterations, too, in iter-N/",
    )
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="CKPT", help="checkpoints to compare"
    )
    parser.add_argument(
        "--to",
        nargs="+",
        default=[],
        metavar="CKPT",
        help="the checkpoint of the reference run for each of them",
    )
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.spec is not None:
        if asked.out is None:
            parser.error("--spec needs --out")
        spec = parse(json.loads(asked.spec.read_text()))
        if spec.train is None:
            raise UsageError(
                "a command task has no reference run", "give the spec of a train: task"
            )
        train_undisturbed(
            spec.train,
            asked.out,
            order=orders(spec.train.num_micro_batches)[asked.order],
            tell=lambda iteration, loss: _say({"iteration": iteration, "loss": loss}),
            num_iterations=asked.iterations,
            keep=asked.keep,
        )
    if len(asked.compare) != len(asked.to):
        parser.error("--compare needs as many checkpoints after --to")
    for one, other in zip(asked.compare, asked.to, strict=True):
        gap = compare(one, other)
        _say({name: getattr(gap, name) for name in gap.__struct_fields__})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

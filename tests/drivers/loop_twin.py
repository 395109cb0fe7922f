"""The reference run of a custom loop: its own functions under Megatron's schedule, in one process.

As reference.py for a `train:` task. It shares with a rank only the objects that `build` makes and
the seeds of the micro-batches; reduction, scaling, clipping and step are Megatron's own.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from unicron.events.spec.job import JobSpec, Loop
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel
from unicron.workers.training import adopt as adopt_package
from unicron.workers.training.adopt.custom_loop import LoopWorkload
from unicron.workers.training.checkpoint import checkpoint
from unicron.workers.training.communicators import process_groups
from unicron.workers.training.model import cpu_device
from unicron.workers.training.process.history import History

LIMIT_S = 60.0
Item = tuple[int, int]
"""Iteration and micro-batch."""


def train_stock(spec: JobSpec, out: Path, order: Sequence[int]) -> None:
    """Run the spec's script up to its `adopt`, then train what it gives. The micro-batches are
    summed in this order; the final state goes to `out`/final. The script must give `samples` and
    `iterations`."""
    assert spec.loop is not None
    assert spec.command is not None
    adopt_package.adopt = partial(_train, spec.loop, out, order)  # type: ignore[assignment]
    sys.argv = list(spec.command)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _train(loop: Loop, out: Path, order: Sequence[int], *, build: Any, sample: Any, forward: Any,
           samples: int, sequence: int, loss: str = "per_token", seed: int = 1234, **unused: Any
           ) -> None:
    """In place of `adopt`. The rest of the script does not run."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device = cpu_device.prepare_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(),
                            rank=0, world_size=1)
    work = LoopWorkload(replace(loop, parallel=Parallel()), build, sample, forward,
                        samples_num=samples, sequence=sequence, loss=loss, seed=seed)
    groups = process_groups.build(None, LIMIT_S)
    work.on_groups(groups)
    trainee = work.build(device, groups, Axes(), 0)
    config = trainee.ddps[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = trainee.optimizer.scale_loss
    # If this is False, Megatron's schedule divides the loss sum of each micro-batch by its number
    # of tokens and by the number of micro-batches.
    config.calculate_per_token_loss = loss == "per_token"

    def step(iterator: Iterator[Item], ddp: Any) -> tuple[Any, Any]:
        trainee.draw.at(*(item := next(iterator)))
        found, of = forward(ddp, sample(*item))

        def summed(losses: Any) -> tuple[Any, Any, tuple[float, int]]:
            loss_sum, num = of(losses)
            return loss_sum, torch.tensor(num), (loss_sum.item(), num)

        return found, summed

    history = History()
    for iteration in range(loop.iterations):
        trainee.clear()
        sums = get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter([(iteration, item) for item in order]),
            model=trainee.ddps, num_microbatches=len(order), seq_length=sequence,
            micro_batch_size=samples, forward_only=False)
        if trainee.optimizer.step()[0]:
            trainee.scheduler.step(len(order) * samples)
        history.add(iteration, _loss(loss, sums), 0.0)
    checkpoint.save(str(out / "final"), trainee, loop.iterations, history)
    sys.exit()


def _loss(loss: str, sums: Sequence[tuple[float, int]]) -> float:
    if loss == "per_token":
        return sum(part for part, _ in sums) / sum(num for _, num in sums)
    return sum(part / num for part, num in sums) / len(sums)

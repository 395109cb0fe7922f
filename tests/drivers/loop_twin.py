"""The reference run of a custom loop: its own functions under Megatron's schedule, in one process.

As reference.py for a `train:` task. It shares with a rank only the objects that `build` makes, the
initial weights and the seeds of the micro-batches; reduction, scaling, clipping and step are
Megatron's own.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from unicron.events.spec.job import JobSpec, Loop
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import is_plain
from unicron.workers.training import adopt as adopt_package
from unicron.workers.training.adopt.custom_loop import LoopWorkload
from unicron.workers.training.checkpoint import checkpoint
from unicron.workers.training.communicators.communicators import Communicators
from unicron.workers.training.model import cpu_device
from unicron.workers.training.process.history import History
from unicron.workers.training.state_recovery import part_builder, with_shards

Item = tuple[int, int]
"""Iteration and micro-batch."""


class _Adopted(Exception):
    """The script has called `adopt`."""


def given_by(command: Sequence[str]) -> dict[str, Any]:
    """Run a script up to its `adopt`; the arguments that it gives."""

    def adopt(**given: Any) -> None:
        raise _Adopted(given)

    real, words = adopt_package.adopt, sys.argv
    adopt_package.adopt, sys.argv = adopt, list(command)  # type: ignore[assignment]
    try:
        runpy.run_path(command[0], run_name="__main__")
    except _Adopted as one:
        given: dict[str, Any] = one.args[0]
        return given
    finally:
        adopt_package.adopt, sys.argv = real, words
    raise AssertionError(f"{command[0]} has not adopted Unicron")


@contextmanager
def one_member() -> Generator[tuple[torch.device, Communicators]]:
    """A world of one process: the device, and its communicators."""
    device = cpu_device.prepare_device()
    communicators = Communicators("127.0.0.1", device)
    communicators.meet(1, 0, 1, communicators.endpoint, b"")
    communicators.up(Axes(dp=communicators.num_members))
    yield device, communicators
    communicators.down([])


class StockLoop:
    """What a script has given to `adopt`, under Megatron's own schedule. The initial weights are
    those of the largest layout of the loop, as under Unicron."""

    def __init__(
        self,
        loop: Loop,
        device: torch.device,
        communicators: Communicators,
        given: Mapping[str, Any],
    ) -> None:
        self._given = given
        self._divides = given.get("loss", "per_token") == "per_micro_batch"
        work = LoopWorkload(
            replace(loop, parallel=replace(loop.parallel, optimizer="whole")),
            given["build"],
            given["sample"],
            given["forward"],
            samples_num=given["samples"],
            sequence=given["sequence"],
            loss=given.get("loss", "per_token"),
        )
        work.on_groups(communicators.groups)
        self.trainee = work.build(device, communicators.groups, Axes(), 0)
        if not is_plain(loop.parallel.largest):
            work.begin(with_shards(self.trainee), part_builder(work, communicators, device))
        self.history = History()
        config = self.trainee.ddps[0].config
        from megatron.core.distributed import finalize_model_grads

        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.trainee.optimizer.scale_loss
        # If this is False, Megatron's schedule divides the loss sum of each micro-batch by its
        # number of tokens and by the number of micro-batches.
        config.calculate_per_token_loss = not self._divides

    def run(self, iteration: int, order: Sequence[int]) -> float:
        """Train an iteration, its micro-batches summed in this order; its loss."""
        self.trainee.clear()
        loss = self._pass(iteration, order, forward_only=False)
        if self.trainee.optimizer.step()[0]:
            self.trainee.scheduler.step(len(order) * self._given["samples"])
        self.history.add(iteration, loss, 0.0)
        return loss

    def loss(self, iteration: int, order: Sequence[int] = (0,)) -> float:
        """The loss of an iteration that is not trained."""
        return self._pass(iteration, order, forward_only=True)

    def _pass(self, iteration: int, order: Sequence[int], *, forward_only: bool) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sums: list[tuple[float, int]] = get_forward_backward_func()(
            forward_step_func=self._forward,
            model=self.trainee.ddps,
            data_iterator=iter([(iteration, item) for item in order]),
            num_microbatches=len(order),
            seq_length=self._given["sequence"],
            micro_batch_size=self._given["samples"],
            forward_only=forward_only,
        )
        if self._divides:
            return sum(part / num for part, num in sums) / len(sums)
        return sum(part for part, _ in sums) / sum(num for _, num in sums)

    def _forward(self, iterator: Iterator[Item], ddp: Any) -> tuple[Any, Any]:
        item = next(iterator)
        self.trainee.draw.at(*item)
        out, of = self._given["forward"](ddp, self._given["sample"](*item))

        def summed(losses: Any) -> tuple[Any, Any, tuple[float, int]]:
            loss_sum, num = of(losses)
            return loss_sum, torch.tensor(num, device=loss_sum.device), (loss_sum.item(), num)

        return out, summed


def train_stock(spec: JobSpec, out: Path, order: Sequence[int]) -> None:
    """Train the spec's script; the final state goes to `out`/final."""
    assert spec.loop is not None
    assert spec.command is not None
    given = given_by(list(spec.command))
    with one_member() as (device, communicators):
        stock = StockLoop(spec.loop, device, communicators, given)
        for iteration in range(spec.loop.iterations):
            stock.run(iteration, order)
        checkpoint.save(str(out / "final"), stock.trainee, spec.loop.iterations, stock.history)

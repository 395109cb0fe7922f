"""The peers' training loop in a layout: Megatron's own schedule, reduction and optimizer step.

As a program (`python -m bench.detection.layout_loop`): a rank under env:// rendezvous. LAYOUT has
tp, pp and dp; the timeout of every collective is UNICRON_BENCH_COLLECTIVE_S.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.dependencies import private_megatron
    from unicron.workers.training.model import trainee as model
from bench.recovery.loop import BUILD, COLLECTIVE, Loop

LAYOUT = "UNICRON_BENCH_LAYOUT"


class LayoutLoop(Loop):
    """One rank of the layout."""

    def build(self) -> None:
        tp, pp, dp = map(int, os.environ[LAYOUT].split(","))
        self.axes, self.place = Axes(tp=tp, pp=pp, dp=dp), dist.get_rank()
        cpu_device.install_stand_ins()
        self.groups = process_groups.build(self.axes, COLLECTIVE.total_seconds())
        private_megatron.publish_globals(self.groups, self.axes.chunks)
        self.trainee = model.build(self.train, self.device, self.groups, self.axes, self.place)
        config = self.trainee.ddps[0].config
        config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=self.groups)
        config.grad_scale_func = self.trainee.optimizer.scale_loss

    def train_for_ever(self) -> None:
        """Train until killed."""
        dist.barrier()
        num = self.train.num_micro_batches
        mine = range(coordinates(self.axes, self.place).dp, num, self.axes.dp)
        while self.iteration < self.train.iterations:
            self.passes(mine)
            self.step_optimizer()

    def passes(self, items: Iterable[int]) -> None:
        """Forward and backward of these micro-batches, and the reduction over the layout's dp."""
        items = list(items)
        self.trainee.clear()
        get_forward_backward_func(pp_size=self.axes.pp)(
            forward_step_func=self._forward,
            data_iterator=iter(items),
            model=self.trainee.ddps,
            num_microbatches=len(items),
            seq_length=self.train.model.sequence,
            micro_batch_size=self.train.batch.micro,
            forward_only=False,
            pg_collection=self.groups,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.trainee.ddps[0].config)
            if self.axes.pp > 1
            else None,
        )

    def step_optimizer(self) -> None:
        """Step the optimizer and the schedule."""
        self.trainee.optimizer.step()
        self.trainee.scheduler.step(self.train.batch.global_)
        self.note("done")
        self.iteration += 1

    def _forward(self, items: Iterator[int], ddp: Any) -> tuple[Any, Any]:
        trainee, train, item = self.trainee, self.train, next(items)
        self.note("forward", item)
        trainee.draw.at(self.iteration, item)
        tokens = trainee.given(
            self.text.sample(
                train.seed,
                self.iteration,
                item,
                rows=train.batch.micro,
                sequence=train.model.sequence,
            )
        )

        def summed(per_token: torch.Tensor) -> tuple[Any, Any, float]:
            loss = trainee.loss_of(per_token, tokens)
            return loss, trainee.num_tokens(tokens).to(torch.int), loss.item()

        return trainee.forward(ddp, tokens), summed


def main() -> None:
    """One rank, until killed."""
    dist.init_process_group("gloo", timeout=BUILD)
    loop = LayoutLoop(dist.get_rank())
    loop.build()
    loop.train_for_ever()


if __name__ == "__main__":
    main()

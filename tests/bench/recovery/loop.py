"""The training loop of all peers, with Unicron's model, data and trace: plain Megatron-core.

As a program (`python -m bench.recovery.loop`): one rank under env:// rendezvous. The rank is either
bare, or a worker of torchrun with a checkpoint every SAVE_EVERY_NUM iterations.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from unicron.events.spec.job import parse
from unicron.events.spec.model import Axes
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from megatron.core.distributed import finalize_model_grads
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.model import text_data
    from unicron.workers.training.model import trainee as model
from bench.recovery.job import BUILD_S_MAX, COLLECTIVE_S_MAX, SAVE_EVERY_NUM
from rank_trace import Trace

COLLECTIVE = datetime.timedelta(
    seconds=float(os.environ.get("UNICRON_BENCH_COLLECTIVE_S", COLLECTIVE_S_MAX))
)
ALONE = datetime.timedelta(hours=1)
BUILD = datetime.timedelta(seconds=BUILD_S_MAX)
SPEC, FOLDER = "UNICRON_BENCH_SPEC", "UNICRON_BENCH_FOLDER"


class Loop:
    """Model, optimizer and text of one rank, and the trace of its training.

    `rank` names the process in the trace, whatever its current rank in the group.
    """

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.device = cpu_device.prepare_device()
        train = parse(json.loads(Path(os.environ[SPEC]).read_text())).train
        assert train is not None
        self.train = train
        self.folder = Path(os.environ[FOLDER])
        traced = os.environ.get("UNICRON_BENCH_TRACE", "1") != "0"
        self.trace = Trace(str(self.folder / "trace") if traced else "", 1, rank, 1)
        (self.folder / "trace").mkdir(exist_ok=True, parents=True)
        self._told = os.open(
            self.folder / "trace" / f"told-{rank}.jsonl",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o644,
        )
        self.text = text_data.load(train.data, train.model.sequence)
        self.generation = 0
        self.iteration = 0
        self.loss_sum, self.num_tokens, self.num_done = 0.0, 0, 0

    def build(self) -> None:
        """Build model and groups from the seed, in the current process group."""
        self.groups = process_groups.build(Axes(dp=dist.get_world_size()), COLLECTIVE_S_MAX)
        self.trainee = model.build(self.train, self.device, self.groups)

    def micro_batches(self, items: Iterable[int]) -> None:
        """Forward and backward of these micro-batches into the local gradient sum."""
        trainee, train = self.trainee, self.train
        trainee.clear()
        self.loss_sum, self.num_tokens, self.num_done = 0.0, 0, 0
        for item in items:
            self.note("micro_batch", item)
            trainee.draw.at(self.iteration, item)
            tokens = self.text.sample(
                train.seed,
                self.iteration,
                item,
                rows=train.batch.micro,
                sequence=train.model.sequence,
            )
            loss = trainee.loss(tokens)
            loss.backward()
            self.loss_sum += loss.item()
            self.num_tokens += int(trainee.num_tokens(tokens))
            self.num_done += 1
        self.note("reduce")

    def stats(self) -> torch.Tensor:
        """Loss sum, token count and number of micro-batches of this rank."""
        return torch.tensor([self.loss_sum, self.num_tokens, self.num_done], dtype=torch.float64)

    def reduce(self) -> torch.Tensor:
        """Sum the stats over all ranks; then run Megatron's gradient reduction, which divides."""
        stats = self.stats()
        dist.all_reduce(stats)
        finalize_model_grads(
            self.trainee.ddps, torch.tensor(int(self.num_tokens)), pg_collection=self.groups
        )
        return stats

    def step(self, stats: torch.Tensor, *, tells: bool) -> None:
        """Step the optimizer and the schedule. `tells`: this rank reports the loss."""
        self.trainee.optimizer.step()
        self.trainee.scheduler.step(self.train.batch.global_)
        self.note("done")
        if tells:
            loss_sum, num_tokens, num_done = stats.tolist()
            self.tell(
                event="loss",
                iteration=self.iteration,
                loss=loss_sum / num_tokens,
                num_done=int(num_done),
                generation=self.generation,
                at_s=time.time(),
            )
        self.iteration += 1

    def run(self, place: int, num_members: int, saves: Callable[[], Any] | None) -> None:
        """Train until killed. `saves`: context in which the first member writes a checkpoint."""
        dist.barrier()
        # The bare loop is stopped while other systems are measured; no fault is injected into it.
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE if saves else ALONE)
        while self.iteration < self.train.iterations:
            self.micro_batches(range(place, self.train.num_micro_batches, num_members))
            self.step(self.reduce(), tells=place == 0)
            if saves and place == 0 and self.iteration % SAVE_EVERY_NUM == 0:
                with saves():
                    self.save()

    def save(self) -> None:
        """Write the checkpoint to a new file, then rename it: readers see only complete files."""
        new = self.folder / "checkpoint.new"
        torch.save({**self.state(), "iteration": self.iteration}, new)
        new.replace(self.folder / "checkpoint")

    def load(self) -> None:
        """Load the last checkpoint, if there is one."""
        if (self.folder / "checkpoint").exists():
            saved = torch.load(self.folder / "checkpoint", weights_only=False)
            self.adopt(saved)
            self.iteration = saved["iteration"]

    def state(self) -> dict[str, Any]:
        trainee = self.trainee
        return {
            "model": trainee.modules[0].state_dict(),
            "optimizer": trainee.optimizer.state_dict(),
            "scheduler": trainee.scheduler.state_dict(),
        }

    def adopt(self, state: dict[str, Any]) -> None:
        self.trainee.modules[0].load_state_dict(state["model"])
        self.trainee.optimizer.load_state_dict(state["optimizer"])
        self.trainee.scheduler.load_state_dict(state["scheduler"])

    def note(self, event: Any, micro_batch: int = -1) -> None:
        self.trace.note(event, self.generation, self.iteration, micro_batch=micro_batch)

    def tell(self, **line: object) -> None:
        """Write a line that the trace has no event for."""
        os.write(self._told, json.dumps(line).encode() + b"\n")


def main() -> None:
    """One rank, until killed."""
    from contextlib import nullcontext

    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    dist.init_process_group("gloo", timeout=BUILD)
    loop = Loop(dist.get_rank())
    loop.generation = int(restarts or 0)
    loop.build()
    loop.load()
    loop.run(dist.get_rank(), dist.get_world_size(), nullcontext if restarts else None)


if __name__ == "__main__":
    main()

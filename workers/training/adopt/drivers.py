"""What drives a loop of somebody's own: the member of a task that heals, or nobody.

Without an agent, or where the loop cannot be healed in memory, the same iterations run as they
would with one, and a fault ends them: whoever has started the processes starts them again.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol

import structlog
import torch
import torch.distributed as dist

from ....events.errors import UsageError
from ....events.spec.job import Train, is_url
from ....events.spec.model import Axes
from ...ipc.pipe_protocol import Unpacker
from ...ipc.progress_page import Pulse
from ..checkpoint import checkpoint
from ..communicators.communicators import Communicators
from ..model import cpu_device, optimizers
from ..model.trainee import Trainee
from ..process.control_thread import Control
from ..process.history import History
from ..process.trace import Trace
from ..recovery.settlement import settle
from ..state_recovery import seen
from ..step.iteration import Iteration
from .custom_loop import OwnWork

log = structlog.get_logger()


class Driver(Protocol):
    """`steps` and `together` are those of member.py."""

    communicators: Communicators
    control: Control
    iteration: Iteration
    settled: int

    def steps(self) -> Generator[int | None]: ...
    def together(self, call: Callable[[], None]) -> bool: ...


class Unhealed:
    """This process alone, or one of those that a launcher such as torchrun has started, or an
    agent: of a task's `output` it writes checkpoints, and goes on from the last of them.

    Raises UsageError for a loop that cannot be trained.
    """

    def __init__(self, work: OwnWork, environment: Mapping[str, str]) -> None:
        work.heals = False
        self.control = Control(socket.socketpair()[0], 0, Unpacker())
        self._train = work.train
        self._place = int(environment.get("RANK", "0"))
        num = int(environment.get("WORLD_SIZE", "1"))
        axes = self._axes(num)
        if torch.cuda.is_available():
            local = int(environment.get("LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
        device = cpu_device.stand_in()
        self.communicators = Communicators(environment.get("UNICRON_HOST", "127.0.0.1"), device)
        self.communicators.on_groups = work.on_groups
        self._hosted = None
        endpoint = self.communicators.endpoint
        if "MASTER_ADDR" in environment:
            endpoint = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
            if self._place == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._hosted = dist.TCPStore(
                    "0.0.0.0", int(environment["MASTER_PORT"]), is_master=True,
                    wait_for_workers=False)
        self.communicators.meet(1, self._place, num, endpoint, b"")
        self.communicators.up(axes)
        trainee = work.build(device, self.communicators.groups, axes, self._place)
        if trainee.num_parts > 1:
            work.begin(seen(trainee),
                       lambda: seen(work.build_whole(device, self.communicators.alone())))
        self.history = History()
        self._last = LastCheckpoint(work.train, trainee, environment.get("UNICRON_TASK", ""))
        self.settled = self._agreed(self._last.load(trainee, self.history), device)
        self.iteration = Iteration(trainee, work, Trace("", 0, self._place, 0), Pulse(),
                                   self.history)
        claims = [self.iteration.claim() for _ in range(num)]
        share = settle(claims, self._train.num_micro_batches, axes).shares[self._place]
        self.iteration.take(self.settled, share, 1, begun=False)

    def _axes(self, num: int) -> Axes:
        """The first layout that is named and has so many ranks."""
        parallel, micro_batches = self._train.parallel, self._train.num_micro_batches
        for axes in parallel.layouts(num, micro_batches):
            return axes
        raise UsageError(f"no layout of tensor {list(parallel.tensor)} by pipeline "
                         f"{list(parallel.pipeline)} has {num} ranks and a micro-batch for each "
                         f"replica, of {micro_batches}", "start another number of processes")

    def _agreed(self, step_version: int, device: torch.device) -> int:
        """As all loaded it. Each looks for itself, in a folder that may not be a shared one."""
        apart = torch.tensor([step_version, -step_version], device=device)
        if dist.is_initialized():
            dist.all_reduce(apart, dist.ReduceOp.MAX)
        most, least = int(apart[0]), -int(apart[1])
        if most != least:
            raise UsageError(f"some ranks go on from iteration {least}, others from {most}: they "
                             "do not see the same checkpoints",
                             "loop.output has to be a folder that all nodes share")
        return step_version

    def steps(self) -> Generator[int | None]:
        """Each iteration as it is stepped; RuntimeError where a collective failed."""
        yield None
        while self.iteration.step_version < self._train.iterations:
            outcome = self.iteration.run(self.control, self.communicators)
            if outcome not in ("stepped", "boundary"):
                raise RuntimeError(self.iteration.reduction.why)
            if self._place == 0:
                self._last.save(self.iteration, self.history)
            yield self.iteration.step_version - 1
        # A process that ends while another still waits for its last answer would fail that one.
        self.iteration.meet(self.control, self.communicators)
        self.iteration.meet(self.control, self.communicators)

    def together(self, call: Callable[[], None]) -> bool:
        """RuntimeError where a collective failed."""
        found = self.iteration.beside(self.control, self.communicators, call)
        if found is not None:
            raise RuntimeError(self.iteration.reduction.why)
        return True


class LastCheckpoint:
    """Where a task that does not heal keeps its last checkpoint: in its output, by its number.

    Nowhere without an agent, and where no rank has the whole of a state that is known.
    """

    def __init__(self, train: Train, trainee: Trainee, task: str) -> None:
        self._train = train
        self._folder = ""
        if not (train.output and task):
            return
        if trainee.is_plain and not optimizers.not_adam(trainee.optimizer) and not is_url(
                train.output):
            self._folder = checkpoint.within(train.output, f"task-{task}")
        else:
            log.warning("no checkpoints: after a fault it begins at the first iteration",
                        why="no rank has a whole state to write to a folder")

    def load(self, trainee: Trainee, history: History) -> int:
        """The newest, if there is one; its step version."""
        found = self._found()
        return checkpoint.load(str(found[-1]), trainee, history) if found else 0

    def save(self, iteration: Iteration, history: History) -> None:
        """The state as it is, where that is due; it takes the place of the last one."""
        at, every = iteration.step_version, self._train.checkpoint_every
        is_last = at == self._train.iterations
        if not self._folder or not (is_last or (every and at % every == 0)):
            return
        old = self._found()
        try:
            checkpoint.save(f"{self._folder}/iter-{at}", iteration.trainee, at, history)
        except checkpoint.NotSaved as error:
            if is_last:
                raise
            log.warning("checkpoint not saved; training goes on", iteration=at, why=str(error))
            return
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)

    def _found(self) -> list[Path]:
        """Whole ones, the newest last."""
        found = Path(self._folder).glob("iter-*") if self._folder else ()
        return sorted((one for one in found if one.name[5:].isdecimal()),
                      key=lambda one: int(one.name[5:]))

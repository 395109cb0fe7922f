"""`keep_in_memory`: restart from memory for a loop that trains by itself, without `adopt`.

For models that `job.step()` cannot train: in FSDP, or with context parallelism. After a fault all
processes of the task start again, in the same number. docs/guides/scripts.md has an example.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ....events.errors import UsageError
from ....events.records.reports import InMemoryRecoveryDeclined
from ...ipc.pipe_protocol import FD, Adopted
from ..checkpoint.checkpoint import WRITE_ERRORS, NotSaved
from ..checkpoint.process_state import meshes_of
from ..checkpoint.restart_memory import RestartMemory
from ..checkpoint.save_reports import SaveReports
from ..model import determinism
from ..rank import connect_agent
from .arguments import usage_errors_reported


class OwnLoop:
    """The stored state of this process: containers, numbers, texts and tensors, such as a
    `state_dict`, and the random generators. Without an agent, nothing is stored. All processes call
    each method after the same iteration; several need an initialised torch.distributed."""

    def __init__(
        self, memory: RestartMemory | None, every: int, reports: SaveReports | None = None
    ) -> None:
        self._memory, self._every, self._reports = memory, every, reports

    @contextmanager
    def telling_of_save(self, folder: str, iterations: int, *, final: bool) -> Generator[None]:
        """In this context the loop writes its own checkpoint; a failure is reported, and raised."""
        try:
            yield
        except (*WRITE_ERRORS, CheckpointException) as error:
            if self._reports is not None:
                self._reports.failed(NotSaved.of(folder, error), 0, iterations, final=final)
            raise
        if self._reports is not None:
            self._reports.worked(folder, 0, iterations, is_whole=True)

    def resume(
        self, state: Callable[[], Any], load: Callable[[Any], None], *, after: int = 0
    ) -> int:
        """Load the newest state of which every process has its own, if it is of more than `after`
        iterations. Returns the number of iterations in it; 0: nothing was loaded. `state` returns
        the present state; `load` gets what it returned in an earlier process."""
        if self._memory is None:
            return 0
        found = self._memory.restore(meshes_of(state()), after=after)
        if found is None:
            return 0
        load(found.tree)
        return found.step_version

    def stepped(self, iterations: int, state: Callable[[], Any]) -> None:
        """After each iteration: store the state if it is due. Returns when it may change."""
        if self._memory is not None and self.is_due(iterations):
            self._memory.copy_in_turn(state, iterations)

    def is_due(self, iterations: int) -> bool:
        """Whether the state is stored after as many iterations."""
        return self._memory is not None and iterations % self._every == 0


@contextmanager
def keep_in_memory(why: str) -> Generator[OwnLoop]:
    """Store the state of this process in memory, as the job's `loop.copy_every` says. `why`: what
    the loop has that cannot be healed in place, for `unicron status`. Raises UsageError."""
    with usage_errors_reported():
        if FD not in os.environ:
            yield OwnLoop(None, 0)
            return
        control, start, _ = connect_agent(int(os.environ[FD]))
        loop = start.spec.loop
        assert loop is not None, "an agent opens its pipe for a loop task only"
        if not loop.copy_every:
            raise UsageError(
                "loop.copy_every is 0: no state is stored in memory",
                "give loop.copy_every, or leave `heal` out",
            )
        determinism.decline(loop.reproducible, why)
        if not start.declined:
            control.tell(Adopted(pid=os.getpid()))
            control.tell(
                InMemoryRecoveryDeclined(
                    task=start.task,
                    rank=start.rank,
                    attempt=start.attempt,
                    why=why,
                    from_memory=True,
                )
            )
        place, num = start.rank, start.num_seats
        assert not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) == (place, num)
        memory = RestartMemory(start, control, place, num)
        reports = SaveReports(start, "export", control.tell, is_unknown=start.attempt > 1)
        yield OwnLoop(memory, loop.copy_every, reports)
        memory.wait()
        control.flush()

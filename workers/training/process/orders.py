"""What a training thread asks of those that may order it to stop: the agent, or nobody."""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from ....events.detached_thread import DetachedThread
from ....events.records.types import QuiesceMode

T = TypeVar("T")


class Orders(Protocol):
    """The orders to a rank. Only its training thread asks. Control (control_thread.py) has those of
    an agent."""

    def pending_quiesce(self, generation: int) -> QuiesceMode | None:
        """The mode in which queued orders end this generation; None if none does."""
        ...

    def waiting_for_others(
        self, generation: int, wake: Callable[[], None], replica: frozenset[int] = frozenset()
    ) -> AbstractContextManager[None]:
        """In this context the thread may wait for other members of `generation`. At an immediate
        order to stop, another thread calls `wake`. Raises Interrupted if such an order is queued.
        `replica`: the thread waits for these ranks only."""
        ...

    def run_detached(
        self,
        generation: int,
        wake: Callable[[], None],
        call: Callable[[], T],
        replica: frozenset[int] = frozenset(),
    ) -> T:
        """Run `call` as in `waiting_for_others`, but in a detached thread. Raises Interrupted,
        Abandoned, and what `call` raises."""
        ...

    def abandon(self, waits: Callable[[], bool]) -> None:
        """Count an abandoned operation while `waits` returns True."""

    def flush(self) -> None:
        """Wait until all that was reported has arrived, or nobody is there."""


def result_of(future: Future[T]) -> T:
    """The result of a collective in a detached thread, or its error: a RuntimeError without its
    traceback, whose frames would keep the generation's groups alive. Waits."""
    error = future.exception()
    if isinstance(error, RuntimeError):
        raise error.with_traceback(None)
    return future.result()


class NoOrders:
    """There is no agent: nobody orders anything. A fault ends the process."""

    def __init__(self) -> None:
        self._detached = DetachedThread("collective")

    def pending_quiesce(self, generation: int) -> QuiesceMode | None:
        return None

    @contextmanager
    def waiting_for_others(
        self, generation: int, wake: Callable[[], None], replica: frozenset[int] = frozenset()
    ) -> Generator[None]:
        yield

    def run_detached(
        self,
        generation: int,
        wake: Callable[[], None],
        call: Callable[[], T],
        replica: frozenset[int] = frozenset(),
    ) -> T:
        return result_of(self._detached.submit(call))

    def abandon(self, waits: Callable[[], bool]) -> None:
        return

    def flush(self) -> None:
        return

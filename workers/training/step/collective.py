"""Runs what waits for other members: it ends at a fault or at an order, and says which."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ..communicators.communicators import ABORTED, Communicators
from ..communicators.operations import Operations, Works
from ..model import cpu_device
from ..process.control_thread import Abandoned, Interrupted
from ..process.exit_report import is_cuda_error, verdict_of
from ..process.orders import Orders
from ..process.trace import Marks
from .results import Done, Failed, Result, Stopped

T = TypeVar("T")
END_S_MAX = 1.0
"""Time for launched operations to end once the connections of their generation are closed."""
END_S = 0.001


class Collectives:
    """The collectives of a member with one model. The operations themselves are `operations`, which
    counts them.

    `is_stuck`: a call that holds the model was abandoned, and still waits in a detached thread. It
    may write into the model at any time, so its gradients are never cleared or used again.
    """

    def __init__(self, control: Orders, communicators: Communicators, marks: Marks) -> None:
        self.is_stuck = False
        self._control, self._communicators, self._marks = control, communicators, marks

    @property
    def operations(self) -> Operations:
        """Of the current generation. Take it before `run`: the call may outlive its generation."""
        return self._communicators.operations

    @property
    def replica(self) -> frozenset[int]:
        """The ranks of this member's replica."""
        return self._communicators.replica

    def must_stop(self) -> bool:
        """Whether this member has an order to stop at once."""
        return self._pending() == "now"

    def stops(self) -> bool:
        """Whether it has an order to stop, at once or at the next boundary."""
        return self._pending() is not None

    def activity_check(self) -> Callable[[], None]:
        """A function that raises RuntimeError as soon as the current generation is being left."""
        communicators, operations = self._communicators, self.operations

        def check() -> None:
            if communicators.woken or not communicators.is_current(operations):
                raise RuntimeError("the generation ended meanwhile")

        return check

    def run(
        self,
        collective: Callable[[], T],
        replica: frozenset[int] = frozenset(),
        *,
        holds_model: bool = False,
    ) -> Result[T]:
        """Run a collective of all members, or of `replica`. `holds_model`: it uses the parameters
        or the local gradients. Raises what is no failed collective: errors of the CUDA context, and
        of the groups before anything was aborted."""
        result: Result[T] = Failed("")
        why = ""
        communicators = self._communicators
        try:
            with self._marks.in_collective():
                result = Done(self._call(collective, replica))
        except Interrupted:
            return Stopped()
        except Abandoned:
            self.is_stuck = self.is_stuck or holds_model
            return Stopped(is_abandoned=True)
        except (RuntimeError, *ABORTED) as error:
            if is_cuda_error(error) or (isinstance(error, ABORTED) and not communicators.woken):
                raise
            why = f"{type(error).__name__}: {error}".strip()
            result = Failed(why, verdict_of(error))
        if communicators.woken or (why and self.must_stop()):
            return Stopped(why=why)
        return result

    def end(self, works: Works, group: Any, *, holds_model: bool = False) -> None:
        """The generation ends: end these launched operations of `group`. A wait that does not end
        is abandoned. `holds_model`: as in `run`."""
        waiter = end_all(works, self._communicators.interrupt, group)
        if waiter is not None:
            self._control.abandon(waiter.is_alive)
            self.is_stuck = self.is_stuck or holds_model

    def _pending(self) -> str | None:
        return self._control.pending_quiesce(self._communicators.generation)

    def _call(self, collective: Callable[[], T], replica: frozenset[int]) -> T:
        """With gloo, run in a detached thread: nothing interrupts some waits. NCCL is aborted."""
        generation, interrupt = self._communicators.generation, self._communicators.interrupt
        if self._communicators.backend == "nccl":
            with self._control.waiting_for_others(generation, interrupt, replica):
                return collective()

        def call() -> T:
            with cpu_device.cpu_mode():
                return collective()

        return self._control.run_detached(generation, interrupt, call, replica)


def end_all(works: Works, wake: Callable[[], None], group: Any) -> threading.Thread | None:
    """Wait until these launched operations end, once `wake` has closed their connections; returns
    the thread of an abandoned wait, if any.

    That thread holds `group` until the wait ends. A gloo group waits for its works before it is
    destroyed. If a work is stuck, the thread that waits for it must drop the group last, not the
    main thread.
    """
    deadline_s = time.monotonic() + END_S_MAX
    while not all(work.is_completed() for work in works):
        wake()
        if time.monotonic() > deadline_s:
            waiter = threading.Thread(
                target=_wait_abandoned, args=(works, group), name="abandoned", daemon=True
            )
            waiter.start()
            return waiter
        time.sleep(END_S)
    return None


def _wait_abandoned(works: Works, group: Any) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()

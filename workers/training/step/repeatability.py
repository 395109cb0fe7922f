"""Whether a micro-batch that runs twice gives the same gradient: if not, no run is repeatable."""

from functools import partial
from typing import Generic

from ....events.errors import UsageError
from ....events.words import listed
from ..communicators.operations import Operations
from ..model.exact_sum import ExactSum
from ..model.stop_agreement import StopAgreement
from .own_part import E
from .passes import PassRunner
from .results import Done, Ended, Result


class RepeatabilityTest(Generic[E]):
    """Of one process: the first that it trains passes the test, or ends."""

    def __init__(self, passes: PassRunner[E]) -> None:
        self._passes = passes
        self._is_passed = False

    def run(self, exact: ExactSum, item: int) -> Ended | None:
        """In the first iteration of a process, it and its replica run a micro-batch twice: added
        and then subtracted, its gradient must leave nothing. Raises UsageError if it does."""
        part = self._passes.part
        engine, collectives = part.engine, part.collectives
        is_alone = engine.replica_size == 1
        if is_alone and (self._is_passed or collectives.must_stop()):
            return None
        twice = partial(self._twice, exact, item, collectives.operations, is_alone=is_alone)
        result: Result[list[int] | None] = (
            Done(twice())
            if is_alone and engine.is_gathered
            else collectives.run(
                twice, frozenset() if is_alone else collectives.replica, holds_model=True
            )
        )
        if isinstance(result, Done) and result.value is None:
            return None
        part.sum.give_up()
        part.discard_passes()
        if not isinstance(result, Done):
            return result
        engine.set_gathered(is_gathered=True)
        self._is_passed = True
        if result.value:
            raise UsageError(
                f"rank {part.notes.trace.rank}: run twice, micro-batch {item} of iteration "
                f"{part.state.step_version} gives other gradients of "
                f"{listed(engine.parameter_names(result.value))}",
                "a kernel is not deterministic: replace it, or set reproducible: rounding",
            )
        return None

    def _twice(
        self, exact: ExactSum, item: int, operations: Operations, *, is_alone: bool
    ) -> list[int] | None:
        """The parameters whose gradients differ. None: no member of the replica needs the test."""
        part = self._passes.part
        engine = part.engine
        if not is_alone:
            agreement = StopAgreement(operations, "mp", engine.device)
            agreement.ask(must_stop=not self._is_passed)
            if not agreement.answer():
                return None
        for _ in range(2):
            engine.run(
                operations,
                part.state.step_version,
                (item,),
                self._passes.sample,
                lambda event, item: part.notes.marks.note(event),
                must_stop=None,
                begin=None,
                backward=partial(part.sum.backward, is_last=False),
            )
            exact.negate()
        return exact.left()

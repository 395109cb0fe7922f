"""What the members do together beside iterations: they meet, compare their states, call others."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..communicators.communicators import Communicators
from ..model.losses import Losses
from . import stats
from .corruption import CorruptionSearch
from .gathering import expect_gather
from .own_part import E
from .passes import PassRunner
from .results import Again, Done, Ended, Outcome, Result, Stepped, Wrong
from .stats import Stats

T = TypeVar("T")


class Beside(Generic[E]):
    """Of one member. All members call each method together; those that have no micro-batches, the
    standby members, run an iteration here too."""

    def __init__(
        self,
        passes: PassRunner[E],
        corruption: CorruptionSearch[E],
        communicators: Communicators,
    ) -> None:
        self._part, self._passes, self._corruption = passes.part, passes, corruption
        self._communicators = communicators

    def run_as_standby(self, iteration: int) -> Outcome:
        """Run the iteration as a standby member: only the collectives of all members."""
        axes, sum_ = self._communicators.axes, self._part.sum
        self._part.notes.marks.pulse.begin(self._communicators.generation, iteration, "first")
        is_checked = self._corruption.is_due(iteration)
        while True:
            mine = self._passes.own_stats()
            met = self._meet(mine)
            if not isinstance(met, Done):
                return met
            if not sum_.needs_barrier(axes):
                break
            result = sum_.barrier_of_standby(
                self._corruption.values_of_standby() if is_checked else ()
            )
            if not isinstance(result, Done):
                return result
            judged = self._corruption.judge_barrier(result.value)
            if judged is None:
                break
            if isinstance(judged, Wrong):
                return judged.failed
        self._part.notes.marks.pulse.finish()
        return stepped(met.value, mine)

    def meet(self, *, has_saved: bool = True) -> Outcome:
        """After the last iteration: wait until every member is done. `num_saving` of the result
        counts the members that have not saved."""
        mine = self._passes.own_stats()._replace(num_saving=float(not has_saved))
        met = self._meet(mine)
        return stepped(met.value, mine) if isinstance(met, Done) else met

    def run(self, call: Callable[[], None]) -> Ended | None:
        """Run `call`, which needs all members. None if it succeeded."""
        result = self._run(call)
        return None if isinstance(result, Done) else result

    def check_end(self, *, is_standby: bool) -> Ended | None:
        """After the last iteration: compare the states. None if all are well."""
        if not self._corruption.digest_every:
            return None
        operations = self._part.collectives.operations

        def exchange() -> tuple[int, ...]:
            values = torch.tensor(
                self._corruption.values_of_standby()
                if is_standby
                else self._corruption.own_values(False),
                device=self._part.engine.device,
            )
            operations.all_reduce(values)
            return tuple(values.tolist())

        result = self._run(exchange)
        if not isinstance(result, Done):
            return result
        judged = self._corruption.judge(result.value, has_probes=False)
        assert not isinstance(judged, Again), "without probes nothing is tried again"
        return None if judged is None else judged.failed

    def _meet(self, mine: Stats) -> Result[Stats]:
        """Exchange only the stats. Returns when every member has reached this point."""
        collectives = self._part.collectives
        operations = collectives.operations
        values = stats.own_values(self._part.engine, mine, Losses(), stops=collectives.stops())

        def exchange() -> Stats:
            operations.all_reduce(values)
            return stats.read(values.tolist())

        return collectives.run(exchange)

    def _run(self, call: Callable[[], T]) -> Result[T]:
        ended = expect_gather(self._part, will_pass=False)
        return self._part.collectives.run(call, holds_model=True) if ended is None else ended


def stepped(told: Stats, mine: Stats) -> Stepped:
    """`told` is of all members, `mine` what this one has told."""
    num_saving = round(told.num_saving)
    return Stepped(
        stops=bool(told.num_stopping),
        may_copy=not told.num_sending,
        is_copied=not told.num_unstored,
        num_saving=num_saving,
        num_others_saving=num_saving - round(mine.num_saving),
    )

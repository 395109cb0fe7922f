"""Silent data corruption: when the members look for it, and what follows from what they find.

checks.py has what they compare, and which of them is wrong.
"""

from typing import Generic

import structlog

from ....events.spec.parallelism import coordinates
from ..communicators.communicators import Communicators
from ..recovery.state_sources import NO_STATE
from .checks import CorruptionError, no_values
from .own_part import E
from .passes import PassRunner
from .progress import Differed, Overflowed
from .results import Again, Ended, Failed, Wrong
from .sums import PassedBarrier

log = structlog.get_logger()


class CorruptionSearch(Generic[E]):
    """Every `digest_every` iterations the members compare their states before the step, and the
    gradient of one micro-batch that all replicas compute; at the end their states once more."""

    def __init__(self, passes: PassRunner[E], communicators: Communicators) -> None:
        self._part, self._passes = passes.part, passes
        self._communicators = communicators

    @property
    def digest_every(self) -> int:
        engine = self._part.engine
        return 0 if engine.exact is None else engine.train.digest_every

    def is_due(self, step_version: int) -> bool:
        """Whether the members compare in this iteration."""
        return self.digest_every > 0 and step_version > 0 and step_version % self.digest_every == 0

    def own_values(self, has_sum: bool) -> tuple[int, ...]:
        """What this member tells (Checks.values). Waits for the device."""
        return self._part.checks.values(self._part.state.step_version, has_sum=has_sum)

    def values_of_standby(self) -> tuple[int, ...]:
        return no_values(self._communicators.axes)

    def probe(self) -> Ended | None:
        """Compute the gradient of one micro-batch, the same on all replicas, and its digest. None
        if that succeeds."""
        part = self._part
        exact, train = part.engine.exact, part.engine.train
        if exact is None or part.engine.axes.dp == 1:
            return None
        item = part.state.step_version // train.digest_every % train.num_micro_batches
        ended = self._passes.run([item], is_probe=True)
        if ended is None:
            part.checks.probe = exact.digest()
        part.discard_passes()
        return ended

    def judge_barrier(self, passed: PassedBarrier) -> Wrong | Again | None:
        """What follows from a passed step barrier, the same on all members; None: they step. Raises
        as `judge`."""
        has_overflowed = passed.barrier.num_overflows > 0
        judged = self.judge(passed.checks, has_probes=not has_overflowed) if passed.checks else None
        return Again(Overflowed()) if judged is None and has_overflowed else judged

    def judge(self, told: tuple[int, ...], *, has_probes: bool) -> Wrong | Again | None:
        """Compare what all members have told, and change nothing of the iteration. None: all are
        well. Raises CorruptionError if this member is wrong."""
        part = self._part
        axes, own = self._communicators.axes, self._communicators.place
        step_version = part.state.step_version
        wrong, repeats = part.checks.judge(told, axes, has_probes=has_probes)
        if own in wrong:
            raise CorruptionError(
                f"silent data corruption in rank {part.notes.trace.rank}, iteration "
                f"{step_version}: {wrong[own]}"
            )
        if wrong:
            replicas = {coordinates(axes, place).dp for place in wrong}
            return Wrong(
                Failed(
                    "; ".join(
                        f"silent data corruption at position {place}: {why}"
                        for place, why in wrong.items()
                    )
                ),
                in_own_replica=coordinates(axes, own).dp in replicas,
            )
        if repeats:
            log.warning(
                "replicas differ in the gradient of a micro-batch: the iteration is done again",
                iteration=step_version,
            )
            return Again(Differed())
        if step_version != NO_STATE:
            part.history.digests[step_version] = f"{told[0] % 2**64:016x}"
        return None

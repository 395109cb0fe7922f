"""Silent data corruption: what the members compare at a step barrier, and which of them is wrong.

All members receive the values of all, and come to the same verdict. A member is wrong if its memory
changed without a step, or if it differs from most replicas. Of gradients, one micro-batch that all
replicas compute is compared; a member is wrong if it differs again when all repeat the iteration.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog
import torch

from ....events.spec.model import Axes
from ....events.spec.parallelism import Coordinates, coordinates, num_positions, position_of
from ..model.engine import Engine
from ..model.training_state import OF_OPTIMIZER
from ..recovery.state_digest import shard_digests

log = structlog.get_logger()


class CorruptionError(RuntimeError):
    """This member's state or gradients are wrong: silent data corruption."""


class _Slot(NamedTuple):
    """Whether its state or its sum changed in memory, the digest of what other replicas have too,
    and that of the probe, the gradient of the micro-batch that all replicas compute (0: none)."""

    changed: int = 0
    sum_changed: int = 0
    state: int = 0
    probe: int = 0


def no_values(axes: Axes) -> tuple[int, ...]:
    """What a standby member adds: the digest of the state, and a _Slot for each position."""
    return (0,) * (1 + len(_Slot()) * num_positions(axes))


class Checks:
    """The checks of one member, with its model. `probe` is that of the current iteration."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._record: tuple[int, torch.Tensor] | None = None
        self.forget()

    def forget(self, *, state: bool = False) -> None:
        """A new generation begins; with `state`, with another state."""
        self._first: dict[int, int] = {}
        self.probe: torch.Tensor | None = None
        self._record = None if state else self._record

    def begin(self, step_version: int) -> None:
        """Record the digest of the state of a new iteration; do nothing if that has been done."""
        if self._engine.is_gathered and (self._record is None or self._record[0] != step_version):
            self._record = step_version, shard_digests(self._engine)

    def values(self, step_version: int, *, has_sum: bool) -> tuple[int, ...]:
        """What this member adds. `has_sum`: the local sum is as before its reduction. Waits for the
        device."""
        engine, exact, digests = self._engine, self._engine.exact, shard_digests(self._engine)
        zero = digests.new_zeros(())
        replicated = [
            not (engine.is_sharded and shard.key.startswith(OF_OPTIMIZER))
            for shard in engine.shards
        ]
        record = self._record[1] if self._record and self._record[0] == step_version else digests
        total, *slot = torch.stack(
            [
                value.long()
                for value in (
                    digests[torch.tensor(engine.counted(), device=digests.device)].sum(),
                    (digests != record).any(),
                    exact.digest() != exact.check if has_sum and exact is not None else zero,
                    digests[torch.tensor(replicated, device=digests.device)].sum(),
                    zero if self.probe is None else self.probe,
                )
            ]
        ).tolist()
        values = [total, *no_values(engine.axes)[1:]]
        begin = 1 + engine.place * len(slot)
        values[begin : begin + len(slot)] = slot
        return tuple(values)

    def judge(
        self, values: Sequence[int], axes: Axes, *, has_probes: bool
    ) -> tuple[dict[int, str], bool]:
        """The verdict on the sums of all members: by position, why it must end; and whether all run
        the iteration again, to confirm. A difference that proves nothing is logged."""
        size = len(_Slot())
        slots = [_Slot(*values[at : at + size]) for at in range(1, len(values), size)]
        wrong = {
            place: "its parameters or its optimizer's state changed in memory, without a step"
            if slot.changed
            else "the sum of its gradients changed in memory"
            for place, slot in enumerate(slots)
            if slot.changed or slot.sum_changed
        }
        parts = [
            [position_of(axes, Coordinates(tp=tp, pp=pp, dp=dp)) for dp in range(axes.dp)]
            for pp in range(axes.pp)
            for tp in range(axes.tp)
        ]
        for part in parts:
            states = {place: slots[place].state for place in part if place not in wrong}
            wrong |= dict.fromkeys(
                _odd(states), "its parameters or its optimizer's state differ from other replicas'"
            )
            if len(set(states.values())) > 1 and not _odd(states):
                log.warning(
                    "replicas have different states, and nothing tells which is wrong",
                    positions=part,
                )
        probes = (
            [{place: slots[place].probe for place in part if slots[place].probe} for part in parts]
            if has_probes and not wrong
            else []
        )
        differing = [part for part in probes if len(set(part.values())) > 1]
        first, self._first = self._first, {}
        if differing and not first:
            self._first = {place: probe for part in probes for place, probe in part.items()}
        elif differing:
            wrong = _wrong_twice(first, differing, axes)
            if not wrong:
                log.warning(
                    "replicas twice computed different gradients of one micro-batch, and "
                    "nothing tells which is wrong",
                    positions=list(map(list, differing)),
                )
        return wrong, bool(self._first)


def _wrong_twice(
    first: Mapping[int, int], differing: Sequence[Mapping[int, int]], axes: Axes
) -> dict[int, str]:
    """The members that differ from most replicas in both probes; without a majority, the one that
    differs from itself. If several of a replica do, any of them may be the cause."""
    suspects: list[int] = []
    for now in differing:
        before = {place: first.get(place, value) for place, value in now.items()}
        changed = [place for place in now if now[place] != before[place]]
        odd = _odd(now)
        suspects += set(odd) & set(_odd(before)) if odd else changed * (len(changed) == 1)
    replicas = Counter(coordinates(axes, place).dp for place in suspects)
    return {
        place: "it computes another gradient of a micro-batch than other replicas, twice"
        for place in suspects
        if replicas[coordinates(axes, place).dp] == 1
    }


def _odd(values: Mapping[int, int]) -> list[int]:
    """The places whose value is not that of more than half of them; none without such a value."""
    usual = [value for value, num in Counter(values.values()).items() if 2 * num > len(values)]
    return [place for place, value in values.items() if usual and value != usual[0]]

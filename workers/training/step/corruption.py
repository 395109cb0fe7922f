"""Silent data corruption: what the members compare at a step barrier, and which of them is wrong.

All members receive the values of all, and come to the same verdict. A member is wrong if its memory
changed without a step, or if it differs from most replicas. Of gradients, one micro-batch that all
replicas compute is compared; a member is wrong if it differs again when all repeat the iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ....events.spec.model import Axes
from ....events.spec.parallelism import Coordinates, coordinates, num_positions, position_of
from ..model.trainee import TrainingModel
from ..recovery.state_digest import counted, replicated, shard_digests

CHANGED, SUM_CHANGED, HAS_PROBE, REPEATS = 1, 2, 4, 8
Values = tuple[int, ...]
"""The digest of the state, and for each position a _Slot. Members add up theirs as int64."""


class CorruptionError(RuntimeError):
    """This member's state or gradients are wrong: silent data corruption."""


class _Slot(NamedTuple):
    """The digests of what other replicas have too, and of the probe: the gradient of the
    micro-batch that all replicas compute."""

    flags: int = 0
    state: int = 0
    probe: int = 0


class Verdict(NamedTuple):
    """`wrong`: by position, why this member must end. `repeats`: run the iteration again, to
    confirm. `notes`: differences that prove nothing about any member."""

    digest: str
    wrong: dict[int, str]
    repeats: bool
    notes: list[str]


def no_values(axes: Axes) -> Values:
    """What a standby member adds."""
    return (0,) * (1 + len(_Slot()) * num_positions(axes))


class Checks:
    """The checks of one member, with its model. `probe` is that of the current iteration."""

    def __init__(self, trainee: TrainingModel) -> None:
        self._trainee = trainee
        self._recorded_at = -1
        self._record = torch.zeros(())
        self._first: dict[int, int] = {}
        self.probe: torch.Tensor | None = None

    def forget(self, *, state: bool = False) -> None:
        """A new generation, in which no probe is confirmed; with `state`, of another state."""
        self._first, self.probe = {}, None
        if state:
            self._recorded_at = -1

    def begin(self, step_version: int) -> None:
        """Record the digest of the state of a new iteration; do nothing if that has been done."""
        if self._recorded_at != step_version and self._trainee.is_gathered:
            self._recorded_at, self._record = step_version, shard_digests(self._trainee)

    def values(self, step_version: int, *, has_sum: bool) -> Values:
        """What this member adds. `has_sum`: the local sum is as it was before its reduction. Waits
        for the device."""
        trainee, exact = self._trainee, self._trainee.exact
        found = shard_digests(trainee)
        zero = found.new_zeros(())
        is_changed = (found != self._record).any() if self._recorded_at == step_version else zero
        is_sum_changed = exact.digest() != exact.check if has_sum and exact is not None else zero
        device = found.device
        total, state, probe, changed, sum_changed = torch.stack([value.long() for value in (
            found[torch.tensor(list(counted(trainee)), device=device)].sum(),
            found[torch.tensor(replicated(trainee), device=device)].sum(),
            zero if self.probe is None else self.probe, is_changed, is_sum_changed)]).tolist()
        flags = (CHANGED * changed + SUM_CHANGED * sum_changed
                 + HAS_PROBE * (self.probe is not None) + REPEATS * bool(self._first))
        values = list(no_values(trainee.axes))
        begin = 1 + trainee.place * len(_Slot())
        values[begin:begin + len(_Slot())] = _Slot(flags, state, probe)
        return total, *values[1:]

    def judge(self, values: Sequence[int], axes: Axes, *, probes_count: bool = True) -> Verdict:
        """The verdict on the sums of all members. `probes_count` False: the iteration is repeated
        for another reason."""
        size = len(_Slot())
        slots = [_Slot(*values[at:at + size]) for at in range(1, len(values), size)]
        wrong = {place: "its parameters or its optimizer's state changed in memory, without a step"
                 if slot.flags & CHANGED else "the sum of its gradients changed in memory"
                 for place, slot in enumerate(slots) if slot.flags & (CHANGED | SUM_CHANGED)}
        notes: list[str] = []
        for part in _parts(axes):
            states = {place: slots[place].state for place in part if place not in wrong}
            for place in _odd(states):
                wrong[place] = "its parameters or its optimizer's state differ from other replicas'"
            if len(set(states.values())) > 1 and not _odd(states):
                notes.append(f"the states of the members at positions {part} differ, and nothing "
                             "tells which is wrong")
        probes = {place: slot.probe for place, slot in enumerate(slots)
                  if slot.flags & HAS_PROBE} if probes_count and not wrong else {}
        differing = [part for part in _parts(axes)
                     if len({probes[place] for place in part if place in probes}) > 1]
        repeats = bool(differing) and not any(slot.flags & REPEATS for slot in slots)
        if differing and not repeats:
            wrong = self._wrong_twice(probes, differing, axes)
            if not wrong:
                notes.append(f"the gradients of one micro-batch at positions {differing} differ "
                             "twice, and nothing tells which is wrong")
        self._first = probes if repeats else {}
        return Verdict(f"{values[0] & (1 << 64) - 1:016x}", wrong, repeats, notes)

    def _wrong_twice(self, probes: Mapping[int, int], differing: Sequence[Sequence[int]],
                     axes: Axes) -> dict[int, str]:
        """The members that differ from most replicas in both probes; without a majority, one that
        differs from itself. If several of a replica do, any of them may be the cause."""
        suspects: list[int] = []
        for part in differing:
            now = {place: probes[place] for place in part if place in probes}
            first = {place: self._first.get(place, value) for place, value in now.items()}
            changed = [place for place in now if now[place] != first[place]]
            odd = _odd(now)
            suspects += set(odd) & set(_odd(first)) if odd else changed * (len(changed) == 1)
        replicas = Counter(coordinates(axes, place).dp for place in suspects)
        return {place: "it computes another gradient of a micro-batch than other replicas, twice"
                for place in suspects if replicas[coordinates(axes, place).dp] == 1}


def _parts(axes: Axes) -> list[list[int]]:
    """The positions that hold the same part of the model, for each part."""
    return [[position_of(axes, Coordinates(tp=tp, pp=pp, dp=dp)) for dp in range(axes.dp)]
            for pp in range(axes.pp) for tp in range(axes.tp)]


def _odd(values: Mapping[int, int]) -> list[int]:
    """The places whose value is not that of more than half of them; none without such a value."""
    if not values:
        return []
    (value, num), = Counter(values.values()).most_common(1)
    return [place for place, own in values.items() if own != value] if 2 * num > len(values) else []

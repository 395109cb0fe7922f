"""The format of orders: fields that agents of older releases do not know, and what they are sent.

An agent refuses an order whose job spec has a key that it does not know. So the copy of an order in
an agent's stream leaves out each added field that stands at its default: to leave it out and to
write it mean the same. A field that is not at its default must be obeyed. Only an agent whose
number is at least that of `needed_format` gets such an order: the plan gives the task no slots on
other nodes (control_plane/placement/usable_slots.py).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from ..spec.job import JobSpec, Loop, Train
from ..spec.model import MegatronModel
from ..spec.parallelism import Parallel
from .orders import ProbeNode, PublishCheckpoint, Quiesce, Reconfigure, StartRank, StopRank
from .types import Body

ORDER_FORMAT_VERSION = 1
"""The format that this tree's agents read (NodeJoined). 0: that of release 0.3.0. Raise it with the
first field that is added to an order after a release."""


ADDED_KINDS: dict[type[Body], int] = {ProbeNode: 1}
"""Orders that release 0.3.0 does not have, and the format of the agents that may be given them."""


class Added(NamedTuple):
    """A field that an order has since a format. `of`: the struct that has the field."""

    kind: type[Body]
    path: tuple[str, ...]
    """From the order's body, by the names of the attributes."""
    of: type[Struct]
    since: int
    ignorable: bool = False
    """An agent that does not know the field may ignore it, whatever its value: the copy of an order
    marks it. Agents of format 0 do not read marks."""

    @property
    def default(self) -> Any:
        (found,) = (one for one in fields(self.of) if one.name == self.path[-1])
        return found.default if found.default is not NODEFAULT else found.default_factory()


def _exact_sums(at: str, of: type[Struct]) -> Iterator[Added]:
    for name in ("reproducible", "reproducible_bits", "digest_every"):
        yield Added(StartRank, ("spec", at, name), of, 1)


ADDED: tuple[Added, ...] = (
    *_exact_sums("train", Train),
    *_exact_sums("loop", Loop),
    Added(StartRank, ("spec", "train", "skip_not_finite"), Train, 1),
    Added(StartRank, ("spec", "loop", "skip_not_finite"), Loop, 1),
    Added(StartRank, ("spec", "train", "checkpoint_keep"), Train, 1),
    Added(StartRank, ("spec", "loop", "checkpoint_keep"), Loop, 1),
    Added(StartRank, ("spec", "train", "begin_from"), Train, 1),
    Added(StartRank, ("spec", "loop", "begin_from"), Loop, 1),
    Added(PublishCheckpoint, ("remove",), PublishCheckpoint, 1, ignorable=True),
    Added(Reconfigure, ("earlier",), Reconfigure, 1, ignorable=True),
    Added(StartRank, ("spec", "model", "exact_sum_bits"), MegatronModel, 1),
    Added(StartRank, ("spec", "loop", "model", "exact_sum_bits"), MegatronModel, 1),
    Added(StartRank, ("has_begun",), StartRank, 1, ignorable=True),
    Added(Quiesce, ("save_attempt",), Quiesce, 1),
    Added(Quiesce, ("output",), Quiesce, 1),
    Added(Reconfigure, ("output",), Reconfigure, 1),
    Added(StopRank, ("keeps_stacks",), StopRank, 1, ignorable=True),
    Added(StartRank, ("first_iteration_s_max",), StartRank, 1, ignorable=True),
    Added(StartRank, ("spec", "train", "parallel", "mirror"), Parallel, 1, ignorable=True),
    Added(StartRank, ("spec", "loop", "parallel", "mirror"), Parallel, 1, ignorable=True),
    Added(StartRank, ("local_slots",), StartRank, 1, ignorable=True),
    Added(StartRank, ("tell_s",), StartRank, 1, ignorable=True),
    Added(Quiesce, ("tell_s",), Quiesce, 1, ignorable=True),
    Added(Reconfigure, ("tell_s",), Reconfigure, 1, ignorable=True),
    Added(StartRank, ("restore_s_max",), StartRank, 1, ignorable=True),
    Added(Reconfigure, ("restore_s_max",), Reconfigure, 1, ignorable=True),
)
"""Every field of an order that release 0.3.0 does not have. Its default must never change."""


def needed_format(spec: JobSpec, added: Sequence[Added] = ADDED) -> int:
    """The lowest format of an agent that can start a task with this spec."""
    return max(
        (
            1 if one.ignorable else one.since
            for one in added
            if one.kind is StartRank
            and one.path[0] == "spec"
            and _value(spec, one, one.path[1:]) != one.default
        ),
        default=0,
    )


def changes(
    order: Body, added: Sequence[Added] = ADDED
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """(the fields that an order's copy leaves out, those that it marks as ignorable)."""
    own = [one for one in added if isinstance(order, one.kind)]
    at_default = [_value(order, one, one.path) == one.default for one in own]
    return (
        [
            one.path
            for one, absent in zip(own, at_default, strict=True)
            if absent and _holder(order, one.path) is not None
        ],
        [
            one.path
            for one, absent in zip(own, at_default, strict=True)
            if not absent and one.ignorable
        ],
    )


def unknown(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those of an order's ignorable fields that this Unicron does not know."""
    known = {one.path for one in ADDED}
    return [path for path in paths if path not in known]


def without(body: dict[str, Any], paths: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The plain body without these fields; it is changed in place. A path may lead nowhere."""
    for path in paths:
        at: dict[str, Any] | None = body
        for name in path[:-1]:
            found = at.get(name) if at is not None else None
            at = cast(dict[str, Any], found) if isinstance(found, dict) else None
        if at is not None:
            at.pop(path[-1], None)
    return body


def _holder(body: Any, path: Sequence[str]) -> Any:
    """The struct that has the field at the end of the path; None: a part of the path is None."""
    for name in path[:-1]:
        body = getattr(body, name, None)
    return body


def _value(body: Any, one: Added, path: Sequence[str]) -> Any:
    holder = _holder(body, path)
    return one.default if holder is None else getattr(holder, path[-1])

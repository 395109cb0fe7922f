"""The limits of waits for processes: how long nothing may move, and the policy field of each."""

from typing import NamedTuple

from ...events.records.types import QuiesceMode
from ...events.spec.policy import Policy
from .task import Work

TELLS_NUM = 3
"""A process that works is told of at most so often within its limit."""


class Limit(NamedTuple):
    """How long nothing may move."""

    field: str
    """The field of the policy that says it."""
    s: float
    """Its value."""

    @property
    def tell_s(self) -> float:
        """How often an agent tells of a process that works."""
        return self.s / TELLS_NUM


def of(policy: Policy, field: str) -> Limit:
    return Limit(field, getattr(policy, field))


def to_leave(policy: Policy, mode: QuiesceMode | str) -> Limit:
    """Of members that are to leave their generation."""
    return of(policy, "quiesce_s_max" if mode == "now" else "boundary_s_max")


def of_work(policy: Policy, limit: Limit, work: Work) -> Limit:
    """The limit of a wait for a process that does this."""
    storage = of(policy, "storage_s_max")
    return max(limit, storage, key=lambda longer: longer.s) if work.is_storage else limit


def restore_s_max(policy: Policy) -> float:
    """How long the checkpoint stores may send a member nothing: time is left to read the checkpoint
    on disk before the generation fails."""
    return min(policy.restore_s_max, policy.reconfigure_s_max / 2)

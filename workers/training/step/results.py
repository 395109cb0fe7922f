"""What came of a collective, and of an iteration: values that the caller must look at."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ...diagnosis.classifier import NOTHING, Verdict
from .progress import Differed, Overflowed

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """The collective returned `value` on this member, before it began to abort anything."""

    value: T


class Stopped(NamedTuple):
    """An order to stop came first. `is_abandoned`: the call still waits in a detached thread, and
    its later effects must not matter. `why`: the error that came with the order, if one did."""

    is_abandoned: bool = False
    why: str = ""

    @property
    def goes_on(self) -> bool:
        return False


class Failed(NamedTuple):
    """Another member is gone, or wrong. `why` is the error, `verdict` its classification."""

    why: str
    verdict: Verdict = NOTHING

    @property
    def goes_on(self) -> bool:
        return False


class Stepped(NamedTuple):
    """This member has stepped, or all have met at the end. What all told with the reduction:"""

    stops: bool = False
    """Whether they stop here, because a member has an order to stop at this boundary."""
    may_copy: bool = False
    """Whether all of them can take an in-memory checkpoint now."""
    is_copied: bool = False
    """Whether all of them have stored their share of the last one."""
    num_saving: int = 0
    """The members that still write their share of a checkpoint, or have not saved at the end."""
    num_others_saving: int = 0
    """Those of them that are not this one."""

    @property
    def goes_on(self) -> bool:
        return not self.stops


class Again(NamedTuple):
    """No member steps: all of them begin the iteration again, because this has happened."""

    because: Differed | Overflowed


class Wrong(NamedTuple):
    """Another member is wrong: no member steps, and the generation has failed."""

    failed: Failed
    in_own_replica: bool
    """Whether it is of this member's replica, whose local sum then does not count."""


Ended = Stopped | Failed
"""The generation ends. Whether this member has stepped, its `step_version` says: the gather comes
after the step."""
Result = Done[T] | Stopped | Failed
Outcome = Stepped | Stopped | Failed

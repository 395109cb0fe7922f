"""What detection tells of nodes, and of ranks that go on living: bodies of reports, frozen.

`status` is a row of the paper's table (events/statuses.py), "" where no row is meant; `rule` names
what matched, so that a person can look it up.
"""

from __future__ import annotations

from typing import Literal

from .reports import Body

CheckHealth = Literal["healthy", "degraded", "unhealthy", "unknown"]
"""What a check says, in the order of the exit codes 0 to 3 of a check command."""
Whereabouts = Literal["own", "collective"]
"""What a rank is in: work of its own, or a collective, where it waits for others."""


# --- said by a rank ---------------------------------------------------------------------------
class HealingDeclined(Body, frozen=True):
    """The loop that a command runs cannot heal in memory: the task is a command as any other, and
    this process trains on, or ends, as one."""

    task: int
    rank: int
    attempt: int
    why: str


# --- said by an agent about its node ------------------------------------------------------------
class HealthChanged(Body, frozen=True):
    """A check of the node says something else than before; the first "healthy" is not told.

    `check` is its name ("gpu", "memory", "check/NAME" of a site's own). `devices` are the slots
    that it is about; empty: the whole node.
    """

    node: str
    incarnation: int
    check: str
    health: CheckHealth
    why: str
    devices: tuple[int, ...] = ()
    status: str = ""
    rule: str = ""


class DeviceErred(Body, frozen=True):
    """The kernel or a driver told of an error: evidence, once for each burst of equal ones.

    `devices` are the slots whose GPU it names; empty: the whole node, or nobody knows. `code` is
    the XID (0: it is none), `pid` the process that it names (0: none).
    """

    node: str
    incarnation: int
    origin: Literal["kernel", "nvml", "network"]
    status: str
    rule: str
    text: str
    devices: tuple[int, ...] = ()
    code: int = 0
    pid: int = 0


# --- said by an agent about a rank --------------------------------------------------------------
class RankStalled(Body, frozen=True):
    """The rank has passed no mark for more than three times its average iteration.

    First, evaluation, checkpoint and reconfiguration do not count. Each rank of a task that stands
    is told of by itself, so that they can be compared. `collective` is how many collectives of this
    iteration it has entered, the one that it is in included; `what` names the mark passed last;
    `stack` where its code stands, where that could be read.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    where: Whereabouts
    what: str
    collective: int
    in_s: float
    """For so long it has passed no mark."""
    normal_s: float
    """The running average of an iteration."""
    stack: str = ""


class RankWentOn(Body, frozen=True):
    """A stalled rank passed a mark again."""

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    stalled_s: float


class RankPaced(Body, frozen=True):
    """How fast the rank works: told when it is first known, and when it has changed for good.

    Medians over the last `num_iterations`. `own_s` is what its own work of an iteration takes,
    without waiting for others in collectives; `normal_s` what that took when it was first known.
    `num_iterations` 1: of one that has not ended and lasts too long by the rank's own work, though
    that passes marks; told again whenever it has lasted twice as long.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    num_iterations: int
    iteration_s: float
    own_s: float
    normal_s: float


# --- said by an operator ------------------------------------------------------------------------
class QuarantineLifted(Body, frozen=True):
    """The node may have tasks again, and what it did before counts no more."""

    node: str
    reason: str = ""

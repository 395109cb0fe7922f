"""What is noticed of ranks that go on living, as the state holds it."""

from __future__ import annotations

from msgspec import Struct

from ..events.detected import Whereabouts


class Stall(Struct, frozen=True, kw_only=True):
    """A member stands, as RankStalled told and RankWentOn has not denied."""

    iteration: int
    where: Whereabouts
    what: str
    collective: int
    since_s: float
    """When it passed its last mark, by the log's clock: late rather than early."""
    normal_s: float
    told_s: float
    seq: int
    """What tells so."""
    stack: str = ""
    """What its process does."""

    @property
    def position(self) -> tuple[int, int]:
        """How far it got: work of its own after a collective is beyond it, and before the next."""
        return self.iteration, 2 * self.collective + (self.where == "own")


class Crawl(Struct, frozen=True, kw_only=True):
    """A member passes marks, and yet its iteration does not end: as RankPaced told last of it."""

    iteration: int
    own_s: float
    """Its own work of it until then, without waiting for others."""
    normal_s: float
    """What its own work usually takes."""
    since_s: float
    """When the iteration began, by the log's clock: late rather than early."""
    told_s: float
    seq: int


class Pace(Struct, frozen=True, kw_only=True):
    """How fast a rank works, as RankPaced told last."""

    generation: int
    """0: of an earlier process, from which is known what the rank can do."""
    num_micro_batches: int
    """Its part of an iteration then."""
    iteration_s: float
    own_s: float
    normal_s: float
    normal_num: int
    """Its part of an iteration when `normal_s` was told first."""
    normal_iteration_s: float
    """What an iteration took then."""
    seq: int


class Slow(Struct, frozen=True, kw_only=True):
    """A rank that keeps others waiting, though all go on."""

    ratio: float
    """Its own work takes so many times what it did, or what that of its peers takes."""
    holds_up: float
    """For it an iteration takes so many times what it would."""
    since_s: float


class Priced(Struct, frozen=True, kw_only=True):
    """What a degraded node costs, as DegradedPriced told last."""

    tasks: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_waf: float
    drain_waf: float
    why: str
    now_waf: float
    seq: int
    at_s: float

"""A policy: what decides after a fault, and how long its steps take."""

from collections.abc import Callable

from msgspec import Struct, field

from ...decide.decide import Decide


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the steps of one policy take, in seconds. docs/guides/simulate.md describes each."""

    detect_s: dict[str, float]
    detect_other_s: float
    detect_iterations: dict[str, float] = field(default_factory=dict[str, float])
    start_s: float
    quiesce_s: float = 0.0
    regroup_s: float = 0.0
    checkpoint_s: float
    copy_s: float = 0.0
    speed: float = 1.0
    num_spares: int = 0

    def detection_s(self, cause: str, iteration_s: float) -> float:
        """The time from a fault of this cause to its report, given the time of an iteration."""
        return max(
            self.detect_s.get(cause, self.detect_other_s),
            self.detect_iterations.get(cause, 0.0) * iteration_s,
        )


class Policy(Struct, frozen=True, kw_only=True):
    """`heals`: after a fault the surviving members keep their state; if not, all processes of the
    task restart. `escalates`: the limits can quarantine a node and fail a task. `decides` makes the
    `decide` of a run from its costs."""

    heals: bool
    escalates: bool = False
    decides: Callable[[Costs], Decide]
    costs: Costs

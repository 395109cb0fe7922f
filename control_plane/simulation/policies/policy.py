"""A policy: what decides after a fault, and how long its steps take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field

from ...decide.decide import Decide


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the steps of one policy take, in seconds. The policy's module names the sources.

    `detect_s`: from a fault until it is reported, by cause; `detect_other_s` for all other causes.
    A cause in `detect_iterations` takes at least this number of iterations. `start_s`: from the
    order to start a process until it trains, or, in a task that heals in memory, until it is ready.
    `quiesce_s`: from an order to leave a generation at once until a member has left it.
    `regroup_s`: from an order to join a generation until a member has joined it, with its state.
    `checkpoint_s`, `copy_s`: training time between two checkpoints, on disk and in memory; 0: none.
    `speed`: training speed without a fault, relative to Megatron's. `num_spares` nodes are idle.
    """

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
        return max(self.detect_s.get(cause, self.detect_other_s),
                   self.detect_iterations.get(cause, 0.0) * iteration_s)


class Policy(Struct, frozen=True, kw_only=True):
    """`heals`: after a fault the surviving members keep their state; if not, all processes of the
    task restart. `escalates`: the limits can quarantine a node and fail a task. `decides` makes the
    `decide` of a run from its costs and, if `by_params`, the model size of each task."""

    heals: bool
    escalates: bool = False
    decides: Callable[[Costs, Mapping[str, float]], Decide]
    costs: Costs
    by_params: bool = False

"""A policy: what decides, and what its steps take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field

from ...decide.decide import Decide

# --- What a policy's steps take, in seconds. ---


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one policy. Where the figures are from stands in its file.

    `detect_s` is from a fault until it is told, by cause; of the others `detect_other_s`. Of those
    in `detect_iterations` it is so many iterations instead, where these take longer. `start_s` is
    from the order to start a process until it trains, or where it heals in memory, until it holds.
    `quiesce_s`: until a member has left its generation when it is told to at once. `regroup_s`:
    until the members are in the next one, with their parts of the state. A checkpoint is made every
    `checkpoint_s` of training, a copy in memory every `copy_s`, 0 for none. `speed` is that of
    training without a fault, beside Megatron's. `num_spares` nodes are kept idle.
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

    def until_told_s(self, cause: str, iteration_s: float) -> float:
        """From a fault of this cause until it is told, where an iteration takes so long."""
        return max(self.detect_s.get(cause, self.detect_other_s),
                   self.detect_iterations.get(cause, 0.0) * iteration_s)


class Told(Struct, frozen=True, kw_only=True):
    """What a policy knows of a run before it begins. `params`: of the model, by task's name."""

    costs: Costs
    params: Mapping[str, float]


class Policy(Struct, frozen=True, kw_only=True):
    """`heals`: members go on in memory; else all processes of a task start again together.

    `escalates`: nodes are quarantined and tasks given up as the limits say; others know neither.
    `decides` makes the `decide` of one run. `quick`: the same decisions with less to explain them,
    where nobody keeps the log. `by_params`: it asks for each task's parameters.
    """

    what: str
    heals: bool
    escalates: bool = False
    decides: Callable[[Told], Decide]
    quick: Decide | None = None
    costs: Costs
    by_params: bool = False

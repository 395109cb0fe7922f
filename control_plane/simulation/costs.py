"""What a policy's steps take, in seconds."""

from __future__ import annotations

from msgspec import Struct, field


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

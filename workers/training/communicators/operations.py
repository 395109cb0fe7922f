"""The groups of one generation, and the operations that a training step starts on them.

Every collective and every message of a step goes through `Operations`, which counts it before it
begins. So another thread can tell how far this process has come on each group.
"""

from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

Role = Literal["world", "dp_cp", "tp", "pp", "mp", "embd"]
"""A group by what it is for; `world` has all members. Several roles may share one group."""
Kind = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "send_next",
    "send_previous",
    "receive_next",
    "receive_previous",
]
"""A collective, or a message to or from a neighbouring pipeline stage."""
Works = list[Any]
"""torch's handles of operations that were started and may not have ended."""
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Started(NamedTuple):
    """What this process has started on the group of one role: the number of operations, and the
    kind and the bytes of the last."""

    number: int
    kind: Kind
    num_bytes: int


class Operations:
    """The operations of one generation. `groups` is its ProcessGroupCollection, for libraries that
    start their own; they are told to `count`.

    The members of a group call each method together, in the same order. A method raises
    RuntimeError when a member is gone. After `close`, which the training thread calls at the end of
    the generation, every method raises it: an abandoned thread then starts nothing more.
    """

    def __init__(self, groups: Any) -> None:
        self.groups = groups
        self.started: dict[Role, Started] = {}
        """By role. Another thread may read it at any time."""
        self._world: Any = dist.group.WORLD
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._world = None

    def group(self, role: Role) -> Any:
        """The group of this role. Raises RuntimeError after `close`, ValueError if torch has
        forgotten an aborted world."""
        if self._is_closed:
            raise RuntimeError("the generation ended meanwhile")
        if role != "world":
            return getattr(self.groups, role)
        dist.get_rank()  # raises ValueError
        return self._world

    def count(self, role: Role, kind: Kind, num_bytes: int) -> None:
        """An operation is about to be started on the group of this role."""
        last = self.started.get(role)
        self.started[role] = Started(1 if last is None else last.number + 1, kind, num_bytes)

    def all_reduce(self, values: Tensor, role: Role = "world", op: Any = SUM) -> None:
        """Reduce `values` in place over the group, and wait. On CUDA the stream waits."""
        group = self.group(role)
        self.count(role, "all_reduce", values.nbytes)
        dist.all_reduce(values, op, group=group)

    def start_all_reduce(self, values: Tensor, role: Role = "world") -> Works:
        """As `all_reduce`, of sums, without the wait."""
        group = self.group(role)
        self.count(role, "all_reduce", values.nbytes)
        return [dist.all_reduce(values, group=group, async_op=True)]

    def start_reduce_scatter(self, part: Tensor, values: Tensor, role: Role) -> Works:
        """Start to add up `values`, of which this member gets its share in `part`."""
        group = self.group(role)
        self.count(role, "reduce_scatter", values.nbytes)
        # Its successor in torch 2.13 is not in 2.11.
        return [
            dist.reduce_scatter_tensor(  # pyright: ignore[reportDeprecated]
                part, values, group=group, async_op=True
            )
        ]

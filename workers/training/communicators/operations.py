"""The groups of one generation, and the operations that a training step starts on them.

counting.py counts them, as all others of this process.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

Role = Literal["world", "dp_cp", "tp", "pp", "mp", "embd"]
"""A group by what it is for; `world` has all members. Several roles may share one group."""
Works = list[Any]
"""torch's handles of operations that were started and may not have ended."""
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Operations:
    """The operations of one generation. `groups` is its ProcessGroupCollection, for libraries that
    start their own.

    The members of a group call each method together, in the same order. A method raises
    RuntimeError when a member is gone. After `close`, which the training thread calls at the end of
    the generation, every method raises it: an abandoned thread then starts nothing more.
    """

    def __init__(self, groups: Any) -> None:
        self.groups = groups
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

    def all_reduce(self, values: Tensor, role: Role = "world", op: Any = SUM) -> None:
        """Reduce `values` in place over the group, and wait. On CUDA the stream waits."""
        dist.all_reduce(values, op, group=self.group(role))

    def start_all_reduce(self, values: Tensor, role: Role = "world") -> Works:
        """As `all_reduce`, of sums, without the wait."""
        return [dist.all_reduce(values, group=self.group(role), async_op=True)]

    def start_reduce_scatter(self, part: Tensor, values: Tensor, role: Role) -> Works:
        """Start to add up `values`, of which this member gets its share in `part`."""
        group = self.group(role)
        # Its successor in torch 2.13 is not in 2.11.
        return [
            dist.reduce_scatter_tensor(  # pyright: ignore[reportDeprecated]
                part, values, group=group, async_op=True
            )
        ]

    def start_ring(self, sent: Sequence[Tensor], received: Sequence[Tensor], role: Role) -> Works:
        """Start to send tensors to the next member of the group, and to receive those of the
        previous member, which sends as many of the same sizes."""
        group = self.group(role)
        at, num = group.rank(), group.size()
        messages = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(at + 1) % num)
            for tensor in sent
        ]
        messages += [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=(at - 1) % num)
            for tensor in received
        ]
        return dist.batch_isend_irecv(messages) if messages else []

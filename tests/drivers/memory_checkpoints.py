"""Reports about in-memory checkpoints, for tests of the decider."""

from __future__ import annotations

from decider import Driver, only, task_of, the
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.types import first_store_number

FIRST = first_store_number(1)


def kept(
    d: Driver,
    task: int,
    node: str,
    step: int,
    *,
    generation: int = 0,
    start: int = FIRST,
    share: int = 0,
    num_shares: int = 1,
) -> None:
    """The first member reports that a node's store has a copy, or one share of it."""
    it = d.state.tasks[task]
    first = it.members[0]
    d.tell(
        d.source(first.node),
        r.MemoryCheckpointStored(
            task=task,
            rank=first.rank,
            attempt=first.attempt,
            generation=generation or it.generation,
            step_version=step,
            node=node,
            copy_bytes=12,
            checksum="crc32:00000001",
            keeper_start=start,
            share=share,
            num_shares=num_shares,
        ),
    )


def ordered_anew(d: Driver, task: int) -> o.Reconfigure:
    """Kill all processes of the task and start them again. Returns the order that they then get."""
    begin = len(d.log)
    for rank in sorted(task_of(d, task).ranks):
        d.exit(task, rank)
    for record in only(o.StartRank, d.log[begin:]):
        d.do(record.body)
    return the(o.Reconfigure, d.log[begin:])


def came(
    d: Driver, order: o.Reconfigure, rank: int, origin: str, node: str, size: int, step: int = 4
) -> None:
    """The rank has joined the generation, with state from that origin."""
    process = d.state.tasks[order.task].ranks[rank]
    d.tell(
        d.source(process.slot.node),
        r.Reconfigured(
            task=order.task,
            rank=rank,
            attempt=process.attempt,
            generation=order.generation,
            step_version=step,
            kept_micro_batches=(),
            remaining_micro_batches=(0,),
            reassigned_micro_batches=(),
            source=0 if origin == "peer" else -1,
            received_bytes=size,
            down_s=0.0,
            up_s=0.0,
            settle_s=0.0,
            origin=origin,
            origin_node=node,
        ),
    )  # type: ignore[arg-type]

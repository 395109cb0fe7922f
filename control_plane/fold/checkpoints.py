"""The fold of a task's stored state: checkpoints on disk and in memory."""

from msgspec.structs import replace

from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.codec import encode_record
from ...events.records.envelope import Record
from ..state.cluster import ClusterState
from ..state.memory_checkpoints import whole_checkpoints
from ..state.node import Node
from ..state.task import Checkpoint, StoredCheckpoint, Task
from .edits import close_orders, forget_store, set_stores

# --- checkpoints on disk ---
REMOVALS_NUM_MAX = 8
"""An old checkpoint is named in so many orders: an agent may end before it has removed it."""


def checkpoint_saved(
    state: ClusterState, record: Record, task: Task, body: r.CheckpointSaved
) -> None:
    if body.generation != task.generation:
        return
    output = task.spec.training.output if task.spec.training is not None else ""
    path = body.path.removeprefix(output).lstrip("/")
    task.stored = [stored for stored in task.stored if stored.path != path]
    task.stored.append(StoredCheckpoint(path=path, step_version=body.step_version))
    ways = [task.saved, task.checkpoint, *task.publishing.values()]
    if any(
        way is not None
        and way.generation == body.generation
        and way.step_version > body.step_version
        for way in ways
    ):
        return  # another rank took over the save and has saved a newer state
    saved = Checkpoint(
        generation=body.generation,
        step_version=body.step_version,
        path=path,
        final=body.final,
        loss=body.loss,
    )
    if body.loss:  # the published one stays: it is finite
        task.unpublished = saved
        return
    task.saved = saved
    if task.unpublished is not None and task.unpublished.step_version <= saved.step_version:
        task.unpublished = None


def checkpoint_published(
    state: ClusterState, record: Record, task: Task, body: r.CheckpointPublished
) -> None:
    published = task.publishing.get(body.order)
    if published is None:
        return
    for order in [order for order in task.publishing if order <= body.order]:
        del task.publishing[order]
        state.orders.pop(order, None)
    task.checkpoint = published
    training = task.spec.training
    keep = training.checkpoint_keep if training is not None else "all"
    num = REMOVALS_NUM_MAX + (keep if keep != "all" else 0)
    task.stored = [
        replace(stored, is_published=True) if stored.path == published.path else stored
        for stored in task.stored[-num:]
    ]


def publish_ordered(
    state: ClusterState, record: Record, task: Task, body: o.PublishCheckpoint
) -> None:
    known = [
        x
        for x in (task.saved, *task.publishing.values())
        if x is not None and (x.generation, x.path) == (body.generation, body.path)
    ]
    if not known:
        return
    for order in [key for key, value in task.publishing.items() if value is known[0]]:
        del task.publishing[order]
        close_orders(state, [order])
    node = body.nodes[0] if body.nodes else ""
    task.publishing[record.seq], task.saved = replace(known[0], node=node), None
    state.orders[record.seq] = encode_record(record)


# --- in-memory checkpoints ---
def checkpoint_stored(state: ClusterState, record: Record, body: r.MemoryCheckpointStored) -> None:
    """Record an in-memory checkpoint of the current generation (of a task that restarts from
    memory: of any); older ones are not used. The end of the store may be reported before."""
    task, node = state.tasks.get(body.task), state.nodes.get(body.node)
    if task is None or node is None or node.health == "left" or not node.keeper:
        return
    start = body.keeper_start or node.keeper_start  # 0: reported by an older agent
    if start < node.keeper_start:
        return
    if task.phase == "ended":  # stored by an orphaned process: order the drop again
        close_orders(state, [task.drop_order])
        task.store_nodes, task.drop_order = sorted({*task.store_nodes, node.name}), 0
    if task.phase == "ended" or (
        body.generation != task.generation and not task.restarts_from_memory
    ):
        return
    if start > node.keeper_start:
        _store_ended(state, node, start)
    copy = t.MemoryCheckpoint(
        node=node.name,
        endpoint=node.keeper,
        rank=body.rank,
        generation=body.generation,
        step_version=body.step_version,
        copy_bytes=body.copy_bytes,
        checksum=body.checksum,
        share=min(max(body.share, 0), max(body.num_shares, 1) - 1),
        num_shares=max(body.num_shares, 1),
    )
    here = [one for one in task.copies if one.node == node.name and one.share == copy.share]
    task.copies = [one for one in task.copies if one.node != node.name or one.share != copy.share]
    task.copies += [*here[1 - t.CHECKPOINTS_NUM_MAX :], copy]
    if {one.num_shares for one in task.copies} != {copy.num_shares}:
        # Once a version is whole, no newer share replaces those of other numbers of shares.
        whole = next(iter(whole_checkpoints(task.copies)), None)
        if whole is not None and whole.generation == task.generation:
            task.copies = [
                one
                for one in task.copies
                if one.generation == task.generation or one.num_shares == whole.num_shares
            ]


def checkpoints_lost(
    state: ClusterState, record: Record, node: Node, body: r.MemoryCheckpointsLost
) -> None:
    task = state.tasks.get(body.task)
    if task is not None and body.order:
        if body.order == task.drop_order:
            forget_store(state, task, node.name)
        return
    start = body.keeper_start or node.keeper_start
    if start < node.keeper_start:
        return
    if not body.task:
        _store_ended(state, node, start + 1)
    elif task is not None:
        task.copies = [copy for copy in task.copies if copy.node != node.name]


def _store_ended(state: ClusterState, node: Node, start: int) -> None:
    """A new store has begun: in-memory checkpoints of the node's earlier stores are lost."""
    node.keeper_start = start
    for task in state.tasks.values():
        task.copies = [copy for copy in task.copies if copy.node != node.name]


def stores_ordered(
    state: ClusterState, record: Record, task: Task, body: o.SetCheckpointStores
) -> None:
    if body.generation != task.generation:
        return
    close_orders(state, [task.keep_order])
    task.keep_order = record.seq
    state.orders[record.seq] = encode_record(record)
    set_stores(task, body.keepers, body.stores)


def drop_ordered(
    state: ClusterState, record: Record, task: Task, body: o.DropMemoryCheckpoints
) -> None:
    if task.phase == "ended":
        close_orders(state, [task.drop_order])
        task.drop_order, task.store_nodes = record.seq, list(body.nodes)
        state.orders[record.seq] = encode_record(record)

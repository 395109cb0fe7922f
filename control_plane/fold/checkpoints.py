"""The fold of a task's stored state: checkpoints on disk and in memory."""

from msgspec.structs import replace

from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.codec import encode_record
from ...events.records.envelope import Record
from ...events.timing import pause_after_s
from ..state.cluster import ClusterState
from ..state.memory_checkpoints import whole_checkpoints
from ..state.node import Node
from ..state.task import Checkpoint, FailedSave, Rank, StoredCheckpoint, Task
from .edits import clear_deadline, close_orders, forget_store, set_deadline, set_stores

# --- checkpoints on disk ---
REMOVALS_NUM_MAX = 8
"""An old checkpoint is named in so many orders: an agent may end before it has removed it."""

UNPUBLISHED_NUM_MAX = 256
"""Saved checkpoints of a task that the state knows while none of them is published."""


def checkpoint_saved(
    state: ClusterState, record: Record, task: Task, body: r.CheckpointSaved
) -> None:
    if body.generation != task.generation:
        return
    output = body.output or task.output
    elsewhere = output if output != task.output else ""
    path = body.path.removeprefix(output).lstrip("/")
    task.stored = [each for each in task.stored if (each.path, each.output) != (path, elsewhere)]
    task.stored.append(
        StoredCheckpoint(path=path, step_version=body.step_version, output=elsewhere)
    )
    waiting = [each for each in task.stored if not each.is_published]
    if len(waiting) > UNPUBLISHED_NUM_MAX:
        task.stored.remove(waiting[0])
    if any(
        way.generation == body.generation and way.step_version > body.step_version
        for way in task.complete_checkpoints
    ):
        return  # another rank took over the save and has saved a newer state
    saved = Checkpoint(
        generation=body.generation,
        step_version=body.step_version,
        path=path,
        final=body.final,
        loss=body.loss,
        output=elsewhere,
    )
    if body.loss:  # the published one stays: it is finite
        task.unpublished = saved
        task.failed_saves.pop("checkpoint", None)
        return
    task.saved = saved
    if task.unpublished is not None and task.unpublished.step_version <= saved.step_version:
        task.unpublished = None
    drop_refused(state, task)


def save_failed(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.CheckpointFailed
) -> None:
    """Keep what could not be saved, until it is. If an order has asked for the save, because the
    task loses its slots, it is given again after a pause."""
    if not body.why:
        task.failed_saves.pop(body.what, None)
        return
    before = task.failed_saves.get(body.what)
    order = task.quiesce_order if task.phase == "quiescing" and task.savers else 0
    final = body.final or (
        before is not None and before.final and body.step_version == before.step_version
    )
    failed = FailedSave(
        what=body.what,
        since_s=record.at_s if before is None else before.since_s,
        seq=record.seq,
        generation=body.generation,
        step_version=body.step_version,
        path=body.path,
        rank=rank.rank,
        node=rank.slot.node,
        why=body.why,
        errno=body.errno,
        final=final,
        order=order,
        num_orders=int(order > 0),
    )
    if before is not None:
        is_same = (before.generation, before.step_version) == (body.generation, body.step_version)
        # Of one save the first reason counts; others follow from it.
        if is_same and before.rank != body.rank and (before.errno or not body.errno):
            failed = replace(before, seq=record.seq, order=order, final=final)
        if order:
            failed = replace(failed, num_orders=before.num_orders + (before.order != order))
    task.failed_saves[body.what] = failed
    if order and body.what == "checkpoint":
        set_deadline(state, f"save/{task.id}", pause_after_s(max(failed.num_orders, 1)))


def checkpoint_published(
    state: ClusterState, record: Record, task: Task, body: r.CheckpointPublished
) -> None:
    published = task.publishing.get(body.order)
    if published is None:
        return
    for order in [order for order in task.publishing if order <= body.order]:
        del task.publishing[order]
        state.orders.pop(order, None)
    task.checkpoint, task.damaged = published, ""
    training = task.spec.training
    keep = training.checkpoint_keep if training is not None else "all"
    num = REMOVALS_NUM_MAX + (keep if keep != "all" else 0)
    task.stored = [
        replace(stored, is_published=True)
        if (stored.path, stored.output) == (published.path, published.output)
        else stored
        for stored in task.stored[-num:]
    ]
    for what in ("checkpoint", "publication"):
        failed = task.failed_saves.get(what)
        if failed is not None and (
            published.step_version >= failed.step_version
            or published.generation > failed.generation
        ):
            del task.failed_saves[what]


def publication_refused(
    state: ClusterState, record: Record, task: Task, refused: Checkpoint, body: r.OrderRefused
) -> None:
    """The files are there: publish them after a pause, unless a later checkpoint is to be."""
    if task.saved is not None or any(order > body.order for order in task.publishing):
        return
    before = task.failed_saves.get("publication")
    num_orders = 1 + (before.num_orders if before is not None else 0)
    task.refused = refused
    task.failed_saves["publication"] = FailedSave(
        what="publication",
        since_s=record.at_s if before is None else before.since_s,
        seq=record.seq,
        generation=refused.generation,
        step_version=refused.step_version,
        path=refused.output or task.output,
        rank=-1,
        node=body.node,
        why=body.why,
        errno=body.errno,
        final=refused.final,
        order=body.order,
        num_orders=num_orders,
    )
    set_deadline(state, f"publish/{task.id}", pause_after_s(num_orders))


def drop_refused(state: ClusterState, task: Task) -> None:
    """A later checkpoint is to be published, or none."""
    task.refused = None
    clear_deadline(state, f"publish/{task.id}")


def output_set(state: ClusterState, record: Record, task: Task, body: r.TaskOutputSet) -> None:
    """The next generation saves to another folder; what is complete stays where it is. A save that
    has failed before the task leaves its slots is ordered again at once."""
    old, train, loop = task.output, task.spec.train, task.spec.loop
    if not old or body.output in ("", old):
        return
    moved = {
        name: replace(way, output=old)
        for name in ("saved", "checkpoint", "refused")
        if (way := getattr(task, name)) is not None and not way.output
    }
    for name, way in moved.items():
        setattr(task, name, way)
    task.publishing = {
        order: way if way.output else replace(way, output=old)
        for order, way in task.publishing.items()
    }
    task.stored = [
        stored if stored.output else replace(stored, output=old) for stored in task.stored
    ]
    task.spec = replace(
        task.spec,
        train=replace(train, output=body.output) if train is not None else None,
        loop=replace(loop, output=body.output) if loop is not None else None,
    )
    task.moved_in = task.generation
    if task.is_save_repeated:
        task.savers = []


def publish_ordered(
    state: ClusterState, record: Record, task: Task, body: o.PublishCheckpoint
) -> None:
    known = [
        x
        for x in (task.saved, task.refused, *task.publishing.values())
        if x is not None and (x.generation, x.path) == (body.generation, body.path)
    ]
    if not known:
        return
    for order in [key for key, value in task.publishing.items() if value is known[0]]:
        del task.publishing[order]
        close_orders(state, [order])
    node = body.nodes[0] if body.nodes else ""
    if known[0] is task.refused:
        drop_refused(state, task)
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
    was_copied = task.is_final_state_copied
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
    failed = task.failed_saves.get("copy")
    if failed is not None and any(
        whole.step_version >= failed.step_version for whole in whole_checkpoints(task.copies)
    ):
        del task.failed_saves["copy"]
    if not was_copied and task.is_final_state_copied:
        state.replan = state.replan or f"the final state of {task.spec.name} is in memory"


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
    task.failed_saves.pop("copy", None)


def drop_ordered(
    state: ClusterState, record: Record, task: Task, body: o.DropMemoryCheckpoints
) -> None:
    if task.phase == "ended":
        close_orders(state, [task.drop_order])
        task.drop_order, task.store_nodes = record.seq, list(body.nodes)
        state.orders[record.seq] = encode_record(record)

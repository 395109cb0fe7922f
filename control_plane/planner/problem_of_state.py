"""Builds the planner's problem from the cluster's state, in the same way for all dry runs."""

import hashlib
from collections import Counter

import msgspec
from msgspec import Struct

from ...events.records.types import Slot
from ...events.spec.parallelism import shape
from ..placement import usable_slots
from ..placement.usable_slots import Limits
from ..state.cluster import ClusterState, allocatable_slots, live_tasks
from ..state.members import is_pinned, is_whole
from ..state.task import Task
from ..throughput import table as throughput
from ..throughput import transition_cost
from ..throughput.training_layouts import layout_within
from .problem import PlanProblem, TaskDemand

LAST = -1
"""The priority of a task that is done, and whose last state only waits for its disk: it keeps its
slots while no other task needs them for its floor."""
_SPARE_BITS = 64 - 52
"""Bits cut off a digest: JSON readers store integers as doubles, which are exact to 53 bits."""


class PlanningSnapshot(Struct, frozen=True, kw_only=True):
    """The planner's problem, and the slots that it may allocate."""

    problem: PlanProblem
    """It has the demands of the tasks that the plan may change: first of those that are known to
    earn something, then of commands whose rate is nominal, each by id. So of equally good plans the
    planner chooses one in which a task that trains keeps its slots."""
    slots: tuple[Slot, ...]
    """The slots that the plan may allocate, in order. Their number is `problem.num_slots`."""
    all_demands: tuple[TaskDemand, ...]
    """The demand of each live task that is not ending; the plan may not change some of them."""
    num_slots_all: int
    """Slots of all nodes that have not left."""
    barred: Limits
    """What tasks that the plan may change may not have."""
    most: dict[int, int]
    """By task in `barred`: the most slots that it may have."""


def planning_snapshot(state: ClusterState, *, without: str = "") -> PlanningSnapshot:
    """The snapshot for a plan now, or after a drain of the node `without`. A task that is ending,
    or pinned (`is_pinned`), keeps its slots: the plan cannot give them to others. Slots in which
    another task already has a seat are excepted."""
    slots = (
        [slot for slot in allocatable_slots(state) if slot.node != without]
        if without
        else (allocatable_slots(state))
    )
    open_tasks: list[Task] = []  # in the order of the demands
    pinned: list[Slot] = []
    for task in live_tasks(state):
        if task.ending or is_pinned(state, task):
            pinned += [rank.slot for rank in task.ranks.values()]
            pinned += [seat.slot for seat in task.target]
        else:
            open_tasks.append(task)
    open_tasks.sort(key=_is_nominal)
    taken = set(pinned)
    if taken:
        taken -= {seat.slot for task in open_tasks for seat in task.target}
    free = tuple(slot for slot in slots if slot not in taken) if taken else tuple(slots)
    policy = state.policy
    usable = set(slots)
    barred = usable_slots.limits(state, open_tasks)
    pools = usable_slots.pools(open_tasks, free, barred)
    most = usable_slots.most_slots(open_tasks, pools, barred)
    all_demands = {
        task.id: _demand(state, task, usable, most.get(task.id))
        for task in live_tasks(state)
        if not task.ending
    }
    spares = policy.hot_spare and not policy.alpha  # its price is in WAF
    problem = PlanProblem(
        demands=tuple(all_demands[task.id] for task in open_tasks),
        num_slots=len(free),
        mtbf_gpu_s=state.mtbf_gpu_s or policy.mtbf_gpu_s,
        gain_min=policy.gain_min,
        moves_max=policy.moves_max,
        quotas=tuple(sorted(policy.quotas.items())),
        floor=policy.floor,
        alpha=policy.alpha,
        repair_s=policy.repair_s if spares else 0.0,
        spare_slots=node_slots(state) if spares else 0,
    )
    return PlanningSnapshot(
        problem=problem,
        slots=free,
        all_demands=tuple(all_demands.values()),
        num_slots_all=sum(node.num_slots for node in state.nodes.values() if node.health != "left"),
        barred=barred,
        most=most,
    )


def _is_nominal(task: Task) -> bool:
    return throughput.origin(task.spec, task.throughput, task.modelled) == "nominal"


def digest(state: ClusterState, snapshot: PlanningSnapshot) -> int:
    """Digest of the planner's complete input, in 52 bits. Equal digests mean the same plan on the
    same slots. `plan --apply --check` uses it to detect that a dry run is out of date."""
    targets = [state.tasks[demand.task].target for demand in snapshot.all_demands]
    data = msgspec.msgpack.encode((snapshot.problem, snapshot.slots, targets))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> _SPARE_BITS


def input_digest(state: ClusterState) -> int:
    return digest(state, planning_snapshot(state))


def node_slots(state: ClusterState) -> int:
    """The most frequent number of slots per node; the largest on a tie; 0 without nodes."""
    counts = Counter(
        node.num_slots for node in state.nodes.values() if node.health != "left" and node.num_slots
    )
    return max(counts, key=lambda num: (counts[num], num), default=0)


def _demand(state: ClusterState, task: Task, usable: set[Slot], most: int | None) -> TaskDemand:
    table = task.throughput or throughput.table(task.id, task.spec, modelled=task.modelled)
    found = throughput.candidates(table, len(task.target), task.spec.slots.floor)
    if most is not None:
        found = [(size, rate) for size, rate in found if size <= most]
    fits = usable.issuperset([seat.slot for seat in task.target])
    faulted = bool(task.target) and not (fits and (not task.incident or is_whole(task)))
    weight = task.weight
    return TaskDemand(
        task=task.id,
        name=task.spec.name,
        now=len(task.target),
        faulted=faulted,
        transition=transition_cost.transition(state, task),
        sizes=tuple(size for size, _ in found),
        shapes=shapes(task, found),
        wafs=tuple(weight * rate for _, rate in found),
        priority=LAST if task.is_final_state_copied else task.spec.priority,
        team=task.spec.team,
        weight=weight,
        floor=task.spec.slots.floor,
    )


def shapes(task: Task, found: list[tuple[int, float]]) -> tuple[int, ...]:
    """By candidate: a number for the replica shape of its layout. Empty: all have one shape."""
    train = task.spec.training
    if train is None or train.parallel.is_plain:
        return ()
    layouts = [layout_within(train, size) for size, _ in found]
    known = [shape(axes) if axes is not None else None for axes in layouts]
    return tuple(map(known.index, known)) if len(dict.fromkeys(known)) > 1 else ()

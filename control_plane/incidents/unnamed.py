"""Faults without a name: which place the members of several of them share.

A collective that fails or never ends names no cause: no process died, no device erred. One such
fault is reattempted in place. When it comes back, within `restart_iterations` or NUM_A_DAY times a
day, the places that it may be of are counted over incidents and tasks: slots, hosts, links, racks
and switches. The ranks of the most suspected place move to other slots, as an experiment.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ...events.records.decisions import ExperimentBegun, PlaceKind, SlotsJudged, Suspicion
from ...events.records.statuses import NCCL_TIMEOUT
from ...events.records.types import Body, Seat, Slot
from ..state.cluster import NUM_UNNAMED_MAX, ClusterState
from ..state.incident import UnnamedFault
from ..state.members import is_pinned
from ..state.task import Task
from . import blame
from .blame import DAY_S
from .hangs import located_in_groups
from .root_cause import host_of, nodes_by_host

NUM_A_DAY = 3
LASTS_S = 3600.0
"""A place is out only if its faults span so long (our choice): what is bad for minutes recovers."""
NUM_NODES_MAX = 64
"""A fault that more nodes explain points at none of them."""
NUM_CONSIDERED_MAX = 8
"""Places that a record names, the most suspected first."""
Link = tuple[str, str]
Place = tuple[PlaceKind, str]
"""Of what kind, and its name."""


class Move(NamedTuple):
    """The ranks of a place, and free slots outside it."""

    place: Place
    suspects: Sequence[Seat]
    free: Sequence[Slot]


# --- evidence ---
def remember(state: ClusterState, task: Task, incident: int, status: str) -> None:
    """Fold: keep a fault without a name, once a generation, and where it may be."""
    now = {member.node for member in task.members}
    places = _places_above(state, now)
    if task.unnamed_s:
        now &= set(task.common_nodes)
        places &= set(task.common_places)
    task.common_nodes, task.common_places = sorted(now), sorted(places)
    task.unnamed_s = task.unnamed_s or state.at_s
    if any((fault.task, fault.generation) == (task.id, task.generation) for fault in state.unnamed):
        return
    nodes, links = _where(state, task)
    fault = UnnamedFault(
        generation=task.generation,
        at_s=state.at_s,
        task=task.id,
        incident=incident,
        status=status,
        iteration=task.max_iteration,
        nodes=nodes,
        links=links,
    )
    since_s = state.at_s - DAY_S
    kept = [fault for fault in state.unnamed if fault.at_s >= since_s]
    state.unnamed = [*kept, fault][-NUM_UNNAMED_MAX:]


def _places_above(state: ClusterState, nodes: Iterable[str]) -> set[Place]:
    """The racks and switches of these nodes."""
    labels = [state.nodes[name].labels for name in nodes if name in state.nodes]
    racks: set[Place] = {("rack", label.rack) for label in labels if label.rack}
    switches: set[Place] = {("switch", label.switch) for label in labels if label.switch}
    return racks | switches


def _where(state: ClusterState, task: Task) -> tuple[tuple[str, ...], tuple[Link, ...]]:
    """The nodes that explain most of what members say about their peers; else those of the members
    that are in an operation which does not end; else all members' nodes. Also the links that are
    named. None, if members call different operations: no place explains that."""
    located = located_in_groups(task)
    if located is not None and located.kind == "mismatch":
        return (), ()
    links = tuple(sorted(set(_accusations(state, task))))
    peers: dict[str, set[str]] = {}
    for a, b in links:
        peers.setdefault(a, set()).add(b)
        peers.setdefault(b, set()).add(a)
    most = max(map(len, peers.values()), default=0)
    named = [name for name, others in peers.items() if len(others) == most]
    nodes = sorted(
        named
        or _nodes_of(task, located.stuck if located is not None else ())
        or _of_faults(task)
        or {member.node for member in task.members}
    )
    return (tuple(nodes) if len(nodes) <= NUM_NODES_MAX else ()), links


def _nodes_of(task: Task, ranks: Collection[int]) -> set[str]:
    return {rank.slot.node for rank in task.living_members() if rank.rank in ranks}


def _of_faults(task: Task) -> set[str]:
    """The nodes of the ranks that wait for a collective which does not end."""
    return {
        strike.slot.node
        for fault in task.faults
        if fault.status == NCCL_TIMEOUT and not fault.second_hand
        for strike in fault.strikes
    }


def _accusations(state: ClusterState, task: Task) -> Iterator[Link]:
    """The pairs of nodes between which members say that nothing comes through, each in order."""
    hosts = nodes_by_host(task)
    for rank in task.living_members():
        said = [host_of(rank.failed_peer)] if rank.failed == task.generation else []
        stall = task.stalls.get(rank.rank)
        said += stall.silent_peers if stall is not None else ()
        for host in said:
            if (other := hosts.get(host, "")) and other != rank.slot.node:
                yield min(rank.slot.node, other), max(rank.slot.node, other)


def recent(state: ClusterState) -> list[UnnamedFault]:
    return [fault for fault in state.unnamed if state.at_s - fault.at_s <= DAY_S]


def is_known(state: ClusterState, task: Task) -> bool:
    """Whether the fault of the task's present generation is kept, or has a name."""
    return bool(task.faults) or any(
        (fault.task, fault.generation) == (task.id, task.generation) for fault in state.unnamed
    )


def has_returned(state: ClusterState, task: Task) -> bool:
    """Whether the task's newest fault without a name is one that came back."""
    faults = recent(state)
    own = [fault for fault in faults if fault.task == task.id]
    if not own:
        return False
    newest, num = own[-1], state.policy.restart_iterations
    near = [fault for fault in own if newest.iteration - fault.iteration < num]
    shares = [fault for fault in faults if not set(fault.nodes).isdisjoint(newest.nodes)]
    return len(near) > 1 or len({fault.incident for fault in shares}) >= NUM_A_DAY


# --- suspicion ---
def counts(state: ClusterState) -> Counter[Place]:
    """How many faults without a name each place explains: (kind, name)."""
    nums: Counter[Place] = Counter()
    for fault in recent(state):
        places: set[Place] = {("host", name) for name in fault.nodes}
        places |= {("link", f"{a} - {b}") for a, b in fault.links}
        nums.update(places | _places_above(state, fault.nodes))
    return nums


def experiment(state: ClusterState, task: Task, status: str) -> Iterator[Body]:
    """Clear the places without which the fault came back; then move the ranks of the most suspected
    place. Nothing while the former move is not complete, or if there are no slots for them."""
    pending = _pending(task)
    here = {member.node for member in task.members}
    if any(seat.slot.node in here for seat in pending):
        return
    again = [*pending, *_out_without(state, task, here)]
    if again:
        where = blame.names_of([seat.slot for seat in again])
        yield SlotsJudged(
            task=task.id,
            suspects=tuple(again),
            verdict="cleared",
            why=f"{status} came back without {where}",
        )
    if state.held or not has_returned(state, task):
        return
    nums = counts(state)
    moves = [*_leave_shared_places(state, task), *_moves(state, task, _places(state, task, nums))]
    for place, suspects, free in moves[:1]:
        yield ExperimentBegun(
            task=task.id,
            suspects=tuple(suspects),
            status=status,
            why=_why(place, nums, suspects, free),
            seats=blame.moved(task, suspects, free),
            considered=_considered(nums, here),
        )


def _moves(
    state: ClusterState, task: Task, candidates: Iterable[tuple[Place, set[str]]]
) -> Iterator[Move]:
    """The places whose ranks can move to free slots outside."""
    if not task.heals_in_memory or is_pinned(state, task):
        return
    for place, nodes in candidates:
        suspects = [seat for seat in task.target if seat.slot.node in nodes]
        free = _free(state, task, suspects, place, nodes)
        if suspects and len(free) >= len(suspects):
            yield Move(place, suspects, free)


def _leave_shared_places(state: ClusterState, task: Task) -> Iterator[Move]:
    """When the fault has lasted longer than it may: the racks and switches that have been under it
    all the time. A host was exchanged for another behind the same switch."""
    if _lasts(state, task):
        yield from _moves(
            state,
            task,
            (
                (
                    (kind, name),
                    {
                        seat.slot.node
                        for seat in task.target
                        if getattr(state.nodes[seat.slot.node].labels, kind) == name
                    },
                )
                for kind, name in task.common_places
            ),
        )


def _pending(task: Task) -> list[Seat]:
    """The seats that ranks have left because of a fault without a name."""
    return [
        Seat(number, suspect.slot)
        for number, suspect in sorted(task.suspects.items())
        if suspect.is_unnamed
    ]


def _out_without(state: ClusterState, task: Task, here: Collection[str]) -> list[Seat]:
    """The slots that are out for such a fault of the task, which has come back without them."""
    return [
        Seat(-1, slot)
        for slot in task.blamed_slots
        if slot.node not in here
        and (node := state.nodes.get(slot.node)) is not None
        and blame.is_avoided(state, node)
    ]


def _places(
    state: ClusterState, task: Task, nums: Mapping[Place, int]
) -> Iterator[tuple[Place, set[str]]]:
    """The places to try, each with its nodes: a rack or switch first if no host alone explains as
    many faults, then hosts, the most suspected first. A place of all members tells nothing."""
    newest = [fault for fault in recent(state) if fault.task == task.id][-1]
    here = {seat.slot.node for seat in task.target}
    hosts = [name for name in newest.nodes if name in here]
    hosts.sort(key=lambda name: (-nums["host", name], -len(_ranks_on(task, name)), name))
    most = nums["host", hosts[0]] if hosts else 0
    kinds: tuple[PlaceKind, ...] = ("switch", "rack")
    for kind in kinds:
        for name in sorted({getattr(state.nodes[host].labels, kind) for host in hosts} - {""}):
            under = {
                host for host in sorted(here) if getattr(state.nodes[host].labels, kind) == name
            }
            if nums[kind, name] > most and under < here:
                yield (kind, name), under
    for name in hosts:
        if {name} < here:
            yield ("host", name), {name}


def _ranks_on(task: Task, node: str) -> list[Seat]:
    return [seat for seat in task.target if seat.slot.node == node]


def _free(
    state: ClusterState,
    task: Task,
    suspects: Sequence[Seat],
    place: Place,
    nodes: Collection[str],
) -> list[Slot]:
    """Free slots outside the place, those that are not avoided first."""
    kind, name = place
    return [
        slot
        for slot in blame.free_slots(state, task, suspects)
        if slot.node not in nodes
        and (kind == "host" or getattr(state.nodes[slot.node].labels, kind) != name)
    ]


def _why(
    place: Place,
    nums: Mapping[Place, int],
    suspects: Sequence[Seat],
    free: Sequence[Slot],
) -> str:
    kind, name = place
    to = blame.names_of(free[: len(suspects)])
    return (
        f"{blame.ranks_in_words(suspects)} of {kind} {name}, which explains {nums[place]} faults "
        f"without a name in 24 h: tried on {to}"
    )


def _considered(nums: Mapping[Place, int], here: Collection[str]) -> tuple[Suspicion, ...]:
    """The most suspected places, with how many faults each explains."""
    of = [
        Suspicion(kind=kind, name=name, num=num)
        for (kind, name), num in nums.items()
        if kind != "host" or name in here
    ]
    of.sort(key=lambda suspicion: (-suspicion.num, suspicion.kind, suspicion.name))
    return tuple(of[:NUM_CONSIDERED_MAX])


# --- judgement ---
def judge_progress(state: ClusterState, task: Task) -> Iterator[Body]:
    """Judge the ranks that have moved when the fault has stayed away since then. Their node is out
    if it alone explains lasting faults; else it is avoided: what is bad for minutes also ends by
    itself."""
    passed = [seat for seat in blame.passed(state, task) if task.suspects[seat.rank].is_unnamed]
    nums = counts(state) if passed else Counter[Place]()
    for is_out in (True, False):
        seats = [seat for seat in passed if _is_proved(state, nums, seat.slot.node) == is_out]
        if seats:
            status = task.suspects[seats[0].rank].status
            where = blame.names_of([seat.slot for seat in seats])
            yield SlotsJudged(
                task=task.id,
                suspects=tuple(seats),
                verdict="slot" if is_out else "open",
                why=f"{status} has not come back without {where}",
            )


def _is_proved(state: ClusterState, nums: Mapping[Place, int], name: str) -> bool:
    """Whether the node explains NUM_A_DAY incidents or more over LASTS_S, and no other place of its
    kind or above it explains nearly as many."""
    own = [fault for fault in recent(state) if name in fault.nodes]
    if len({fault.incident for fault in own}) < NUM_A_DAY or own[-1].at_s - own[0].at_s < LASTS_S:
        return False
    labels = state.nodes[name].labels if name in state.nodes else None
    above: set[Place] = set()
    if labels is not None:
        above = {("rack", labels.rack), ("switch", labels.switch)}
    most = max(
        (num for place, num in nums.items() if place[0] == "host" and place[1] != name), default=0
    )
    return most < len(own) - 1 and all(nums[place] <= len(own) for place in sorted(above))


def is_everywhere(state: ClusterState, task: Task) -> bool:
    """Whether the fault comes back at the same iteration whatever nodes the task has, for longer
    than faults of a network may last: it is the task's own. No rack or switch is left that all its
    nodes had, and that it can leave."""
    return (
        not task.common_nodes
        and _lasts(state, task)
        and next(_leave_shared_places(state, task), None) is None
    )


def _lasts(state: ClusterState, task: Task) -> bool:
    """Whether the fault has come back for longer than faults of a network may last."""
    return task.unnamed_s > 0 and state.at_s - task.unnamed_s >= state.policy.passing_s_max


def may_go_on(state: ClusterState, task: Task) -> bool:
    """Whether the task is reattempted however often its fault comes back: it may pass, or there are
    slots to try."""
    lasts_s = state.at_s - task.unnamed_s
    return lasts_s < state.policy.passing_s_max or bool(blame.free_slots(state, task, ()))


# --- fold ---
def forget(state: ClusterState, incident: int) -> None:
    """Fold: the incident has a name, or was made on purpose."""
    if any(fault.incident == incident for fault in state.unnamed):
        state.unnamed = [fault for fault in state.unnamed if fault.incident != incident]


def clear(state: ClusterState, task: Task, nodes: Iterable[str]) -> None:
    """Fold: the fault of this task came back without the nodes: they do not explain it."""
    gone = set(nodes)
    state.unnamed = [
        replace(fault, nodes=tuple(name for name in fault.nodes if name not in gone))
        if fault.task == task.id
        else fault
        for fault in state.unnamed
    ]


def confine(state: ClusterState, task: Task, nodes: Iterable[str]) -> None:
    """Fold: the fault stays away without the nodes: those that stayed do not explain it."""
    kept = set(nodes)
    state.unnamed = [
        replace(fault, nodes=tuple(name for name in fault.nodes if name in kept))
        if fault.task == task.id and not kept.isdisjoint(fault.nodes)
        else fault
        for fault in state.unnamed
    ]

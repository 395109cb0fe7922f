"""Hang localisation: which ranks stall a task, and how certain that is.

A rank that stalls in its own work waits for no other. Its peers are the second source: they stall
in a collective that it has not entered. If all ranks are in collectives, the network stalls. If
most are in their own work, they share a cause (a file system, a machine), and none is faulty.
"""

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ..state.cluster import ClusterState
from ..state.limits import Limit
from ..state.task import Rank, SlowIteration, Stall, Task
from .group_evidence import Located, has_groups, locate_stalls

STALLED = "is stalled"
"""Timeout reason of a rank that hangs."""
WORKS_ON = "is still working"
"""Timeout reason of a rank that passes progress marks but never ends its own work."""
WAITED_FOR = "is waited for in a collective"
"""Timeout reason of a rank on an unreachable node."""
STANDS_TIMES = 3.0
"""Threshold of a fault, in times of the average iteration: that of the Unicron paper."""
CRAWLS_TIMES = 10.0
"""Threshold for a rank that passes progress marks: it may be slow only for a moment."""
NETWORK_TIMES = 2.0
"""Factor on the threshold if all ranks wait in collectives, so that no rank is the cause."""
FIRST_MORE_S = 5.0
"""Added to `first_iteration_s_max` of the policy, the threshold of what has no usual time yet."""
UNKNOWN_TIMES = 30.0
UNKNOWN_S_MIN = 1800.0
"""Thresholds if most ranks are in their own work: the timeout of a collective (NCCL)."""
ADDRESSES_NUM_MAX = 8


class Hang(Struct, frozen=True, kw_only=True):
    """A stalled task: all reachable ranks are stalled or in a slow iteration."""

    kind: Literal["rank", "mismatch", "slow", "silent", "network", "unknown"]
    ranks: tuple[int, ...]
    """`rank`: the cause; `mismatch`: the cause, which called another collective than its peers;
    `slow`: the cause, which still passes progress marks; `silent`: ranks on unreachable nodes;
    `network`: all stalled ranks; `unknown`: all ranks in their own work."""
    since_s: float
    """When the first of `ranks` last made progress (`silent`: the first of the waiting ranks)."""
    due_s: float
    """When the stall is long enough to act upon."""
    why: str
    evidence: tuple[int, ...]
    is_actionable: bool = True
    """False: the hang is shown, but not acted upon."""


def locate_hang(state: ClusterState, task: Task) -> Hang | None:
    """Locate the hang of a task; None if a rank may still progress or another fault explains it.

    Stopped ranks (SIGSTOP) do not count, since they have a deadline of their own, nor do ranks on
    unreachable nodes, of which nothing is known. While there are such ranks, only a rank that
    stalls in its own work can be the cause. Without one, all wait for the ranks on unreachable
    nodes.
    """
    if not task.stalls or task.finished or task.ending or task.failed_s >= 0:
        return None
    if task.holds_final_state:
        return None
    if task.phase != "training" and (task.phase, task.mode) != ("quiescing", "boundary"):
        return None
    silent = frozenset(state.unreachable)
    if (
        len(task.stalls) + len(task.slow_iterations) < len(task.members)
        and not silent
        and not any(rank.is_stopped for rank in task.ranks.values())
    ):
        return None
    living = task.living_members()
    if len(living) < len(task.members) or any(
        not rank.is_healthy or rank.quiesced == task.generation for rank in living
    ):
        return None
    reachable = [rank for rank in living if not rank.is_stopped and rank.slot.node not in silent]
    if not reachable:
        return None
    if any(rank.rank not in task.stalls for rank in reachable):
        return _slow_hang(state, task, reachable)
    unreachable = tuple(rank.rank for rank in living if rank.slot.node in silent)
    return _classify(
        state, task, reachable, unreachable, all_reachable=len(reachable) == len(living)
    )


def _classify(
    state: ClusterState,
    task: Task,
    reachable: list[Rank],
    unreachable: tuple[int, ...],
    *,
    all_reachable: bool,
) -> Hang | None:
    stalls = {rank.rank: task.stalls[rank.rank] for rank in reachable}
    own = [rank for rank in reachable if stalls[rank.rank].where == "own"]
    limits_s = _limits_s(state, stalls)
    evidence = tuple(stalls[rank.rank].seq for rank in reachable)
    located = None if unreachable or not all_reachable else _located(task, stalls, own)
    # After a pause of a whole machine, its agent reports stalls of ranks that then continue.
    # Of the usual times the median counts: one rank that tells a wrong one delays nothing.
    usual_s = median_high(stall.normal_s for stall in stalls.values())
    sure_s = max(stall.told_s for stall in stalls.values()) + usual_s
    if located is not None and located.ranks:
        return Hang(
            kind="rank" if located.kind == "rank" else "mismatch",
            ranks=located.ranks,
            evidence=evidence,
            since_s=min(stalls[number].since_s for number in located.ranks),
            due_s=max(
                sure_s,
                _due_s(located.ranks, stalls, limits_s, waited_since_s=located.waited_since_s),
            ),
            why=_of_groups(state, task, located, stalls),
        )
    num_waiting = len(reachable) - len(own)
    if own and num_waiting and 2 * len(own) <= len(reachable):
        numbers = tuple(rank.rank for rank in own)
        waits_s = min(stall.since_s for stall in stalls.values() if stall.where != "own")
        return Hang(
            kind="mismatch" if _is_astray(own, stalls) else "rank",
            ranks=numbers,
            evidence=evidence,
            since_s=min(stalls[number].since_s for number in numbers),
            due_s=max(sure_s, _due_s(numbers, stalls, limits_s, waited_since_s=waits_s)),
            why=_of_ranks(own, stalls, num_waiting),
        )
    if unreachable and not own:
        # The expired lease is one source, unless the node returns within evidence_s_max. The stalls
        # of all other ranks are the second.
        back_s = max(state.nodes[task.ranks[number].slot.node].since_s for number in unreachable)
        due_s = max(stalls[number].since_s + limits_s[number] for number in _timed(stalls))
        return Hang(
            kind="silent",
            ranks=unreachable,
            evidence=evidence,
            why=_of_network(stalls),
            since_s=min(stall.since_s for stall in stalls.values()),
            due_s=max(due_s, back_s + state.policy.evidence_s_max),
        )
    if not all_reachable:
        return None
    if located is not None and all(stall.waits for stall in stalls.values()):
        own = []  # nobody works, whatever the marks say
    hang = _of_all(state, task, stalls, own, limits_s, sure_s)
    if hang is None or located is None or hang.kind != "network":
        return hang
    return replace(hang, why=f"{hang.why}; {located.why}")


def _limits_s(state: ClusterState, stalls: Mapping[int, Stall]) -> dict[int, float]:
    """How long each rank may stall before it counts as hung."""
    return {
        number: state.policy.first_iteration_s_max + FIRST_MORE_S
        if stall.is_untimed
        else max(STANDS_TIMES * stall.normal_s, state.policy.hang_s_min)
        for number, stall in stalls.items()
    }


def limit_of(state: ClusterState, task: Task, hang: Hang) -> Limit:
    """The limit that a hang has passed. Of several ranks that of the one that may last longest."""
    if hang.kind == "unknown":
        return Limit("of ranks in their own work", UNKNOWN_S_MIN)
    if any(task.stalls[number].is_untimed for number in hang.ranks if number in task.stalls):
        return Limit("first_iteration_s_max", state.policy.first_iteration_s_max)
    times = CRAWLS_TIMES if hang.kind == "slow" else STANDS_TIMES
    longer = NETWORK_TIMES if hang.kind == "network" else 1.0
    stalls_s = [stall.normal_s for stall in task.stalls.values()]
    slow_s = [slow.normal_s for slow in task.slow_iterations.values()]
    usual_s = max(stalls_s + slow_s, default=0.0)
    least_s = state.policy.hang_s_min
    if times * usual_s > least_s:
        return Limit(f"{longer * times:g} usual iterations", longer * times * usual_s)
    return Limit("hang_s_min" if longer == 1 else f"{longer:g} hang_s_min", longer * least_s)


def _due_s(
    ranks: Sequence[int],
    stalls: Mapping[int, Stall],
    limits_s: Mapping[int, float],
    *,
    waited_since_s: float,
) -> float:
    """When all of these ranks count as hung. Work that has no usual time may take as long as it
    likes until another rank waits for it."""
    return max(
        limits_s[number]
        + (
            max(stalls[number].since_s, waited_since_s)
            if stalls[number].is_untimed
            else stalls[number].since_s
        )
        for number in ranks
    )


def _timed(stalls: Mapping[int, Stall]) -> list[int]:
    """The ranks whose limits count where all wait: those with a usual time, if there are any."""
    timed = [number for number, stall in stalls.items() if not stall.is_untimed]
    return timed or list(stalls)


def _located(task: Task, stalls: Mapping[int, Stall], own: Sequence[Rank]) -> Located | None:
    """What the groups of all members show; None if a member does not tell of its groups, or if
    they contradict the marks: some ranks work, and another one would be the cause. In a pass with
    overlapped gathers a rank is in its own work by its marks, and may wait for its peers."""
    if not all(map(has_groups, stalls.values())):
        return None
    located = locate_stalls(stalls, [member.rank for member in task.members])
    if located is None or 2 * len(located.ranks) > len(stalls):
        return None
    works = {rank.rank for rank in own if not stalls[rank.rank].waits}
    return None if works and not works.issuperset(located.ranks) else located


def located_in_groups(task: Task) -> Located | None:
    """What the groups of all members show, if all wait in collectives."""
    stalls = task.stalls
    if any(member.rank not in stalls for member in task.members) or any(
        stall.where == "own" for stall in stalls.values()
    ):
        return None
    return _located(task, stalls, ())


def _of_all(
    state: ClusterState,
    task: Task,
    stalls: dict[int, Stall],
    own: list[Rank],
    limits_s: dict[int, float],
    sure_s: float,
) -> Hang | None:
    """No rank is to blame alone: all wait, or too many are in their own work. These limits are
    longer, since nothing tells which process to end."""
    evidence = tuple(stall.seq for stall in stalls.values())
    if not own:
        since_s = min(stall.since_s for stall in stalls.values())
        due_s = max(
            sure_s,
            *(
                stalls[number].since_s
                + limits_s[number] * (1.0 if stalls[number].is_untimed else NETWORK_TIMES)
                for number in _timed(stalls)
            ),
        )
        return Hang(
            kind="network",
            ranks=tuple(stalls),
            since_s=since_s,
            due_s=due_s,
            evidence=evidence,
            why=_of_network(stalls)
            + _of_links(state, task, stalls)
            + _addresses(state, task, stalls),
        )
    if any(stall.is_untimed for stall in stalls.values()):
        return None  # nobody waits: they compile, load or evaluate, for as long as that takes
    due_s = max(
        sure_s,
        *(
            stall.since_s + max(limits_s[number], UNKNOWN_TIMES * stall.normal_s, UNKNOWN_S_MIN)
            for number, stall in stalls.items()
        ),
    )
    return Hang(
        kind="unknown",
        ranks=tuple(rank.rank for rank in own),
        evidence=evidence,
        since_s=min(stalls[rank.rank].since_s for rank in own),
        due_s=due_s,
        why=_of_own(stalls, len(own)),
    )


def _slow_hang(state: ClusterState, task: Task, reachable: list[Rank]) -> Hang | None:
    """The hang of a task in which all other ranks wait for slow iterations; None if not all do. It
    is actionable if the reported own work is long enough: this work may have ended since then."""
    going = [rank for rank in reachable if rank.rank not in task.stalls]
    waiting = [task.stalls[rank.rank] for rank in reachable if rank.rank in task.stalls]
    if 2 * len(going) > len(reachable) or any(
        rank.rank not in task.slow_iterations for rank in going
    ):
        return None
    crawls = {rank.rank: task.slow_iterations[rank.rank] for rank in going}
    known: list[Stall | SlowIteration] = [*waiting, *crawls.values()]
    if any(stall.where == "own" for stall in waiting) or (
        len({one.iteration for one in known}) > 1
    ):
        return None
    normal_s = max(one.normal_s for one in known)
    least_s = max(CRAWLS_TIMES * normal_s, state.policy.hang_s_min)
    sure_s = max(one.told_s for one in known) + normal_s
    verb = "is still working" if len(going) == 1 else "are still working"
    longest = max(crawls.values(), key=lambda crawl: crawl.own_s)
    return Hang(
        kind="slow",
        ranks=tuple(crawls),
        is_actionable=all(crawl.own_s >= least_s for crawl in crawls.values()),
        since_s=min(crawl.since_s for crawl in crawls.values()),
        due_s=max(sure_s, *(crawl.since_s + least_s for crawl in crawls.values())),
        why=f"{_names_of(going)} {verb} in iteration {longest.iteration}, for "
        f"{longest.own_s:.3g} s, usual is {longest.normal_s:.3g} s; {_others_wait(len(waiting))}",
        evidence=tuple(sorted(one.seq for one in known)),
    )


def _of_ranks(guilty: list[Rank], stalls: dict[int, Stall], num_waiting: int) -> str:
    """For example `rank 2 on n2 is stalled (backward) and did not enter collective 1 ...`."""
    stall = min((stalls[rank.rank] for rank in guilty), key=lambda stall: stall.position)
    astray = f" in {_last_entered(stall)}, none of its step" if _is_astray(guilty, stalls) else ""
    return (
        f"{_stalled_in(guilty, stall)}{astray}, collective {stall.collective + 1} not entered; "
        f"{_others_wait(num_waiting)}"
    )


def _stalled_in(guilty: Sequence[Rank], stall: Stall) -> str:
    """For example `rank 2 on n2 is stalled after backward in iteration 7`."""
    after = f" after {stall.what}" if stall.what else ""
    verb = "is stalled" if len(guilty) == 1 else "are stalled"
    return f"{_names_of(guilty)} {verb}{after} in iteration {stall.iteration}"


def _names_of(ranks: Sequence[Rank]) -> str:
    return ", ".join(f"rank {rank.rank} on {rank.slot.node}" for rank in ranks)


def _others_wait(num: int) -> str:
    return "1 other waits" if num == 1 else f"{num} others wait"


def _is_astray(guilty: Sequence[Rank], stalls: Mapping[int, Stall]) -> bool:
    """Whether the rank waits in an operation, while its marks say that it works: the step that it
    shares with its peers has not started that one."""
    return len(guilty) == 1 and stalls[guilty[0].rank].waits


def _last_entered(stall: Stall) -> str:
    """For example `all_reduce 7 of world`."""
    told = max(stall.groups, key=lambda told: told.order, default=None)
    if told is None:
        return "an operation"
    return f"{told.kind} {told.entered} of {told.role or f'group {told.key:08x}'}"


def _of_groups(
    state: ClusterState, task: Task, located: Located, stalls: Mapping[int, Stall]
) -> str:
    """For example `rank 1 on n1 is stalled after forward in iteration 7: ...; 3 others wait`."""
    guilty = [task.ranks[number] for number in located.ranks]
    others = _others_wait(len(stalls) - len(guilty))
    return f"{_stalled_in(guilty, stalls[located.ranks[0]])}: {located.why}; {others}" + _addresses(
        state, task, stalls
    )


def _of_network(stalls: dict[int, Stall]) -> str:
    where = sorted({stall.position for stall in stalls.values()})
    iteration, place = where[0]
    if len(where) == 1:
        return (
            f"all {len(stalls)} members entered collective {place // 2} of iteration "
            f"{iteration}, and it does not end"
        )
    return f"all {len(stalls)} members wait in collectives of iteration {iteration}, none works"


def _of_links(state: ClusterState, task: Task, stalls: dict[int, Stall]) -> str:
    """The links that lose what is sent, for example `; not acknowledged is n1 -> n2`."""
    if not any(stall.silent_peers for stall in stalls.values()):
        return ""
    hosts = {node.host: name for name, node in state.nodes.items()}
    links = sorted(
        {
            f"{task.ranks[number].slot.node} -> {hosts.get(peer, peer)}"
            for number, stall in stalls.items()
            for peer in stall.silent_peers
        }
    )
    return f"; not acknowledged is {', '.join(links)}"


def _addresses(state: ClusterState, task: Task, stalls: Mapping[int, Stall]) -> str:
    """In a first iteration the addresses of all hosts: the wrong interface is a usual cause. For
    example `; hosts: n1 10.0.0.1, n2 192.168.4.2`."""
    if not all(stall.is_untimed for stall in stalls.values()):
        return ""
    nodes = sorted({task.ranks[number].slot.node for number in stalls})
    listed = [f"{name} {state.nodes[name].host}" for name in nodes if name in state.nodes]
    more = len(listed) - ADDRESSES_NUM_MAX
    return (
        f"; hosts: {', '.join(listed[:ADDRESSES_NUM_MAX])}" + f" and {more} more" * (more > 0)
        if len(listed) > 1
        else ""
    )


def _of_own(stalls: dict[int, Stall], num: int) -> str:
    iteration = min(stall.iteration for stall in stalls.values())
    if len(stalls) == 1:
        return f"its only member is stalled in its own work of iteration {iteration}"
    many = f"all {num}" if num == len(stalls) else f"{num} of {len(stalls)}"
    return (
        f"{many} members are stalled outside collectives in iteration {iteration}: a file "
        "system, a machine, or what all of them read"
    )

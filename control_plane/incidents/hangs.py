"""Hangs, located: who keeps a task waiting that stands, and whether that is known.

A rank that stands in work of its own waits for nobody; its peers, which stand in a collective that
it has not entered, are the second source. Where all are in collectives, the network is what stands;
where most are in work of their own, they stand for a reason that they share: a file system, a
machine. Nobody of them is to blame.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ..state.cluster import ClusterState
from ..state.task import Crawl, Rank, Stall, Task

STANDS = "stands still"
"""Why a rank that was found to hang is overdue."""
WORKS_ON = "works on and on"
"""Why a rank is overdue that passes marks, and does not come to the end of its own work."""
WAITED_FOR = "is waited for in a collective"
"""Why a rank on a silent node is given up."""
STANDS_TIMES = 3.0
"""Times the average iteration: the paper's line of a fault."""
CRAWLS_TIMES = 10.0
"""Of a rank that passes marks: it may only be slow, for a moment."""
NETWORK_TIMES = 2.0
"""Where all wait in collectives: so many times as patient, nobody is behind."""
UNKNOWN_TIMES = 30.0
UNKNOWN_S_MIN = 1800.0
"""Where most are in work of their own: as long as a collective's timeout gives them (NCCL's)."""


class Hang(Struct, frozen=True, kw_only=True):
    """A task stands: all that can be asked say so."""

    kind: Literal["rank", "slow", "silent", "network", "unknown"]
    ranks: tuple[int, ...]
    """Who is to blame (`slow`: though it passes marks); `silent`: those of whom nobody knows;
    `network`: all that stand; `unknown`: all in work of their own."""
    since_s: float
    """When the first of these passed its last mark; `silent`: of those that wait for them."""
    due_s: float
    """When it has lasted so long that it is acted upon."""
    why: str
    evidence: tuple[int, ...]
    is_sure: bool = True
    """False: it is only told, whenever."""


def located(state: ClusterState, task: Task) -> Hang | None:
    """The hang of a task, None where somebody may still go on, or where another fault explains it.

    Those that are stopped (SIGSTOP) have a deadline of their own, and of those on a silent node
    nobody knows: neither is asked. While there are such, only a rank that waits for nobody is to
    blame; where there is none, those on silent nodes are what the others wait for.
    """
    if not task.stalls or task.finished or task.ending or task.failed_s >= 0:
        return None
    if task.phase != "training" and (task.phase, task.mode) != ("quiescing", "boundary"):
        return None
    silent = frozenset(state.silent)
    if len(task.stalls) + len(task.crawls) < len(task.members) and not silent and not any(
            rank.suspended for rank in task.ranks.values()):
        return None
    living = task.living_members()
    if len(living) < len(task.members) or any(
            not rank.sound or rank.quiesced == task.generation for rank in living):
        return None
    asked = [rank for rank in living if not rank.suspended and rank.slot.node not in silent]
    if not asked:
        return None
    if any(rank.rank not in task.stalls for rank in asked):
        return _crawling(state, task, asked)
    mute = tuple(rank.rank for rank in living if rank.slot.node in silent)
    return _judged(state, task, asked, mute, all_asked=len(asked) == len(living))


def _judged(state: ClusterState, task: Task, asked: list[Rank], mute: tuple[int, ...], *,
            all_asked: bool) -> Hang | None:
    stalls = {rank.rank: task.stalls[rank.rank] for rank in asked}
    own = [rank for rank in asked if stalls[rank.rank].where == "own"]
    limits_s = {number: max(STANDS_TIMES * stall.normal_s, state.policy.hang_s_min)
                for number, stall in stalls.items()}
    evidence = tuple(stalls[rank.rank].seq for rank in asked)
    # A machine that was paused with its agent tells of stalls, and goes on at once.
    sure_s = max(stall.told_s + stall.normal_s for stall in stalls.values())
    num_waiting = len(asked) - len(own)
    if own and num_waiting and 2 * len(own) <= len(asked):
        numbers = tuple(rank.rank for rank in own)
        return Hang(kind="rank", ranks=numbers, evidence=evidence,
                    since_s=min(stalls[number].since_s for number in numbers),
                    due_s=max(sure_s, *(stalls[number].since_s + limits_s[number]
                                        for number in numbers)),
                    why=_of_ranks(own, stalls, num_waiting))
    if mute and not own:
        # Their nodes' lease is one source, if it is not back at once; that all others wait is the
        # second.
        back_s = max(state.nodes[task.ranks[number].slot.node].since_s for number in mute)
        due_s = max(stall.since_s + limits_s[number] for number, stall in stalls.items())
        return Hang(kind="silent", ranks=mute, evidence=evidence, why=_of_network(stalls),
                    since_s=min(stall.since_s for stall in stalls.values()),
                    due_s=max(due_s, back_s + state.policy.evidence_s_max))
    if not all_asked:
        return None
    numbers = tuple(stalls)
    if not own:
        since_s = min(stall.since_s for stall in stalls.values())
        due_s = max(sure_s, *(stall.since_s + NETWORK_TIMES * limits_s[number]
                              for number, stall in stalls.items()))
        return Hang(kind="network", ranks=numbers, since_s=since_s, due_s=due_s,
                    evidence=evidence, why=_of_network(stalls))
    due_s = max(sure_s, *(stall.since_s + max(
        limits_s[number], UNKNOWN_TIMES * stall.normal_s, UNKNOWN_S_MIN)
        for number, stall in stalls.items()))
    return Hang(kind="unknown", ranks=tuple(rank.rank for rank in own), evidence=evidence,
                since_s=min(stalls[rank.rank].since_s for rank in own), due_s=due_s,
                why=_of_own(stalls, len(own)))


def _crawling(state: ClusterState, task: Task, asked: list[Rank]) -> Hang | None:
    """Not all stand: whoever does not works on and on, in the very iteration that all others wait
    for. None where less is known.

    It is acted upon when its own work was told to have lasted so long: whoever came to its end
    since does not count as slow for what followed.
    """
    going = [rank for rank in asked if rank.rank not in task.stalls]
    waiting = [task.stalls[rank.rank] for rank in asked if rank.rank in task.stalls]
    if any(rank.rank not in task.crawls for rank in going) or 2 * len(going) > len(asked):
        return None
    crawls = {rank.rank: task.crawls[rank.rank] for rank in going}
    known: list[Stall | Crawl] = [*waiting, *crawls.values()]
    if any(stall.where == "own" for stall in waiting) or (
            len({told.iteration for told in known}) > 1):
        return None
    normal_s = max(told.normal_s for told in known)
    least_s = max(CRAWLS_TIMES * normal_s, state.policy.hang_s_min)
    sure_s = max(told.told_s for told in known) + normal_s
    who = ", ".join(f"rank {rank.rank} on {rank.slot.node}" for rank in going)
    verb = "works on and on" if len(going) == 1 else "work on and on"
    longest = max(crawls.values(), key=lambda crawl: crawl.own_s)
    others = "1 other waits" if len(waiting) == 1 else f"{len(waiting)} others wait"
    return Hang(
        kind="slow", ranks=tuple(crawls), is_sure=all(
            crawl.own_s >= least_s for crawl in crawls.values()),
        since_s=min(crawl.since_s for crawl in crawls.values()),
        due_s=max(sure_s, *(crawl.since_s + least_s for crawl in crawls.values())),
        why=f"{who} {verb} in iteration {longest.iteration}, for {longest.own_s:.3g} s, usual is "
            f"{longest.normal_s:.3g} s; {others}",
        evidence=tuple(sorted(told.seq for told in known)))


def _of_ranks(guilty: list[Rank], stalls: dict[int, Stall], num_waiting: int) -> str:
    """For example `rank 2 on n2 stands still (backward) and did not enter collective 1 ...`."""
    stall = min((stalls[rank.rank] for rank in guilty), key=lambda stall: stall.position)
    who = ", ".join(f"rank {rank.rank} on {rank.slot.node}" for rank in guilty)
    after = f" after {stall.what}" if stall.what else ""
    verb = "stands still" if len(guilty) == 1 else "stand still"
    others = "1 other waits" if num_waiting == 1 else f"{num_waiting} others wait"
    return (f"{who} {verb}{after} in iteration {stall.iteration}, collective "
            f"{stall.collective + 1} not entered; {others}")


def _of_network(stalls: dict[int, Stall]) -> str:
    where = sorted({stall.position for stall in stalls.values()})
    iteration, place = where[0]
    if len(where) == 1:
        return (f"all {len(stalls)} members entered collective {place // 2} of iteration "
                f"{iteration}, and it does not end")
    return f"all {len(stalls)} members wait in collectives of iteration {iteration}, none works"


def _of_own(stalls: dict[int, Stall], num: int) -> str:
    iteration = min(stall.iteration for stall in stalls.values())
    if len(stalls) == 1:
        return f"its only member stands in its own work of iteration {iteration}"
    many = f"all {num}" if num == len(stalls) else f"{num} of {len(stalls)}"
    return (f"{many} members stand in work of their own in iteration {iteration}: a file system, "
            "a machine, or what all of them read")

"""The pace of ranks: who is slow, and holds up the others.

A rank is compared with itself, and with those of its generation that have as many micro-batches:
the remainder of a dealing makes nobody slow.
"""

from __future__ import annotations

from statistics import median

from ..state.task import Pace, Rank, Slow, Task

SLOW_RATIO = 1.1
"""Below it all is ordinary fluctuation, of own work and of iterations: the paper's line (our
reading)."""
FAULT_RATIO = 3.0
"""An iteration that takes longer for one rank is its fault."""
RATIO_MAX = 1e6
"""More is absurd."""
CONFIRMED_SHARE = 0.8
"""Of the slow rank's iteration: so long at least that of another takes, if it waits."""
NUM_PEERS_MIN = 7
"""With as many micro-batches, before they say what is usual, and how much they differ: the others
of a node of eight."""
MOST_SHARE = 0.9
"""Of the peers: slower than so many, or there is no one who holds up the others."""
SPREAD_TIMES = 3.0
LASTS_S = 60.0
"""Before a rank has been slow for so long, nobody is advised to drain its node."""
DEVIATION_TIMES = 1.4826
"""From a median deviation to a standard deviation of a normal distribution."""


def slow_ranks(task: Task, at_s: float) -> dict[int, Slow]:
    """By rank: how many times slower, and how many times longer an iteration takes for it.

    A rank whose own work has grown holds up nobody unless the iterations have grown with it: on a
    machine that is shared, who computes longer may only have waited less. Where the others' work
    has grown alike it holds up nobody either: the task is slower as a whole (`slower_alike`).
    """
    if len(task.members) < 2:
        return {}
    found: dict[int, tuple[float, float]] = {}
    for number, pace in task.paces.items():
        if not pace.generation or not (_may_be_slow(pace) or _differs(task.paces, pace)):
            continue
        others = [other for one, other in task.paces.items()
                  if one != number and other.generation == pace.generation]
        ratio, holds_up = max(_beside_itself(pace, others), _beside_peers(pace, others),
                              key=lambda one: one[1])
        if holds_up >= SLOW_RATIO:
            found[number] = ratio, holds_up
    return {number: Slow(ratio=min(found[number][0], RATIO_MAX), holds_up=min(times, RATIO_MAX),
                         since_s=(task.slow[number].since_s if number in task.slow else at_s))
            for number, times in _last_to_arrive(task, found).items()}


def _last_to_arrive(task: Task, found: dict[int, tuple[float, float]]) -> dict[int, float]:
    """Of those found slow, whom all others wait for, by how many times longer iterations take.

    The one that works longest; those that are about as slow hold the others up together with it.
    Who is slow too, and yet long there when the last arrives, holds up nobody now.
    """
    late = sorted(found, key=lambda number: (-task.paces[number].own_s, number))
    for num in range(1, len(late)):
        times = _held_up(task.paces[late[0]], task.paces[late[num]].own_s)
        if times >= SLOW_RATIO:
            return {number: min(found[number][1], times) for number in late[:num]}
    return {number: found[number][1] for number in late}


def _beside_itself(pace: Pace, others: list[Pace]) -> tuple[float, float]:
    """Its own work beside what it was at first, and how much longer iterations take for it.

    What the others' work has grown by too is none of its doing, and not counted.
    """
    known = [_grown(other) for other in others if _is_comparable(other)]
    if not _may_be_slow(pace) or not known:
        return 1.0, 1.0
    alike = max(median(known), 1.0)
    if _grown(pace) < SLOW_RATIO * alike:
        return 1.0, 1.0
    most_s = max((other.own_s for other in others if not (
        _may_be_slow(other) and _grown(other) >= SLOW_RATIO * alike)), default=0.0)
    usual_s = min(max(alike * pace.normal_s, most_s), pace.own_s)
    grew = pace.iteration_s / pace.normal_iteration_s
    return _grown(pace), min(grew, _held_up(pace, usual_s))


def _is_comparable(pace: Pace) -> bool:
    """With what it was at first: it has as many micro-batches as then."""
    return pace.num_micro_batches == pace.normal_num and pace.normal_s > 0


def _grown(pace: Pace) -> float:
    return pace.own_s / pace.normal_s


def slower_alike(task: Task) -> float:
    """So many times longer an iteration takes where most members are slow and none stands out.

    1: it is not so. Whether machines, the network or the job are slower, ranks cannot tell.
    """
    if task.slow or len(task.members) < 2:
        return 1.0
    grew = [pace.iteration_s / pace.normal_iteration_s for pace in task.paces.values()
            if pace.generation == task.generation and _may_be_slow(pace)]
    return min(median(grew), RATIO_MAX) if 2 * len(grew) > len(task.members) else 1.0


def _may_be_slow(pace: Pace) -> bool:
    return (_is_comparable(pace)
            and pace.own_s >= SLOW_RATIO * pace.normal_s
            and pace.iteration_s >= SLOW_RATIO * pace.normal_iteration_s)


def _beside_peers(pace: Pace, others: list[Pace]) -> tuple[float, float]:
    """Its own work beside that of its peers, where it lies far outside of how they differ."""
    alike_s = [other.own_s for other in others
               if other.num_micro_batches == pace.num_micro_batches]
    if len(alike_s) < NUM_PEERS_MIN:
        return 1.0, 1.0
    usual_s = median(alike_s)
    spread_s = DEVIATION_TIMES * median([abs(own_s - usual_s) for own_s in alike_s])
    if pace.own_s < max(SLOW_RATIO * usual_s, usual_s + SPREAD_TIMES * spread_s):
        return 1.0, 1.0
    most_s = sorted(alike_s)[int(MOST_SHARE * len(alike_s))]
    return pace.own_s / usual_s, _held_up(pace, min(most_s, pace.own_s))


def _differs(paces: dict[int, Pace], pace: Pace) -> bool:
    """Whether most others work less: a quick look, before all are compared."""
    num = len([other for other in paces.values() if other.own_s * SLOW_RATIO <= pace.own_s])
    return 2 * num >= len(paces) - 1


def _held_up(pace: Pace, usual_s: float) -> float:
    """How many times longer an iteration takes than if its own work took `usual_s`."""
    return pace.iteration_s / max(pace.iteration_s - (pace.own_s - usual_s), usual_s)


def slowdown(task: Task, *, without: str = "") -> float:
    """So many times longer an iteration takes for its slow ranks; those on a node left out."""
    return max((slow.holds_up for number, slow in task.slow.items()
                if number in task.ranks and task.ranks[number].slot.node != without), default=1.0)


def at_fault(task: Task) -> list[Rank]:
    """Ranks that are slow beyond what is only told, where another process says so too.

    Its peers wait for it: an iteration takes them about as long as it takes the slow one.
    """
    if not any(slow.holds_up > FAULT_RATIO for slow in task.slow.values()):
        return []
    found: list[Rank] = []
    for number, slow in task.slow.items():
        rank, pace = task.member(number), task.paces.get(number)
        if slow.holds_up <= FAULT_RATIO or rank is None or pace is None or not rank.sound:
            continue
        least_s = CONFIRMED_SHARE * pace.iteration_s
        wait = any(other.iteration_s >= least_s for one, other in task.paces.items()
                   if one not in task.slow and other.generation == pace.generation)
        told = task.members[0].rank not in task.slow and task.step_s >= least_s
        if wait or told:
            found.append(rank)
    return found

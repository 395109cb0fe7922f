"""Straggler detection from step times.

A rank is compared with its own past, and with peers of its generation that have as many
micro-batches. So an uneven assignment of micro-batches makes no straggler.
"""

from statistics import median

from ..state.task import Rank, StepTime, Straggler, Task

SLOW_RATIO = 1.1
"""Smaller ratios are normal variation. This is the Unicron paper's threshold (our reading)."""
FAULT_RATIO = 3.0
"""A rank that makes iterations longer by more than this factor is at fault."""
RATIO_MAX = 1e6
"""Limit of a reported ratio."""
CONFIRMED_SHARE = 0.8
"""A peer confirms a straggler if its iterations take at least this share of the straggler's."""
NUM_PEERS_MIN = 7
"""A comparison needs this many peers with as many micro-batches: a node of 8 slots has 7."""
MOST_SHARE = 0.9
"""Quantile of the peers' own work that a straggler's delay is measured from."""
SPREAD_TIMES = 3.0
LASTS_S = 60.0
"""A rank must be slow for this time before advice to drain its node is given."""
DEVIATION_TIMES = 1.4826
"""Factor from median deviation to standard deviation (normal distribution)."""


def slow_ranks(task: Task, at_s: float) -> dict[int, Straggler]:
    """Find the stragglers: by rank, the ratios of its own work and of the iteration time. Only more
    own work in slower iterations counts: on a shared machine a rank may have waited less instead.
    If all ranks have slowed equally, there is none (`uniform_slowdown`)."""
    if len(task.members) < 2:
        return {}
    found: dict[int, tuple[float, float]] = {}
    for number, pace in task.step_times.items():
        if not pace.generation or not (_may_be_slow(pace) or _differs(task.step_times, pace)):
            continue
        others = [
            other
            for one, other in task.step_times.items()
            if one != number and other.generation == pace.generation
        ]
        ratio, holds_up = max(
            _beside_itself(pace, others), _beside_peers(pace, others), key=lambda one: one[1]
        )
        if holds_up >= SLOW_RATIO:
            found[number] = ratio, holds_up
    return {
        number: Straggler(
            ratio=min(found[number][0], RATIO_MAX),
            holds_up=min(times, RATIO_MAX),
            since_s=task.slow[number].since_s if number in task.slow else at_s,
        )
        for number, times in _last_to_arrive(task, found).items()
    }


def _last_to_arrive(task: Task, found: dict[int, tuple[float, float]]) -> dict[int, float]:
    """The slow ranks that arrive last: the rank with the longest own work, and ranks about as slow.
    Other slow ranks arrive earlier, so they delay nothing now."""
    late = sorted(found, key=lambda number: (-task.step_times[number].own_s, number))
    for num in range(1, len(late)):
        times = _held_up(task.step_times[late[0]], task.step_times[late[num]].own_s)
        if times >= SLOW_RATIO:
            return {number: min(found[number][1], times) for number in late[:num]}
    return {number: found[number][1] for number in late}


def _beside_itself(pace: StepTime, others: list[StepTime]) -> tuple[float, float]:
    """Own work and iteration time relative to the rank's past, without growth that all share."""
    known = [_grown(other) for other in others if _is_comparable(other)]
    if not _may_be_slow(pace) or not known:
        return 1.0, 1.0
    alike = max(median(known), 1.0)
    if _grown(pace) < SLOW_RATIO * alike:
        return 1.0, 1.0
    most_s = max(
        (
            other.own_s
            for other in others
            if not (_may_be_slow(other) and _grown(other) >= SLOW_RATIO * alike)
        ),
        default=0.0,
    )
    usual_s = min(max(alike * pace.normal_s, most_s), pace.own_s)
    grew = pace.iteration_s / pace.normal_iteration_s
    return _grown(pace), min(grew, _held_up(pace, usual_s))


def _is_comparable(pace: StepTime) -> bool:
    """Whether the step time has as many micro-batches as its reference."""
    return pace.num_micro_batches == pace.normal_num and pace.normal_s > 0


def _grown(pace: StepTime) -> float:
    return pace.own_s / pace.normal_s


def uniform_slowdown(task: Task) -> float:
    """Ratio of iteration times if most members are slower without a straggler; otherwise 1. The
    cause (machines, network or job) cannot be determined from the ranks."""
    if task.slow or len(task.members) < 2:
        return 1.0
    grew = [
        pace.iteration_s / pace.normal_iteration_s
        for pace in task.step_times.values()
        if pace.generation == task.generation and _may_be_slow(pace)
    ]
    return min(median(grew), RATIO_MAX) if 2 * len(grew) > len(task.members) else 1.0


def _may_be_slow(pace: StepTime) -> bool:
    return (
        _is_comparable(pace)
        and pace.own_s >= SLOW_RATIO * pace.normal_s
        and pace.iteration_s >= SLOW_RATIO * pace.normal_iteration_s
    )


def _beside_peers(pace: StepTime, others: list[StepTime]) -> tuple[float, float]:
    """Own work and iteration time relative to the peers; 1 if within their spread."""
    peers_s = [other.own_s for other in others if other.num_micro_batches == pace.num_micro_batches]
    if len(peers_s) < NUM_PEERS_MIN:
        return 1.0, 1.0
    usual_s = median(peers_s)
    spread_s = DEVIATION_TIMES * median([abs(own_s - usual_s) for own_s in peers_s])
    if pace.own_s < max(SLOW_RATIO * usual_s, usual_s + SPREAD_TIMES * spread_s):
        return 1.0, 1.0
    most_s = sorted(peers_s)[int(MOST_SHARE * len(peers_s))]
    return pace.own_s / usual_s, _held_up(pace, min(most_s, pace.own_s))


def _differs(paces: dict[int, StepTime], pace: StepTime) -> bool:
    """Whether most other ranks have less own work: a cheap check before the full comparison."""
    num = len([other for other in paces.values() if other.own_s * SLOW_RATIO <= pace.own_s])
    return 2 * num >= len(paces) - 1


def _held_up(pace: StepTime, usual_s: float) -> float:
    """Iteration time relative to that of an iteration with `usual_s` of own work."""
    return pace.iteration_s / max(pace.iteration_s - (pace.own_s - usual_s), usual_s)


def slow_on(task: Task, node: str) -> list[int]:
    """The task's stragglers on the node, by rank."""
    return [
        number
        for number in sorted(task.slow)
        if number in task.ranks and task.ranks[number].slot.node == node
    ]


def slowdown(task: Task, *, without: str = "") -> float:
    """Ratio of iteration times caused by stragglers, except stragglers on node `without`."""
    return max(
        (
            slow.holds_up
            for number, slow in task.slow.items()
            if number in task.ranks and task.ranks[number].slot.node != without
        ),
        default=1.0,
    )


def at_fault(task: Task) -> list[Rank]:
    """Stragglers slow enough to be a fault, if a peer confirms that iterations take as long."""
    if not any(slow.holds_up > FAULT_RATIO for slow in task.slow.values()):
        return []
    found: list[Rank] = []
    for number, slow in task.slow.items():
        rank, pace = task.member(number), task.step_times.get(number)
        if slow.holds_up <= FAULT_RATIO or rank is None or pace is None or not rank.is_healthy:
            continue
        least_s = CONFIRMED_SHARE * pace.iteration_s
        wait = any(
            other.iteration_s >= least_s
            for one, other in task.step_times.items()
            if one not in task.slow and other.generation == pace.generation
        )
        confirmed = task.members[0].rank not in task.slow and task.step_s >= least_s
        if wait or confirmed:
            found.append(rank)
    return found

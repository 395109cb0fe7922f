"""The pace of ranks: who is slow, and holds up the others.

A rank is compared with itself, and with those of its generation that have as many micro-batches:
the remainder of a dealing makes nobody slow.
"""

from __future__ import annotations

from statistics import median

from .noticed import Pace, Slow
from .state import Rank, Task

SLOW_RATIO = 1.1
"""Below it all is ordinary fluctuation: the paper's line (our reading)."""
FAULT_RATIO = 3.0
"""Above it a rank is at fault."""
HELD_UP_RATIO_MIN = 1.01
"""What makes an iteration longer by less keeps nobody waiting."""
RATIO_MAX = 1e6
"""More is absurd."""
CONFIRMED_SHARE = 0.8
"""Of the slow rank's own work: so long at least the iteration of another takes, if it waits."""
NUM_PEERS_MIN = 2
"""With as many micro-batches, before a median says what is usual."""


def slow_ranks(task: Task, at_s: float) -> dict[int, Slow]:
    """By rank: how many times slower, and how many times longer an iteration takes for it."""
    paces = task.paces
    ratios = _ratios(paces)
    slow = {number: ratio for number, ratio in ratios.items() if ratio >= SLOW_RATIO}
    others_s: dict[int, float] = {}
    for number, pace in paces.items() if slow else ():
        if number not in slow:
            others_s[pace.generation] = max(others_s.get(pace.generation, 0.0), pace.own_s)
    found: dict[int, Slow] = {}
    for number, ratio in slow.items():
        pace, known = paces[number], task.slow.get(number)
        usual_s = max(pace.own_s / ratio, others_s.get(pace.generation, 0.0))
        excess_s = pace.own_s - usual_s
        holds_up = pace.iteration_s / max(pace.iteration_s - excess_s, usual_s)
        if len(task.members) > 1 and excess_s > 0 and holds_up >= HELD_UP_RATIO_MIN:
            found[number] = Slow(ratio=ratio, holds_up=min(holds_up, ratio),
                                 since_s=known.since_s if known is not None else at_s)
    return found


def _ratios(paces: dict[int, Pace]) -> dict[int, float]:
    """Each rank's own work beside what it was at first, or beside its peers', the larger."""
    peers: dict[tuple[int, int], list[float]] = {}
    for pace in paces.values():
        peers.setdefault((pace.generation, pace.num_micro_batches), []).append(pace.own_s)
    usual_s = {key: median(found) for key, found in peers.items() if len(found) > NUM_PEERS_MIN}
    ratios: dict[int, float] = {}
    for number, pace in paces.items():
        own = pace.num_micro_batches == pace.normal_num and pace.normal_s > 0
        usual = usual_s.get((pace.generation, pace.num_micro_batches), 0.0)
        ratio = max(pace.own_s / pace.normal_s if own else 1.0,
                    pace.own_s / usual if usual > 0 else 1.0)
        ratios[number] = min(ratio, RATIO_MAX)
    return ratios


def slowdown(task: Task, *, without: str = "") -> float:
    """So many times longer an iteration takes for its slow ranks; those on a node left out."""
    return max((slow.holds_up for number, slow in task.slow.items()
                if number in task.ranks and task.ranks[number].slot.node != without), default=1.0)


def at_fault(task: Task) -> list[Rank]:
    """Ranks that are slow beyond what is only told, where another process says so too.

    Its peers wait for it: an iteration takes them about as long as the slow one's own work.
    """
    if not any(slow.ratio > FAULT_RATIO for slow in task.slow.values()):
        return []
    found: list[Rank] = []
    for number, slow in task.slow.items():
        rank, pace = task.member(number), task.paces.get(number)
        if slow.ratio <= FAULT_RATIO or rank is None or pace is None or not rank.sound:
            continue
        least_s = CONFIRMED_SHARE * pace.own_s
        wait = any(other.iteration_s >= least_s for one, other in task.paces.items()
                   if one not in task.slow and other.generation == pace.generation)
        told = task.members[0].rank not in task.slow and task.step_s >= least_s
        if wait or told:
            found.append(rank)
    return found

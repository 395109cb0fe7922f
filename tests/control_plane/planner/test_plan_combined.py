"""All that binds a plan at once: floors, alpha, limits and gain_min, held against every plan."""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.throughput.transition_cost import Transition

SPANS_S = (0.0, 1.0, 10.0, 1e4)
LEVELS = ((0.0, 1.0, 1.5, 2.0, 3.0), (0.0, 1.0, 1e12, 3e12, 1e-9), (1.0, 2.0, 3.0, 4.0, 5.0))


def asking(seed: int) -> PlanProblem:
    """Ties are frequent; some have what they cannot have any more, or what earns nothing."""
    random = Random(seed)
    levels = random.choice(LEVELS)
    return PlanProblem(
        demands=tuple(_wish(random, task, levels) for task in range(1, random.randint(1, 4) + 1)),
        num_slots=random.randint(0, 12), mtbf_gpu_s=random.choice([10.0, 1e5, 7.2e6]),
        gain_min=random.choice([0.0, 0.0, 0.005, 0.3]), moves_max=random.choice([None, None, 0, 1]),
        quotas=random.choice([(), (("red", 4),), (("blue", 0), ("red", 3))]),
        floor=random.random() < 0.3, alpha=random.choice([0.0, 0.5, 1.0, 2.0]))


def _wish(random: Random, task: int, levels: tuple[float, ...]) -> TaskDemand:
    sizes = sorted(random.sample(range(1, 8), random.randint(0, 4)))
    weight = random.choice([1.0, 4.0])
    spans = [random.choice(SPANS_S) for _ in range(4)]
    return TaskDemand(task=10 * task, name=f"t{task}", now=random.choice([0, 0, 3, *sizes]),
                faulted=random.random() < 0.3, weight=weight, sizes=tuple(sizes),
                wafs=tuple(weight * random.choice(levels) for _ in sizes),
                transition=Transition(same_s=spans[0], shrink_s=spans[1], grow_s=spans[2],
                                      stop_s=spans[3]),
                team=random.choice(["", "red", "blue"]), priority=random.choice([0, 0, 1]),
                floor=random.choice([0, 0, 2, 4]))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_no_plan_that_keeps_them_all_is_worth_more(seed: int) -> None:
    asked = asking(seed)
    wishes, rows, quotas = asked.demands, planner.allowed_candidates(asked), dict(asked.quotas)
    flat = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    by_row = [flat[begin:end] for begin, end in itertools.pairwise(rows.starts.tolist())]
    priorities = sorted({one.priority for one in wishes}, reverse=True)
    found: list[tuple[int, list[int], tuple[int, ...]]] = []
    for plan in itertools.product(*by_row):
        slots = tuple(x for x, _ in plan)
        if sum(slots) > asked.num_slots or any(
                sum(x for x, one in zip(slots, wishes, strict=True) if one.team == team) > quota
                for team, quota in quotas.items()):
            continue
        moves = sum(one.now > 0 and not one.faulted and x != one.now
                    for x, one in zip(slots, wishes, strict=True))
        found.append((moves, [sum(gain for (_, gain), one in zip(plan, wishes, strict=True)
                                  if one.priority == priority) for priority in priorities], slots))
    fewest = min(moves for moves, *_ in found)
    most = len(wishes) if asked.moves_max is None else max(fewest, asked.moves_max)
    chosen = planner.choose_plan(asked).plan.slots
    moves, worth = next(one[:2] for one in found if one[2] == chosen)
    assert moves <= most
    assert worth == max(worth for moves, worth, _ in found if moves <= most)

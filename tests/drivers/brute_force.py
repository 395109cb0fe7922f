"""The planner's choice, compared with every possible plan."""

from __future__ import annotations

from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem


def check_best(
    problem: PlanProblem, worths: dict[tuple[int, ...], list[float]], close: float = 0.0
) -> None:
    """The choice is the best plan within `moves_max` changed tasks, or within the fewest possible.

    `worths`: the objective value of each plan by priority, highest first. `close`: tolerance.
    """
    moves = {
        slots: sum(
            one.now > 0 and not one.faulted and x != one.now
            for one, x in zip(problem.demands, slots, strict=True)
        )
        for slots in worths
    }
    fewest = min(moves.values())
    most = len(problem.demands) if problem.moves_max is None else max(problem.moves_max, fewest)
    chosen = planner.choose_plan(problem).plan.slots
    assert moves[chosen] <= most
    best = max(worth for slots, worth in worths.items() if moves[slots] <= most)
    assert all(abs(x - y) <= close for x, y in zip(worths[chosen], best, strict=True))

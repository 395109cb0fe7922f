"""A plan with the explanation that its record has."""

from __future__ import annotations

from unicron.control_plane.planner import explain, planner
from unicron.control_plane.planner.objective import objective_flop
from unicron.control_plane.planner.problem import PlanProblem
from unicron.events.records.decisions import Alternative


def explained(problem: PlanProblem) -> tuple[planner.Choice, tuple[Alternative, ...], str]:
    """The planner's choice, its alternatives with their distances, and the explanation.

    No task allows more than its largest size.
    """
    choice = planner.choose_plan(problem)
    others = explain.with_distances(
        problem, choice.alternatives, objective_flop(problem, choice.plan.slots)
    )
    bound, _ = explain.binding_constraint(problem, choice, {})
    return choice, others, explain.why(problem, choice, others, bound)

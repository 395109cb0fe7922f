"""A plan with the explanation that its record has."""

from __future__ import annotations

from unicron.control_plane.planner import explain, planner
from unicron.control_plane.planner.objective import objective_flop
from unicron.control_plane.planner.problem import PlanProblem
from unicron.events.records.decisions import Alternative


def explained(asked: PlanProblem) -> tuple[planner.Choice, tuple[Alternative, ...], str]:
    """The planner's choice, its alternatives with their distances, and the explanation.

    No task allows more than its largest size.
    """
    choice = planner.choose_plan(asked)
    others = explain.with_distances(asked, choice.alternatives,
                                    objective_flop(asked, choice.plan.slots))
    bound, _ = explain.binding_constraint(asked, choice, {})
    return choice, others, explain.why(asked, choice, others, bound)

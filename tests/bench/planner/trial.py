"""One solver, one case, one process: `bench.planner.trial SYSTEM CASE SEED LIMIT_S`.

Each solver starts from the planner's input and returns slots by task. Small cases are solved first,
so that one-time loading is not counted. The result is one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import plain_program
from planner_cases import SIZES, case
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem
from unicron.control_plane.planner.solver import knapsack
from unicron.control_plane.planner.solver.candidates import Candidates

Slots = tuple[int, ...]


class Late(Exception):
    """The solver's own time limit was reached."""


def unicron(asked: PlanProblem, limit_s: float) -> Slots:
    """The bare solver. Production also builds the explanation (`explained_ms`)."""
    found = knapsack.best(planner.allowed_candidates(asked), asked.num_slots)
    assert found is not None
    return found[0]


def plain_dp(asked: PlanProblem, limit_s: float) -> Slots:
    """The method of the Unicron paper: every candidate at every number of slots."""
    rows = planner.allowed_candidates(asked)
    after = plain_program.suffixes(rows, asked.num_slots)
    return tuple(plain_program.backtrack(rows, after, asked.num_slots))


def highs(asked: PlanProblem, limit_s: float) -> Slots:
    """scipy.optimize.milp with default options."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, vstack

    rows = planner.allowed_candidates(asked)
    one_each, num = _one_each(rows)
    every = vstack([csr_array(rows.sizes[None, :].astype(float)), one_each])
    least = np.concatenate(([0.0], np.ones(rows.num)))
    most = np.concatenate(([float(asked.num_slots)], np.ones(rows.num)))
    found = milp(
        -_scaled(rows),
        constraints=LinearConstraint(every, least, most),
        integrality=np.ones(num),
        bounds=Bounds(0, 1),
        options={"time_limit": limit_s},
    )
    if found.status != 0:
        raise Late
    return _slots(rows, found.x)


def glpk_mi(asked: PlanProblem, limit_s: float) -> Slots:
    """cvxpy with GLPK's branch and bound, as in Sia's scheduler."""
    import cvxpy as cp

    rows = planner.allowed_candidates(asked)
    one_each, num = _one_each(rows)
    chosen = cp.Variable(num, boolean=True)
    problem = cp.Problem(
        cp.Maximize(_scaled(rows) @ chosen),
        [one_each @ chosen == 1, rows.sizes.astype(float) @ chosen <= asked.num_slots],
    )
    problem.solve(solver=cp.GLPK_MI, glpk={"tm_lim": int(limit_s * 1000), "msg_lev": "GLP_MSG_OFF"})
    if problem.status != cp.OPTIMAL:
        raise Late
    return _slots(rows, chosen.value)


def cp_sat(asked: PlanProblem, limit_s: float) -> Slots:
    """OR-tools' CP-SAT on the same integers as Unicron."""
    from ortools.sat.python import cp_model

    rows = planner.allowed_candidates(asked)
    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in range(len(rows.sizes))]
    for begin, end in zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True):
        model.add_exactly_one(chosen[begin:end])
    model.add(cp_model.LinearExpr.weighted_sum(chosen, rows.sizes.tolist()) <= asked.num_slots)
    model.maximize(cp_model.LinearExpr.weighted_sum(chosen, rows.gains.tolist()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    if solver.solve(model) != cp_model.OPTIMAL:
        raise Late
    return _slots(rows, np.array([solver.value(one) for one in chosen]))


SOLVERS: dict[str, Callable[[PlanProblem, float], Slots]] = {
    "unicron": unicron,
    "plain_dp": plain_dp,
    "glpk_mi": glpk_mi,
    "highs": highs,
    "cp_sat": cp_sat,
}


def _one_each(rows: Candidates) -> tuple[object, int]:
    """(matrix tasks x candidates: 1 for a task's own candidates; number of candidates)."""
    from scipy.sparse import csr_array

    num = len(rows.sizes)
    return csr_array((np.ones(num), (rows.row_of, np.arange(num))), shape=(rows.num, num)), num


def _scaled(rows: Candidates) -> np.ndarray:
    """The gains, scaled to at most 1 for the tolerances of the solvers."""
    scaled: np.ndarray = rows.gains / max(float(np.abs(rows.gains).max()), 1.0)
    return scaled


def _slots(rows: Candidates, chosen: np.ndarray) -> Slots:
    return rows.slots(np.flatnonzero(np.asarray(chosen) > 0.5))


def main() -> None:
    system, name, seed, limit_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    for small in ((3, 32), (12, 1024)):  # two sizes: the solver may use another method for each
        SOLVERS[system](case(*small, seed), limit_s)
        planner.choose_plan(case(*small, seed))
    asked = case(*SIZES[name], seed)
    began_s = time.perf_counter()
    try:
        slots = SOLVERS[system](asked, limit_s)
    except Late:
        print(json.dumps({"late": True}))
        return
    told = {"plan_ms": 1000 * (time.perf_counter() - began_s)}
    rows = planner.allowed_candidates(asked)
    gain, taken = rows.sums(rows.vector(slots))
    assert taken <= asked.num_slots
    assert len(slots) == rows.num
    told["objective"] = gain
    if system == "unicron":
        began_s = time.perf_counter()
        planner.choose_plan(asked)
        told["explained_ms"] = 1000 * (time.perf_counter() - began_s)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

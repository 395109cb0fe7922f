"""Planner time on inputs whose candidates differ little or not at all.

`PYTHONPATH=tests:.typing python -P -m bench.planner.degenerate [TASKS GPUS]`; default 1000 100000.
"""

from __future__ import annotations

import sys
import time

from planner_cases import FAMILIES, degenerate
from unicron.control_plane.planner import explain, pending, planner
from unicron.control_plane.planner.objective import objective_flop


def main() -> None:
    """By family, the times of: plan with alternatives, explanation, pending prices."""
    num_tasks, num_gpus = (int(word) for word in sys.argv[1:3] or (1000, 100_000))
    for family in FAMILIES:
        problem = degenerate(family, num_tasks, num_gpus)
        began_s = time.perf_counter()
        choice = planner.choose_plan(problem)
        chosen_s = time.perf_counter()
        others = explain.with_distances(
            problem, choice.alternatives, objective_flop(problem, choice.plan.slots)
        )
        most = {wish.task: wish.sizes[-1] for wish in problem.demands}
        explain.why(problem, choice, others, explain.binding_constraint(problem, choice, most)[0])
        planner.ideal_waf(problem.demands, num_gpus)
        told_s = time.perf_counter()
        pending.prices(problem, choice.plan)
        print(
            f"{family:36} {sum(len(wish.sizes) for wish in problem.demands):7} sizes  "
            f"choice {1000 * (chosen_s - began_s):7.1f} ms  "
            f"explained {1000 * (told_s - chosen_s):7.1f} ms  "
            f"prices {1000 * (time.perf_counter() - told_s):7.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()

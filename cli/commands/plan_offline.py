"""`unicron plan --offline`: plans the tasks of a file, without a cluster."""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...control_plane.api import dry_run
from ...control_plane.api.dry_run import DryRunResult
from ...control_plane.planner.objective import cost_flop
from ...control_plane.planner.problem import PlanProblem, TaskDemand, waf_of
from ...control_plane.throughput.transition_cost import Transition
from ...events.errors import SpecError, UsageError, need
from ...events.records.decisions import PlanChosen
from ...events.spec.job import RATE_FLOPS_MAX, WEIGHT_RATIO_MAX
from ...events.spec.validation import spec_error
from ..files.job_file import read_large, read_text, shown_name
from ..screens import plan as plan_screen
from ..terminal import console
from ..terminal.format import Plain


def plan(path: Path, *, as_json: bool) -> None:
    """Read the file, plan, print. Raises UsageError."""
    problem, gpus_per_node = load(path)
    began_s = time.perf_counter()
    result = dry_run.of_problem(problem, gpus_per_node)
    answer = plain(problem, result)
    took_s = time.perf_counter() - began_s
    page = plan_screen.offline({**msgspec.to_builtins(result), "took_s": took_s}, str(path))
    console.show(answer, page, as_json=as_json)


def plain(problem: PlanProblem, result: DryRunResult) -> Plain:
    """The fields of `-o json` (docs/guides/plan-offline.md). WAF is in weighted FLOP/s;
    `objective`, `loses`, `earned` and `transition` are in weighted FLOP."""
    plan, demands = result.plan, problem.demands
    assert plan is not None
    slots = [x.slots for x in plan.allocations]
    tasks = {
        demand.name: {
            "current": demand.now,
            "gpus": x,
            "faulted": demand.faulted,
            "waf_before": waf_of(demand, demand.now),
            "waf": waf_of(demand, x),
            "earned": waf_of(demand, x) * problem.running_s,
            "transition": cost_flop(demand, x),
        }
        for demand, x in zip(demands, slots, strict=True)
    }
    return {
        "allocation": {demand.name: x for demand, x in zip(demands, slots, strict=True)},
        "objective": plan.objective_flop,
        "reason": plan.why,
        "waf": plan.waf,
        "waf_before": math.fsum(waf_of(demand, demand.now) for demand in demands),
        "transition": plan.transition_flop,
        "gpus": problem.num_slots,
        "used": sum(slots),
        "running_s": problem.running_s,
        "tasks": tasks,
        "binding": {
            "gpus": result.more_waf > 0,
            "more_gpus": result.more_slots,
            "more_earn_waf": result.more_waf,
            "at_largest": [
                demand.name
                for demand, x in zip(demands, slots, strict=True)
                if demand.sizes and x == demand.sizes[-1]
            ],
        },
        "alternatives": _alternatives(plan, demands),
    }


def _alternatives(plan: PlanChosen, demands: Sequence[TaskDemand]) -> list[Plain]:
    """The rejected plans, the nearest first. `instead`: the GPUs of tasks that differ."""
    names = {demand.task: demand.name for demand in demands}
    chosen = {x.task: x.slots for x in plan.allocations}
    others: list[Plain] = [
        {
            "what": other.what,
            "objective": plan.objective_flop - other.behind_flop,
            "loses": max(other.behind_flop, 0.0),
            "waf": other.waf,
            "instead": {names[task]: x for task, x in other.slots if x != chosen[task]},
        }
        for other in plan.alternatives
    ]
    return sorted(others, key=lambda other: float(other["loses"]))


# --- Plan files: strict YAML or JSON to the planner's problem. ---
FILE_BYTES_MAX = 64 << 20
GPUS_NUM_MAX = 10_000_000
SPAN_S_MIN, SPAN_S_MAX = 1e-3, 1e15
NAME_CHARS_MAX = 100
DOCS = "see docs/guides/plan-offline.md"
_need = partial(need, hint=DOCS)


class TaskInFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task."""

    name: str
    flops: dict[int, float]
    """T(t, x): the throughput in FLOP/s on x GPUs. Sizes that are not named are not allowed."""
    weight: float = 1.0
    current: int = 0
    """The GPUs before the event; 0: a new task."""
    faulted: bool = False
    """A worker of the task failed: any number of GPUs costs a transition, the same one too."""
    transition_s: float | None = None
    """D_transition, the cost of a change in seconds; optional if `current` is 0."""


class PlanFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan file."""

    gpus: int
    """n' of the paper: the number of GPUs after the event."""
    mtbf_gpu_s: float
    """Mean time between faults of one GPU: the plan's horizon is `mtbf_gpu_s / gpus`."""
    tasks: list[TaskInFile]
    gpus_per_node: int = 8
    """How many more GPUs the page prices: a new node."""


def load(path: Path) -> tuple[PlanProblem, int]:
    """Read and check a plan file. Returns the problem and `gpus_per_node`. Raises UsageError."""
    text = read_text(
        path,
        FILE_BYTES_MAX,
        f"name a file, or - for standard input; {DOCS}",
        DOCS,
        "leave out sizes that no plan needs",
    )
    try:
        return parse(read_large(text, DOCS))
    except SpecError as error:
        raise UsageError(f"{shown_name(path)}: {error}", error.hint) from None


def parse(data: Any) -> tuple[PlanProblem, int]:
    """Check plain data and return its content. Raises SpecError with the path and a hint."""
    try:
        plan_file = msgspec.convert(data, PlanFile, strict=True, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise spec_error(str(error), PlanFile, DOCS, given=data) from None
    _within("gpus", plan_file.gpus, 0, GPUS_NUM_MAX)
    _within("gpus_per_node", plan_file.gpus_per_node, 1, GPUS_NUM_MAX)
    _need(
        SPAN_S_MIN <= plan_file.mtbf_gpu_s <= SPAN_S_MAX,
        "mtbf_gpu_s",
        f"must be between {SPAN_S_MIN:g} and {SPAN_S_MAX:g}",
    )
    seen: dict[str, int] = {}
    for i, (task, raw) in enumerate(zip(plan_file.tasks, data["tasks"], strict=True)):
        _check(task, f"tasks[{i}]")
        _need(len(raw["flops"]) == len(task.flops), f"tasks[{i}].flops", "names a size twice")
        first = seen.setdefault(task.name, i)
        _need(first == i, f"tasks[{i}].name", f"{task.name!r} is that of tasks[{first}] too")
    problem = PlanProblem(
        demands=tuple(_demand(i, task) for i, task in enumerate(plan_file.tasks, 1)),
        num_slots=plan_file.gpus,
        mtbf_gpu_s=plan_file.mtbf_gpu_s,
    )
    return problem, plan_file.gpus_per_node


def _demand(number: int, task: TaskInFile) -> TaskDemand:
    sizes = sorted(size for size in task.flops if size)
    return TaskDemand(
        task=number,
        name=task.name,
        now=task.current,
        faulted=task.faulted,
        transition=Transition.uniform(task.transition_s or 0.0),
        sizes=tuple(sizes),
        wafs=tuple(task.weight * task.flops[size] for size in sizes),
    )


def _check(task: TaskInFile, path: str) -> None:
    _need(
        0 < len(task.name.strip()) <= NAME_CHARS_MAX and task.name.isprintable(),
        f"{path}.name",
        f"must be 1 to {NAME_CHARS_MAX} printable characters",
    )
    _need(
        1 / WEIGHT_RATIO_MAX <= task.weight <= WEIGHT_RATIO_MAX,
        f"{path}.weight",
        f"must be between {1 / WEIGHT_RATIO_MAX:g} and {WEIGHT_RATIO_MAX:g}",
    )
    _within(f"{path}.current", task.current, 0, GPUS_NUM_MAX)
    if task.transition_s is None:
        _need(
            task.current == 0,
            f"{path}.transition_s",
            "is missing",
            hint="write the cost of a change, in seconds; 0: none",
        )
    else:
        _need(
            0 <= task.transition_s <= SPAN_S_MAX,
            f"{path}.transition_s",
            f"must be between 0 and {SPAN_S_MAX:g}",
        )
    for size, rate in task.flops.items():
        if not (0 <= size <= GPUS_NUM_MAX and 0 <= rate <= RATE_FLOPS_MAX and (size or not rate)):
            at = f"{path}.flops[{size}]"
            _within(at, size, 1, GPUS_NUM_MAX)
            raise SpecError(at, f"must be between 0 and {RATE_FLOPS_MAX:g} FLOP/s", DOCS)


def _within(path: str, value: int, least: int, most: int) -> None:
    _need(least <= value <= most, path, f"must be between {least} and {most}")

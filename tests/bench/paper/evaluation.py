"""The evaluation of the Unicron paper (arXiv 2401.00134): its cluster, cases, traces and runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

from condensed import condensed
from msgspec.structs import replace
from unicron.control_plane.decide.decide import decisions
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.planner.problem_of_state import planning_snapshot
from unicron.control_plane.simulation.policies import POLICIES, START_S
from unicron.control_plane.simulation.policies.baseline import placed, records
from unicron.control_plane.simulation.policies.policy import Costs, Policy
from unicron.control_plane.simulation.run import RunInput
from unicron.control_plane.simulation.scenario import (
    Cluster,
    Scenario,
    SimulatedTask,
    policy,
    run_input,
)
from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.control_plane.simulation.trace.generator import STUDIES
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.throughput.flops import parameters
from unicron.control_plane.throughput.layout_search import modelled
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.records.statuses import (
    EXITED_ABNORMALLY,
    LINK_FLAPPING,
    LOST_CONNECTION,
    NCCL_TIMEOUT,
    OTHER_NETWORK,
    TASK_HANG,
)
from unicron.events.records.types import Body
from unicron.events.spec.job import API_VERSION, Slots
from unicron.events.spec.model import MegatronModel

NODES_NUM, NODE_SLOTS_NUM = 16, 8
DAY_S = 86400.0


def _gpt(layers: int, hidden: int, heads: int, batch: int) -> MegatronModel:
    return MegatronModel(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        sequence=2048,
        vocabulary=50257,
        global_batch=batch,
        gpu="A800-80",
    )


# Layers and widths are those of GPT-3 (arXiv 2005.14165, table 2.1), for 70 B those of Megatron's
# weak scaling. The batches, in sequences, are close to the batches of these sources.
MODELS: dict[str, MegatronModel] = {
    "1.3B": _gpt(24, 2048, 16, 512),
    "7B": _gpt(32, 4096, 32, 1024),
    "13B": _gpt(40, 5120, 40, 1024),
    "70B": _gpt(80, 8192, 64, 1536),
    "175B": _gpt(96, 12288, 96, 1536),
}
MODEL_OF = {size.lower().replace(".", "-"): model for size, model in MODELS.items()}
"""By the beginning of the names of tasks."""
SIZES = ("1.3B", "1.3B", "1.3B", "7B", "7B", "13B")
WEIGHTS = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
CASES: dict[int, tuple[tuple[str, ...], tuple[float, ...]]] = {
    1: (("7B",) * 6, (1.0,) * 6),
    2: (("7B",) * 6, WEIGHTS),
    3: (SIZES, (1.0,) * 6),
    4: (SIZES, WEIGHTS),
    5: (SIZES, WEIGHTS[::-1]),
}
"""By case number: the models and the weights of six tasks."""

_SHARES = STUDIES["unicron"]
SEV1_SHARES = {
    **{cause: share for cause, share in _SHARES.items() if TABLE[cause] == "SEV1"},
    LOST_CONNECTION: 3.3,
}
OTHER_SHARES = {cause: share for cause, share in _SHARES.items() if TABLE[cause] != "SEV1"}
"""Per cent of tasks, as the paper reports. The paper's "others" (3.3) are lost nodes here."""


class Trace(NamedTuple):
    """The distribution of a trace. A repair is uniform between the values of `repair_s`."""

    horizon_s: float
    num_sev1: int
    num_others: int
    repair_s: tuple[float, float]


TRACES: dict[str, Trace] = {
    "trace-a": Trace(56 * DAY_S, 10, 33, (1 * DAY_S, 7 * DAY_S)),
    # Twenty times the fault rate of trace-a. Repairs are 20 times shorter, to keep as many nodes.
    "trace-b": Trace(7 * DAY_S, 26, 80, (DAY_S / 20, 7 * DAY_S / 20)),
}
"""10 SEV1 and 33 other faults in 8 weeks; 26 and 80 in a week."""


def events(trace: Trace, seed: int, repair_ratio: float = 1.0) -> list[ExternalEvent]:
    """Times are uniform; nodes are uniform over the present nodes; causes follow their shares."""
    rng = Random(f"{seed}")
    times = [
        (rng.uniform(0, trace.horizon_s), hard)
        for hard, num in ((True, trace.num_sev1), (False, trace.num_others))
        for _ in range(num)
    ]
    back_s = dict.fromkeys(Cluster(nodes=NODES_NUM).names, 0.0)
    found: list[ExternalEvent] = []
    for at_s, hard in sorted(times):
        node = rng.choice([name for name, until_s in back_s.items() if until_s <= at_s])
        shares = SEV1_SHARES if hard else OTHER_SHARES
        (cause,) = rng.choices(list(shares), list(shares.values()))
        found.append(ExternalEvent(at_s, node, "fault", cause))
        if hard:
            back_s[node] = at_s + repair_ratio * rng.uniform(*trace.repair_s)
            found.append(ExternalEvent(back_s[node], node, "repaired"))
    return sorted(one for one in found if one.at_s <= trace.horizon_s)


def tasks(case: int) -> tuple[SimulatedTask, ...]:
    """The tasks of a case, each on whole nodes."""
    return tuple(
        SimulatedTask(
            name=f"{size.lower().replace('.', '-')}-{number}",
            weight=weight,
            slots=Slots(
                min=NODE_SLOTS_NUM, max=NODES_NUM * NODE_SLOTS_NUM, multiple_of=NODE_SLOTS_NUM
            ),
            model=MODELS[size],
        )
        for number, (size, weight) in enumerate(zip(*CASES[case], strict=True))
    )


def scenario(name: str, policies: Sequence[str]) -> Scenario:
    """Case 5 under a trace of the paper. `floor` (T_necessary): each task has at least a node."""
    return Scenario(
        api_version=API_VERSION,
        name=name,
        cluster=Cluster(nodes=NODES_NUM, slots=NODE_SLOTS_NUM),
        tasks=tasks(5),
        policies={policy: {} for policy in policies},
        trace="",
        horizon_s=TRACES[name].horizon_s,
        limits={"floor": True},
    )


# --- the runs: policies on both traces, allocation rules on the cases, other constants ---

Due = Callable[[TaskDemand], float]
"""The value that a task's share is proportional to."""


def shared(problem: PlanProblem, due: Due) -> tuple[int, ...]:
    """Give each task the largest size within its share. Then, while a larger size of some task
    fits, choose the one that exceeds the task's share least; in a tie, that of the first task."""
    dues = [due(demand) for demand in problem.demands]
    whole = math.fsum(dues)
    shares = [problem.num_slots * one / whole for one in dues]
    counts = [
        max((size for size in demand.sizes if size <= share), default=0)
        for demand, share in zip(problem.demands, shares, strict=True)
    ]
    while True:
        left = problem.num_slots - sum(counts)
        more = [
            (size - shares[at], at, size)
            for at, demand in enumerate(problem.demands)
            for size in demand.sizes
            if 0 < size - counts[at] <= left
        ]
        if not more:
            return tuple(counts)
        _, at, size = min(more)
        counts[at] = size


def _rule(due: Due) -> Policy:
    """A policy in which each task gets its share by `due`, whatever its throughput. Detection and
    healing are Unicron's."""

    def plan(state: ClusterState) -> Iterator[Body]:
        snapshot = planning_snapshot(state)
        yield from records(
            state, placed(state, snapshot, shared(snapshot.problem, due), snapshot.slots)
        )

    return replace(
        POLICIES["unicron"], decides=lambda _: lambda state, record: decisions(state, record, plan)
    )


RULES: dict[str, Policy] = {
    "equally": _rule(lambda _: 1.0),
    "by-weight": _rule(lambda demand: demand.weight),
    "by-size": _rule(lambda demand: parameters(MODEL_OF[demand.name.rpartition("-")[0]]).total),
}
_RESILIENT = Costs(
    # Hangs are noticed after three iterations (Unicron, table 2).
    detect_s={LOST_CONNECTION: 1.17, EXITED_ABNORMALLY: 0.076, OTHER_NETWORK: 0.3},
    detect_other_s=0.019,
    detect_iterations={NCCL_TIMEOUT: 3.0, LINK_FLAPPING: 3.0, TASK_HANG: 3.0},
    start_s=START_S,
    checkpoint_s=1800.0,
)
RESILIENT: dict[str, Policy] = {
    "oobleck": replace(POLICIES["shrink"], costs=replace(_RESILIENT, regroup_s=10.0, speed=0.32)),
    "bamboo": replace(POLICIES["shrink"], costs=replace(_RESILIENT, regroup_s=450.0, speed=0.26)),
    # A checkpoint every ten iterations. The 120 s that it takes are part of Varuna's speed.
    "varuna": replace(
        POLICIES["shrink"],
        heals=False,
        costs=replace(_RESILIENT, start_s=701.0, checkpoint_s=100.0, speed=0.25),
    ),
}
SYSTEMS = {**POLICIES, **RESILIENT, **RULES}
OURS, THEIRS = "unicron", "megatron"
REPORTED: dict[tuple[str, str], float] = {
    ("trace-a", "megatron"): 1.2,
    ("trace-b", "megatron"): 1.9,
    ("trace-a", "oobleck"): 3.7,
    ("trace-b", "oobleck"): 3.8,
    ("trace-a", "varuna"): 4.8,
    ("trace-b", "varuna"): 5.8,
    ("trace-a", "bamboo"): 4.6,
    ("trace-b", "bamboo"): 4.8,
}
"""The paper's ratios of Unicron's accumulated WAF to the system's. Bamboo's are from memory."""


class EvaluationRun(NamedTuple):
    """One run of the evaluation. `changed` names the changed constant; empty: none is changed."""

    case: str
    system: str
    seed: int
    changed: str
    policy: Policy
    run_input: RunInput


class Change(NamedTuple):
    """Other values of a constant: of policies' costs, of the trace's repairs, or of the limits."""

    what: str
    costs: Mapping[str, Mapping[str, Any]] = {}
    """The changed costs, by policy."""
    repair_ratio: float = 1.0
    limits: Mapping[str, Any] = {}

    @property
    def systems(self) -> tuple[str, ...]:
        """The systems to run: Unicron, and the systems to compare it with."""
        return (OURS, *([name for name in self.costs if name != OURS] or [THEIRS]))


# Unicron, table 2, "without": 5.7 s for a lost node, 30 min for all else.
_PUBLISHED: dict[str, Any] = {
    "detect_other_s": 1800.0,
    "detect_s": {**dict.fromkeys(POLICIES[THEIRS].costs.detect_s, 1800.0), LOST_CONNECTION: 5.7},
}
SENSITIVITY: tuple[Change, ...] = (
    Change("a lost node is back four times as soon", repair_ratio=0.25),
    Change("a lost node is back four times as late", repair_ratio=4.0),
    Change(
        "Megatron notices and starts again as published",
        {THEIRS: {**_PUBLISHED, "start_s": 1380.0}},
    ),
    Change("Megatron notices as published, after 30 min", {THEIRS: _PUBLISHED}),
    Change("Megatron starts again as published, in 23 min", {THEIRS: {"start_s": 1380.0}}),
    Change("Megatron has a checkpoint each 5 min", {THEIRS: {"checkpoint_s": 300.0}}),
    Change(
        "Unicron detects ten times as late",
        {
            OURS: {
                "detect_other_s": 0.19,
                "detect_s": {
                    cause: 10 * at_s for cause, at_s in POLICIES[OURS].costs.detect_s.items()
                },
            }
        },
    ),
    Change("Unicron's members regroup in 30 s", {OURS: {"regroup_s": 30.0}}),
    Change("Unicron's processes start in 10 min", {OURS: {"start_s": 600.0}}),
    Change(
        "Oobleck, Bamboo and Varuna train at Megatron's speed",
        {name: {"speed": 1.0} for name in RESILIENT},
    ),
    Change("tasks may get nothing (no T_necessary)", limits={"floor": False}),
)
"""Constants on which the conclusions may depend. Each change is simulated alone."""


def all_policies(seeds: int) -> list[EvaluationRun]:
    """Every policy on both traces, for this number of seeds."""
    return [
        part
        for seed in range(1, seeds + 1)
        for case in TRACES
        for part in _trace_runs(case, seed, tuple(SYSTEMS))
    ]


def sensitivity() -> list[EvaluationRun]:
    """Unicron and the systems that a change concerns, on both traces, with the first seed."""
    return [
        part
        for change in SENSITIVITY
        for case in TRACES
        for part in _trace_runs(case, 1, change.systems, change)
    ]


def _trace_runs(
    case: str, seed: int, systems: tuple[str, ...], change: Change | None = None
) -> list[EvaluationRun]:
    change = change or Change("")
    drawn = events(TRACES[case], seed, change.repair_ratio)
    base = scenario(case, systems)
    base = replace(
        base,
        limits={**base.limits, **change.limits},
        policies={name: dict(change.costs.get(name, {})) for name in systems},
    )
    return _runs(base, case, seed, change.what, drawn)


def _runs(
    base: Scenario, case: str, seed: int = 0, changed: str = "", drawn: Sequence[ExternalEvent] = ()
) -> list[EvaluationRun]:
    return [
        EvaluationRun(
            case,
            name,
            seed,
            changed,
            chosen,
            condensed(run_input(base, chosen, drawn), NODE_SLOTS_NUM),
        )
        for name in base.policies
        for chosen in [
            policy(base, name)
            if name in POLICIES
            else replace(SYSTEMS[name], costs=replace(SYSTEMS[name].costs, **base.policies[name]))
        ]
    ]


def allocation_cases() -> list[EvaluationRun]:
    """The five multi-task cases without faults, under Unicron's plan and the three rules."""
    base = replace(scenario("trace-a", (OURS, *RULES)), horizon_s=1.0)
    return [
        part
        for number in CASES
        for part in _runs(replace(base, tasks=tasks(number)), f"case-{number}")
    ]


class PauseEstimate(NamedTuple):
    """Parts of the pause of a task that trains on all GPUs of a cluster, if a node is lost."""

    gpus: int
    detect_s: float
    change_s: float
    """Time to leave a generation and join the next over gloo, measured on four ranks."""
    nccl_s: float
    """Additional time for NCCL's communicators, as published."""

    @property
    def pause_s(self) -> float:
        return self.detect_s + self.change_s + self.nccl_s


# MegaScale (arXiv 2402.15627, 3.5): communicators of 2,048 GPUs in under 5 s, of more than 10,000
# in under 30 s; linear in between and below.
NCCL_POINTS = ((0, 0.0), (2_048, 5.0), (10_240, 30.0))
GPUS_NUMS = (16, 128, 1_024, 2_048, 4_096, 10_240)


def growth(gpus: int) -> PauseEstimate:
    """The parts of the pause on `gpus` GPUs: measured on four ranks, or published."""
    costs = POLICIES[OURS].costs
    (low, low_s), (high, high_s) = next(
        pair for pair in pairwise(NCCL_POINTS) if gpus <= pair[1][0]
    )
    return PauseEstimate(
        gpus,
        costs.detection_s(LOST_CONNECTION, 0.0),
        costs.quiesce_s + costs.regroup_s,
        low_s + (high_s - low_s) * (gpus - low) / (high - low),
    )


def planning_problem(gpus: int) -> PlanProblem:
    """The plan problem of the tasks of case 5 on `gpus` GPUs, after the loss of a node."""
    tables = [modelled(MODELS[size], NODES_NUM * NODE_SLOTS_NUM) for size in SIZES]
    each = gpus // len(tables) // 8 * 8
    wishes = tuple(
        TaskDemand(
            task=number,
            name=f"task-{number}",
            now=each,
            faulted=not number,
            transition=Transition.uniform(1.0),
            weight=weight,
            sizes=tuple(range(8, gpus + 1, 8)),
            wafs=tuple(weight * slots * rate_flops for slots in range(8, gpus + 1, 8)),
        )
        for number, (weight, table) in enumerate(zip(WEIGHTS[::-1], tables, strict=True))
        for rate_flops in [table.rates_flops[-1] / table.sizes[-1]]
    )
    return PlanProblem(demands=wishes, num_slots=gpus - 8, mtbf_gpu_s=3600.0 * 4001)

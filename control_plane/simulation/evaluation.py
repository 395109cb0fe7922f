"""The paper's evaluation, as plays: policies on its traces, rules on its cases, other constants."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...events.statuses import LOST_CONNECTION
from ..best_layout import modelled
from ..wishes import PlanInput, Transition, Wish
from . import cases
from .policies import POLICIES
from .policy import Policy
from .run import Ground
from .scenario import ground, policy

OURS, THEIRS = "unicron", "megatron"
RULES = ("equally", "by-weight", "by-size")
REPORTED: dict[tuple[str, str], float] = {
    ("trace-a", "megatron"): 1.2, ("trace-b", "megatron"): 1.9, ("trace-a", "oobleck"): 3.7,
    ("trace-b", "oobleck"): 3.8, ("trace-a", "varuna"): 4.8, ("trace-b", "varuna"): 5.8,
    ("trace-a", "bamboo"): 4.6, ("trace-b", "bamboo"): 4.8}
"""Accumulated WAF, Unicron over it: of the paper. Bamboo's two are as we remember them."""


class Part(NamedTuple):
    """One run of the evaluation. `changed`: what is other than usual, empty for nothing."""

    case: str
    system: str
    seed: int
    changed: str
    policy: Policy
    ground: Ground


class Change(NamedTuple):
    """Another value of a constant: of whose costs, or of the trace."""

    what: str
    costs: Mapping[str, Mapping[str, Any]] = {}
    """By policy."""
    repair_ratio: float = 1.0
    limits: Mapping[str, Any] = {}

    @property
    def systems(self) -> tuple[str, ...]:
        """Whom it is played with: Unicron, and who is compared with it."""
        return (OURS, *([name for name in self.costs if name != OURS] or [THEIRS]))


SENSITIVITY: tuple[Change, ...] = (
    Change("a lost node is back four times as soon", repair_ratio=0.25),
    Change("a lost node is back four times as late", repair_ratio=4.0),
    Change("Megatron's collectives time out after 10 min", {THEIRS: {"detect_other_s": 600.0}}),
    Change("Megatron starts again in 5 min", {THEIRS: {"start_s": 300.0}}),
    Change("Megatron has a checkpoint each 5 min", {THEIRS: {"checkpoint_s": 300.0}}),
    Change("Unicron detects ten times as late", {OURS: {
        "detect_other_s": 0.19, "detect_s": {
            cause: 10 * at_s for cause, at_s in POLICIES[OURS].costs.detect_s.items()}}}),
    Change("Unicron's members regroup in 30 s", {OURS: {"regroup_s": 30.0}}),
    Change("Unicron's processes start in 10 min", {OURS: {"start_s": 600.0}}),
    Change("Oobleck, Bamboo and Varuna train at Megatron's speed", {
        name: {"speed": 1.0} for name in ("oobleck", "bamboo", "varuna")}),
    Change("tasks may get nothing (no T_necessary)", limits={"floor": False}),
)
"""What the conclusions may hang on: each alone, with all else as it is."""


def whole(seeds: int) -> list[Part]:
    """Every policy on both traces, drawn with so many seeds."""
    return [part for seed in range(1, seeds + 1) for case in cases.TRACES
            for part in _of_trace(case, seed, tuple(POLICIES))]


def sensitivity(seeds: int) -> list[Part]:
    """Unicron and whom a change concerns, with it, on both traces."""
    return [part for change in SENSITIVITY for seed in range(1, seeds + 1) for case in cases.TRACES
            for part in _of_trace(case, seed, change.systems, change)]


def _of_trace(case: str, seed: int, systems: tuple[str, ...], change: Change | None = None
              ) -> list[Part]:
    change = change or Change("")
    drawn = cases.happenings(cases.TRACES[case], seed, change.repair_ratio)
    asked = cases.scenario(case, systems)
    asked = replace(asked, limits={**asked.limits, **change.limits},
                    policies={name: dict(change.costs.get(name, {})) for name in systems})
    found: list[Part] = []
    for name in systems:
        chosen = policy(asked, name)
        found.append(Part(case, name, seed, change.what, chosen, ground(asked, chosen, drawn)))
    return found


def of_cases() -> list[Part]:
    """The five multi-task cases without a fault, under Unicron's plan and the three rules."""
    found: list[Part] = []
    for number in cases.CASES:
        asked = replace(cases.scenario("trace-a", (OURS, *RULES)), tasks=cases.tasks(number),
                        horizon_s=1.0)
        for name in (OURS, *RULES):
            chosen = policy(asked, name)
            found.append(Part(f"case-{number}", name, 0, "", chosen, ground(asked, chosen)))
    return found


class Growth(NamedTuple):
    """Of a task on so many GPUs, all of the cluster, that loses a node: pieces of its pause."""

    gpus: int
    detect_s: float
    change_s: float
    """Members leave their generation and are in the next, with gloo, as measured on four ranks."""
    nccl_s: float
    """What NCCL's communicators take beside that, as others publish."""

    @property
    def pause_s(self) -> float:
        return self.detect_s + self.change_s + self.nccl_s


# MegaScale (arXiv 2402.15627, 3.5): communicators of 2,048 GPUs in under 5 s, of more than 10,000
# in under 30 s; between and below in proportion.
NCCL_POINTS = ((0, 0.0), (2_048, 5.0), (10_240, 30.0))
GPUS_NUMS = (16, 128, 1_024, 2_048, 4_096, 10_240)


def growth(gpus: int) -> Growth:
    """The pieces, measured here, or published where no more than four ranks were to be had."""
    costs = POLICIES[OURS].costs
    (low, low_s), (high, high_s) = next(
        pair for pair in pairwise(NCCL_POINTS) if gpus <= pair[1][0])
    return Growth(gpus, costs.until_told_s(LOST_CONNECTION, 0.0), costs.quiesce_s + costs.regroup_s,
                  low_s + (high_s - low_s) * (gpus - low) / (high - low))


def asked(gpus: int) -> PlanInput:
    """What a planner is asked when a node of such a cluster is lost, with the tasks of case 5."""
    tables = [modelled(cases.MODELS[size], cases.NODES_NUM * cases.NODE_SLOTS_NUM)
              for size in cases.SIZES]
    each = gpus // len(tables) // 8 * 8
    wishes = tuple(Wish(
        task=number, name=f"task-{number}", now=each, hurt=not number,
        transition=Transition.alike(1.0), weight=weight,
        sizes=tuple(range(8, gpus + 1, 8)),
        wafs=tuple(weight * slots * rate_flops for slots in range(8, gpus + 1, 8)))
        for number, (weight, table) in enumerate(zip(cases.WEIGHTS[::-1], tables, strict=True))
        for rate_flops in [table.rates_flops[-1] / table.sizes[-1]])
    return PlanInput(wishes=wishes, num_slots=gpus - 8, mtbf_gpu_s=3600.0 * 4001)

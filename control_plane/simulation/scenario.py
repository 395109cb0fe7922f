"""A scenario: a cluster, tasks, what befalls them, and the policies to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from ...events.errors import SpecError
from ...events.model_spec import MegatronModel
from ...events.policy import Policy as Limits
from ...events.refused import refused
from ...events.spec import API_VERSION, COUNT_NUM_MAX, JobSpec, Slots
from ...events.spec import parse as parse_job
from ..best_layout import modelled
from ..model_flops import parameters
from ..nodes import NUM_SLOTS_MAX
from .happening import Happening
from .policies import POLICIES
from .policy import Policy
from .run import Ground

DOCS = "see docs/guides/simulate.md"
NODES_NUM_MAX = 100_000
HORIZON_S_MAX = 1e12
STOP_S = 0.1


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many nodes, named n0, n1 and so on, or those that are named; `slots` of each are GPUs."""

    nodes: int | tuple[str, ...]
    slots: int = 8

    @property
    def names(self) -> tuple[str, ...]:
        return (tuple(f"n{number}" for number in range(self.nodes))
                if isinstance(self.nodes, int) else self.nodes)


class PaperTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task as a job spec has it, as far as a plan follows from it: FLOP/s by size, or a model.

    `params` are the model's, where it is not there: a rule that goes by size asks for them.
    """

    name: str
    weight: float = 1.0
    slots: Slots = field(default_factory=Slots)
    throughput: dict[int, float] = field(default_factory=dict[int, float])
    model: MegatronModel | None = None
    params: float = 0.0

    @property
    def size(self) -> float:
        """Parameters of what it trains, 0 where nothing says so."""
        return float(parameters(self.model).total) if self.model is not None else self.params


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`policies`: by name, what of their constants is another. `trace` is a file beside this one.

    An iteration takes `iteration_s` at a task's largest size. `limits` are those of the heart.
    """

    api_version: str = field(name="apiVersion")
    name: str
    cluster: Cluster
    tasks: tuple[PaperTask, ...]
    policies: dict[str, dict[str, Any]]
    trace: str
    horizon_s: float
    iteration_s: float = 10.0
    limits: dict[str, Any] = field(default_factory=dict[str, Any])


def parse(data: object) -> Scenario:
    """From plain data. Raises SpecError with the field and a hint."""
    if not isinstance(data, dict):
        raise SpecError("", "a scenario is a mapping", DOCS)
    given: dict[Any, Any] = {**data}
    try:
        found = msgspec.convert(given, Scenario, strict=True, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise refused(str(error), Scenario, DOCS, given=given) from None
    need(found.api_version == API_VERSION, "apiVersion", f"is {found.api_version!r}",
         f"write apiVersion: {API_VERSION}")
    names = found.cluster.names
    need(0 < len(names) <= NODES_NUM_MAX, "cluster.nodes",
         f"must be at least 1 and at most {NODES_NUM_MAX}")
    need(len(set(names)) == len(names), "cluster.nodes", "names a node twice")
    need(0 < found.cluster.slots <= NUM_SLOTS_MAX, "cluster.slots",
         f"must be at least 1 and at most {NUM_SLOTS_MAX}")
    need(bool(found.tasks), "tasks", "is empty")
    need(bool(found.policies), "policies", "is empty", f"name some of {', '.join(POLICIES)}")
    for name in found.policies:
        need(name in POLICIES, f"policies.{name}", "is no policy",
             f"one of {', '.join(POLICIES)}")
    for name, value, most in (("horizon_s", found.horizon_s, HORIZON_S_MAX),
                              ("iteration_s", found.iteration_s, HORIZON_S_MAX)):
        need(math.isfinite(value) and 0 < value <= most, name, "must be above 0, in seconds")
    return found


def policy(scenario: Scenario, name: str) -> Policy:
    """The policy with the constants that the scenario gives it. Raises SpecError."""
    known = POLICIES[name]
    given = scenario.policies[name]
    costs = type(known.costs)
    try:
        found = msgspec.convert(msgspec.to_builtins(known.costs) | given, costs, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        told = refused(str(error), costs, DOCS, given=given)
        raise SpecError(f"policies.{name}", str(told), told.hint) from None
    plain: dict[str, Any] = msgspec.to_builtins(found)
    times: dict[str, float] = {**plain.pop("detect_s"), **plain.pop("detect_iterations"), **plain}
    for key, value in times.items():
        need(math.isfinite(value) and value >= 0, f"policies.{name}: {key}",
             "must be a number, at least 0")
    need(found.checkpoint_s > 0 and found.speed > 0 and found.start_s > 0, f"policies.{name}",
         "checkpoint_s, start_s and speed must be above 0")
    need(found.num_spares < len(scenario.cluster.names), f"policies.{name}",
         "num_spares leaves no node", "fewer than the cluster has")
    return msgspec.structs.replace(known, costs=found)


def _limits(scenario: Scenario, chosen: Policy) -> Limits:
    """Those of the scenario; where it says nothing, no step of the policy takes too long."""
    costs = chosen.costs
    longest_s = 10 * (costs.start_s + costs.quiesce_s + costs.regroup_s + scenario.iteration_s)
    usual = Limits()
    ample = {name: max(getattr(usual, name), longest_s) for name in (
        "start_s_max", "quiesce_s_max", "boundary_s_max", "reconfigure_s_max")}
    if not chosen.heals:
        ample["stop_s_max"] = STOP_S  # to end processes is part of a restart, as it is published
    try:
        return msgspec.convert(msgspec.to_builtins(usual) | ample | scenario.limits, Limits,
                               strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        told = refused(str(error), Limits, DOCS, given=scenario.limits)
        raise SpecError("limits", str(told), told.hint) from None


def ground(scenario: Scenario, chosen: Policy, happenings: Sequence[Happening] = ()) -> Ground:
    """What a policy is played on. Raises SpecError."""
    for number, task in enumerate(scenario.tasks):
        need(not chosen.by_params or task.size > 0, f"tasks[{number}]",
             "says nothing of its model's size, and a policy goes by it", "add params: 7.0e+9")
    return Ground(
        slots=dict.fromkeys(scenario.cluster.names, scenario.cluster.slots),
        tasks=tuple(_job(scenario, number, chosen) for number in range(len(scenario.tasks))),
        iteration_s=scenario.iteration_s, happenings=happenings, horizon_s=scenario.horizon_s,
        limits=_limits(scenario, chosen),
        params={task.name: task.size for task in scenario.tasks})


def _job(scenario: Scenario, number: int, chosen: Policy) -> JobSpec:
    task, path = scenario.tasks[number], f"tasks[{number}]"
    need(bool(task.throughput) != (task.model is not None), path,
         "has to have one of throughput and model", "FLOP/s by slots, or what it trains")
    rates = task.throughput
    if task.model is not None:
        most = len(scenario.cluster.names) * scenario.cluster.slots
        told = modelled(task.model, min(task.slots.max, most))
        need(bool(told.sizes), f"{path}.model", told.refused)
        rates = dict(zip(told.sizes, told.rates_flops, strict=True))
    given: dict[str, Any] = {
        "apiVersion": API_VERSION, "name": task.name, "weight": task.weight,
        "slots": {key: value for key, value in msgspec.to_builtins(task.slots).items() if value},
        "throughput": {size: rate * chosen.costs.speed for size, rate in rates.items()},
        "command": ["on-paper"]}
    if chosen.heals:
        given |= {"heal": "in-memory", "loop": {
            "micro_batches": max(task.slots.max, 1), "iterations": COUNT_NUM_MAX,
            "output": "/on-paper", "copy_every": 0}}
    try:
        return parse_job(given)
    except SpecError as error:
        raise SpecError(path, str(error), error.hint) from None


def need(holds: bool, path: str, message: str, hint: str = DOCS) -> None:
    if not holds:
        raise SpecError(path, message, hint)

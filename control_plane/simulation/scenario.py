"""A scenario: a cluster, tasks, external events, and the policies to compare."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ...events.errors import SpecError, need
from ...events.spec import policy as policy_check
from ...events.spec.job import API_VERSION, JobSpec, Slots
from ...events.spec.job import parse as parse_job
from ...events.spec.model import MegatronModel
from ...events.spec.policy import BOUNDS
from ...events.spec.policy import Policy as Limits
from ...events.spec.validation import COUNT_NUM_MAX, spec_error
from ..incidents.severity import TABLE
from ..state.node import NUM_SLOTS_MAX
from ..throughput.layout_search import modelled
from .policies import POLICIES
from .policies.policy import Policy
from .run import RunInput
from .trace.external_event import ExternalEvent
from .trace.generator import DrawnTrace
from .trace.trace_file import check_name

DOCS = "see docs/guides/simulate.md"
NODES_NUM_MAX = 100_000
HORIZON_S_MAX = 1e12
ITERATION_S_MAX = 1e5
COST_S_MAX = 1e9
SPEED_RATIO_MAX = 1e3
NAME_CHARS_MAX = 100
PATH_CHARS_MAX = 1024
STOP_S = 0.1
BY_CAUSE = ("detect_s", "detect_iterations")
"""Constants by cause: a scenario names only the causes whose values change."""


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes`: the names of the nodes, or their number; then their names are n0, n1 and so on. Each
    has `slots` GPUs."""

    NOT_KEYS: ClassVar[dict[str, str]] = {"gpus": "a slot is a GPU: write slots, of each node"}
    nodes: int | tuple[str, ...]
    slots: int = 8

    @property
    def names(self) -> tuple[str, ...]:
        return (
            tuple(f"n{number}" for number in range(self.nodes))
            if isinstance(self.nodes, int)
            else self.nodes
        )


class SimulatedTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a job spec that a plan depends on. A task has `throughput`, its FLOP/s by size,
    or `model`."""

    name: str
    weight: float = 1.0
    slots: Slots = field(default_factory=Slots)
    throughput: dict[int, float] = field(default_factory=dict[int, float])
    model: MegatronModel | None = None


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`policies`: by policy name, the constants to change. `trace` is a drawn trace, or the path of
    a file relative to the scenario. An iteration takes `iteration_s` at a task's largest size.
    `limits` are fields of the policy file."""

    api_version: str = field(name="apiVersion")
    name: str
    cluster: Cluster
    tasks: tuple[SimulatedTask, ...]
    policies: dict[str, dict[str, Any]]
    trace: str | DrawnTrace
    horizon_s: float
    iteration_s: float = 10.0
    limits: dict[str, Any] = field(default_factory=dict[str, Any])


def parse(data: object) -> Scenario:
    """Make a scenario from plain data. Raises SpecError with the field and a hint."""
    if not isinstance(data, dict):
        raise SpecError("", "a scenario is a mapping", DOCS)
    given: dict[Any, Any] = {**data}
    given["policies"] = _as_mapping(given.get("policies"))
    _check_policies(given["policies"])
    try:
        found = msgspec.convert(given, Scenario, strict=True, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise spec_error(str(error), Scenario, DOCS, given=given) from None
    need(
        found.api_version == API_VERSION,
        "apiVersion",
        f"is {found.api_version!r}",
        f"write apiVersion: {API_VERSION}",
    )
    need(
        bool(found.name) and len(found.name) <= NAME_CHARS_MAX and found.name.isprintable(),
        "name",
        f"{found.name[:NAME_CHARS_MAX]!r} is not a name",
        f"printable text, at most {NAME_CHARS_MAX} characters",
    )
    _check_nodes(found)
    need(
        not isinstance(found.trace, str)
        or (0 < len(found.trace) <= PATH_CHARS_MAX and found.trace.isprintable()),
        "trace",
        "names no file",
        "a file beside the scenario, or drawn: {...}",
    )
    need(bool(found.tasks), "tasks", "is empty", DOCS)
    for number, task in enumerate(found.tasks):
        need(
            all(task.name != other.name for other in found.tasks[:number]),
            f"tasks[{number}].name",
            f"{task.name[:NAME_CHARS_MAX]!r} is another task's too",
            "give each a name of its own",
        )
    need(bool(found.policies), "policies", "is empty", f"name some of {', '.join(POLICIES)}")
    for name, value, most in (
        ("horizon_s", found.horizon_s, HORIZON_S_MAX),
        ("iteration_s", found.iteration_s, ITERATION_S_MAX),
    ):
        need(0 < value <= most, name, f"is {value:g}", f"seconds, above 0 and at most {most:g}")
    return found


def _as_mapping(policies: Any) -> Any:
    """Turn a list of policy names into a mapping in which no constant changes."""
    need(policies is not None, "policies", "is missing", f"name some of {', '.join(POLICIES)}")
    listed: Any = policies  # isinstance on `policies` would narrow its type
    names: list[Any] = [*listed] if isinstance(listed, list) else []
    if names and all(isinstance(name, str) for name in names):
        return {name: dict[str, Any]() for name in names}
    return policies


def _check_policies(policies: object) -> None:
    """Check the names here: msgspec.convert does not report them."""
    given: dict[Any, Any] = {**policies} if isinstance(policies, dict) else {}
    for name, constants in given.items():
        need(
            name in POLICIES,
            "policies",
            f"{str(name)[:NAME_CHARS_MAX]!r} is no policy",
            f"one of {', '.join(POLICIES)}",
        )
        need(
            isinstance(constants, dict),
            f"policies.{name}",
            "is no mapping",
            f"write {name}: {{}}, or the constants that are others",
        )


def _check_nodes(scenario: Scenario) -> None:
    nodes, slots = scenario.cluster.nodes, scenario.cluster.slots
    need(
        0 < slots <= NUM_SLOTS_MAX,
        "cluster.slots",
        f"must be at least 1 and at most {NUM_SLOTS_MAX}",
        DOCS,
    )
    if isinstance(nodes, tuple):
        for number, name in enumerate(nodes):
            check_name(name, f"cluster.nodes[{number}]")
        need(
            len(frozenset(nodes)) == len(nodes),
            "cluster.nodes",
            "names a node twice",
            "each is named once",
        )
    num = nodes if isinstance(nodes, int) else len(nodes)
    need(
        0 < num <= NODES_NUM_MAX,
        "cluster.nodes",
        f"must be at least 1 and at most {NODES_NUM_MAX}",
        DOCS,
    )


def policy(scenario: Scenario, name: str) -> Policy:
    """The policy with the constants of the scenario. Raises SpecError."""
    known = POLICIES[name]
    given = scenario.policies[name]
    costs = type(known.costs)
    usual: dict[str, Any] = msgspec.to_builtins(known.costs)
    for name_of in BY_CAUSE:
        if isinstance(by_cause := given.get(name_of), dict):
            given = given | {name_of: usual[name_of] | by_cause}
    try:
        found = msgspec.convert(usual | given, costs, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        refusal = spec_error(str(error), costs, DOCS, given=given)
        raise SpecError(f"policies.{name}", str(refusal), refusal.hint) from None
    for cause in (*found.detect_s, *found.detect_iterations):
        need(
            cause in TABLE,
            f"policies.{name}",
            f"{cause[:NAME_CHARS_MAX]!r} is no cause",
            f"one of {', '.join(TABLE)}",
        )
    constants: dict[str, Any] = msgspec.to_builtins(found)
    by_cause = [pair for name_of in BY_CAUSE for pair in constants.pop(name_of).items()]
    for key, value in (*by_cause, *constants.items()):
        most = SPEED_RATIO_MAX if key == "speed" else COST_S_MAX
        need(
            0 <= value <= most,
            f"policies.{name}: {key}",
            f"must be a number, at least 0 and at most {most:g}",
            DOCS,
        )
    need(
        found.checkpoint_s > 0 and found.speed > 0 and found.start_s > 0,
        f"policies.{name}",
        "checkpoint_s, start_s and speed must be above 0",
        DOCS,
    )
    need(
        found.num_spares < len(scenario.cluster.names),
        f"policies.{name}",
        "num_spares leaves no node",
        "fewer than the cluster has",
    )
    return replace(known, costs=found)


def limits(
    chosen: Policy, given: dict[Any, Any], iteration_s: float, usual: Limits | None = None
) -> Limits:
    """The limits of a run: `usual`, adapted to the policy, then `given`. Raises SpecError."""
    costs, usual = chosen.costs, usual or Limits()
    longest_s = 10 * (costs.start_s + costs.quiesce_s + costs.regroup_s + iteration_s)
    bounds = {
        name: max(getattr(usual, name), min(longest_s, BOUNDS[name][1]))
        for name in ("start_s_max", "quiesce_s_max", "boundary_s_max", "reconfigure_s_max")
    }
    if not chosen.escalates:
        bounds["replace_after_s"] = 0.0  # the policy's `detect_s` defines when a node is lost
    if not chosen.heals:
        # Published restart times include the end of processes, and all pauses.
        bounds |= {"stop_s_max": STOP_S, "restart_pause_s_max": 0.0}
    try:
        found = policy_check.parse(given, replace(usual, **bounds))
    except SpecError as error:
        raise SpecError("limits", str(error), error.hint) from None
    return (
        found
        if chosen.escalates
        else replace(found, quarantine_faults=COUNT_NUM_MAX, restarts_max=COUNT_NUM_MAX)
    )


def run_input(
    scenario: Scenario, chosen: Policy, happenings: Sequence[ExternalEvent] = ()
) -> RunInput:
    """The input of a run. Raises SpecError."""
    tasks = [_job(scenario, number, chosen) for number in range(len(scenario.tasks))]
    return RunInput(
        slots=dict.fromkeys(scenario.cluster.names, scenario.cluster.slots),
        tasks=tuple(tasks),
        iteration_s=scenario.iteration_s,
        events=happenings,
        horizon_s=scenario.horizon_s,
        limits=limits(chosen, scenario.limits, scenario.iteration_s),
    )


def _job(scenario: Scenario, number: int, chosen: Policy) -> JobSpec:
    task, path = scenario.tasks[number], f"tasks[{number}]"
    need(
        bool(task.throughput) != (task.model is not None),
        path,
        "has to have one of throughput and model",
        "FLOP/s by slots, or what it trains",
    )
    rates = task.throughput
    if task.model is not None:
        most = len(scenario.cluster.names) * scenario.cluster.slots
        modelled_rates = modelled(task.model, min(task.slots.max, most))
        need(bool(modelled_rates.sizes), f"{path}.model", modelled_rates.refused, DOCS)
        rates = dict(zip(modelled_rates.sizes, modelled_rates.rates_flops, strict=True))
    try:
        return simulated_job(chosen, task.name, task.weight, task.slots, rates)
    except SpecError as error:
        raise SpecError(path, str(error), error.hint) from None


def simulated_job(
    chosen: Policy,
    name: str,
    weight: float,
    slots: Slots,
    rates: Mapping[int, float],
    *,
    heals: bool = True,
    **more: Any,
) -> JobSpec:
    """The spec of a simulated task, with the policy's speed and way of healing. `rates`: FLOP/s by
    size. `heals`: False for a task that no policy heals in memory. Raises SpecError."""
    given: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "name": name,
        "weight": weight,
        "command": ["on-paper"],
        "slots": {key: value for key, value in msgspec.to_builtins(slots).items() if value},
        "throughput": {size: rate * chosen.costs.speed for size, rate in rates.items()},
        **more,
    }
    if chosen.heals and heals:
        given |= {
            "heal": "in-memory",
            "loop": {
                "micro_batches": max(slots.max, 1),
                "iterations": COUNT_NUM_MAX,
                "output": "/on-paper",
                "copy_every": 0,
            },
        }
    return parse_job(given)

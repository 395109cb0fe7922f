"""Counterfactual runs: the faults and requests of a log, simulated again with other choices."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ....events.errors import UsageError
from ....events.records import reports as r
from ....events.records.decisions import ThroughputSet
from ....events.records.envelope import Record
from ....events.spec.job import JobSpec
from ....events.spec.policy import Policy as Limits
from ...decide.replay import Verdict, verify
from ...state.cluster import ClusterState
from .. import scenario
from ..accounting import Accounting, AttributedWaf
from ..policies import POLICIES
from ..policies.policy import Policy
from ..run import Outcome, Run, RunInput
from ..trace.external_event import AnyEvent, CostChange, ExternalEvent, OperatorRequest
from .recorded_costs import KEPT, STEPS, RecordedCosts, detected
from .recorded_earnings import LogAccounting, StartState
from .recorded_faults import FaultReader, RecordedFaults

OURS = "unicron"
ITERATION_S = 10.0
"""Iteration time of a task that reported no iteration: the default of a scenario."""
SWITCHED_OFF: dict[str, Any] = {"observe": False, "allow_inject": False}


class RunResult(NamedTuple):
    """`earned`: weighted FLOP by task name. `work`: the same without weights."""

    outcome: Outcome
    earnings: AttributedWaf
    earned: dict[str, float]
    work: dict[str, float]


class Recording(NamedTuple):
    """The earnings of a log, and the input of a simulated run. Times are those of the log."""

    verdict: Verdict
    faults: RecordedFaults
    measured: RecordedCosts
    start_state: StartState
    names: dict[int, str]
    specs: dict[int, JobSpec]
    played: RunResult
    end_s: float

    @property
    def began_s(self) -> float:
        return self.played.outcome.began_s

    @property
    def events(self) -> list[AnyEvent]:
        """Events in the horizon, by time. The n-th that can cause a loss belongs to `losses[n]`."""
        return [one for one in self.faults.events if self.began_s < one.at_s <= self.end_s]


class Choice(Struct, frozen=True, kw_only=True):
    """What a run changes: weights by task name, fields of the policy file, the policy."""

    weights: dict[str, float] = field(default_factory=dict[str, float])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    policy: str = OURS

    @property
    def words(self) -> str:
        """The choice as a user writes it; empty for no change."""
        return " ".join(
            [
                *([self.policy] if self.policy != OURS or self.settings else ()),
                *([self.settings] if self.settings else ()),
            ]
        )

    @property
    def settings(self) -> str:
        """The choice without the policy."""
        return " ".join(
            [
                *(f"weight.{name}={weight:g}" for name, weight in self.weights.items()),
                *(f"policy.{name}={_plain(value)}" for name, value in self.fields.items()),
            ]
        )


def _plain(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else (f"{value:g}" if isinstance(value, float) else str(value))
    )


def read(records: Callable[[], Iterable[Record]], source: str) -> Recording:
    """Verify a log, then measure it. Raises UsageError if that fails, or if no task trained."""
    reader = FaultReader()
    specs: dict[int, JobSpec] = {}
    tables: dict[int, ThroughputSet] = {}

    def watch(state: ClusterState, record: Record) -> None:
        reader.see(state, record)
        if isinstance(record.body, r.TaskSubmitted):
            specs[record.seq] = record.body.spec
        elif isinstance(record.body, ThroughputSet):
            tables[record.body.task] = record.body

    verdict = verify(records(), watch=watch)
    if not verdict.ok:
        raise UsageError(
            f"{source}: at seq {verdict.seq}: {verdict.problem}",
            f"unicron replay {source} --verify",
        )
    if not specs:
        raise UsageError(f"{source}: no task was submitted in this log", "nothing to compare")
    faults, earnings = reader.all(), AttributedWaf()
    meter = LogAccounting(faults, tables, earnings)
    outcome = meter.measure(records())
    if meter.start_state is None:
        raise UsageError(f"{source}: no task ever trained in this log", "nothing to compare")
    return Recording(
        verdict,
        faults,
        meter.measured,
        meter.start_state,
        reader.names,
        specs,
        _played(outcome, earnings, meter.account, reader.names),
        meter.state.at_s,
    )


def _played(
    outcome: Outcome, earnings: AttributedWaf, account: Accounting, names: dict[int, str]
) -> RunResult:
    return RunResult(
        outcome,
        earnings,
        {names[number]: flop for number, flop in earnings.flop_of.items()},
        {names[number]: job.done_flop - job.began_flop for number, job in account.jobs.items()},
    )


def play(recording: Recording, choice: Choice) -> RunResult:
    """Simulate the log's faults and requests."""
    chosen, earnings = _policy(recording, choice), AttributedWaf()
    run = Run(_setup(recording, choice, chosen), chosen, earnings=earnings)
    outcome = run.play()
    names = {task.id: task.spec.name for task in run.engine.state.tasks.values()}
    return _played(outcome, earnings, run.account, names)


def _policy(recording: Recording, choice: Choice) -> Policy:
    """The policy. Unicron's steps take as long as in this log."""
    known = POLICIES[choice.policy]
    if choice.policy != OURS:
        return known
    return replace(
        known, costs=recording.measured.costs(known.costs, recording.began_s, _faults(recording))
    )


def _faults(recording: Recording) -> list[ExternalEvent]:
    return [one for one in recording.events if isinstance(one, ExternalEvent)]


def _setup(recording: Recording, choice: Choice, chosen: Policy) -> RunInput:
    start, measured, names = recording.start_state, recording.measured, recording.names
    iterations_s = {
        names[task]: measured.iteration_s(task) or ITERATION_S for task in recording.specs
    }
    longest_s = max(iterations_s.values())
    usual = replace(start.policy, **SWITCHED_OFF)
    return RunInput(
        slots=start.slots,
        iteration_s=longest_s,
        iterations_s=iterations_s,
        tasks=tuple(
            _job(recording, task, choice.weights.get(names[task], weight), chosen)
            for task, weight in start.tasks.items()
        ),
        events=[
            *_cost_changes(recording, choice, chosen),
            *(
                changed
                for one in recording.events
                if (changed := _translated(recording, one, choice, chosen)) is not None
            ),
        ],
        horizon_s=recording.end_s - recording.began_s,
        limits=scenario.limits(chosen, choice.fields, longest_s, usual),
    )


def _cost_changes(recording: Recording, choice: Choice, chosen: Policy) -> list[CostChange]:
    """The durations of the steps that began between each event of the log and the next."""
    if choice.policy != OURS:
        return []
    times_s = [recording.began_s, *(one.at_s for one in recording.events), float("inf")]
    return [
        CostChange(
            from_s - recording.began_s, recording.measured.costs_between(chosen.costs, from_s, to_s)
        )
        for from_s, to_s in pairwise(times_s)
        if to_s > from_s
    ]


def _translated(
    recording: Recording, one: AnyEvent, choice: Choice, chosen: Policy
) -> AnyEvent | None:
    """The event under this choice. Its time is counted from the start of the horizon."""
    at_s = one.at_s - recording.began_s
    if isinstance(one, ExternalEvent):
        changed = one._replace(at_s=at_s)
        return (
            changed
            if choice.policy == OURS
            else changed._replace(detected_in_s=-1.0, peers_detect_in_s=-1.0)
        )
    if not isinstance(one, OperatorRequest):
        return one._replace(at_s=at_s)
    body = one.body
    if isinstance(body, r.TaskSubmitted):
        number = next(task for task, name in recording.names.items() if name == one.task)
        weight = choice.weights.get(one.task, body.spec.weight)
        body = r.TaskSubmitted(spec=_job(recording, number, weight, chosen))
    elif isinstance(body, r.TaskWeightSet) and one.task in choice.weights:
        body = replace(body, weight=choice.weights[one.task])
    elif isinstance(body, r.PolicySet):
        body = r.PolicySet(
            policy=scenario.limits(
                chosen, choice.fields, ITERATION_S, replace(body.policy, **SWITCHED_OFF)
            )
        )
    elif isinstance(body, r.NodeUndrained) and body.node in recording.start_state.drained:
        return ExternalEvent(at_s, body.node, "joined")
    return OperatorRequest(at_s, body, one.task)


def _job(recording: Recording, number: int, weight: float, chosen: Policy) -> JobSpec:
    """The spec of the simulated task, with its throughput table and the policy's healing."""
    spec, table = recording.specs[number], recording.measured.tables[number]
    return scenario.simulated_job(
        chosen,
        recording.names[number],
        weight,
        spec.slots,
        dict(zip(table.sizes, table.rates_flops, strict=True)),
        heals=spec.training is not None,
        priority=spec.priority,
        team=spec.team,
    )


def reweighted_flop(played: RunResult, weights: dict[str, float]) -> float:
    """Weighted FLOP earned, as if these weights had held throughout."""
    found = played.earnings.flop
    for name, weight in weights.items():
        found += weight * played.work.get(name, 0.0) - played.earned.get(name, 0.0)
    return found


def limits_of(recording: Recording, fields: dict[str, Any]) -> Limits:
    """The policy with these fields. Raises SpecError if they are not valid."""
    return scenario.limits(
        POLICIES[OURS], fields, ITERATION_S, replace(recording.start_state.policy, **SWITCHED_OFF)
    )


# --- sentences for users: which inputs of a counterfactual the log has, and which it lacks ---

WORDS = {
    "start_s": "start",
    "quiesce_s": "quiesce",
    "regroup_s": "regroup",
    "checkpoint_s": "between checkpoints",
    "copy_s": "between in-memory checkpoints",
}


def sentences(recording: Recording, played: Sequence[tuple[Choice, RunResult]]) -> list[str]:
    """Sentences about the log, then about the simulated runs."""
    length_s = recording.end_s - recording.began_s
    horizon = (
        f"the horizon is {length_s:,.0f} s: from the time when all "
        "tasks with slots trained until the last record; a task that ended in the log is "
        "removed at that time in each choice"
    )
    return [
        horizon,
        *_sizes(recording),
        _costs(recording),
        *_absent(recording),
        *(line for choice, one in played for line in _notes_of(recording, choice, one)),
    ]


def _sizes(recording: Recording) -> list[str]:
    """The source of a task's throughput at each size."""
    found: list[str] = []
    for task, table in recording.measured.tables.items():
        seen = sorted(recording.measured.times_s(task))
        others = [size for size in table.sizes if size not in seen]
        trained = f"trained here on {_numbers(seen)}" if seen else "reported no iteration"
        rest = f"; {_numbers(others)}: {table.origin}, never tried" if others else ""
        found.append(
            f"{recording.names[task]}'s FLOP/s are {table.origin}; it {trained} slots{rest}"
            if seen
            else f"{recording.names[task]}'s FLOP/s are {table.origin}; it {trained}"
        )
    return found


def _numbers(sizes: Sequence[int]) -> str:
    """Each size, or the range if there are many."""
    return (
        " ".join(map(str, sizes))
        if len(sizes) <= 4
        else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"
    )


def _costs(recording: Recording) -> str:
    measured = recording.measured
    costs = measured.costs(POLICIES[OURS].costs, recording.began_s, _faults(recording))
    parts = [
        f"{WORDS[name]} {getattr(costs, name):.3g} s ({len(measured.samples[name])})"
        for name in (*STEPS, *KEPT)
        if measured.samples[name]
    ]
    parts += [
        f"{cause} reported after {costs.detect_s[cause]:.3g} s ({len(each)})"
        for cause, each in detected(_faults(recording)).items()
    ]
    return (
        "Unicron's steps as measured here, each incident's own where it has them, else medians "
        "(samples): " + ", ".join(parts)
        if parts
        else "no recovery step was measured here"
    )


def _absent(recording: Recording) -> list[str]:
    measured, usual = recording.measured, POLICIES[OURS].costs
    unmeasured = [
        f"{WORDS[name]} {getattr(usual, name):g} s"
        for name in (*STEPS, *KEPT)
        if not measured.samples[name]
    ]
    found = (
        [f"never in this log, so the policy's constants: {', '.join(unmeasured)}"]
        if unmeasured
        else []
    )
    no_iterations = [
        recording.names[task] for task in recording.specs if not measured.times_s(task)
    ]
    if no_iterations:
        found.append(f"no iteration of {', '.join(no_iterations)} was reported: 10 s are used")
    if recording.faults.num_indirect:
        found.append(
            f"{recording.faults.num_indirect} reports of a fault are indirect evidence "
            "of another fault: not simulated as faults"
        )
    if any(recording.specs[task].training is None for task in recording.specs):
        found.append("iterations that a command repeated are known only if it printed them")
    return found


def _notes_of(recording: Recording, choice: Choice, one: RunResult) -> list[str]:
    name, found = choice.words or "simulated", list[str]()
    if one.outcome.ignored:
        found.append(
            f"{name}: {one.outcome.ignored} events had no target: the node, process or "
            "task was absent"
        )
    costs, horizon_s = POLICIES[choice.policy].costs, recording.end_s - recording.began_s
    if choice.policy != OURS:
        longest_s = (
            max(
                [
                    costs.detection_s(fault.cause, 0.0)
                    for fault in _faults(recording)
                    if fault.event == "fault"
                ],
                default=0.0,
            )
            + costs.start_s
        )
        found.append(
            f"{name}: our reading of it, with the published or the measured costs, "
            "whichever favour it"
            + (
                f"; a fault and a restart alone take {longest_s:g} s, longer than the horizon"
                if longest_s > horizon_s
                else ""
            )
        )
    if choice.weights:
        found.append(f"{name}: compared by these weights, as is the recorded run")
    return found

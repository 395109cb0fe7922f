"""The incident that might have been: what befell by a log, played again under other choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ....events.errors import UsageError, need
from ....events.records import reports as r
from ....events.records.decisions import ThroughputSet
from ....events.records.envelope import Record
from ....events.spec.job import API_VERSION, COUNT_NUM_MAX, JobSpec
from ....events.spec.job import parse as parse_job
from ....events.spec.policy import Policy as Limits
from ...decide.replay import Verdict, verify
from ...state.cluster import ClusterState
from .. import scenario
from ..accounting import Account, Traced
from ..policies import POLICIES
from ..policies.policy import Policy
from ..run import Ground, Outcome, Run
from ..trace.external_event import Anything, Asked, Happening, Takes
from .recorded_costs import KEPT, STEPS, Measured, detected
from .recorded_earnings import Begun, Meter
from .recorded_faults import Befallen, Befell

OURS = "unicron"
ITERATION_S = 10.0
"""Of a task that told of no iteration: as in a scenario that says nothing."""
SWITCHED_OFF: dict[str, Any] = {"observe": False, "allow_inject": False}


class Played(NamedTuple):
    """By task's name what it `earned`, and its `work`: the same not weighted."""

    outcome: Outcome
    earnings: Traced
    earned: dict[str, float]
    work: dict[str, float]


class Recording(NamedTuple):
    """A log, read: what it says it earned, and all to play it anew. Times are the log's."""

    verdict: Verdict
    befallen: Befallen
    measured: Measured
    begun: Begun
    names: dict[int, str]
    specs: dict[int, JobSpec]
    played: Played
    end_s: float

    @property
    def began_s(self) -> float:
        return self.played.outcome.began_s

    @property
    def happenings(self) -> list[Anything]:
        """Within the horizon, in order; of those that are felt the n-th is `felt[n]` of each play.
        """
        return [one for one in self.befallen.happenings
                if self.began_s < one.at_s <= self.end_s]


class Choice(Struct, frozen=True, kw_only=True):
    """What is chosen otherwise: weights by task's name, fields of the policy file, the policy."""

    weights: dict[str, float] = field(default_factory=dict[str, float])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    policy: str = OURS

    @property
    def words(self) -> str:
        """As a person writes it; empty: nothing is another."""
        return " ".join([*([self.policy] if self.policy != OURS or self.settings else ()),
                         *([self.settings] if self.settings else ())])

    @property
    def settings(self) -> str:
        """That of it which is not the policy."""
        return " ".join([*(f"weight.{name}={weight:g}" for name, weight in self.weights.items()),
                         *(f"policy.{name}={_plain(value)}" for name, value in
                           self.fields.items())])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else (
        f"{value:g}" if isinstance(value, float) else str(value))


def read(records: Callable[[], Iterable[Record]], source: str) -> Recording:
    """A log, read twice: every decision made again, then measured.

    Raises UsageError for one that does not verify, or has nothing to compare.
    """
    befell, specs, tables = Befell(), dict[int, JobSpec](), dict[int, ThroughputSet]()

    def watch(state: ClusterState, record: Record) -> None:
        befell.see(state, record)
        if isinstance(record.body, r.TaskSubmitted):
            specs[record.seq] = record.body.spec
        elif isinstance(record.body, ThroughputSet):
            tables[record.body.task] = record.body

    verdict = verify(records(), watch=watch)
    if not verdict.ok:
        raise UsageError(f"{source}: at seq {verdict.seq}: {verdict.problem}",
                         f"unicron replay {source} --verify")
    if not specs:
        raise UsageError(f"{source}: no task was submitted in this log", "nothing to compare")
    befallen, earnings = befell.all(), Traced()
    meter = Meter(befallen, tables, earnings)
    outcome = meter.measure(records())
    if meter.begun is None:
        raise UsageError(f"{source}: no task ever trained in this log", "nothing to compare")
    return Recording(verdict, befallen, meter.measured, meter.begun, befell.names, specs,
                     _played(outcome, earnings, meter.account, befell.names), meter.state.at_s)


def _played(outcome: Outcome, earnings: Traced, account: Account, names: dict[int, str]) -> Played:
    return Played(outcome, earnings,
                  {names[number]: flop for number, flop in earnings.by_task.items()},
                  {names[number]: job.done_flop - job.began_flop
                   for number, job in account.jobs.items()})


def play(recording: Recording, choice: Choice) -> Played:
    """The same faults and requests on paper. Raises SpecError for a policy that cannot be."""
    chosen, earnings = _policy(recording, choice), Traced()
    need(not chosen.by_params or all(recording.measured.params.get(task, 0) > 0
                                     for task in recording.specs), f"--policy {choice.policy}",
         "goes by the models' sizes, and this log does not tell them all", "name another policy")
    run = Run(_ground(recording, choice, chosen), chosen, earnings=earnings)
    outcome = run.play()
    names = {task.id: task.spec.name for task in run.engine.state.tasks.values()}
    return _played(outcome, earnings, run.account, names)


def as_measured(choice: Choice) -> bool:
    """Whether its steps are Unicron's, and take what they took in the log."""
    return POLICIES[choice.policy].costs == POLICIES[OURS].costs


def _policy(recording: Recording, choice: Choice) -> Policy:
    """Unicron's steps take what they took in this log; others', what is published."""
    known = POLICIES[choice.policy]
    if not as_measured(choice):
        return known
    return replace(known, costs=recording.measured.costs(
        known.costs, recording.began_s, _faults(recording)))


def _faults(recording: Recording) -> list[Happening]:
    return [one for one in recording.happenings if isinstance(one, Happening)]


def _ground(recording: Recording, choice: Choice, chosen: Policy) -> Ground:
    begun, measured, names = recording.begun, recording.measured, recording.names
    iterations_s = {names[task]: measured.iteration_s(task) or ITERATION_S
                    for task in recording.specs}
    longest_s = max(iterations_s.values())
    usual = replace(begun.policy, **SWITCHED_OFF)
    params = {names[task]: num for task, num in measured.params.items()}
    return Ground(
        slots=begun.slots, iteration_s=longest_s, iterations_s=iterations_s,
        tasks=tuple(_job(recording, task, choice.weights.get(names[task], weight), chosen)
                    for task, weight in begun.tasks.items()),
        happenings=[*_takes(recording, choice, chosen), *(
            moved for one in recording.happenings
            if (moved := _moved(recording, one, choice, chosen)) is not None)],
        horizon_s=recording.end_s - recording.began_s,
        limits=scenario.limits(chosen, choice.fields, longest_s, usual), params=params)


def _takes(recording: Recording, choice: Choice, chosen: Policy) -> list[Takes]:
    """From each thing that befell the cluster until the next, what the steps took then."""
    if not as_measured(choice):
        return []
    times_s = [recording.began_s, *(one.at_s for one in recording.happenings), float("inf")]
    return [Takes(from_s - recording.began_s, recording.measured.costs_between(
        chosen.costs, from_s, to_s)) for from_s, to_s in pairwise(times_s) if to_s > from_s]


def _moved(recording: Recording, one: Anything, choice: Choice, chosen: Policy) -> Anything | None:
    """By the horizon's clock, and as it would have been under this choice."""
    at_s = one.at_s - recording.began_s
    if isinstance(one, Happening):
        moved = one._replace(at_s=at_s)
        return moved if as_measured(choice) else moved._replace(told_in_s=-1.0, seen_in_s=-1.0)
    if not isinstance(one, Asked):
        return one._replace(at_s=at_s)
    body = one.body
    if isinstance(body, r.TaskSubmitted):
        number = next(task for task, name in recording.names.items() if name == one.task)
        weight = choice.weights.get(one.task, body.spec.weight)
        body = r.TaskSubmitted(spec=_job(recording, number, weight, chosen))
    elif isinstance(body, r.TaskWeightSet) and one.task in choice.weights:
        body = replace(body, weight=choice.weights[one.task])
    elif isinstance(body, r.PolicySet):
        body = r.PolicySet(policy=scenario.limits(
            chosen, choice.fields, ITERATION_S, replace(body.policy, **SWITCHED_OFF)))
    elif isinstance(body, r.NodeUndrained) and body.node in recording.begun.drained:
        return Happening(at_s, body.node, "joined")
    return Asked(at_s, body, one.task)


def _job(recording: Recording, number: int, weight: float, chosen: Policy) -> JobSpec:
    """The task as its spec has it, on paper: it trains by its table, and heals as the policy does.
    """
    spec, table = recording.specs[number], recording.measured.tables[number]
    slots = {key: value for key, value in msgspec.to_builtins(spec.slots).items() if value}
    given: dict[str, Any] = {
        "apiVersion": API_VERSION, "name": recording.names[number], "weight": weight,
        "priority": spec.priority, "team": spec.team, "slots": slots, "command": ["on-paper"],
        "throughput": {size: rate * chosen.costs.speed for size, rate in
                       zip(table.sizes, table.rates_flops, strict=True)}}
    if chosen.heals and spec.training is not None:
        given |= {"heal": "in-memory", "loop": {
            "micro_batches": max(spec.slots.max, 1), "iterations": COUNT_NUM_MAX,
            "output": "/on-paper", "copy_every": 0}}
    return parse_job(given)


def weighed(played: Played, weights: dict[str, float]) -> float:
    """What was earned, had these weights held all the time; weighted FLOP."""
    found = played.earnings.flop
    for name, weight in weights.items():
        found += weight * played.work.get(name, 0.0) - played.earned.get(name, 0.0)
    return found


def limits_of(recording: Recording, fields: dict[str, Any]) -> Limits:
    """Whether these fields can be. Raises SpecError."""
    return scenario.limits(POLICIES[OURS], fields, ITERATION_S,
                           replace(recording.begun.policy, **SWITCHED_OFF))


# --- What of a counterfactual a log holds, and what it does not: in plain sentences. ---

WORDS = {"start_s": "start", "quiesce_s": "quiesce", "regroup_s": "regroup",
         "checkpoint_s": "between checkpoints", "copy_s": "between copies"}


def sentences(recording: Recording, played: Sequence[tuple[Choice, Played]]) -> list[str]:
    """The first are of the log, the last of what was played."""
    return [_horizon(recording), *_sizes(recording), _costs(recording), *_absent(recording),
            *(line for choice, one in played for line in _of(recording, choice, one))]


def _horizon(recording: Recording) -> str:
    return (f"the horizon is {recording.end_s - recording.began_s:,.0f} s: from when all that had "
            "slots trained until the last record; a task that ended in the log is taken out then "
            "in each choice")


def _sizes(recording: Recording) -> list[str]:
    """Where a task's speed at a size is from."""
    found: list[str] = []
    for task, table in recording.measured.tables.items():
        seen = sorted(recording.measured.times_s(task))
        others = [size for size in table.sizes if size not in seen]
        trained = f"trained here on {_numbers(seen)}" if seen else "told of no iteration"
        rest = f"; {_numbers(others)}: {table.origin}, never tried" if others else ""
        found.append(f"{recording.names[task]}'s FLOP/s are {table.origin}; it {trained} slots"
                     f"{rest}" if seen else
                     f"{recording.names[task]}'s FLOP/s are {table.origin}; it {trained}")
    return found


def _numbers(sizes: Sequence[int]) -> str:
    """Each, or where they are many, from which to which."""
    return (" ".join(map(str, sizes)) if len(sizes) <= 4 else
            f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}")


def _costs(recording: Recording) -> str:
    measured = recording.measured
    costs = measured.costs(POLICIES[OURS].costs, recording.began_s, _faults(recording))
    told = [f"{WORDS[name]} {getattr(costs, name):.3g} s ({len(measured.samples[name])})"
            for name in (*STEPS, *KEPT) if measured.samples[name]]
    told += [f"{cause} told after {costs.detect_s[cause]:.3g} s ({len(each)})"
             for cause, each in detected(_faults(recording)).items()]
    return ("Unicron's steps as measured here, each incident's own where it has them, else medians "
            "(of so many): " + ", ".join(told) if told else "no step of healing was measured here")


def _absent(recording: Recording) -> list[str]:
    measured, usual = recording.measured, POLICIES[OURS].costs
    never = [f"{WORDS[name]} {getattr(usual, name):g} s" for name in (*STEPS, *KEPT)
             if not measured.samples[name]]
    found = [f"never in this log, so the policy's constants: {', '.join(never)}"] if never else []
    silent = [recording.names[task] for task in recording.specs
              if not measured.times_s(task)]
    if silent:
        found.append(f"no iteration was told of {', '.join(silent)}: 10 s are taken")
    if recording.befallen.num_hearsay:
        found.append(f"{recording.befallen.num_hearsay} reports of a fault only tell of another's "
                     "end: not played as faults")
    if any(recording.specs[task].training is None for task in recording.specs):
        found.append("what a command did again is known only where it printed its iterations")
    return found


def _of(recording: Recording, choice: Choice, one: Played) -> list[str]:
    name, found = choice.words or "on paper", list[str]()
    if one.outcome.ignored:
        found.append(f"{name}: {one.outcome.ignored} of what befell met nobody: what was to be "
                     "struck, or asked for, was not there")
    costs, horizon_s = POLICIES[choice.policy].costs, recording.end_s - recording.began_s
    if not as_measured(choice):
        longest_s = max([costs.until_told_s(fault.cause, 0.0) for fault in _faults(recording)
                         if fault.event == "fault"], default=0.0) + costs.start_s
        found.append(f"{name}: our reading of it, with the published or the measured costs, "
                     "whichever favour it" + (
            f"; a fault and a restart alone take {longest_s:g} s, longer than the horizon"
            if longest_s > horizon_s else ""))
    if choice.weights:
        found.append(f"{name}: compared by these weights, also as recorded")
    return found

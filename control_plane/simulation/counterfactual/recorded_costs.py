"""Durations of the recovery steps and of iterations in a recorded log, as medians."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import replace

from ....events.records import decisions as d
from ....events.records import orders as o
from ....events.records import reports as r
from ....events.records.envelope import Record
from ...history.history import History
from ...throughput.table import rate_at
from ..accounting import Key
from ..policies.policy import Costs
from ..trace.external_event import ExternalEvent

STEPS = ("start_s", "quiesce_s", "regroup_s")
KEPT = ("checkpoint_s", "copy_s")


class Sample(NamedTuple):
    at_s: float
    took_s: float


class RecordedCosts:
    """Collects durations. Pass each record to `see` after the history has read it."""

    def __init__(self, history: History, tables: Mapping[int, d.ThroughputSet]) -> None:
        self.tables, self._history = tables, history
        self.samples: dict[str, list[Sample]] = {name: [] for name in (*STEPS, *KEPT)}
        self._starts_s: dict[Key, float] = {}
        self._quiesces_s: dict[int, float] = {}
        self._regroups_s: dict[tuple[int, int], float] = {}
        self._kept_s: dict[tuple[str, int], tuple[int, float]] = {}

    def see(self, record: Record) -> None:
        at_s = record.at_s
        match record.body:
            case o.StartRank() as body:
                self._starts_s[body.task, body.rank, body.attempt] = at_s
            case r.RankReady() as body:
                self._took(
                    "start_s", self._starts_s.pop((body.task, body.rank, body.attempt), None), at_s
                )
            case r.RankStarted() as body:
                task = self._history.state.tasks.get(body.task)
                if task is not None and not task.heals_in_memory:
                    self._took(
                        "start_s",
                        self._starts_s.pop((body.task, body.rank, body.attempt), None),
                        at_s,
                    )
            case o.Quiesce() as body:
                self._quiesces_s.pop(body.task, None)
                if body.mode == "now":
                    self._quiesces_s[body.task] = at_s
            case o.Reconfigure() as body:
                self._took("quiesce_s", self._quiesces_s.pop(body.task, None), at_s)
                self._regroups_s[body.task, body.generation] = at_s
            case o.Resume() as body:
                self._took(
                    "regroup_s", self._regroups_s.pop((body.task, body.generation), None), at_s
                )
            case r.MemoryCheckpointStored() as body:
                self._kept("copy_s", body.task, body.step_version, at_s)
            case r.CheckpointSaved() as body if not body.final:
                self._kept("checkpoint_s", body.task, body.step_version, at_s)
            case _:
                pass

    def _took(self, name: str, since_s: float | None, at_s: float) -> None:
        if since_s is not None:
            self.samples[name].append(Sample(since_s, at_s - since_s))

    def _kept(self, name: str, task: int, version: int, at_s: float) -> None:
        known = self._kept_s.get((name, task))
        if known is not None and version > known[0]:
            self._took(name, known[1], at_s)
        if known is None or version > known[0]:
            self._kept_s[name, task] = (version, at_s)

    # --- results --------------------------------------------------------------------------------
    def costs(self, usual: Costs, from_s: float, faults: Iterable[ExternalEvent]) -> Costs:
        """The median of each step since `from_s`, else in the whole log, else as in `usual`."""
        found: dict[str, Any] = {}
        for name, samples in self.samples.items():
            recent = [one for one in samples if one.at_s >= from_s] or samples
            if recent:
                found[name] = median(one.took_s for one in recent)
        return replace(
            usual,
            **found,
            detect_s=usual.detect_s
            | {cause: median(each) for cause, each in detected(faults).items()},
        )

    def costs_between(self, usual: Costs, from_s: float, to_s: float) -> Costs:
        """The median of each step that began in this interval, else as in `usual`."""
        took_s = {
            name: [one.took_s for one in self.samples[name] if from_s <= one.at_s < to_s]
            for name in STEPS
        }
        return replace(usual, **{name: median(each) for name, each in took_s.items() if each})

    def times_s(self, task: int) -> dict[int, list[float]]:
        """By number of slots: the durations of the task's iterations."""
        by_size = {
            size: [one for one in times_s if one > 0]
            for size, times_s in self._history.tasks[task].paces_s.items()
        }
        return {size: times_s for size, times_s in by_size.items() if size and times_s}

    def iteration_s(self, task: int) -> float:
        """Iteration time at the largest size, from the size with most samples; 0.0 without any."""
        times_s, table = self.times_s(task), self.tables[task]
        if not times_s:
            return 0.0
        size = max(times_s, key=lambda one: (len(times_s[one]), one))
        most = max(table.rates_flops)
        return median(times_s[size]) * rate_at(table, size) / most if most else 0.0


def detected(faults: Iterable[ExternalEvent]) -> dict[str, list[float]]:
    """By cause: the time until each fault was reported."""
    found: dict[str, list[float]] = {}
    for one in faults:
        if one.event == "fault" and one.detected_in_s >= 0:
            found.setdefault(one.cause, []).append(one.detected_in_s)
    return found

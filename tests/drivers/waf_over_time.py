"""The WAF of a cluster over time, from its log: achieved, planned, ideal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct, field
from unicron.control_plane.history.history import History
from unicron.control_plane.state.task import Task
from unicron.control_plane.throughput.calibration import batch_counts
from unicron.events.records.decisions import PlanChosen, TaskEnded
from unicron.events.records.envelope import Record
from unicron.events.records.reports import IterationsLogged, LossNotFinite, TaskProgressed


class Work(Struct, frozen=True):
    """Weighted FLOP done for the first time, evenly from `from_s` to `to_s`."""

    from_s: float
    to_s: float
    flop: float


class Planned(Struct, frozen=True):
    """Planned WAF from `at_s` on, weighted FLOP/s, and the ideal."""

    seq: int
    at_s: float
    waf: float = 0.0
    ideal_waf: float = 0.0
    origins: tuple[str, ...] = ()
    """Origins of the throughput tables of the tasks in the plan, sorted."""


class Waf(Struct, frozen=True, kw_only=True):
    """WAF over time in buckets of `bucket_s` from `from_s` on: weighted FLOP/s, means of a bucket.
    `achieved` is measured. `planned` and `ideal` are in the units of the tasks' throughput tables,
    whose `origins` say whether they compare with it: only `measured` does."""

    from_s: float
    bucket_s: float
    achieved: tuple[float, ...]
    planned: tuple[float, ...]
    ideal: tuple[float, ...]
    origins: tuple[str, ...]
    """Origins of the throughput tables in the log's plans: declared, modelled, measured."""


class WafHistory(History):
    """The history of a log, with the work that was done and the plans."""

    work: list[Work] = field(default_factory=list[Work])
    plans: list[Planned] = field(default_factory=list[Planned])

    def add(self, record: Record) -> None:
        body, task = record.body, self.state.tasks.get(getattr(record.body, "task", 0))
        furthest = task.max_iteration if task is not None else 0
        super().add(record)
        if task is not None:
            self._task_worked(task, record, task.max_iteration - furthest)
        if isinstance(body, PlanChosen):
            waf = math.fsum([body.waf, *(one.waf for one in body.kept)])
            self.plans.append(Planned(record.seq, record.at_s, waf, body.ideal_waf,
                                      self.origins[record.seq]))
        elif isinstance(body, TaskEnded) and all(x.outcome for x in self.state.tasks.values()):
            self.plans.append(Planned(record.seq, record.at_s))

    def _task_worked(self, task: Task, record: Record, new: int) -> None:
        body = record.body
        if isinstance(body, LossNotFinite):
            took_s = task.step_s
        elif isinstance(body, TaskProgressed):
            took_s = math.fsum(body.step_s[-new:]) if new else 0.0
        elif isinstance(body, IterationsLogged) and task.logged is not None and (  # it counts
                task.logged.rank == body.rank and task.attempts.get(body.rank) == body.attempt):
            new = min(new, body.num_iterations) if batch_counts(task) else 0
            took_s = new * body.step_s
        else:
            return
        if new > 0:
            self.work.append(Work(record.at_s - took_s, record.at_s,
                                  new * task.iteration_flops * task.weight))


def waf_history(records: Iterable[Record]) -> WafHistory:
    found = WafHistory()
    for record in records:
        found.add(record)
    return found


def waf(it: WafHistory, num_buckets: int) -> Waf:
    """WAF over time, from the first submission to the last record, in equal buckets. `achieved`:
    FLOP of iterations done for the first time x weight, spread over the time that they took.
    `planned` and `ideal` hold from one PlanChosen to the next; 0 before the first and after the
    last task. Raises ValueError if `num_buckets` is below 1."""
    from_s = min((one.task.submitted_s for one in it.tasks.values()), default=it.at_s)
    return over_time(it.work, it.plans, from_s=from_s, to_s=it.at_s, num_buckets=num_buckets)


def over_time(work: Sequence[Work], plans: Sequence[Planned], *, from_s: float, to_s: float,
              num_buckets: int) -> Waf:
    """WAF in equal buckets; `plans` are steps, 0 before them. Raises ValueError on no buckets."""
    if num_buckets < 1:
        raise ValueError("at least one bucket")
    bucket_s = max(to_s - from_s, 1e-3) / num_buckets
    edges = [from_s + bucket_s * index for index in range(num_buckets + 1)]
    until_s = [plan.at_s for plan in plans[1:]] + [edges[-1]]
    planned = [Work(plan.at_s, end_s, plan.waf * (end_s - plan.at_s))
               for plan, end_s in zip(plans, until_s, strict=False)]
    ideal = [Work(plan.at_s, end_s, plan.ideal_waf * (end_s - plan.at_s))
             for plan, end_s in zip(plans, until_s, strict=False)]
    return Waf(from_s=from_s, bucket_s=bucket_s, achieved=_rates(work, edges),
               planned=_rates(planned, edges), ideal=_rates(ideal, edges),
               origins=tuple(dict.fromkeys(name for plan in plans for name in plan.origins)))


def _rates(work: Sequence[Work], edges: Sequence[float]) -> tuple[float, ...]:
    """The mean FLOP/s between neighbouring edges; work before the first edge counts to it."""
    bucket_s = edges[1] - edges[0]
    parts: list[list[float]] = [[] for _ in edges[1:]]
    for one in work:
        from_s, to_s = max(one.from_s, edges[0]), min(one.to_s, edges[-1])
        first, last = (min(max(int((at_s - edges[0]) / bucket_s), 0), len(parts) - 1)
                       for at_s in (from_s, to_s))
        for index in range(first, last + 1):
            inside_s = min(to_s, edges[index + 1]) - max(from_s, edges[index])
            share = inside_s / (to_s - from_s) if to_s > from_s else 1.0 / (last - first + 1)
            parts[index].append(one.flop * max(share, 0.0))
    return tuple(math.fsum(part) / bucket_s for part in parts)

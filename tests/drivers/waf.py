"""The WAF of a log over time: achieved, and by its plans. The demo draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.throughput.calibration import batch_counts
from unicron.events.records.decisions import PlanChosen, TaskEnded
from unicron.events.records.envelope import Record
from unicron.events.records.reports import IterationsLogged, LossNotFinite, TaskProgressed


class Work(NamedTuple):
    """Weighted FLOP, evenly from `from_s` to `to_s`."""

    from_s: float
    to_s: float
    flop: float


class Waf(NamedTuple):
    """Means of weighted FLOP/s in buckets of `bucket_s`. `achieved` is measured; `planned` and
    `ideal` are in the units of the tasks' throughput tables, of these `origins`."""

    bucket_s: float
    achieved: tuple[float, ...]
    planned: tuple[float, ...]
    ideal: tuple[float, ...]
    origins: tuple[str, ...]


def waf(records: Iterable[Record], num_buckets: int) -> Waf:
    """From the first submission to the last record. A plan holds until the next one, or until the
    last task has ended."""
    state, work, origins = ClusterState(), list[Work](), set[str]()
    plans: list[tuple[float, ...]] = []
    for record in records:
        body = record.body
        task = state.tasks.get(getattr(body, "task", 0))
        before = task.max_iteration if task is not None else 0
        fold(state, record)
        new = task.max_iteration - before if task is not None else 0
        if (
            task is not None
            and new > 0
            and isinstance(body, TaskProgressed | LossNotFinite | IterationsLogged)
        ):
            took_s = task.step_s
            if isinstance(body, TaskProgressed):
                took_s = math.fsum(body.step_s[-new:])
            elif isinstance(body, IterationsLogged):
                new = min(new, body.num_iterations) if batch_counts(task) else 0
                took_s = new * body.step_s
            work.append(
                Work(record.at_s - took_s, record.at_s, new * task.iteration_flops * task.weight)
            )
        if isinstance(body, PlanChosen):
            plans.append(
                (record.at_s, body.waf + math.fsum(one.waf for one in body.kept), body.ideal_waf)
            )
            origins |= {
                planned.throughput.origin
                for one in (*body.allocations, *body.kept)
                if one.slots
                and (planned := state.tasks.get(one.task)) is not None
                and planned.throughput is not None
            }
        elif isinstance(body, TaskEnded) and all(one.outcome for one in state.tasks.values()):
            plans.append((record.at_s, 0.0, 0.0))
    from_s = min((one.submitted_s for one in state.tasks.values()), default=state.at_s)
    bucket_s = max(state.at_s - from_s, 1e-3) / num_buckets
    edges = [from_s + bucket_s * index for index in range(num_buckets + 1)]
    ends_s = [*(at_s for at_s, *_ in plans[1:]), edges[-1]]
    planned, ideal = (
        [
            Work(plan[0], end_s, plan[which] * (end_s - plan[0]))
            for plan, end_s in zip(plans, ends_s, strict=False)
        ]
        for which in (1, 2)
    )
    return Waf(
        bucket_s,
        rates(work, edges),
        rates(planned, edges),
        rates(ideal, edges),
        tuple(sorted(origins)),
    )


def rates(work: Sequence[Work], edges: Sequence[float]) -> tuple[float, ...]:
    """The mean FLOP/s between neighbouring edges; work before the first edge counts to it."""
    bucket_s = edges[1] - edges[0]
    parts: list[list[float]] = [[] for _ in edges[1:]]
    for one in work:
        from_s, to_s = max(one.from_s, edges[0]), min(one.to_s, edges[-1])
        first, last = (
            min(max(int((at_s - edges[0]) / bucket_s), 0), len(parts) - 1)
            for at_s in (from_s, to_s)
        )
        for index in range(first, last + 1):
            inside_s = min(to_s, edges[index + 1]) - max(from_s, edges[index])
            share = inside_s / (to_s - from_s) if to_s > from_s else 1.0 / (last - first + 1)
            parts[index].append(one.flop * max(share, 0.0))
    return tuple(math.fsum(part) / bucket_s for part in parts)

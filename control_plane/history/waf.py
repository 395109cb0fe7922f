"""The WAF of a cluster over time: achieved, planned, ideal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct


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

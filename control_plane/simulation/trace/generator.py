"""Drawn traces: times, causes and durations of faults, bursts, and nodes with repeated faults.

The same seed draws the same trace on every machine: all values come from `random()`, which Python
guarantees, and times are rounded to milliseconds. Each quantity has its own random stream, and if
it belongs to a node, one stream per node. A fault of a node that is away is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from msgspec import Struct

from ....events.errors import SpecError, need
from ....events.records import statuses as s
from ...incidents.severity import TABLE
from .external_event import ExternalEvent

# --- published shares of causes: a drawn trace may name a study instead of its own shares ---
#
# `tests/data/failure_categories.csv` maps the terms of each study to rows of the paper's table; a
# test adds them up to these values. Studies whose severities differ from the table's (FT-HSDP,
# Fire-Flyer 2, Philly, Meta's lemon nodes) are left out: the rows of their faults would be guesses.

STUDIES: dict[str, dict[str, float]] = {
    # Unicron, arXiv 2401.00134, table 1: per cent of a month's tasks, without 3.3 of "others".
    "unicron": {
        s.NCCL_TIMEOUT: 10.1, s.ECC_ERRORS: 5.0, s.NVLINK_ERRORS: 4.5, s.OTHER_NETWORK: 4.0,
        s.LINK_FLAPPING: 3.9, s.TASK_HANG: 3.1, s.ILLEGAL_MEMORY_ACCESS: 2.1,
        s.INVALID_DMA_MAPPING: 2.1, s.CONNECTION_REFUSED: 2.1, s.CUDA_ERRORS: 1.6,
        s.CONNECTION_RESET: 1.0, s.GPU_DRIVER_ERRORS: 0.6},
    # Llama 3, arXiv 2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100.
    "llama3": {
        s.GPU_DRIVER_ERRORS: 171, s.ECC_ERRORS: 97, s.OTHER_SOFTWARE: 56, s.LOST_CONNECTION: 53,
        s.OTHER_NETWORK: 35, s.NCCL_TIMEOUT: 7},
    # ByteRobust, arXiv 2509.16293, table 1: 3 months, 778,135 jobs. Without its slow jobs, NaNs and
    # restarts by hand.
    "byterobust": {
        s.CUDA_ERRORS: 19968, s.OTHER_SOFTWARE: 11130, s.EXITED_ABNORMALLY: 6348,
        s.TASK_HANG: 5506, s.OTHER_NETWORK: 1727, s.LOST_CONNECTION: 250, s.ECC_ERRORS: 188,
        s.GPU_DRIVER_ERRORS: 76},
    # Acme, arXiv 2403.07648, table 3: numbers of faults, most of them errors of scripts. NVLink and
    # CUDA errors lost the most GPU time.
    "acme": {
        s.OTHER_SOFTWARE: 2274, s.CONNECTION_REFUSED: 147, s.NVLINK_ERRORS: 54, s.CUDA_ERRORS: 35,
        s.OTHER_NETWORK: 25, s.LOST_CONNECTION: 16, s.ECC_ERRORS: 12, s.NCCL_TIMEOUT: 6,
        s.EXITED_ABNORMALLY: 6},
}

HOUR_S = 3600.0
MTBF_S_MAX = 1e12
FAULTS_NUM_MAX = 1_000_000
SEED_MAX = 2**53
RATES = ("mtbf_gpu_h", "mtbf_node_h", "count")
SEVERITIES = ("SEV1", "SEV2", "SEV3")
OTHER = "other"


class Repeat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's mean time to its next fault shrinks by the same factor with each fault. Before fault
    number `incidents` it is `ratio` times the time before the first; then it stays the same."""

    ratio: float
    incidents: int = 20

    def shrunk(self, num_before: int) -> float:
        """The ratio of the mean time after this number of faults to the first mean time."""
        steps = self.incidents - 1
        return math.pow(self.ratio, min(num_before, steps) / steps)


OFFENDERS = {
    # SuperBench: 719.4 h until the first incident of a node, 151.7 h until its 20th.
    "superbench": Repeat(ratio=151.7 / 719.4, incidents=20)}


class Bursts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several nodes fail together; they are neighbours in the cluster's list (a rack, a switch).
    The whole cluster has one burst in `every_h` hours on average, or `count` over the horizon.
    `sizes`: the shares of bursts, by number of nodes."""

    sizes: dict[int, float]
    every_h: float | None = None
    count: int | None = None
    cause: str = s.LOST_CONNECTION


class Drawn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rate: a mean time between faults (a Poisson process for each GPU or node), or a `count`
    over the horizon, in all or by severity; without it, only bursts. docs/guides/traces.md
    describes each field."""

    seed: int = 1
    mtbf_gpu_h: float | None = None
    mtbf_node_h: float | None = None
    count: int | dict[str, int] | None = None
    causes: str | dict[str, float] = "unicron"
    repair: str | Repair = "lanl"
    bursts: Bursts | None = None
    repeat: str | Repeat | None = None


class DrawnTrace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drawn trace, in the place of a trace file."""

    drawn: Drawn


class _Fault(NamedTuple):
    """`nodes`: by number; if empty, `quantile` selects a present node. `lasts`: repair times."""

    at_s: float
    nodes: tuple[int, ...]
    cause: str
    lasts: tuple[float, ...]
    quantile: float = 0.0


def check(drawn: Drawn, num_nodes: int, num_slots: int, horizon_s: float) -> None:
    """Raises SpecError if the trace cannot be drawn, or is too large."""
    at = "trace.drawn"
    need(0 <= drawn.seed <= SEED_MAX, f"{at}.seed", f"is {drawn.seed}",
         f"at least 0 and at most {SEED_MAX}")
    rates = [name for name in RATES if getattr(drawn, name) is not None]
    need(len(rates) <= 1 and bool(rates or drawn.bursts), at, f"has {len(rates)} of its rates, "
         "not one", f"one of {', '.join(RATES)}, or bursts alone")
    _check_mix(drawn.causes, f"{at}.causes")
    repair_of(drawn.repair, f"{at}.repair")
    repeat = _repeat(drawn)
    need(repeat is None or (0 < repeat.ratio <= 1 and 1 < repeat.incidents <= FAULTS_NUM_MAX),
         f"{at}.repeat", "must shrink", "ratio above 0 and at most 1, incidents at least 2")
    for name in RATES[:-1]:
        value: float | None = getattr(drawn, name)
        need(value is None or 0 < value * HOUR_S <= MTBF_S_MAX, f"{at}.{name}",
             f"is {value}", "must be above 0")
    num_faults = _num_faults(drawn, num_nodes, num_slots, horizon_s)
    if (bursts := drawn.bursts) is not None:
        num_faults += _check_bursts(bursts, num_nodes, horizon_s)
    need(num_faults <= FAULTS_NUM_MAX, at, f"draws about {num_faults:.3g} faults, more than "
         f"{FAULTS_NUM_MAX}", "a shorter horizon_s, or a longer time between faults")


def _num_faults(drawn: Drawn, num_nodes: int, num_slots: int, horizon_s: float) -> float:
    """An upper bound on the average number of faults."""
    repeat, at = _repeat(drawn), "trace.drawn.count"
    if drawn.count is None:
        node_s = mean_s(drawn, num_slots) * (repeat.ratio if repeat else 1)
        return num_nodes * horizon_s / node_s
    mix = _mix(drawn.causes)
    for name, count in _counts(drawn.count).items():
        need(name in (*SEVERITIES, OTHER), at, f"{name[:40]!r} is no severity",
             f"{', '.join(SEVERITIES)} and {OTHER}")
        need(count >= 0, at, f"is {count}", "at least 0")
        need(not count or bool(_mix_of(mix, name, _counts(drawn.count))), at,
             f"needs a cause of {name}, and causes has none", f"one of {', '.join(TABLE)}")
    return math.fsum(_counts(drawn.count).values())


def _check_bursts(bursts: Bursts, num_nodes: int, horizon_s: float) -> float:
    """An upper bound on the average number of faults in bursts."""
    at = "trace.drawn.bursts"
    need((bursts.every_h is None) != (bursts.count is None), at,
         "has to have one of every_h and count", "every_h: 100")
    need(bursts.every_h is None or 0 < bursts.every_h * HOUR_S <= MTBF_S_MAX, f"{at}.every_h",
         f"is {bursts.every_h}", "must be above 0")
    need(bursts.count is None or bursts.count >= 0, f"{at}.count", f"is {bursts.count}",
         "at least 0")
    need(bursts.cause in TABLE, f"{at}.cause", f"is {bursts.cause[:40]!r}",
         f"one of {', '.join(TABLE)}")
    _check_shares(bursts.sizes, f"{at}.sizes")
    need(all(1 <= size <= num_nodes for size in bursts.sizes), f"{at}.sizes",
         f"are {', '.join(map(str, sorted(bursts.sizes)))} nodes together",
         f"the cluster has {num_nodes}")
    times = bursts.count if bursts.count is not None else (
        horizon_s / ((bursts.every_h or 1) * HOUR_S))
    return times * max(bursts.sizes)


def _check_mix(causes: str | dict[str, float], at: str) -> None:
    if isinstance(causes, str):
        need(causes in STUDIES, at, f"{causes[:40]!r} is no study",
             f"one of {', '.join(STUDIES)}, or shares by cause")
        return
    for cause in causes:
        need(cause in TABLE, at, f"{cause[:40]!r} is no cause", f"one of {', '.join(TABLE)}")
    _check_shares(causes, at)


def _check_shares(shares: dict[str, float] | dict[int, float], at: str) -> None:
    need(all(math.isfinite(share) and share >= 0 for share in shares.values())
         and 0 < math.fsum(shares.values()) < math.inf, at, "has shares that are none",
         "each at least 0, one above; they need not add up to 1")


def draw(drawn: Drawn, nodes: Sequence[str], num_slots: int, horizon_s: float
         ) -> list[ExternalEvent]:
    """All events of nodes with `num_slots` slots until the horizon, by time. Raises SpecError."""
    check(drawn, len(nodes), num_slots, horizon_s)
    faults = [*_bursts(drawn, len(nodes), horizon_s)]
    faults += (_counted(drawn, horizon_s) if drawn.count is not None else
                _faults(drawn, len(nodes), num_slots, horizon_s))
    found = [*_events(drawn, nodes, sorted(faults, key=lambda one: (one.at_s, one.nodes)))]
    return sorted((one for one in found if one.at_s <= horizon_s), key=lambda one: one.at_s)


def _events(drawn: Drawn, nodes: Sequence[str], faults: Iterable[_Fault]
            ) -> Iterator[ExternalEvent]:
    """The faults of present nodes, and the repairs of the nodes that a SEV1 takes away."""
    away_until_s: dict[int, float] = {}
    num_before: dict[int, int] = {}
    repeat = _repeat(drawn)
    for fault in faults:
        nodes_hit = fault.nodes
        if not nodes_hit:
            present = [number for number in range(len(nodes))
                     if away_until_s.get(number, -1.0) < fault.at_s]
            need(bool(present), "trace.drawn.count", f"at {fault.at_s:g} s all nodes are away",
                 "fewer faults, or shorter repairs")
            weights = [1 / repeat.shrunk(num_before.get(number, 0)) if repeat else 1.0
                       for number in present]
            number = present[_chosen(weights, fault.quantile)]
            num_before[number] = num_before.get(number, 0) + 1
            nodes_hit = (number,)
        for number, lasts_s in zip(nodes_hit, fault.lasts, strict=True):
            if away_until_s.get(number, -1.0) >= fault.at_s:
                continue
            yield ExternalEvent(fault.at_s, nodes[number], "fault", fault.cause)
            if TABLE[fault.cause] == "SEV1":
                away_until_s[number] = until_s = _rounded(fault.at_s + lasts_s)
                yield ExternalEvent(until_s, nodes[number], "repaired")


# --- faults -------------------------------------------------------------------------------------
def _faults(drawn: Drawn, num_nodes: int, num_slots: int, horizon_s: float) -> Iterator[_Fault]:
    """Each node has its own Poisson process of faults, which continues while the node is away."""
    node_s, repeat = mean_s(drawn, num_slots), _repeat(drawn)
    mix, lasts = _mix(drawn.causes), repair_of(drawn.repair, "trace.drawn.repair")
    if node_s == math.inf:
        return
    for number in range(num_nodes):
        times, num_before = _stream(drawn, "times", number), 0
        at_s = -node_s * math.log1p(-times.random())
        if at_s >= horizon_s:
            continue
        causes, away = _stream(drawn, "causes", number), _stream(drawn, "repairs", number)
        while at_s < horizon_s:
            yield _Fault(_rounded(at_s), (number,), _cause(mix, causes),
                          (lasts.at_s(away.random()),))
            num_before += 1
            shrunk = repeat.shrunk(num_before) if repeat else 1.0
            at_s -= node_s * shrunk * math.log1p(-times.random())


def _counted(drawn: Drawn, horizon_s: float) -> Iterator[_Fault]:
    lasts = repair_of(drawn.repair, "trace.drawn.repair")
    counts = _counts(drawn.count or 0)
    for name in sorted(counts):
        mix = _mix_of(_mix(drawn.causes), name, counts)
        times, causes = _stream(drawn, "times", name), _stream(drawn, "causes", name)
        places, away = _stream(drawn, "nodes", name), _stream(drawn, "repairs", name)
        for at_s in sorted(horizon_s * times.random() for _ in range(counts[name])):
            yield _Fault(_rounded(at_s), (), _cause(mix, causes), (lasts.at_s(away.random()),),
                          places.random())


def _bursts(drawn: Drawn, num_nodes: int, horizon_s: float) -> Iterator[_Fault]:
    bursts, lasts = drawn.bursts, repair_of(drawn.repair, "trace.drawn.repair")
    if bursts is None:
        return
    times, sizes = _stream(drawn, "bursts"), _stream(drawn, "sizes")
    places, away = _stream(drawn, "places"), _stream(drawn, "burst repairs")
    begin_s = [horizon_s * times.random() for _ in range(bursts.count or 0)]
    if bursts.every_h is not None:
        at_s = -bursts.every_h * HOUR_S * math.log1p(-times.random())
        while at_s < horizon_s:
            begin_s.append(at_s)
            at_s -= bursts.every_h * HOUR_S * math.log1p(-times.random())
    kinds = sorted(bursts.sizes)
    for at_s in sorted(begin_s):
        size = kinds[_chosen([bursts.sizes[kind] for kind in kinds], sizes.random())]
        first = int(places.random() * (num_nodes - size + 1))
        yield _Fault(_rounded(at_s), tuple(range(first, first + size)), bursts.cause,
                      tuple(lasts.at_s(away.random()) for _ in range(size)))


# --- parameters ---------------------------------------------------------------------------------
def mean_s(drawn: Drawn, num_slots: int) -> float:
    """The mean time between faults of one node with `num_slots` slots; inf without such a rate."""
    if drawn.mtbf_node_h is not None:
        return drawn.mtbf_node_h * HOUR_S
    if drawn.mtbf_gpu_h is not None:
        return drawn.mtbf_gpu_h * HOUR_S / num_slots
    return math.inf


def _repeat(drawn: Drawn) -> Repeat | None:
    if not isinstance(drawn.repeat, str):
        return drawn.repeat
    if drawn.repeat not in OFFENDERS:
        raise SpecError("trace.drawn.repeat", f"{drawn.repeat[:40]!r} is no study",
                        f"{', '.join(OFFENDERS)}, or {{ratio: 0.2, incidents: 20}}")
    return OFFENDERS[drawn.repeat]


def _counts(count: int | dict[str, int]) -> dict[str, int]:
    return count if isinstance(count, dict) else {OTHER: count}


def _mix(causes: str | dict[str, float]) -> dict[str, float]:
    """Shares by cause, sorted by name: the order does not depend on the file."""
    shares = STUDIES[causes] if isinstance(causes, str) else causes
    return {cause: shares[cause] for cause in sorted(shares) if shares[cause] > 0}


def _mix_of(mix: dict[str, float], name: str, counts: dict[str, int]) -> dict[str, float]:
    """The part of a mix with this severity; for `other`, the severities without a count."""
    return {cause: share for cause, share in mix.items()
            if (TABLE[cause] not in counts if name == OTHER else TABLE[cause] == name)}


def _cause(mix: dict[str, float], stream: Random) -> str:
    return [*mix][_chosen([*mix.values()], stream.random())]


def _chosen(weights: Sequence[float], quantile: float) -> int:
    """The index selected by `quantile`, 0 <= quantile < 1, in proportion to the weights."""
    left = quantile * math.fsum(weights)
    for number, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return number
    return max(number for number, weight in enumerate(weights) if weight > 0)


def _stream(drawn: Drawn, *names: object) -> Random:
    return Random("/".join(map(str, (drawn.seed, *names))))


def _rounded(at_s: float) -> float:
    """Round to milliseconds: math libraries differ by far less, so that the result is the same."""
    return round(at_s, 3)


# --- Repair times: constant, uniform, exponential, or with a heavy tail. ---
REPAIR_S_MAX = 1e10
SHARES_SLACK_RATIO = 1e-6
REPAIR_HINT = ("one of constant_s, uniform_s: [least, most], exponential_s (its mean), "
               "lognormal_s: {median, mean} and parts_s: [[share, least, most], ...]; or the name "
               "of a study")
DAY_S = 86400.0


class Lognormal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Median and mean in seconds."""

    median: float
    mean: float


class Repair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one is set, in seconds. `parts_s`: (share, least, most), uniform in each part."""

    constant_s: float | None = None
    uniform_s: tuple[float, float] | None = None
    exponential_s: float | None = None
    lognormal_s: Lognormal | None = None
    parts_s: tuple[tuple[float, float, float], ...] | None = None

    def at_s(self, quantile: float) -> float:
        """The value at `quantile` of the distribution, 0 <= quantile < 1."""
        if self.constant_s is not None:
            return self.constant_s
        if self.uniform_s is not None:
            return _between(*self.uniform_s, quantile)
        if self.exponential_s is not None:
            return -self.exponential_s * math.log1p(-quantile)
        if self.lognormal_s is not None:
            median, mean = self.lognormal_s.median, self.lognormal_s.mean
            sigma = math.sqrt(2 * math.log(mean / median))
            return median * math.exp(sigma * NormalDist().inv_cdf(max(quantile, 2.0**-53)))
        assert self.parts_s
        for share, least_s, most_s in self.parts_s:
            if quantile < share:
                return _between(least_s, most_s, quantile / share)
            quantile -= share
        return self.parts_s[-1][2]


REPAIRS: dict[str, Repair] = {
    # Schroeder and Gibson, DSN 2006: all repairs of 22 systems of LANL, mean 355 min, median 54.
    "lanl": Repair(lognormal_s=Lognormal(median=54 * 60.0, mean=355 * 60.0)),
    # SuperBench (Azure A100): 61.9 % of repairs end on the same day, 38.1 % later, 10.3 % after two
    # weeks. The upper end of the last part, 28 days, is our guess.
    "superbench": Repair(parts_s=(
        (0.619, 0.0, DAY_S), (0.278, DAY_S, 14 * DAY_S), (0.103, 14 * DAY_S, 28 * DAY_S))),
}


def repair_of(repair: Repair | str, path: str) -> Repair:
    """Look up the study, or check the distribution that is given. Raises SpecError."""
    if isinstance(repair, str):
        need(repair in REPAIRS, path, f"{repair[:40]!r} is no study",
             f"{', '.join(REPAIRS)}, or {REPAIR_HINT}")
        return REPAIRS[repair]
    given = [name for name in Repair.__struct_fields__ if getattr(repair, name) is not None]
    need(len(given) == 1, path, f"has {len(given)} of its keys, not one", REPAIR_HINT)
    match repair:
        case Repair(uniform_s=(least_s, most_s)):
            _check_seconds(f"{path}.uniform_s", least_s, most_s)
            need(least_s <= most_s, f"{path}.uniform_s", "ends before it begins", REPAIR_HINT)
        case Repair(lognormal_s=Lognormal(median=median_s, mean=mean_s)):
            _check_seconds(f"{path}.lognormal_s", median_s, mean_s)
            need(0 < median_s <= mean_s, f"{path}.lognormal_s",
                 "has a mean below its median, or a median of 0", REPAIR_HINT)
        case Repair(parts_s=tuple() as parts):
            for share, least_s, most_s in parts:
                _check_seconds(f"{path}.parts_s", share, least_s, most_s)
                need(least_s <= most_s, f"{path}.parts_s", "ends before it begins", REPAIR_HINT)
            whole = math.fsum(share for share, _, _ in parts)
            need(abs(whole - 1) <= SHARES_SLACK_RATIO, f"{path}.parts_s",
                 f"its shares add up to {whole:g}", "to 1")
        case _:
            _check_seconds(f"{path}.{given[0]}", getattr(repair, given[0]))
    return repair


def _check_seconds(path: str, *values: float) -> None:
    for value in values:
        need(math.isfinite(value) and 0 <= value <= REPAIR_S_MAX, path, f"is {value:g}",
             f"at least 0 and at most {REPAIR_S_MAX:g}")


def _between(least_s: float, most_s: float, quantile: float) -> float:
    return least_s + (most_s - least_s) * quantile

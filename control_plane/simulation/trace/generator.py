"""A trace that is drawn: faults, what they are, how long they last, bursts and repeat offenders.

The same seed draws the same trace, on every machine: all comes out of the generator's `random()`,
which Python promises to keep, and times are rounded to milliseconds. What is drawn apart has a
stream apart, of each node where it is a node's: other repairs or causes leave the times of faults
as they are, and a larger cluster leaves those of the nodes that it had. A node that is away has no
fault: what was drawn for it then is not in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from msgspec import Struct

from ....events.errors import SpecError, need
from ....events.records import statuses as s
from ....events.records.statuses import LOST_CONNECTION
from ...incidents.severity import TABLE
from . import repair_time
from .external_event import Happening
from .repair_time import Repair

# --- How often which cause was, as published: what a drawn trace may name instead of a mix of its
# own. ---
#
# `tests/data/failure_categories.csv` has the studies' own words, and which row of the paper's table
# each became; a test adds them up to these. Studies of other severities than the table's rows
# (FT-HSDP, Fire-Flyer 2, Philly, Meta's lemon nodes) are not here: which row a fault of theirs is
# would be a guess.

STUDIES: dict[str, dict[str, float]] = {
    # Unicron, arXiv 2401.00134, table 1: per cent of all tasks of a month. Its "others", 3.3, are
    # left out.
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
    # Acme, arXiv 2403.07648, table 3: how many, most of them errors of scripts; by the GPU-time
    # that was lost, NVLink and CUDA errors lead.
    "acme": {
        s.OTHER_SOFTWARE: 2274, s.CONNECTION_REFUSED: 147, s.NVLINK_ERRORS: 54, s.CUDA_ERRORS: 35,
        s.OTHER_NETWORK: 25, s.LOST_CONNECTION: 16, s.ECC_ERRORS: 12, s.NCCL_TIMEOUT: 6,
        s.EXITED_ABNORMALLY: 6},
}

HOUR_S, DAY_S = 3600.0, 86400.0
MTBF_S_MAX = 1e12
FAULTS_NUM_MAX = 1_000_000
SEED_MAX = 2**53
RATES = ("mtbf_gpu_h", "mtbf_gpu_days", "mtbf_node_h", "count")
SEVERITIES = ("SEV1", "SEV2", "SEV3")
OTHER = "other"


class Repeat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's mean time between faults before its fault number `incidents` is `ratio` of that
    before its first; it shrinks by the same factor from fault to fault, and no further."""

    ratio: float
    incidents: int = 20

    def shrunk(self, num_before: int) -> float:
        """Of the mean time, after so many faults."""
        steps = self.incidents - 1
        return math.pow(self.ratio, min(num_before, steps) / steps)


OFFENDERS = {
    # SuperBench: 719.4 h until the first incident of a node, 151.7 h until its 20th.
    "superbench": Repeat(ratio=151.7 / 719.4, incidents=20)}


class Bursts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several nodes fail at one instant, neighbours as the cluster lists them: a rack, a switch.

    One each `every_h` hours on average in the whole cluster, or `count` of them over the horizon.
    `sizes`: how many nodes, and the share of such bursts.
    """

    sizes: dict[int, float]
    every_h: float | None = None
    count: int | None = None
    cause: str = LOST_CONNECTION


class Drawn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the mean times between faults (each GPU or node for itself, at random: Poisson), or
    `count`, over the horizon: of all, or by severity, where `other` are all that are not named.

    `causes`: a study, or shares by cause. A SEV1 takes its node away for a `repair`, a study too;
    others need none. `repeat`: the same node again and again. None of the rates: bursts alone.
    """

    seed: int = 1
    mtbf_gpu_h: float | None = None
    mtbf_gpu_days: float | None = None
    mtbf_node_h: float | None = None
    count: int | dict[str, int] | None = None
    causes: str | dict[str, float] = "unicron"
    repair: str | Repair = "lanl"
    bursts: Bursts | None = None
    repeat: str | Repeat | None = None


class DrawnTrace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In the place of a trace's file."""

    drawn: Drawn


class _Strike(NamedTuple):
    """`nodes` by number; empty: one is found by `luck` among those that are there. `lasts`: the
    repair of each."""

    at_s: float
    nodes: tuple[int, ...]
    cause: str
    lasts: tuple[float, ...]
    luck: float = 0.0


def check(asked: Drawn, num_nodes: int, num_slots: int, horizon_s: float) -> None:
    """Raises SpecError for what cannot be drawn, or has no end."""
    at = "trace.drawn"
    need(0 <= asked.seed <= SEED_MAX, f"{at}.seed", f"is {asked.seed}",
         f"at least 0 and at most {SEED_MAX}")
    rates = [name for name in RATES if getattr(asked, name) is not None]
    need(len(rates) <= 1 and bool(rates or asked.bursts), at, f"has {len(rates)} of its rates, "
         "not one", f"one of {', '.join(RATES)}, or bursts alone")
    _check_mix(asked.causes, f"{at}.causes")
    repair_time.chosen(asked.repair, f"{at}.repair")
    repeat = _repeat(asked)
    need(repeat is None or (0 < repeat.ratio <= 1 and 1 < repeat.incidents <= FAULTS_NUM_MAX),
         f"{at}.repeat", "must shrink", "ratio above 0 and at most 1, incidents at least 2")
    for name in RATES[:-1]:
        value: float | None = getattr(asked, name)
        need(value is None or 0 < value * HOUR_S <= MTBF_S_MAX, f"{at}.{name}",
             f"is {value}", "must be above 0")
    num_faults = _num_faults(asked, num_nodes, num_slots, horizon_s)
    if (bursts := asked.bursts) is not None:
        num_faults += _check_bursts(bursts, num_nodes, horizon_s)
    need(num_faults <= FAULTS_NUM_MAX, at, f"draws about {num_faults:.3g} faults, more than "
         f"{FAULTS_NUM_MAX}", "a shorter horizon_s, or a longer time between faults")


def _num_faults(asked: Drawn, num_nodes: int, num_slots: int, horizon_s: float) -> float:
    """On average, at most."""
    repeat, at = _repeat(asked), "trace.drawn.count"
    if asked.count is None:
        mean_s = _mean_s(asked, num_slots) * (repeat.ratio if repeat else 1)
        return num_nodes * horizon_s / mean_s
    mix = _mix(asked.causes)
    for name, count in _counts(asked.count).items():
        need(name in (*SEVERITIES, OTHER), at, f"{name[:40]!r} is no severity",
             f"{', '.join(SEVERITIES)} and {OTHER}")
        need(count >= 0, at, f"is {count}", "at least 0")
        need(not count or bool(_of(mix, name, _counts(asked.count))), at,
             f"asks for {name}, and causes name none", f"one of {', '.join(TABLE)}")
    return math.fsum(_counts(asked.count).values())


def _check_bursts(bursts: Bursts, num_nodes: int, horizon_s: float) -> float:
    """How many faults they are at most, on average."""
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
         f"are {', '.join(map(str, sorted(bursts.sizes)))} nodes at once",
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


def draw(asked: Drawn, nodes: Sequence[str], num_slots: int, horizon_s: float) -> list[Happening]:
    """All that befalls these nodes, of so many slots each, until the horizon; by time.

    Raises SpecError.
    """
    check(asked, len(nodes), num_slots, horizon_s)
    strikes = [*_bursts(asked, len(nodes), horizon_s)]
    strikes += (_counted(asked, horizon_s) if asked.count is not None else
                _faults(asked, len(nodes), num_slots, horizon_s))
    found = [*_told(asked, nodes, sorted(strikes, key=lambda one: (one.at_s, one.nodes)))]
    return sorted((one for one in found if one.at_s <= horizon_s), key=lambda one: one.at_s)


def _told(asked: Drawn, nodes: Sequence[str], strikes: Iterable[_Strike]) -> Iterator[Happening]:
    """Those that strike a node which is there, and its return where it goes."""
    away_until_s: dict[int, float] = {}
    num_before: dict[int, int] = {}
    repeat = _repeat(asked)
    for strike in strikes:
        struck = strike.nodes
        if not struck:
            there = [number for number in range(len(nodes))
                     if away_until_s.get(number, -1.0) < strike.at_s]
            need(bool(there), "trace.drawn.count", f"at {strike.at_s:g} s all nodes are away",
                 "fewer faults, or shorter repairs")
            weights = [1 / repeat.shrunk(num_before.get(number, 0)) if repeat else 1.0
                       for number in there]
            number = there[_chosen(weights, strike.luck)]
            num_before[number] = num_before.get(number, 0) + 1
            struck = (number,)
        for number, lasts_s in zip(struck, strike.lasts, strict=True):
            if away_until_s.get(number, -1.0) >= strike.at_s:
                continue
            yield Happening(strike.at_s, nodes[number], "fault", strike.cause)
            if TABLE[strike.cause] == "SEV1":
                away_until_s[number] = until_s = _exact(strike.at_s + lasts_s)
                yield Happening(until_s, nodes[number], "repaired")


# --- what strikes -------------------------------------------------------------------------------
def _faults(asked: Drawn, num_nodes: int, num_slots: int, horizon_s: float) -> Iterator[_Strike]:
    """Each node by its own clock, which goes on while it is away."""
    mean_s, repeat = _mean_s(asked, num_slots), _repeat(asked)
    mix, lasts = _mix(asked.causes), repair_time.chosen(asked.repair, "trace.drawn.repair")
    if mean_s == math.inf:
        return
    for number in range(num_nodes):
        times, num_before = _stream(asked, "times", number), 0
        at_s = -mean_s * math.log1p(-times.random())
        if at_s >= horizon_s:
            continue
        causes, away = _stream(asked, "causes", number), _stream(asked, "repairs", number)
        while at_s < horizon_s:
            yield _Strike(_exact(at_s), (number,), _cause(mix, causes),
                          (lasts.at_s(away.random()),))
            num_before += 1
            shrunk = repeat.shrunk(num_before) if repeat else 1.0
            at_s -= mean_s * shrunk * math.log1p(-times.random())


def _counted(asked: Drawn, horizon_s: float) -> Iterator[_Strike]:
    lasts = repair_time.chosen(asked.repair, "trace.drawn.repair")
    counts = _counts(asked.count or 0)
    for name in sorted(counts):
        mix = _of(_mix(asked.causes), name, counts)
        times, causes = _stream(asked, "times", name), _stream(asked, "causes", name)
        places, away = _stream(asked, "nodes", name), _stream(asked, "repairs", name)
        for at_s in sorted(horizon_s * times.random() for _ in range(counts[name])):
            yield _Strike(_exact(at_s), (), _cause(mix, causes), (lasts.at_s(away.random()),),
                          places.random())


def _bursts(asked: Drawn, num_nodes: int, horizon_s: float) -> Iterator[_Strike]:
    bursts, lasts = asked.bursts, repair_time.chosen(asked.repair, "trace.drawn.repair")
    if bursts is None:
        return
    times, sizes = _stream(asked, "bursts"), _stream(asked, "sizes")
    places, away = _stream(asked, "places"), _stream(asked, "burst repairs")
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
        yield _Strike(_exact(at_s), tuple(range(first, first + size)), bursts.cause,
                      tuple(lasts.at_s(away.random()) for _ in range(size)))


# --- what is asked for --------------------------------------------------------------------------
def _mean_s(asked: Drawn, num_slots: int) -> float:
    """Between faults of one node."""
    if asked.mtbf_node_h is not None:
        return asked.mtbf_node_h * HOUR_S
    if asked.mtbf_gpu_h is not None:
        return asked.mtbf_gpu_h * HOUR_S / num_slots
    if asked.mtbf_gpu_days is not None:
        return asked.mtbf_gpu_days * DAY_S / num_slots
    return math.inf


def _repeat(asked: Drawn) -> Repeat | None:
    if not isinstance(asked.repeat, str):
        return asked.repeat
    if asked.repeat not in OFFENDERS:
        raise SpecError("trace.drawn.repeat", f"{asked.repeat[:40]!r} is no study",
                        f"{', '.join(OFFENDERS)}, or {{ratio: 0.2, incidents: 20}}")
    return OFFENDERS[asked.repeat]


def _counts(count: int | dict[str, int]) -> dict[str, int]:
    return count if isinstance(count, dict) else {OTHER: count}


def _mix(causes: str | dict[str, float]) -> dict[str, float]:
    """Shares by cause, in an order that nobody chose."""
    shares = STUDIES[causes] if isinstance(causes, str) else causes
    return {cause: shares[cause] for cause in sorted(shares) if shares[cause] > 0}


def _of(mix: dict[str, float], name: str, counts: dict[str, int]) -> dict[str, float]:
    """The part of a mix that is of this severity, or of none that has a count of its own."""
    return {cause: share for cause, share in mix.items()
            if (TABLE[cause] not in counts if name == OTHER else TABLE[cause] == name)}


def _cause(mix: dict[str, float], stream: Random) -> str:
    return [*mix][_chosen([*mix.values()], stream.random())]


def _chosen(weights: Sequence[float], luck: float) -> int:
    """Which of them, by shares; `luck` is at least 0 and below 1."""
    left = luck * math.fsum(weights)
    for number, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return number
    return max(number for number, weight in enumerate(weights) if weight > 0)


def _stream(asked: Drawn, *names: object) -> Random:
    return Random("/".join(map(str, (asked.seed, *names))))


def _exact(at_s: float) -> float:
    """To the millisecond: what libraries of mathematics differ by is far below."""
    return round(at_s, 3)

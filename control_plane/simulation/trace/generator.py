"""Drawn traces: times, causes and repair times of faults.

The same seed draws the same trace on every machine: all values come from `random()`, which Python
guarantees, and times are rounded to milliseconds. Each quantity of each node has its own random
stream. So other repairs or causes do not change the times of faults, and additional nodes do not
change the faults of the others. A fault of a node that is away is left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from statistics import NormalDist

from msgspec import Struct

from ....events.errors import need
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
        s.NCCL_TIMEOUT: 10.1,
        s.ECC_ERRORS: 5.0,
        s.NVLINK_ERRORS: 4.5,
        s.OTHER_NETWORK: 4.0,
        s.LINK_FLAPPING: 3.9,
        s.TASK_HANG: 3.1,
        s.ILLEGAL_MEMORY_ACCESS: 2.1,
        s.INVALID_DMA_MAPPING: 2.1,
        s.CONNECTION_REFUSED: 2.1,
        s.CUDA_ERRORS: 1.6,
        s.CONNECTION_RESET: 1.0,
        s.GPU_DRIVER_ERRORS: 0.6,
    },
    # Llama 3, arXiv 2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100.
    "llama3": {
        s.GPU_DRIVER_ERRORS: 171,
        s.ECC_ERRORS: 97,
        s.OTHER_SOFTWARE: 56,
        s.LOST_CONNECTION: 53,
        s.OTHER_NETWORK: 35,
        s.NCCL_TIMEOUT: 7,
    },
    # ByteRobust, arXiv 2509.16293, table 1: 3 months, 778,135 jobs. Without its slow jobs, NaNs and
    # restarts by hand.
    "byterobust": {
        s.CUDA_ERRORS: 19968,
        s.OTHER_SOFTWARE: 11130,
        s.EXITED_ABNORMALLY: 6348,
        s.TASK_HANG: 5506,
        s.OTHER_NETWORK: 1727,
        s.LOST_CONNECTION: 250,
        s.ECC_ERRORS: 188,
        s.GPU_DRIVER_ERRORS: 76,
    },
    # Acme, arXiv 2403.07648, table 3: numbers of faults, most of them errors of scripts. NVLink and
    # CUDA errors lost the most GPU time.
    "acme": {
        s.OTHER_SOFTWARE: 2274,
        s.CONNECTION_REFUSED: 147,
        s.NVLINK_ERRORS: 54,
        s.CUDA_ERRORS: 35,
        s.OTHER_NETWORK: 25,
        s.LOST_CONNECTION: 16,
        s.ECC_ERRORS: 12,
        s.NCCL_TIMEOUT: 6,
        s.EXITED_ABNORMALLY: 6,
    },
}

HOUR_S, DAY_S = 3600.0, 86400.0
MTBF_S_MAX = 1e12
FAULTS_NUM_MAX = 1_000_000
SEED_MAX = 2**53
REPAIR_S_MAX = 1e10
SHARES_SLACK_RATIO = 1e-6
REPAIR_HINT = (
    "one of constant_s, lognormal_s: {median, mean} and parts_s: [[share, least, most], "
    "...]; or the name of a study"
)


class Lognormal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Median and mean in seconds."""

    median: float
    mean: float


class Repair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one is set, in seconds. `parts_s`: (share, least, most), uniform in each part."""

    constant_s: float | None = None
    lognormal_s: Lognormal | None = None
    parts_s: tuple[tuple[float, float, float], ...] | None = None

    def at_s(self, quantile: float) -> float:
        """The value at `quantile` of the distribution, 0 <= quantile < 1."""
        if self.constant_s is not None:
            return self.constant_s
        if self.lognormal_s is not None:
            median, mean = self.lognormal_s.median, self.lognormal_s.mean
            sigma = math.sqrt(2 * math.log(mean / median))
            return median * math.exp(sigma * NormalDist().inv_cdf(max(quantile, 2.0**-53)))
        assert self.parts_s
        for share, least_s, most_s in self.parts_s:
            if quantile < share:
                return least_s + (most_s - least_s) * quantile / share
            quantile -= share
        return self.parts_s[-1][2]


REPAIRS: dict[str, Repair] = {
    # Schroeder and Gibson, DSN 2006: all repairs of 22 systems of LANL, mean 355 min, median 54.
    "lanl": Repair(lognormal_s=Lognormal(median=54 * 60.0, mean=355 * 60.0)),
    # SuperBench (Azure A100): 61.9 % of repairs end on the same day, 38.1 % later, 10.3 % after two
    # weeks. The upper end of the last part, 28 days, is our guess.
    "superbench": Repair(
        parts_s=((0.619, 0.0, DAY_S), (0.278, DAY_S, 14 * DAY_S), (0.103, 14 * DAY_S, 28 * DAY_S))
    ),
}


class Drawn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults of each node are a Poisson process with a mean time between faults, of a GPU or
    of a node. docs/guides/traces.md describes each field."""

    seed: int = 1
    mtbf_gpu_h: float | None = None
    mtbf_node_h: float | None = None
    causes: str | dict[str, float] = "unicron"
    repair: str | Repair = "lanl"

    def mtbf_s(self, num_slots: int) -> float:
        """The mean time between faults of one node with `num_slots` slots."""
        if self.mtbf_node_h is not None:
            return self.mtbf_node_h * HOUR_S
        assert self.mtbf_gpu_h is not None
        return self.mtbf_gpu_h * HOUR_S / num_slots


class DrawnTrace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drawn trace, in the place of a trace file."""

    drawn: Drawn


def draw(
    drawn: Drawn, nodes: Sequence[str], num_slots: int, horizon_s: float
) -> list[ExternalEvent]:
    """All events of nodes with `num_slots` slots until the horizon, by time. Raises SpecError."""
    at = "trace.drawn"
    need(
        0 <= drawn.seed <= SEED_MAX,
        f"{at}.seed",
        f"is {drawn.seed}",
        f"at least 0 and at most {SEED_MAX}",
    )
    rates = {
        name: value
        for name in ("mtbf_gpu_h", "mtbf_node_h")
        if (value := getattr(drawn, name)) is not None
    }
    need(
        len(rates) == 1,
        at,
        f"has {len(rates)} of its rates, not one",
        "one of mtbf_gpu_h and mtbf_node_h",
    )
    for name, value in rates.items():
        need(0 < value * HOUR_S <= MTBF_S_MAX, f"{at}.{name}", f"is {value}", "must be above 0")
    num_faults = len(nodes) * horizon_s / drawn.mtbf_s(num_slots)
    need(
        num_faults <= FAULTS_NUM_MAX,
        at,
        f"draws about {num_faults:.3g} faults, more than {FAULTS_NUM_MAX}",
        "a shorter horizon_s, or a longer time between faults",
    )
    shares, repair = _shares(drawn.causes, f"{at}.causes"), _repair(drawn.repair, f"{at}.repair")
    found = [
        event
        for number, name in enumerate(nodes)
        for event in _of_node(
            drawn, number, name, drawn.mtbf_s(num_slots), shares, repair, horizon_s
        )
    ]
    return sorted((one for one in found if one.at_s <= horizon_s), key=lambda one: one.at_s)


def _of_node(
    drawn: Drawn,
    number: int,
    name: str,
    mtbf_s: float,
    shares: Mapping[str, float],
    repair: Repair,
    horizon_s: float,
) -> Iterator[ExternalEvent]:
    """The faults of a node, and its repairs after each SEV1. Its process of faults continues while
    it is away."""
    times, causes, repairs = (
        Random(f"{drawn.seed}/{what}/{number}") for what in ("times", "causes", "repairs")
    )
    at_s, back_s = 0.0, -1.0
    while (at_s := at_s - mtbf_s * math.log1p(-times.random())) < horizon_s:
        # Math libraries differ by far less than a millisecond.
        fault_s = round(at_s, 3)
        cause, repair_s = _chosen(shares, causes.random()), repair.at_s(repairs.random())
        if fault_s <= back_s:
            continue
        yield ExternalEvent(fault_s, name, "fault", cause)
        if TABLE[cause] == "SEV1":
            back_s = round(fault_s + repair_s, 3)
            yield ExternalEvent(back_s, name, "repaired")


def _chosen(shares: Mapping[str, float], quantile: float) -> str:
    """The cause selected by `quantile`, 0 <= quantile < 1, in proportion to the shares."""
    left = quantile * math.fsum(shares.values())
    for cause, share in shares.items():
        left -= share
        if left < 0:
            return cause
    return [*shares][-1]


def _shares(causes: str | dict[str, float], path: str) -> dict[str, float]:
    """The shares above 0 of a study or as given, sorted by cause: the order does not depend on the
    file. Raises SpecError."""
    if isinstance(causes, str):
        need(
            causes in STUDIES,
            path,
            f"{causes[:40]!r} is no study",
            f"one of {', '.join(STUDIES)}, or shares by cause",
        )
        causes = STUDIES[causes]
    for cause in causes:
        need(cause in TABLE, path, f"{cause[:40]!r} is no cause", f"one of {', '.join(TABLE)}")
    need(
        all(math.isfinite(share) and share >= 0 for share in causes.values())
        and 0 < math.fsum(causes.values()) < math.inf,
        path,
        "has shares that are none",
        "each at least 0, one above; they need not add up to 1",
    )
    return {cause: causes[cause] for cause in sorted(causes) if causes[cause] > 0}


def _repair(repair: Repair | str, path: str) -> Repair:
    """Look up the study, or check the distribution that is given. Raises SpecError."""
    if isinstance(repair, str):
        need(
            repair in REPAIRS,
            path,
            f"{repair[:40]!r} is no study",
            f"{', '.join(REPAIRS)}, or {REPAIR_HINT}",
        )
        return REPAIRS[repair]
    given = [name for name in Repair.__struct_fields__ if getattr(repair, name) is not None]
    need(len(given) == 1, path, f"has {len(given)} of its keys, not one", REPAIR_HINT)
    if repair.constant_s is not None:
        _check_seconds(f"{path}.constant_s", repair.constant_s)
    if repair.lognormal_s is not None:
        median_s, mean_s = repair.lognormal_s.median, repair.lognormal_s.mean
        _check_seconds(f"{path}.lognormal_s", median_s, mean_s)
        need(
            0 < median_s <= mean_s,
            f"{path}.lognormal_s",
            "has a mean below its median, or a median of 0",
            REPAIR_HINT,
        )
    if repair.parts_s is not None:
        for share, least_s, most_s in repair.parts_s:
            _check_seconds(f"{path}.parts_s", share, least_s, most_s)
            need(least_s <= most_s, f"{path}.parts_s", "ends before it begins", REPAIR_HINT)
        whole = math.fsum(share for share, _, _ in repair.parts_s)
        need(
            abs(whole - 1) <= SHARES_SLACK_RATIO,
            f"{path}.parts_s",
            f"its shares add up to {whole:g}",
            "to 1",
        )
    return repair


def _check_seconds(path: str, *values: float) -> None:
    for value in values:
        need(
            math.isfinite(value) and 0 <= value <= REPAIR_S_MAX,
            path,
            f"is {value:g}",
            f"at least 0 and at most {REPAIR_S_MAX:g}",
        )

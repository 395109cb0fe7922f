"""Repair times, drawn: constant, uniform, exponential, or with a heavy tail."""

from __future__ import annotations

import math
from statistics import NormalDist

from msgspec import Struct

from ....events.errors import need

REPAIR_S_MAX = 1e10
SHARES_SLACK_RATIO = 1e-6
HINT = ("one of constant_s, uniform_s: [least, most], exponential_s (its mean), lognormal_s: "
        "{median, mean} and parts_s: [[share, least, most], ...]; or the name of a study")
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


STUDIES: dict[str, Repair] = {
    # Schroeder and Gibson, DSN 2006: all repairs of 22 systems of LANL, mean 355 min, median 54.
    "lanl": Repair(lognormal_s=Lognormal(median=54 * 60.0, mean=355 * 60.0)),
    # SuperBench (Azure A100): 61.9 % of repairs end on the same day, 38.1 % later, 10.3 % after two
    # weeks. The upper end of the last part, 28 days, is our guess.
    "superbench": Repair(parts_s=(
        (0.619, 0.0, DAY_S), (0.278, DAY_S, 14 * DAY_S), (0.103, 14 * DAY_S, 28 * DAY_S))),
}


def chosen(repair: Repair | str, path: str) -> Repair:
    """Look up the study, or check the distribution that is given. Raises SpecError."""
    if isinstance(repair, str):
        need(repair in STUDIES, path, f"{repair[:40]!r} is no study",
             f"{', '.join(STUDIES)}, or {HINT}")
        return STUDIES[repair]
    given = [name for name in Repair.__struct_fields__ if getattr(repair, name) is not None]
    need(len(given) == 1, path, f"has {len(given)} of its keys, not one", HINT)
    match repair:
        case Repair(uniform_s=(least_s, most_s)):
            _check(f"{path}.uniform_s", least_s, most_s)
            need(least_s <= most_s, f"{path}.uniform_s", "ends before it begins", HINT)
        case Repair(lognormal_s=Lognormal(median=median_s, mean=mean_s)):
            _check(f"{path}.lognormal_s", median_s, mean_s)
            need(0 < median_s <= mean_s, f"{path}.lognormal_s",
                 "has a mean below its median, or a median of 0", HINT)
        case Repair(parts_s=tuple() as parts):
            for share, least_s, most_s in parts:
                _check(f"{path}.parts_s", share, least_s, most_s)
                need(least_s <= most_s, f"{path}.parts_s", "ends before it begins", HINT)
            whole = math.fsum(share for share, _, _ in parts)
            need(abs(whole - 1) <= SHARES_SLACK_RATIO, f"{path}.parts_s",
                 f"its shares add up to {whole:g}", "to 1")
        case _:
            _check(f"{path}.{given[0]}", getattr(repair, given[0]))
    return repair


def _check(path: str, *values: float) -> None:
    for value in values:
        need(math.isfinite(value) and 0 <= value <= REPAIR_S_MAX, path, f"is {value:g}",
             f"at least 0 and at most {REPAIR_S_MAX:g}")


def _between(least_s: float, most_s: float, quantile: float) -> float:
    return least_s + (most_s - least_s) * quantile

"""Values as words: times, lengths of time, lists of names."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime


def rfc3339(at_s: float) -> str:
    """Seconds since 1970 as UTC with milliseconds."""
    at = datetime.fromtimestamp(at_s, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def span(length_s: float) -> str:
    """A length of time in the unit that leaves two or three digits: `203 ms`, `1.1 s`, `39 min`."""
    if length_s < 0.9995:
        ms = length_s * 1000
        return f"{ms:.1f} ms" if 0 < ms < 9.95 else f"{ms:.0f} ms"
    if length_s < 99.95:
        return f"{length_s:.1f} s" if length_s < 9.995 else f"{length_s:.0f} s"
    if length_s < 90 * 60:
        return f"{length_s / 60:.0f} min"
    return f"{length_s / 3600:.1f} h" if length_s < 48 * 3600 else f"{length_s / 86400:.1f} d"


def listed(names: Sequence[str], num_max: int = 3) -> str:
    """The first `num_max` names and the number of the others: `a, b, c and 2 more`."""
    left = len(names) - num_max
    return ", ".join(names[:num_max]) + (f" and {left} more" if left > 0 else "")

"""Lengths of time and past moments, as people type them."""

import re
import time

from ...events.errors import UsageError

LENGTH = re.compile(r"([1-9][0-9]{0,5})([smhd])")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def length_s(text: str) -> float | None:
    """The seconds of `30d`, `12h`, `90m` or `45s`; None for another text."""
    found = LENGTH.fullmatch(text)
    return None if found is None else float(int(found[1]) * UNITS_S[found[2]])


def past_s(text: str) -> float:
    """The moment of --since in seconds since 1970: a length of time before now, or a time. Raises
    UsageError, also for a moment in the future."""
    from ...control_plane.api.moments import time_s

    length, now_s = length_s(text), time.time()
    at_s = time_s(text) if length is None else now_s - length
    if at_s is None:
        raise UsageError(
            f"--since {text[:40]!r} is neither a length of time nor a time",
            "for example 2h, or 2026-11-27T02:10:00Z",
        )
    if at_s > now_s + 1.0:
        raise UsageError(
            f"--since {text[:40]} is in the future", "give a past time, or a length such as 2h"
        )
    return at_s

"""The result of a check, and the reason why one cannot run here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.recovery.rows import Row, row

CUDA, CPU = "cuda", "cpu"
SYSTEM = "unicron"
Check = Callable[[Path, str], list[Row]]
"""(an empty folder, the device) -> rows. Raises AssertionError if the check fails, and
NotPossible."""


class NotPossible(Exception):
    """What the check looks at is not there; `str()` says what."""


def of(case: str, metric: str, values: list[float], unit: str, note: str = "") -> Row:
    """A row of these values."""
    return row(case, SYSTEM, metric, values, unit, note)

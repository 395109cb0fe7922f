"""The case overhead: Unicron's iteration with all of its detection, over that with none."""

from __future__ import annotations

from pathlib import Path

from bench.recovery.overhead import Say, UnicronSide, compared, in_turn
from bench.recovery.rows import Row

CASE = "overhead"
OFF = "unwatched"


def measure(folder: Path, num_pairs: int, say: Say) -> list[Row]:
    """Both train at once and take turns (recovery_overhead.py); copies of state are off."""
    sides = [UnicronSide(folder / OFF, 0, OFF, watches=False), UnicronSide(folder / "unicron", 0)]
    blocks = in_turn(sides, num_pairs, say)
    return compared(CASE, OFF, [(one[OFF], one["unicron"]) for one in blocks], num_pairs)

"""Snapshots of whole screens, from a log of `make demo`.

`UNICRON_SNAPSHOTS=write pytest tests/cli/test_screens.py` rewrites them; check the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unicron.control_plane.api.view import view
from unicron.control_plane.decide.replay import replay
from unicron.events.log import archive
from unicron.events.records.envelope import Record

DATA = Path(__file__).parents[1] / "data"
RECORDS = list(archive.read(DATA / "demo.jsonl"))


def until(kind: str, nth: int = 1) -> int:
    """The seq of the nth record of a kind."""
    return [record.seq for record in RECORDS if record.kind == kind][nth - 1]


def seen(seq: int) -> tuple[dict[str, Any], float]:
    """The view after that record, a quarter of a second later."""
    cut: list[Record] = RECORDS[:seq]
    state_view = view(replay(cut), now_s=cut[-1].at_s + 0.25)
    state_view["cluster"]["hash"] = "unicron-state-1:0123456789abcdef"  # not part of this test
    return state_view, cut[-1].at_s + 0.25


def check(name: str, lines: list[str], columns_max: int = 130) -> None:
    """Compare the screen with its snapshot."""
    path = DATA / f"screen-{name}.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get("UNICRON_SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, lines)) <= columns_max
    assert not any(line != line.rstrip() for line in lines)

"""Shared by tests of health: a clock that the test sets, and files like the kernel's."""

from __future__ import annotations

from pathlib import Path


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def write(root: Path, files: dict[str, str]) -> None:
    """Write files under `root`, by path."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

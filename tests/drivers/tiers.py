"""Which tests are of `make test-real`: those that tests/real.txt lists."""

from __future__ import annotations

from pathlib import Path

REAL = Path(__file__).parents[1] / "real.txt"
"""The tests that take more than about 5 s and are no one's only witness."""


def listed(file: Path = REAL) -> list[str]:
    """The names in the list: a file, a test, or one of its parameters."""
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def names_of(test: str) -> tuple[str, str, str]:
    """The names under which the list may have a test: its own, its function's, its file's."""
    return test, test.partition("[")[0], test.partition("::")[0]

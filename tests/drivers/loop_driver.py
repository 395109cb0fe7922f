"""A custom loop of the examples, run by real ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nursery import Nursery
from rank_driver import Driver
from unicron.events.spec.job import parse

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "loop.py"
SCRIPT = """
import os, runpy, sys
os.environ["UNICRON_FD"], sys.argv = str(fd), {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit()
"""


def changed_example(folder: Path, changes: Iterable[tuple[str, str]]) -> Path:
    """Write the example with these replacements, each of which must apply; return its path."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text)
    return script


def drive_loop(folder: Path, nursery: Nursery, words: Sequence[str], *, iterations: int,
               micro_batches: int, slots_max: int = 4, script: Path = EXAMPLE, copy_every: int = 0,
               **parallel: Any) -> Driver:
    """A driver whose ranks run the example, or `script`, with these arguments."""
    argv = [str(script), "--iterations", str(iterations), "--micro-batches", str(micro_batches),
            *words]
    spec = parse({
        "apiVersion": "unicron/v1", "name": "own", "slots": {"min": 1, "max": slots_max},
        "command": argv, "heal": "in-memory",
        "loop": {"micro_batches": micro_batches, "iterations": iterations, "parallel": parallel,
                 "copy_every": copy_every, "output": str(folder / "out")}})
    driver = Driver(spec, folder, nursery)
    driver.patch = SCRIPT.format(argv=argv)
    return driver

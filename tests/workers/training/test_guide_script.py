"""The script of the guide to custom loops runs as it stands, alone and under agents."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_driver import drive_loop
from nursery import Nursery
from rank_driver import Driver
from unicron.events.spec.model import Axes

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "scripts.md"
LIMIT_S, ITERATIONS = 120.0, 6
LEARNT_RATIO_MAX = 0.9
"""The last loss over the first."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The guide's script, its first block of code, in a file."""
    text = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)[0]
    file = tmp_path / "train.py"
    file.write_text(text)
    return file


def losses(text: str) -> dict[int, float]:
    """Iteration -> loss, of the lines that the script prints."""
    lines = re.findall(r"^(\d+) (\d+\.\d+)$", text, re.M)
    return {int(iteration): float(loss) for iteration, loss in lines}


@pytest.fixture
def healed(tmp_path: Path, script: Path, nursery: Nursery) -> Iterator[Driver]:
    driver = drive_loop(
        tmp_path, nursery, [], iterations=ITERATIONS, micro_batches=8, script=script
    )
    yield driver
    driver.close()


def test_it_trains_alone_and_heals_under_agents(script: Path, healed: Driver) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--iterations", str(ITERATIONS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    alone = losses(done.stdout)
    assert list(alone) == list(range(ITERATIONS)), done.stdout
    assert alone[ITERATIONS - 1] < LEARNT_RATIO_MAX * alone[0], alone

    healed.start(0, 1)
    healed.form([0, 1], axes=Axes(dp=2))
    healed.strike(1, iteration=2, event="forward")
    healed.kill(1)
    healed.quiesce([0], "now")
    healed.form([0], axes=Axes())
    healed.finish([0])
    found = healed.losses()
    assert list(found) == list(alone)
    assert [*found.values()] == pytest.approx([*alone.values()], rel=1e-5)

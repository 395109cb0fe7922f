"""The same scenario gives the same bytes: in whichever process, on however many cores."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

SCENARIOS = Path(__file__).parents[3] / "deploy" / "scenarios"


def told(path: Path, log: Path, seed: str, cores: set[int]) -> tuple[bytes, bytes]:
    """What the command says, and the log that it writes."""
    done = subprocess.run(
        [sys.executable, "-m", "unicron.cli.main", "simulate", "--scenario", str(path), "-o",
         "json", "--log", str(log)], check=True, capture_output=True, timeout=120,
        env=os.environ | {"PYTHONHASHSEED": seed},
        preexec_fn=partial(os.sched_setaffinity, 0, cores))
    return done.stdout, log.read_bytes()


def test_the_same_bytes_twice(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    path = SCENARIOS / "two-weeks.yaml"
    one = told(path, tmp_path / "one.log", "1", {min(cores)})
    two = told(path, tmp_path / "two.log", "2", cores)
    assert b"accumulated_waf_flop" in one[0]
    assert one == two

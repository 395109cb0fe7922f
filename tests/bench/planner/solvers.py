"""The planner bench's own environment in build/bench-planner: Unicron's planner and the solvers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench.environment import ROOT, lay, pip

PLACE = ROOT / "build" / "bench-planner"
PYTHON = PLACE / "venv" / "bin" / "python"
PINS = (ROOT / "constraints.txt", Path(__file__).with_name("constraints-planner.txt"))
PACKAGES = ("numpy", "msgspec", "cvxpy", "cvxopt", "scipy", "ortools")


def ensure() -> None:
    """Lay it, once (again when the pins change). Raises CalledProcessError with pip's words."""
    lay(PLACE, PINS, ", ".join(PACKAGES), lambda: pip(PLACE, PINS, *PACKAGES))


def versions() -> dict[str, str]:
    """What is measured, by distribution."""
    done = subprocess.run([str(PYTHON), "-P", "-m", "pip", "freeze"], capture_output=True,
                          text=True, check=True, timeout=60)
    pairs = [line.split("==") for line in done.stdout.splitlines() if "==" in line]
    return {name: version for name, version in pairs if name in PACKAGES}


def environment() -> dict[str, str]:
    """What a trial is started with: one thread each, so that processor time is comparable."""
    folders = (str(ROOT / "tests"), str(ROOT / "tests/drivers"), str(ROOT / ".typing"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

"""The virtual environment of the planner bench, build/bench-planner: planner and solvers."""

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
    """Build the environment if missing or outdated by its pins. Raises CalledProcessError."""
    lay(PLACE, PINS, ", ".join(PACKAGES), lambda: pip(PLACE, PINS, *PACKAGES))


def versions() -> dict[str, str]:
    """The version of each package that is measured."""
    done = subprocess.run(
        [str(PYTHON), "-P", "-m", "pip", "freeze"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    pairs = [line.split("==") for line in done.stdout.splitlines() if "==" in line]
    return {name: version for name, version in pairs if name in PACKAGES}


def environment() -> dict[str, str]:
    """The environment of a trial. One thread each, so that processor times are comparable."""
    folders = (str(ROOT / "tests"), str(ROOT / "tests/drivers"), str(ROOT / ".typing"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }

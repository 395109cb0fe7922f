"""The planner bench's own environment in build/bench-planner: Unicron's planner and the solvers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "bench-planner"
PYTHON = PLACE / "venv" / "bin" / "python"
PINS = (ROOT / "constraints.txt", Path(__file__).with_name("constraints-planner.txt"))
PACKAGES = ("numpy", "msgspec", "cvxpy", "cvxopt", "scipy", "ortools")
STEP_S_MAX = 1200.0


def ensure() -> None:
    """Lay it, once (again when the pins change). Raises CalledProcessError with pip's words."""
    stamp = PLACE / "stamp"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in PINS)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"laying {PLACE.relative_to(ROOT)}: {', '.join(PACKAGES)}; once", flush=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        _run([sys.executable, "-m", "venv", str(PLACE / "venv")])
    pins = [word for file in PINS for word in ("-c", str(file))]
    _run([str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", *pins,
          *PACKAGES])
    stamp.write_text(wanted)


def versions() -> dict[str, str]:
    """What is measured, by distribution."""
    done = subprocess.run([str(PYTHON), "-P", "-m", "pip", "freeze"], capture_output=True,
                          text=True, check=True, timeout=60)
    pairs = [line.split("==") for line in done.stdout.splitlines() if "==" in line]
    return {name: version for name, version in pairs if name in PACKAGES}


def environment() -> dict[str, str]:
    """What a trial is started with: one thread each, so that processor time is comparable."""
    folders = (str(ROOT / "tests"), str(ROOT / ".typing"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, timeout=STEP_S_MAX)

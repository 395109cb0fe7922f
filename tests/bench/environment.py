"""A virtual environment for a bench in build/. It is built once, and again when its pins change."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP_S_MAX = 1200.0


def lay(place: Path, pins: Sequence[Path], what: str, install: Callable[[], None]) -> None:
    """Create a bare venv in `place`, then call `install`. Raises CalledProcessError."""
    stamp = place / "stamp"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in pins)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"laying {place.relative_to(ROOT)}: {what}; once", flush=True)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "venv" / "bin" / "python").exists():
        _run([sys.executable, "-m", "venv", str(place / "venv")])
    install()
    stamp.write_text(wanted)


def pip(place: Path, pins: Sequence[Path], *arguments: str) -> None:
    """Install into the environment in `place`, constrained by the pins."""
    held = [word for file in pins for word in ("-c", str(file))]
    _run(
        [
            str(place / "venv" / "bin" / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "-q",
            "install",
            *held,
            *arguments,
        ]
    )


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, timeout=STEP_S_MAX)

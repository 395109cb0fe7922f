"""A virtual environment for a bench in build/. It is built once, and again when its pins change."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP_S_MAX = 1200.0


def lay(
    place: Path,
    pins: Sequence[Path],
    what: str,
    install: Callable[[], None],
    *,
    on_top: bool = False,
) -> None:
    """Create a venv in `place`, then call `install`. Raises CalledProcessError and TimeoutExpired;
    the next call then tries again.

    `on_top`: the venv also sees the packages of the one that runs this, below its own. So pip finds
    that torch is there, and does not fetch another.
    """
    stamp, venv = place / "stamp", place / "venv"
    below = sysconfig.get_path("purelib") if on_top else ""
    said = [*(file.read_bytes() for file in pins), sys.version.encode(), below.encode()]
    wanted = hashlib.sha256(b"".join(said)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"laying {place.relative_to(ROOT)}: {what}; once", flush=True)
    stamp.unlink(missing_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    if on_top:
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)])
        own = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
        Path(own, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    elif not (venv / "bin" / "python").exists():
        _run([sys.executable, "-m", "venv", str(venv)])
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

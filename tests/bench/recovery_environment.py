"""The bench's own environment in build/bench: Unicron and the peers, pinned, and one torch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "bench"
PYTHON = PLACE / "venv" / "bin" / "python"
ABSENT = PLACE / "absent.json"
PINS = (ROOT / "constraints.txt", Path(__file__).with_name("constraints-peers.txt"))
STEP_S_MAX = 1200.0
NEEDED_BY_PEERS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "defusedxml",
                   "nvidia-ml-py", "packaging", "psutil", "pynvml", "pyyaml")
# Both releases of torchft are a package of the same name: each has a folder of its own.
TORCHFT = {"torchft_stable": "torchft", "torchft_fast": "torchft-nightly"}
NVRX = "nvidia-resiliency-ext"


def ensure() -> None:
    """Lay it, once (again when the pins change). What cannot be installed is noted in ABSENT."""
    stamp = PLACE / "stamp"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in PINS)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"laying {PLACE.relative_to(ROOT)}: torch, Megatron and the peers; once", flush=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        _run([sys.executable, "-m", "venv", str(PLACE / "venv")])
    # torch first and bare, as `make setup` does: then nothing else can change its build.
    _pip("setuptools", "torch==2.13.0")
    _pip("--no-build-isolation", "-e", f"{ROOT}[train]")
    absent = {}
    for system, package in TORCHFT.items():
        why = _tried("--no-deps", "--upgrade", "--target", str(PLACE / system), package)
        absent |= {system: why} if why else {}
    if why := _tried("--no-deps", NVRX) or _tried(*NEEDED_BY_PEERS):
        absent |= {"nvrx": why}
    ABSENT.write_text(json.dumps(absent))
    stamp.write_text(wanted)


def absent() -> dict[str, str]:
    """Why a system is not here, by system."""
    return dict(json.loads(ABSENT.read_text())) if ABSENT.exists() else {}


def versions() -> dict[str, str]:
    """What is measured, by distribution."""
    asked = ("import json, importlib.metadata as m; print(json.dumps({d.metadata['Name']: d.version"
             " for d in m.distributions()}))")
    found: dict[str, str] = {}
    for system in ("", *TORCHFT):
        done = subprocess.run([str(PYTHON), "-P", "-c", asked], capture_output=True, text=True,
                              check=True, env=environment(system), timeout=60)
        found |= json.loads(done.stdout)
    wanted = ("torch", "megatron-core", "unicron", *TORCHFT.values(), NVRX)
    return {name: found[name] for name in wanted if name in found}


def environment(system: str) -> dict[str, str]:
    """What a process of a system is started with."""
    folders = [str(Path(__file__).resolve().parents[1])]
    folders += [str(PLACE / system)] if system in TORCHFT else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo"}


def _tried(*arguments: str) -> str:
    """Why it cannot be installed; empty if it was."""
    try:
        _pip(*arguments)
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        return (lines or ["pip failed"])[-1]
    return ""


def _pip(*arguments: str) -> None:
    pins = [word for file in PINS for word in ("-c", str(file))]
    _run([str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", *pins,
          *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, timeout=STEP_S_MAX)

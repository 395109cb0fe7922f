"""The virtual environment of the recovery bench: Unicron, the pinned peers, one torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from bench.environment import ROOT, lay, pip

PLACE = ROOT / "build" / "bench-recovery"
PYTHON = PLACE / "venv" / "bin" / "python"
ABSENT = PLACE / "absent.json"
PINS = (ROOT / "constraints.txt", Path(__file__).with_name("constraints-peers.txt"))
NEEDED_BY_PEERS = (
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
    "defusedxml",
    "nvidia-ml-py",
    "packaging",
    "psutil",
    "pynvml",
    "pyyaml",
)
# Both releases of torchft are packages of the same name; each gets its own folder.
TORCHFT = {"torchft_stable": "torchft", "torchft_fast": "torchft-nightly"}
NVRX = "nvidia-resiliency-ext"


def ensure() -> None:
    """Build the environment if missing or outdated. ABSENT lists failed installations."""
    lay(PLACE, PINS, "torch, Megatron and the peers", _install)


def _install() -> None:
    # torch first and alone, as in `make setup`: then no other package can change its build.
    pip(PLACE, PINS, "setuptools", "torch==2.13.0")
    pip(PLACE, PINS, "--no-build-isolation", "-e", f"{ROOT}[train]")
    absent = {}
    for system, package in TORCHFT.items():
        why = _tried("--no-deps", "--upgrade", "--target", str(PLACE / system), package)
        absent |= {system: why} if why else {}
    if why := _tried("--no-deps", NVRX) or _tried(*NEEDED_BY_PEERS):
        absent |= {"nvrx": why}
    ABSENT.write_text(json.dumps(absent))


def absent() -> dict[str, str]:
    """For each system that could not be installed, the reason."""
    return dict(json.loads(ABSENT.read_text())) if ABSENT.exists() else {}


def versions() -> dict[str, str]:
    """The version of each package that is measured."""
    asked = (
        "import json, importlib.metadata as m; print(json.dumps({d.metadata['Name']: d.version"
        " for d in m.distributions()}))"
    )
    found: dict[str, str] = {}
    for system in ("", *TORCHFT):
        done = subprocess.run(
            [str(PYTHON), "-P", "-c", asked],
            capture_output=True,
            text=True,
            check=True,
            env=environment(system),
            timeout=60,
        )
        found |= json.loads(done.stdout)
    wanted = ("torch", "megatron-core", "unicron-train", *TORCHFT.values(), NVRX)
    return {name: found[name] for name in wanted if name in found}


def environment(system: str) -> dict[str, str]:
    """The environment variables of a system's processes."""
    folders = [str(ROOT / "tests"), str(ROOT / "tests/drivers")]
    folders += [str(PLACE / system)] if system in TORCHFT else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _tried(*arguments: str) -> str:
    """The reason why pip failed; empty if it succeeded."""
    try:
        pip(PLACE, PINS, *arguments)
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        return (lines or ["pip failed"])[-1]
    return ""

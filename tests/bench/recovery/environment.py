"""The virtual environments of the recovery bench: one for each peer, on top of `.venv`.

All systems run the torch and the Megatron of `make setup`. What a peer needs besides lies in
build/bench-recovery/SYSTEM, so that no peer can hinder another one.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from bench.environment import ROOT, lay, pip

PLACE = ROOT / "build" / "bench-recovery"
PEER_PINS = Path(__file__).with_name("constraints-peers.txt")
PINS = (ROOT / "constraints.txt", PEER_PINS)
LAUNCHER = "nvrx_ft_launcher"
PACKAGE = Path("src", "nvidia_resiliency_ext")
"""NVRx's package in its source tree."""
PROTOCOLS = Path("shared_utils", "proto")
COMPILE_S_MAX = 120.0


class Kit(NamedTuple):
    """What a peer needs besides `.venv`: the package that is measured, and others by name."""

    package: str
    others: tuple[str, ...] = ()


KITS = {
    "torchft_stable": Kit("torchft"),
    "torchft_fast": Kit("torchft-nightly"),
    "nvrx": Kit("nvidia-resiliency-ext"),
    # The tree asks for 20 packages, most of them for services that the launcher does not start.
    LAUNCHER: Kit(
        "", ("defusedxml", "grpcio-tools", "httpx", "nvidia-ml-py", "psutil", "setproctitle")
    ),
}


def ensure(systems: Iterable[str], tree: Path | None = None) -> dict[str, str]:
    """Lay what these systems need; by system, why that failed. `tree`: NVRx's source."""
    absent: dict[str, str] = {}
    for system in systems:
        if system not in KITS or (system == LAUNCHER and tree is None):
            continue
        try:
            _lay(system)
            if system == LAUNCHER and tree is not None:
                _copy(tree)
        except subprocess.CalledProcessError as error:
            absent[system] = f"cannot be installed: {reason(str(error.stderr))}"
        except subprocess.TimeoutExpired as error:
            absent[system] = f"cannot be installed: not done within {error.timeout:.0f} s"
        except OSError as error:
            absent[system] = f"cannot be installed: {error}"
    return absent


def _lay(system: str) -> None:
    place, kit = PLACE / system, KITS[system]
    names = [name for name in (kit.package, *kit.others) if name]
    lay(
        place,
        PINS,
        ", ".join(names),
        # A peer that would have to be compiled is absent.
        lambda: pip(place, PINS, "--only-binary", ":all:", *names),
        on_top=True,
    )


def _copy(tree: Path) -> None:
    """Copy NVRx's package out of its tree and compile its protocols, as its build does."""
    copy = PLACE / LAUNCHER / PACKAGE
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(tree / PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted((copy / PROTOCOLS).glob("*.proto"))
    out = [f"--{kind}=." for kind in ("python_out", "grpc_python_out")]
    subprocess.run(
        [
            str(python(LAUNCHER)),
            "-P",
            "-m",
            "grpc_tools.protoc",
            "-I.",
            *out,
            *(str(file.relative_to(copy.parent)) for file in files),
        ],
        cwd=copy.parent,
        check=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=COMPILE_S_MAX,
    )


def is_tree(tree: Path) -> bool:
    """True if this is a source tree of NVRx with the launcher."""
    return (tree / PACKAGE / "fault_tolerance" / "launcher.py").is_file()


def reason(said: str) -> str:
    """The first line that begins with ERROR, which is pip's reason; else the last line."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors[:1] or lines[-1:] or ["it said nothing"])[0].strip()


def python(system: str) -> Path:
    """The interpreter of a system: its own, or the one that runs this."""
    return PLACE / system / "venv" / "bin" / "python" if system in KITS else Path(sys.executable)


def told(system: str, tree: Path | None = None) -> str:
    """Which version of a peer is measured, with its age; empty for what `.venv` has."""
    if system == LAUNCHER and tree is not None:
        return f"NVRx's tree at {_commit(tree)}"
    return age(KITS[system].package) if system in KITS else ""


def _commit(tree: Path) -> str:
    """The tag or commit of a tree and its date."""
    asked = [
        ("describe", "--tags", "--always", "--dirty"),
        ("log", "-1", "--format=of %ad", "--date=short"),
    ]
    done = [
        subprocess.run(
            ["git", "-C", str(tree), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        for words in asked
    ]
    return " ".join(one.stdout.strip() for one in done).strip() or "an unknown commit"


def versions() -> dict[str, str]:
    """The version of each package that is measured, as far as it is installed."""
    wanted = [("", name) for name in ("torch", "megatron-core", "unicron-train")]
    wanted += [(system, kit.package) for system, kit in KITS.items() if kit.package]
    return {name: version for system, name in wanted if (version := _version(system, name))}


def _version(system: str, package: str) -> str:
    own = [str(one) for one in (PLACE / system).glob("venv/lib/python*/site-packages")]
    places = own if system else sys.path
    return next((one.version for one in metadata.distributions(name=package, path=places)), "")


def age(package: str, today: datetime.date | None = None) -> str:
    """The version of a peer and its age, by the date in the pins; empty if there is no pin."""
    found = re.search(rf"^{package}==(\S+) +# (\S+)", PEER_PINS.read_text(), re.MULTILINE)
    if not package or found is None:
        return ""
    born = datetime.date.fromisoformat(found[2])
    days = ((today or datetime.datetime.now(datetime.UTC).date()) - born).days
    return f"{package} {found[1]}, {days} days old"


def environment(system: str) -> dict[str, str]:
    """The environment variables of a system's processes."""
    folders = [ROOT / "tests", ROOT / "tests/drivers"]
    folders += [PLACE / LAUNCHER / PACKAGE.parent] if system == LAUNCHER else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }

"""The lock: what runs Unicron, each package in one version with the digests of its files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LOCK, PINS = ROOT / "requirements-locked.txt", ROOT / "constraints.txt"
EXTRAS = ("train", "gpu", "kubernetes")
"""Those of pyproject.toml that hosts need; the others are for work on Unicron itself."""
TORCH = "torch"
"""Its file depends on the index, CPU or CUDA, so it has no digest here."""
BESIDE_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy")
"""What each build of torch brings. That of CUDA also pins NVIDIA's packages, one version each.
setuptools builds Unicron as well."""
HEAD = """\
# Written by `make lock` from pyproject.toml and constraints.txt: do not edit. What a host needs to
# run Unicron, in the versions of constraints.txt, with the SHA-256 of each file on PyPI:
#   pip install --require-hashes --no-deps -r requirements-locked.txt
#   pip install -c constraints.txt torch=={torch}
#   pip install --no-deps --no-build-isolation .
# torch is pinned by its version alone: which file that is depends on the index, PyPI's build for
# CUDA or a build for the CPU. So are the packages that only the build for CUDA brings: torch pins
# them itself. All else that torch needs is here, so that the second line does not fetch it.
"""


def head() -> str:
    """The beginning of the lock."""
    return HEAD.format(torch=pins(PINS.read_text(encoding="utf-8"))[TORCH])


class Locked(NamedTuple):
    """A package of the lock. `marker`: where it is needed, as PEP 508; "": everywhere."""

    version: str
    marker: str
    digests: tuple[str, ...]


_PACKAGE = re.compile(r"([a-z0-9-]+)==([0-9][\w.+!]*)(?: ; ([^\\]+?))?((?: \\\n +--hash=\S+)+)\n")


def read(text: str) -> dict[str, Locked]:
    """The packages of a lock. Raises ValueError for what is none, as a package without a digest."""
    found: dict[str, Locked] = {}
    rest = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    while rest:
        package = _PACKAGE.match(rest)
        digests = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", package[4]) if package else []
        if package is None or len(digests) != package[4].count("--hash"):
            raise ValueError(f"no package with digests of SHA-256: {rest[:80]!r}")
        found[package[1]] = Locked(package[2], package[3] or "", tuple(digests))
        rest = rest[package.end() :]
    return found


def pins(text: str) -> Mapping[str, str]:
    """The versions of constraints.txt, by the normal name of the package."""
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    return {
        re.sub(r"[-_.]+", "-", name).lower(): at
        for name, _, at in (x.partition("==") for x in lines)
    }


def main() -> None:
    """Write the lock anew."""
    with TemporaryDirectory() as folder:
        beside, without, made = (Path(folder) / name for name in ("in", "without", "out"))
        beside.write_text("\n".join(BESIDE_TORCH) + "\n")
        without.write_text(f"{TORCH} ; python_version < '0'\n")
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "uv"),
                *("pip", "compile", "--no-config", "--quiet", "--universal", "--generate-hashes"),
                *("--python-version", "3.11", "--no-header", "--no-annotate"),
                *("--default-index", "https://pypi.org/simple"),
                *(word for extra in EXTRAS for word in ("--extra", extra)),
                *("--constraints", str(PINS), "--overrides", str(without)),
                *("--output-file", str(made), str(ROOT / "pyproject.toml"), str(beside)),
            ],
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)
        locked = made.read_text(encoding="utf-8")
    read(locked)
    LOCK.write_text(head() + locked, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The check at start: whether the installed torch and megatron-core are versions that are known.

A version that lacks a private part cannot train: wrong input. One that has all of them, but was
never run with Unicron, is a warning. `python -m` of this module prints both for `unicron doctor`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NamedTuple

import msgspec
import structlog
from msgspec import Struct

from ....events.errors import UsageError
from ....events.words import install
from . import parts

log = structlog.get_logger()
NAMED_NUM_MAX = 3
"""Missing parts that a message names; it counts the rest."""
HINT = f"{install('train')} brings known versions"


class _Dependency(NamedTuple):
    """`file`: our file with its private parts."""

    package: str
    module: str
    file: str
    known: Sequence[str]


DEPENDENCIES = (
    # 2.13: all tests, on the CPU. 2.11: `make gpu-check` on a GPU (docs/guides/gpu.md).
    _Dependency("torch", "torch", "private_torch", ("2.11", "2.13")),
    # 0.16: all tests. 0.15: test_megatron_wheels.py. The others: docs/guides/megatron-lm.md.
    _Dependency(
        "megatron-core",
        "megatron.core",
        "private_megatron",
        ("0.15", "0.16", "0.17", "0.18", "0.19", "0.20"),
    ),
)


class Installed(Struct, frozen=True):
    """`problem`: why it cannot train; `warning`: it is untried. Each is one line, or empty."""

    package: str
    version: str
    problem: str = ""
    warning: str = ""


def installed() -> list[Installed]:
    """Both dependencies. Imports them, and each module of theirs that has a private part."""
    return [_installed(each) for each in DEPENDENCIES]


def require_parts() -> None:
    """Raise UsageError if a rank cannot train with what is installed."""
    if problems := [found.problem for found in installed() if found.problem]:
        raise UsageError("; ".join(problems), HINT)


def warn_unknown() -> None:
    """Log one line for each version that Unicron was never run with."""
    for each in DEPENDENCIES:
        if warning := _warning(each, _version(each)):
            log.warning(warning)


def _installed(each: _Dependency) -> Installed:
    try:
        version = _version(each)
        import_module(f".{each.file}", __package__)
    except ImportError as error:
        version = recorded_version(each.package) or "(not installed)"
        return Installed(
            each.package,
            version,
            problem=f"{each.package} {version} cannot be used: {error}; {_known(each)}",
        )
    if missing := parts.missing(each.module.partition(".")[0]):
        named = ", ".join(missing[:NAMED_NUM_MAX])
        more = f" and {len(missing) - NAMED_NUM_MAX} more" if len(missing) > NAMED_NUM_MAX else ""
        return Installed(
            each.package,
            version,
            problem=f"{each.package} {version} has no {named}{more}; {_known(each)}",
        )
    return Installed(each.package, version, warning=_warning(each, version))


def is_known(package: str, version: str) -> bool:
    """Whether Unicron was run with this version of a package."""
    (each,) = (each for each in DEPENDENCIES if each.package == package)
    return version.startswith(tuple(f"{known}." for known in each.known))


def _warning(each: _Dependency, version: str) -> str:
    if is_known(each.package, version):
        return ""
    return f"{each.package} {version} was never run with Unicron; {_known(each)}"


def _known(each: _Dependency) -> str:
    return f"known are {', '.join(each.known[:-1])} and {each.known[-1]}"


def _version(each: _Dependency) -> str:
    return str(import_module(each.module).__version__)


def recorded_version(package: str) -> str:
    """The version of a package that pip has installed, without an import; empty: there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(installed()))

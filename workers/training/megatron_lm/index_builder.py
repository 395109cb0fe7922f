"""Compiles Megatron-LM's index builder for datasets, which a fresh clone lacks.

Megatron-LM compiles it on rank 0, and the other ranks wait at a barrier. Here the ranks have no
communicators at that time, so the first process of a node that needs it compiles it. The same is
true of the index caches of the datasets.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....events.errors import UsageError
from ....events.file_lock import FileLock

MODULE = "megatron.core.datasets.helpers_cpp"


def ensure() -> None:
    """Compile the index builder, unless it is there. Raises UsageError."""
    if _is_there():
        return
    package = importlib.import_module("megatron.core.datasets")
    folder = Path(next(iter(package.__path__)))
    # Its Makefile would ask python3-config, which may be of another Python.
    command = ("make", "-C", str(folder), f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}")
    why = ""
    try:
        # The lock is on a file that is there already.
        with FileLock(folder / "helpers.cpp").acquire(waits=True):
            if not _is_there():
                path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
                made = subprocess.run(
                    command,
                    env={**os.environ, "PATH": path},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                why = made.stderr.strip().splitlines()[0] if made.returncode else ""
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    if _is_there():
        return
    hint = f"install a C++ compiler, or type {' '.join(command)} to see more"
    if importlib.util.find_spec("pybind11") is None:
        why, hint = "pybind11 is not installed", f"{sys.executable} -m pip install pybind11"
    raise UsageError(
        "the index builder of the datasets cannot be compiled: "
        f"{why or 'the result is for another Python'}",
        hint,
    )


@contextmanager
def one_at_a_time(args: Any) -> Generator[None]:
    """Datasets are built in this context: a node's first process writes caches that others find."""
    if args.mock_data:  # without caches
        yield
        return
    folder = Path(args.data_cache_path or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    name = "building.lock" if args.data_cache_path else f"unicron-datasets-{os.getuid()}.lock"
    with FileLock(folder / name, 0o644).acquire(waits=True):
        yield


def _is_there() -> bool:
    importlib.invalidate_caches()
    return importlib.util.find_spec(MODULE) is not None

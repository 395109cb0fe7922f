"""Removes outputs of processes that have ended, the oldest first, so that they stay bounded."""

import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ....events.bounded_file import ASIDE, allowed_bytes
from ...ipc import stack_signal
from . import torch_files

NUM_MAX = 100
"""At most so many outputs of former attempts of a rank stay."""
AGE_S_MIN = 3600.0
"""An output of an ended task stays at least so long after it was written, also on a full disk."""
STACKS = ".stacks"
"""Suffix of the file with what a process did before it was ended."""
_BLOCK_BYTES = 512
_ATTEMPT = re.compile(r"(rank-[0-9]+)\.attempt-([0-9]+)\.log")


class _Output(NamedTuple):
    rank: str
    attempt: int
    path: Path


def mark_used(file: int) -> None:
    """Mark an open output as used, until all processes that have inherited it have ended."""
    with suppress(OSError):  # without locks on this file system, it is never removed
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_attempts(log_path: Path, folder: Path, bytes_max: int) -> None:
    """Before an attempt starts whose output this will be: remove the oldest former ones of its
    rank, with their error files in `folder`, until the rest takes `bytes_max` at most. The newest
    stays, for it may not have been read yet. Also remove what beside the output is of this attempt:
    a task with this number in an earlier log may have left it."""
    (own,) = _outputs([log_path])
    with suppress(OSError):
        torch_files.error_file_of(log_path, folder).unlink(missing_ok=True)
        stack_signal.dump_file_of(log_path, folder).unlink(missing_ok=True)
        log_path.with_suffix(STACKS).unlink(missing_ok=True)
        former = [
            output
            for output in _outputs(log_path.parent.iterdir())
            if output.rank == own.rank and output.attempt < own.attempt
        ]
        former.sort(key=lambda output: output.attempt, reverse=True)
        taken, allowed = 0, allowed_bytes(log_path.parent, bytes_max)
        for num, output in enumerate(former):
            taken += _bytes_of(output.path)
            if num and (num >= NUM_MAX or taken > allowed):
                _remove(output.path, folder)


def remove_oldest(logs: Path) -> None:
    """Remove the oldest outputs in the folders of `logs` that no process has open, until the rest
    takes a bounded share of what is free on the disk."""
    with suppress(OSError):
        ended = [
            output.path for output in _outputs(logs.glob("*/rank-*.log")) if _is_old(output.path)
        ]
        ended.sort(key=_written_s, reverse=True)
        taken, allowed = 0, allowed_bytes(logs, 1 << 62)
        for path in ended:
            with suppress(OSError):  # that of another user holds up no others
                taken += _bytes_of(path)
                if taken > allowed and not _is_used(path):
                    _remove(path, path.parent)
                    _remove_empty(path.parent)


def _remove_empty(folder: Path) -> None:
    """Remove the folder of a task that has no outputs any more, with its flight recorder dumps."""
    if not _outputs(folder.iterdir()):
        for dump in folder.glob("flight-rank-*.json"):
            dump.unlink()
        with suppress(OSError):  # it has other files
            folder.rmdir()


def _outputs(paths: Iterable[Path]) -> list[_Output]:
    return [
        _Output(name[1], int(name[2]), path)
        for path in paths
        if (name := _ATTEMPT.fullmatch(path.name))
    ]


def _is_old(path: Path) -> bool:
    return time.time() - _written_s(path) > AGE_S_MIN


def _written_s(path: Path) -> float:
    """When a regular file was written, in seconds since 1970; for anything else, or if it is gone,
    infinite: that is left alone."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status.st_mtime
    return math.inf


def _is_used(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _bytes_of(path: Path) -> int:
    files = (path, path.with_name(path.name + ASIDE))
    return sum(file.stat().st_blocks * _BLOCK_BYTES for file in files if file.exists())


def _remove(path: Path, folder: Path) -> None:
    for file in (
        torch_files.error_file_of(path, folder),
        stack_signal.dump_file_of(path, folder),
        path.with_suffix(STACKS),
        path.with_name(path.name + ASIDE),
        path,
    ):
        file.unlink(missing_ok=True)

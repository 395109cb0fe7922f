"""Checkpoints in torch's distributed format, written and read by one member alone.

The keys are those of state.py: `model.<parameter>`, `master.<parameter>` where it has 16 bits,
`optimizer.exp_avg.<parameter>` and so on, and `numbers`, plain values. torch.distributed.checkpoint
reads them with nothing of ours. It is loaded at its first use: most ranks never save, and it costs
a starting one 0.8 s (measured).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import msgspec

from ...events.errors import UnicronError, UsageError
from . import state
from .history import History
from .model import Trainee


class NotSaved(UnicronError):
    """A checkpoint could not be written; `str()` says where and why, in one line."""


def check_output(output: str) -> None:
    """Raises UsageError when nothing can be written there: better now than at the first save."""
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise UsageError(f"train.output: {output}: {(error.strerror or 'not usable').lower()}",
                         "name a folder that every node can write") from None


def place(generation: int, step_version: int) -> str:
    """Where a checkpoint goes, relative to the task's output folder."""
    return f"gen-{generation}/iter-{step_version}"


def save(folder: Path, trainee: Trainee, step_version: int, history: History) -> int:
    """Write the whole state into `folder`, which appears only when it is complete; its bytes.

    One that is there already is another task's, of the same output folder, and makes room.
    Raises NotSaved where the disk does not take it; nothing is left of it then.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    data: dict[str, Any] = dict(state.tensors(trainee))
    data["numbers"] = msgspec.to_builtins(state.numbers(trainee, step_version, history))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(data, checkpoint_id=partial, no_dist=True)
        _put_in_place(partial, folder)
        return sum(file.stat().st_size for file in folder.iterdir())
    except (OSError, CheckpointException) as error:
        # Below torch's own error lies the one that says why.
        why = error if isinstance(error, OSError) else next(iter(error.failures.values()))[0]
        # torch writes in C++ too, and tells of a full disk by a RuntimeError there.
        if not isinstance(why, (OSError, RuntimeError)):
            raise
    shutil.rmtree(partial, ignore_errors=True)
    raise NotSaved(f"{folder}: {why}")


def _put_in_place(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f"{folder.name}.{os.getpid()}.old")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)


def load(folder: Path, trainee: Trainee, history: History) -> int:
    """Read the whole state into the trainee; the step version.

    Raises UsageError, before anything is changed, for a state of another precision.
    """
    import torch.distributed.checkpoint as dcp

    told = state.numbers(trainee, 0, history)
    data: dict[str, Any] = dict(state.tensors(trainee))
    data["numbers"] = msgspec.to_builtins(told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = {"numbers": {"precision": ""}}
        dcp.load(head, checkpoint_id=folder, no_dist=True)
        if head["numbers"]["precision"] != told.precision:
            raise UsageError(
                f"{folder} holds a state of {head['numbers']['precision']}, not {told.precision}",
                f"set train.precision: {head['numbers']['precision']}, or name another checkpoint")
        dcp.load(data, checkpoint_id=folder, no_dist=True)
    return state.adopt(trainee, msgspec.convert(data["numbers"], state.Numbers), history)

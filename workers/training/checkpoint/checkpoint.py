"""Checkpoints in torch's distributed format, written and read by a single member.

The keys are those of training_state.py: `model.<parameter>`, `master.<parameter>` for 16-bit
parameters, `optimizer.exp_avg.<parameter>` and so on, and `numbers`, plain values.
torch.distributed.checkpoint reads them without Unicron.

A folder is a path or an fsspec URL (object_storage.py). A checkpoint at a path appears only when it
is complete. A checkpoint at a URL is complete when it has `.metadata`, which is written last.

This module calls torch's planner and writer, not its `save`: `save` uses the process group, which
another thread may destroy meanwhile.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from ....events.errors import UnicronError, UsageError
from ....events.spec.job import is_url
from ...host import object_storage
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.history import History
from ..process.trace import InjectedFault

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of folders that are being written and that are being replaced."""


class NotSaved(UnicronError):
    """A checkpoint could not be written; `str()` gives the folder and the reason in one line."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"{folder}: {why}")
        self.why = why


class Superseded(NotSaved):
    """The write was abandoned for a newer checkpoint."""


WRITE_ERRORS = (OSError, RuntimeError, MemoryError, Superseded)
"""Errors of a write. torch's C++ code reports a full disk as RuntimeError."""


def check_output(output: str) -> None:
    """Raise UsageError at the start, not at the first save, if `output` is not writable."""
    if is_url(output):
        try:
            object_storage.Store(output).check_writable()
        except OSError as error:
            raise UsageError(f"train.output: {output}: {object_storage.reason(error).lower()}",
                             "name a place that every node can reach and write") from None
        return
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise UsageError(f"train.output: {output}: {(error.strerror or 'not usable').lower()}",
                         "name a folder that every node can write") from None


def relative_path(generation: int, step_version: int) -> str:
    """The path of a checkpoint relative to the task's output folder."""
    return f"gen-{generation}/iter-{step_version}"


def folder_of(output: str, path: str) -> str:
    """The folder of a checkpoint: `path` in the output folder."""
    return f"{output.rstrip('/')}/{path}"


def save(folder: str, trainee: TrainingModel, step_version: int, history: History) -> int:
    """Write the current state: see `write`."""
    return write(folder, training_state.tensors(trainee),
                 training_state.numbers(trainee, step_version, history))


def write(folder: str, tensors: Mapping[str, Tensor], numbers: training_state.Numbers,
          on_half: Callable[[], None] = lambda: None,
          is_superseded: Callable[[], bool] = lambda: False) -> int:
    """Write a whole state into `folder`; returns its bytes.

    An existing checkpoint in `folder` belongs to another task with the same output and is replaced.
    `on_half` is called when about half is written, and `is_superseded` before each tensor. May run
    in a thread beside the main one. Raises NotSaved if the write fails, and Superseded if
    `is_superseded` returns True. Nothing is then left of this write.
    """
    data: dict[str, Any] = {**tensors, "numbers": msgspec.to_builtins(numbers)}
    write_there = _write_url if is_url(folder) else _write_path

    def on_tensor() -> None:
        if is_superseded():
            raise Superseded(folder, "a newer one is needed")

    try:
        return write_there(folder, data, _Planner(on_half, on_tensor))
    except (OSError, RuntimeError, MemoryError) as error:
        raise NotSaved(folder, object_storage.reason(error)) from error


def _write_path(path: str, data: dict[str, Any], planner: _Planner) -> int:
    folder = Path(path)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _save(dcp.FileSystemWriter(partial, per_thread_copy_ahead=0), data, planner)
        _replace(partial, folder)
    except WRITE_ERRORS:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in folder.iterdir())


def _write_url(url: str, data: dict[str, Any], planner: _Planner) -> int:
    from . import object_storage as remote

    store = object_storage.Store(url)
    store.remove()
    try:
        with object_storage.as_os_errors(InjectedFault, *WRITE_ERRORS):
            _save(remote.Writer(url), data, planner)
        return store.num_bytes()
    except WRITE_ERRORS:
        remote.discard(url)
        raise


def clear(output: str, generation: int) -> None:
    """Remove partial checkpoints of earlier generations.

    If a member of an earlier generation is still writing, its write then fails: its checkpoint
    would not be published. If a removal fails, the next generation tries again.
    """
    with suppress(OSError):
        if is_url(output):
            from . import object_storage as remote

            remote.clear(output, generation)
        else:
            _clear_path(Path(output), generation)


def _clear_path(folder: Path, generation: int) -> None:
    for partial in (*folder.glob(f"gen-*/*{PARTIAL}"), *folder.glob(f"gen-*/*{OLD}")):
        number = partial.parent.name.removeprefix("gen-")
        if number.isdecimal() and int(number) < generation:
            shutil.rmtree(partial, ignore_errors=True)


class _Planner(dcp.DefaultSavePlanner):
    """torch's planner, which calls `on_half` before the first tensor of the second half and
    `on_tensor` before each tensor."""

    def __init__(self, on_half: Callable[[], None], on_tensor: Callable[[], None]) -> None:
        super().__init__()
        self._on_half, self._on_tensor = on_half, on_tensor
        self._num_left = 0

    def begin(self, num_items: int) -> None:
        self._num_left = num_items - num_items // 2

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of the next item."""
        self._num_left -= 1
        if self._num_left == 0:
            self._on_half()
        self._on_tensor()
        return super().resolve_data(write_item)


def _save(writer: dcp.FileSystemWriter, data: dict[str, Any], planner: _Planner) -> None:
    """torch's `save` for a single process."""
    planner.set_up_planner(data, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    planner.begin(len(plan.items))
    results = writer.write_data(plan, planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def _replace(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f"{folder.name}.{os.getpid()}{OLD}")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)


def reader(folder: str) -> dcp.FileSystemReader:
    """torch's reader of a checkpoint. For a URL, raises UsageError, OSError."""
    if not is_url(folder):
        return dcp.FileSystemReader(folder)
    from . import object_storage as remote

    return remote.reader(folder)


def _read(folder: str, data: dict[str, Any]) -> None:
    """torch's `load`. torch raises CheckpointException, which is a BaseException: convert it."""
    try:
        dcp.load(data, storage_reader=reader(folder), no_dist=True)
    except OSError as error:
        raise RuntimeError(f"{folder}: {object_storage.reason(error)}") from None
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if not isinstance(cause, Exception):
            raise
        raise RuntimeError(f"{folder}: {' '.join(object_storage.reason(cause).split())}") from None


def load(folder: str, trainee: TrainingModel, history: History) -> int:
    """Read the whole state into the trainee; returns the step version.

    Raises UsageError for a state of another precision and leaves the trainee unchanged. Raises
    RuntimeError if a read fails; the trainee's state is then undefined.
    """
    numbers = training_state.numbers(trainee, 0, history)
    data: dict[str, Any] = dict(training_state.tensors(trainee))
    data["numbers"] = msgspec.to_builtins(numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = {"numbers": {"precision": ""}}
        _read(folder, head)
        if (saved := head["numbers"]["precision"]) != numbers.precision:
            raise UsageError(f"{folder} holds a state of {saved}, not {numbers.precision}",
                             f"set train.precision: {saved}, or name another checkpoint")
        _read(folder, data)
    return training_state.load(trainee, msgspec.convert(data["numbers"], training_state.Numbers),
                               history)

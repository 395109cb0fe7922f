"""Checkpoints in torch's distributed format, written and read by one member alone.

The keys are those of state.py: `model.<parameter>`, `master.<parameter>` where it has 16 bits,
`optimizer.exp_avg.<parameter>` and so on, and `numbers`, plain values. torch.distributed.checkpoint
reads them with nothing of ours.

A folder is a path, or an fsspec URL (remote.py). A path's appears only when it is whole; at a URL
it is whole when it has `.metadata`, which comes last.

They are written step by step with torch's planner and writer, not by its `save`: that asks for the
process group, and may be called beside a thread that takes the group down.
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
from ..model.trainee import Trainee
from ..process.history import History
from ..process.trace import Struck

PARTIAL, OLD = ".partial", ".old"
"""How the names of folders end that are on their way in, and out."""


class NotSaved(UnicronError):
    """A checkpoint could not be written; `str()` says where and why, in one line."""

    def __init__(self, folder: str, why: str) -> None:
        super().__init__(f"{folder}: {why}")
        self.why = why


class Overtaken(NotSaved):
    """It was ended early: a newer one is wanted."""


FAILED = (OSError, RuntimeError, MemoryError, Overtaken)
"""What ends a write. torch writes in C++ too, and tells of a full disk by a RuntimeError there."""


def check_output(output: str) -> None:
    """Raises UsageError when nothing can be written there: better now than at the first save."""
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


def place(generation: int, step_version: int) -> str:
    """Where a checkpoint goes, relative to the task's output folder."""
    return f"gen-{generation}/iter-{step_version}"


def within(output: str, path: str) -> str:
    """The folder of a checkpoint, from the output folder and its place there."""
    return f"{output.rstrip('/')}/{path}"


def save(folder: str, trainee: Trainee, step_version: int, history: History) -> int:
    """Write the whole state as it is now: see `write`."""
    return write(
        folder,
        training_state.tensors(trainee),
        training_state.numbers(trainee, step_version, history),
    )


def write(folder: str, tensors: Mapping[str, Tensor], told: training_state.Numbers,
          halfway: Callable[[], None] = lambda: None,
          is_overtaken: Callable[[], bool] = lambda: False) -> int:
    """Write a whole state into `folder`; its bytes.

    One that is there already is another task's, of the same output folder, and makes room.
    `halfway` is called when about half of it is written, and `is_overtaken` before each tensor.
    May run beside the main thread.
    Raises NotSaved where the store does not take it, Overtaken; nothing is left of it then.
    """
    data: dict[str, Any] = {**tensors, "numbers": msgspec.to_builtins(told)}
    write_there = _write_url if is_url(folder) else _write_path

    def goes_on() -> None:
        if is_overtaken():
            raise Overtaken(folder, "a newer one is wanted")

    try:
        return write_there(folder, data, _Planner(halfway, goes_on))
    except (OSError, RuntimeError, MemoryError) as error:
        raise NotSaved(folder, object_storage.reason(error)) from error


def _write_path(path: str, data: dict[str, Any], planner: _Planner) -> int:
    folder = Path(path)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _pour(dcp.FileSystemWriter(partial, per_thread_copy_ahead=0), data, planner)
        _put_in_place(partial, folder)
    except FAILED:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in folder.iterdir())


def _write_url(url: str, data: dict[str, Any], planner: _Planner) -> int:
    from . import object_storage as remote

    store = object_storage.Store(url)
    store.remove()
    try:
        with object_storage.told(Struck, *FAILED):
            _pour(remote.Writer(url), data, planner)
        return store.num_bytes()
    except FAILED:
        remote.discard(url)
        raise


def clear(output: str, generation: int) -> None:
    """Remove what members of generations before this one left half written.

    One of them that still writes fails at that: nobody would publish it. What cannot be removed
    now is left to the next generation.
    """
    with suppress(OSError):
        if is_url(output):
            from . import object_storage as remote

            remote.clear(output, generation)
        else:
            _clear_path(Path(output), generation)


def _clear_path(folder: Path, generation: int) -> None:
    for half in (*folder.glob(f"gen-*/*{PARTIAL}"), *folder.glob(f"gen-*/*{OLD}")):
        told = half.parent.name.removeprefix("gen-")
        if told.isdecimal() and int(told) < generation:
            shutil.rmtree(half, ignore_errors=True)


class _Planner(dcp.DefaultSavePlanner):
    """torch's own, which calls `halfway` before the first tensor of the second half, and `goes_on`
    before each.
    """

    def __init__(self, halfway: Callable[[], None], goes_on: Callable[[], None]) -> None:
        super().__init__()
        self._halfway, self._goes_on = halfway, goes_on
        self._num_left = 0

    def begin(self, num_items: int) -> None:
        self._num_left = num_items - num_items // 2

    def resolve_data(self, write_item: WriteItem) -> Any:
        """What is to be written next."""
        self._num_left -= 1
        if self._num_left == 0:
            self._halfway()
        self._goes_on()
        return super().resolve_data(write_item)


def _pour(writer: dcp.FileSystemWriter, data: dict[str, Any], planner: _Planner) -> None:
    """What torch's `save` does for one process alone."""
    planner.set_up_planner(data, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    planner.begin(len(plan.items))
    results = writer.write_data(plan, planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def _put_in_place(partial: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f"{folder.name}.{os.getpid()}{OLD}")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)


def reader(folder: str) -> dcp.FileSystemReader:
    """What torch reads a checkpoint with. Raises UsageError, OSError for a URL."""
    if not is_url(folder):
        return dcp.FileSystemReader(folder)
    from . import object_storage as remote

    return remote.reader(folder)


def _read(folder: str, data: dict[str, Any]) -> None:
    """torch's `load`. Whatever fails in there, it raises as what no `except Exception` sees."""
    try:
        dcp.load(data, storage_reader=reader(folder), no_dist=True)
    except OSError as error:
        raise RuntimeError(f"{folder}: {object_storage.reason(error)}") from None
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if not isinstance(cause, Exception):
            raise
        raise RuntimeError(f"{folder}: {' '.join(object_storage.reason(cause).split())}") from None


def load(folder: str, trainee: Trainee, history: History) -> int:
    """Read the whole state into the trainee; the step version.

    Raises UsageError, before anything is changed, for a state of another precision; RuntimeError
    where it cannot be read, with half of it in the trainee.
    """
    told = training_state.numbers(trainee, 0, history)
    data: dict[str, Any] = dict(training_state.tensors(trainee))
    data["numbers"] = msgspec.to_builtins(told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = {"numbers": {"precision": ""}}
        _read(folder, head)
        if head["numbers"]["precision"] != told.precision:
            raise UsageError(
                f"{folder} holds a state of {head['numbers']['precision']}, not {told.precision}",
                f"set train.precision: {head['numbers']['precision']}, or name another checkpoint")
        _read(folder, data)
    return training_state.adopt(
        trainee, msgspec.convert(data["numbers"], training_state.Numbers), history
    )

"""Checkpoints: their places, a whole state written by one member, and a member's part read.

A folder is a path or an fsspec URL (folder.py). share_files.py has the format, and saver.py writes
the checkpoints of a task in parts.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from ....events import object_storage
from ....events.errors import UnicronError, UsageError
from ....events.object_storage import Store
from ....events.spec.job import is_url
from ...diagnosis.classifier import classify
from ...host import folder_trial, output_owner
from ...host.output_owner import NotOwner, Owner
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.history import History
from ..recovery.state_shards import EXPONENT
from . import share_files
from .folder import Folder
from .share import whole_share
from .snapshot import Snapshot
from .stored_state import Damaged, StoredState

log = structlog.get_logger()

FROM_ANOTHER = (
    "submit it again with another output: with begin_from it begins at the checkpoint that this "
    "names, else at iteration 0"
)

AWAY, LATEST = "is its storage mounted?", "latest"


class DamagedCheckpoint(UsageError):
    """The checkpoint is missing or not whole."""


class NotSaved(UnicronError):
    """A checkpoint could not be written; `str()` gives the folder and the reason in one line.
    `errno`: as in CheckpointFailed."""

    def __init__(self, folder: str, why: str, errno: str = "") -> None:
        super().__init__(f"{folder}: {why}")
        self.folder, self.why, self.errno = folder, why, errno

    @classmethod
    def of(cls, folder: str, error: BaseException) -> NotSaved:
        why = object_storage.reason(object_storage.root_of(error))
        if isinstance(error, NotOwner):
            why += f": {error.hint}"
        return cls(folder, why, object_storage.errno_name(error))


class Superseded(NotSaved):
    """The write was abandoned for a newer checkpoint."""


PASSING = (ConnectionError, TimeoutError, socket.gaierror)
"""What a store that is away for a while raises."""
WRITE_ERRORS = (OSError, RuntimeError, MemoryError)
"""Errors of a write, beside Superseded. torch's C++ code reports a full disk as RuntimeError."""


def check_output(output: str, what: str = "train.output", task: Owner | None = None) -> None:
    """Raise UsageError at the start, not at the first save, if a path or URL cannot be written.
    `what` names it to the user. `task` becomes the owner of a folder; if that is another task's,
    that is a UsageError too. What may pass, as a full disk, is a warning; a store that does not
    answer is an OSError."""
    if is_url(output):
        try:
            Store(output).check_writable()
        except OSError as error:
            if isinstance(error, PASSING) or classify(str(error)).can_pass:
                raise
            raise UsageError(
                f"{what}: {output}: {object_storage.reason(error).lower()}", folder_trial.ANOTHER
            ) from None
    else:
        for flaw in folder_trial.flaws(Path(output)):
            if flaw.is_proof:
                raise UsageError(f"{what}: {flaw.text}", flaw.hint)
            log.warning("the output may fail", key=what, why=flaw.text, hint=flaw.hint)
    local = output_owner.local_folder(output)
    if task is not None and local is not None:
        try:
            output_owner.claim(local, task)
        except NotOwner as error:
            raise UsageError(f"{what}: {error}", error.hint) from None
        except OSError as error:  # each save tries it again
            log.warning(
                "whose folder it is is not known", key=what, why=object_storage.reason(error)
            )


def warn_of_room(output: str, keep: int | Literal["all"], ckpt_bytes: int) -> None:
    """Log a warning if a new output folder has not the room for the checkpoints that stay, and one
    that is written."""
    num = 2 if keep == "all" else keep + 1
    flaw = None if is_url(output) else folder_trial.shortage(Path(output), num, ckpt_bytes)
    if flaw is not None:
        log.warning("the checkpoints may not fit", why=flaw.text, hint=flaw.hint)


def relative_path(generation: int, step_version: int) -> str:
    """The path of a checkpoint relative to the task's output folder."""
    return f"gen-{generation}/iter-{step_version}"


def step_version_of(path: str) -> int:
    return int(path.rpartition("iter-")[2])


def folder_of(output: str, path: str) -> str:
    """The folder of a checkpoint: in the output, unless the path is a whole one."""
    return path if path.startswith("/") or is_url(path) else f"{output.rstrip('/')}/{path}"


def save(folder: str, trainee: TrainingModel, step_version: int, history: History) -> int:
    """Write a whole replica's state; returns its bytes. After NotSaved nothing is left of it."""
    target = Folder(folder, f"{os.getpid()}")
    snapshot = Snapshot(whole_share(trainee), None)
    try:
        index = share_files.write_share(
            target,
            0,
            step_version,
            snapshot.read(),
            share_files.plain(training_state.numbers(trainee, step_version, history)),
        )
        return share_files.complete(target, [index], model=trainee.description)
    except WRITE_ERRORS as error:
        target.discard()
        raise NotSaved.of(folder, error) from error


def load(
    folder: str, trainee: TrainingModel, history: History, count: WorkCount = UNCOUNTED
) -> int:
    """Read this member's part of the state into its live tensors; returns the step version. Raises
    DamagedCheckpoint, UsageError if the checkpoint is of another model or precision, and
    RuntimeError if it cannot be read now. If a read fails after its beginning, the state is
    undefined."""
    try:
        stored = StoredState(folder)
        plain = stored.numbers()
        expected = trainee.train.precision
        if (saved := plain.get("precision")) != expected:
            raise UsageError(
                f"{folder} holds a state of {saved}, not {expected}",
                f"set train.precision: {saved}, or name another checkpoint",
            )
        numbers = _numbers(folder, plain)
        want = trainee.shards if trainee.shards is not None else whole_share(trainee)
        if any(shard.key.startswith(EXPONENT) and shard.key not in stored.kinds for shard in want):
            raise UsageError(
                f"{folder} has no exponents of exact sums: it was written with "
                "reproducible: rounding",
                "name another checkpoint, or leave reproducible out",
            )
        stored.check(want, count)
        stored.read(want, count)
    except Damaged as error:
        if _is_away(folder):
            raise RuntimeError(f"{folder}: nothing of the task is there: {AWAY}") from None
        raise DamagedCheckpoint(f"{folder}: {error}", FROM_ANOTHER) from None
    except OSError as error:
        raise RuntimeError(f"{folder}: {object_storage.reason(error)}") from None
    return training_state.load(trainee, numbers, history)


def _is_away(folder: str) -> bool:
    """Whether nothing is left of an output whose checkpoint this was: its mount may be away."""
    path = Path(folder)
    return not (is_url(folder) or path.parent.exists() or os.path.lexists(path.parents[1] / LATEST))


def _numbers(folder: str, plain: object) -> training_state.Numbers:
    try:
        return msgspec.convert(plain, training_state.Numbers)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{folder} cannot be used: its numbers are not those of a state: {error}",
            "name another checkpoint",
        ) from None


class StoredBeginning:
    """The `begin_from` of a job: another task's checkpoint, in place of the initial weights. It may
    be a link, such as `latest`, that another task moves: what `newest` has found is read."""

    def __init__(self, folder: str) -> None:
        self._name = self._folder = folder

    def newest(self) -> int:
        """The iterations in it. Raises UsageError; RuntimeError if it cannot be read now."""
        self._folder = self._name if is_url(self._name) else os.path.realpath(self._name)
        try:
            return _numbers(self._folder, StoredState(self._folder).numbers()).step_version
        except Damaged as error:
            if not is_url(self._name) and os.path.realpath(self._name) != self._folder:
                raise RuntimeError(f"{self._name} names another checkpoint now") from None
            raise UsageError(
                f"begin_from: {self._name}: {error}", "name the folder of a checkpoint, iter-N"
            ) from None
        except OSError as error:
            raise RuntimeError(f"{self._folder}: {object_storage.reason(error)}") from None

    def begin(self, trainee: TrainingModel, count: WorkCount = UNCOUNTED) -> bool:
        return False

    def read(
        self,
        trainee: TrainingModel,
        step_version: int,
        history: History,
        count: WorkCount = UNCOUNTED,
    ) -> None:
        """Raises RuntimeError if the first member has found another one, or if it is gone."""
        try:
            version = load(self._folder, trainee, history, count)
        except DamagedCheckpoint:
            if is_url(self._folder) or os.path.exists(self._folder):
                raise
            raise RuntimeError(f"{self._folder} was removed while it was read") from None
        if version != step_version:
            raise RuntimeError(
                f"{self._folder} has iteration {version}, and the first rank found {step_version}"
            )

"""The formats in which a member saves: Unicron's own, and what a workload brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ....events.records.reports import CheckpointSaved
from ....events.records.types import Body
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.history import History
from ..recovery.state_shards import State
from . import checkpoint, folder, share_files
from .share import own_share


class Content(NamedTuple):
    """What one member saves: shards, and values by key; the first member also `common` values."""

    share: State
    values: Mapping[str, Any]
    common: Mapping[str, Any]


class Format(Protocol):
    """A format of checkpoints, and the place of one task's."""

    every: int
    """Iterations between two of them; 0: at the end only."""

    def folder(self, generation: int, step_version: int) -> str:
        ...

    def content(self, trainee: TrainingModel, step_version: int, history: History,
                saving: tuple[int, ...]) -> Content:
        """What this member saves if the members at the positions `saving` save."""
        ...

    def clear(self, generation: int, name: str) -> None:
        """Remove partial checkpoints that no member of this generation writes. `name` is the one
        that is about to be written."""
        ...

    def saved(self, generation: int, step_version: int, ckpt_bytes: int, *, final: bool) -> None:
        """A checkpoint is complete; called on its first member. Raises OSError."""
        ...


class OwnFormat:
    """Unicron's own checkpoints, in the task's output. The control plane is told of each."""

    def __init__(self, output: str, every: int, task: int, tell: Callable[[Body], None]) -> None:
        self.every = every
        self._output, self._task, self._tell = output, task, tell
        self._cleared = 0

    def folder(self, generation: int, step_version: int) -> str:
        return checkpoint.folder_of(self._output,
                                    checkpoint.relative_path(generation, step_version))

    def content(self, trainee: TrainingModel, step_version: int, history: History,
                saving: tuple[int, ...]) -> Content:
        is_first = trainee.place == saving[0]
        numbers = training_state.numbers(trainee, step_version, history)
        return Content(own_share(trainee, saving),
                       share_files.plain(numbers) if is_first else {}, {})

    def clear(self, generation: int, name: str) -> None:
        if generation != self._cleared:
            folder.clear(self._output, generation)
        self._cleared = generation

    def saved(self, generation: int, step_version: int, ckpt_bytes: int, *, final: bool) -> None:
        self._tell(CheckpointSaved(
            task=self._task, generation=generation, step_version=step_version, final=final,
            path=checkpoint.relative_path(generation, step_version), ckpt_bytes=ckpt_bytes))

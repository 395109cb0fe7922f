"""Checkpoints in parts: periodic ones in the background, blocking ones when members leave.

docs/ARCHITECTURE.md, "Checkpoints", has the rules. Any error but those of a write ends the process.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import structlog
from torch import Tensor

from ....events import object_storage
from ....events.records.orders import StartRank
from ....events.records.reports import CheckpointSaved
from ....events.records.types import Body, SaveKind
from ....events.spec.parallelism import has_every_part
from ...host import output_owner
from ...host.checkpoint_index import Index, read_index
from ...host.output_owner import Owner
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.exit_report import is_cuda_error
from ..process.history import History
from ..process.trace import Event
from ..recovery.regions import State
from ..recovery.resharding import Shard
from . import folder, share_files, snapshot
from .checkpoint import WRITE_ERRORS, NotSaved, Superseded, folder_of, relative_path
from .folder import Folder
from .save_reports import SaveReports
from .share import own_share

INDEX_S_MAX = 10.0
"""How long an index may be missing after the other members have ended their writes."""
SHARES_S_MAX = 300.0
"""How long the first member waits for another one whose file does not grow, if it does not know
whether that still writes."""
POLL_S = 0.05

log = structlog.get_logger()


class Content(NamedTuple):
    """What one member saves: shards, and values by key; the first member also `common` values, and
    the description of the model, if its format has one."""

    share: State
    values: Mapping[str, Any]
    common: Mapping[str, Any]
    model: bytes = b""


class Format(Protocol):
    """A format of checkpoints, and the place of one task's."""

    every: int
    """Iterations between two of them; 0: at the end only."""

    def folder(self, generation: int, step_version: int) -> str: ...

    def content(
        self, trainee: TrainingModel, step_version: int, history: History, saving: tuple[int, ...]
    ) -> Content:
        """What this member saves if the members at the positions `saving` save."""
        ...

    def clear(self, generation: int, name: str) -> None:
        """Before a share is written: remove partial checkpoints that no member of this generation
        writes, but not `name`. Raises OSError if the task may not write there."""

    def saved(self, save: "Save", ckpt_bytes: int, *, final: bool) -> None:
        """A checkpoint is complete; called on its first member. Raises OSError."""


class OwnFormat:
    """Unicron's own checkpoints, in the task's output. The control plane is told of each."""

    def __init__(self, every: int, task: Owner, tell: Callable[[Body], None]) -> None:
        self.every = every
        self._output, self._task, self._tell = task.output, task, tell
        self._cleared = 0
        self._device = -1
        """The file system of the output; below 0: not known."""
        if (local := output_owner.local_folder(self._output)) is not None:
            with suppress(OSError):
                self._device = output_owner.device_of(local)

    def folder(self, generation: int, step_version: int) -> str:
        return folder_of(self._output, relative_path(generation, step_version))

    def content(
        self, trainee: TrainingModel, step_version: int, history: History, saving: tuple[int, ...]
    ) -> Content:
        is_first = trainee.place == saving[0]
        numbers = training_state.numbers(trainee, step_version, history)
        return Content(
            own_share(trainee, saving),
            share_files.plain(numbers) if is_first else {},
            {},
            trainee.description,
        )

    def clear(self, generation: int, name: str) -> None:
        local = output_owner.local_folder(self._output)
        if local is not None:
            if self._device >= 0:
                output_owner.check_mounted(local, self._device)
            output_owner.claim(local, self._task, takes_over=False)
            self._device = output_owner.device_of(local)
        if generation != self._cleared:
            folder.clear(self._output, generation)
        self._cleared = generation

    def saved(self, save: "Save", ckpt_bytes: int, *, final: bool) -> None:
        self._tell(
            CheckpointSaved(
                task=self._task.task,
                generation=save.generation,
                step_version=save.step_version,
                final=final,
                path=relative_path(save.generation, save.step_version),
                ckpt_bytes=ckpt_bytes,
                loss=save.loss,
                output=self._task.output,
            )
        )


class Save(NamedTuple):
    """One checkpoint. `saving`: the positions that save; the first completes it. `store`: the
    endpoint of the generation's store, which no other generation of any task has. `loss`: what made
    the state NaN or infinite (History.spoilt_by); empty: nothing has. `attempt`: the number of a
    save that is repeated, the same on all members; they write all shares again."""

    generation: int
    step_version: int
    saving: tuple[int, ...]
    store: str
    loss: str = ""
    attempt: int = 0

    @property
    def token(self) -> str:
        text = f"{self.store} gen-{self.generation}/iter-{self.step_version} {self.saving}"
        if self.attempt:
            text += f" {self.attempt}"
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class _Others(NamedTuple):
    """When the other members were known to have ended their writes (0: they may still write), and
    when they were last known to write."""

    done_s: float = 0.0
    wrote_s: float = 0.0

    def heard(self, num_saving: int, now_s: float) -> "_Others":
        """So many of them are known to write now."""
        return _Others(0.0, now_s) if num_saving else self._replace(done_s=self.done_s or now_s)


class Saver:
    """Writes one member's checkpoints of one format."""

    def __init__(
        self,
        form: Format,
        what: SaveKind,
        start: StartRank,
        *,
        tell: Callable[[Body], None],
        note: Callable[[Event, int, int], None],
        count: WorkCount = UNCOUNTED,
    ) -> None:
        """`count`: of the bytes that are saved while the task waits for it."""
        self._count = count
        self.every = form.every
        self._format, self._reports = form, SaveReports(start, what, tell)
        self._note = note
        self._thread: threading.Thread | None = None
        self._snapshot: snapshot.Snapshot | None = None
        self._save: Save | None = None
        """The thread's current or last save."""
        self._written: Save | None = None
        """The last save of which this member has written its share."""
        self._saved: tuple[Save, int] | None = None
        """The last checkpoint that this member completed, and its bytes."""
        self._is_superseded = False
        """True if the thread must abandon its write."""
        self._is_waiting = self._is_given_up = False
        """Whether the thread waits for the others, and whether it must end this wait."""
        self._others = _Others()
        self._leftover: Folder | None = None
        """The files of the last save that this member did not complete as the first one."""

    def has_begun(self, generation: int, step_version: int) -> bool:
        """Whether the last save in the background was of this state."""
        last = self._save
        return last is not None and (last.generation, last.step_version) == (
            generation,
            step_version,
        )

    def is_saving(self, generation: int) -> bool:
        """Whether this member still writes. A wait for members of an earlier generation, which the
        next save ends, does not count."""
        if self._thread is None or not self._thread.is_alive() or self._save is None:
            return False
        return not self._is_waiting or self._save.generation == generation

    def hear(self, num_others_saving: int) -> None:
        """The number of other members that still write, from the stats of an iteration."""
        self._others = self._others.heard(num_others_saving, time.monotonic())

    def detach(self) -> None:
        if self._snapshot is not None:
            self._snapshot.detach()
            self._snapshot = None

    def begin(self, trainee: TrainingModel, history: History, save: Save) -> None:
        """Save this member's share in the background. Call it only if no member `is_saving`."""
        self._is_given_up = True
        self.wait()
        self._is_given_up = self._is_superseded = False
        self._others = _Others()
        self._note("save", save.generation, save.step_version)
        try:
            content = self._format.content(trainee, save.step_version, history, save.saving)
            taken = snapshot.Snapshot(content.share, snapshot.buffer_bytes(trainee.shards))
            self._save = save
            self._thread = threading.Thread(
                target=self._run,
                name="checkpoint",
                daemon=True,
                args=(save, trainee.place, taken, content),
            )
            self._thread.start()
            self._snapshot = taken
        except (RuntimeError, MemoryError) as error:  # no memory, or no thread
            if is_cuda_error(error):
                raise
            self._thread = None
            folder = self._format.folder(save.generation, save.step_version)
            self._failed(
                save, trainee.place, NotSaved(folder, f"no snapshot of the state: {error}")
            )

    def save(
        self,
        trainee: TrainingModel,
        history: History,
        save: Save,
        *,
        final: bool,
        must_stop: Callable[[], bool],
    ) -> bool:
        """Save this member's share before returning; the first member waits for the others until
        `must_stop` returns True. A preempted member abandons an older write, the final save waits
        for it. Returns False if it could not be saved, which is told."""
        self._is_superseded = not final and (self._save is None or not _is_same(self._save, save))
        if not self._has_written(save, trainee.place):
            self._note("save", save.generation, save.step_version)
        self._others = self._others.heard(0, time.monotonic())
        self.wait()
        self._is_superseded = False
        try:
            if self._has_written(save, trainee.place):
                if trainee.place == save.saving[0]:
                    self._complete_again(save, final=final)
                return True
            content = self._format.content(trainee, save.step_version, history, save.saving)
            taken = snapshot.Snapshot(content.share, None)
            self._others = _Others()
            with self._count.of("saves its state", taken.num_bytes, is_storage=True):
                self._write(
                    *(save, trainee.place, taken, content),
                    final=final,
                    must_stop=must_stop,
                    count=self._count,
                )
        except NotSaved as error:
            if is_cuda_error(error):
                raise
            if isinstance(error, Superseded):
                log.warning("checkpoint not saved", iteration=save.step_version, why=str(error))
            else:
                self._failed(save, trainee.place, error, is_ordered=True, final=final)
            return False
        return True

    def discard_leftover(self) -> None:
        """Remove the files of a save that failed. Call it when no member writes any more."""
        if self._leftover is not None:
            self._leftover.discard()
            self._leftover = None

    def _has_written(self, save: Save, place: int) -> bool:
        """Whether this member has nothing more to write for this checkpoint."""
        if place == save.saving[0]:
            return self._saved is not None and _is_same(self._saved[0], save)
        return self._written == save

    def wait(self) -> None:
        """Wait for a write in progress: a process that exits earlier leaves a partial one."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, save: Save, place: int, taken: snapshot.Snapshot, content: Content) -> None:
        self._note("saving", save.generation, save.step_version)
        try:
            self._write(save, place, taken, content, final=False, must_stop=lambda: False)
        except Superseded as error:
            log.info(
                "checkpoint abandoned: a newer one is needed"
                if self._is_superseded
                else "checkpoint abandoned",
                iteration=save.step_version,
                why=error.why,
            )
        except NotSaved as error:
            self._failed(save, place, error)

    def _write(
        self,
        save: Save,
        place: int,
        taken: snapshot.Snapshot,
        content: Content,
        *,
        final: bool,
        must_stop: Callable[[], bool],
        count: WorkCount = UNCOUNTED,
    ) -> None:
        """Raises NotSaved, and Superseded if it was given up."""
        name = self._format.folder(save.generation, save.step_version)
        is_first = place == save.saving[0]
        try:
            self.discard_leftover()
            target = folder.Folder(name, save.token)
            self._format.clear(save.generation, target.partial_name)
            self._leftover = target if is_first else None
            self._write_share(target, save, place, taken, content, count)
            self._written = save
            if is_first:
                ckpt_bytes = self._complete(target, save, content, must_stop)
                self._leftover = None
                self._note("saved", save.generation, save.step_version)
                self._saved = save, ckpt_bytes
                self._format.saved(save, ckpt_bytes, final=final)
        except WRITE_ERRORS as error:
            raise NotSaved.of(name, error) from error
        finally:
            taken.release()
        self._succeeded(save, name, is_first=is_first)

    def _complete_again(self, save: Save, *, final: bool) -> None:
        """The files of the checkpoint are complete already. Raises NotSaved."""
        assert self._saved is not None
        name = self._format.folder(save.generation, save.step_version)
        try:
            self._format.saved(save, self._saved[1], final=final)
        except OSError as error:
            raise NotSaved.of(name, error) from error
        self._succeeded(save, name, is_first=True)

    def _write_share(
        self,
        target: Folder,
        save: Save,
        place: int,
        taken: snapshot.Snapshot,
        content: Content,
        count: WorkCount,
    ) -> None:
        """Write the share. If that fails, remove what was written, and tell the first member."""
        try:
            share_files.write_share(
                target,
                place,
                save.step_version,
                self._pieces(save, target.name, taken, count),
                content.values,
            )
        except (*WRITE_ERRORS, Superseded) as error:
            if len(save.saving) == 1:
                target.discard()
            else:
                target.remove(target.data_name(place))
                share_files.write_failure(
                    target,
                    place,
                    save.step_version,
                    object_storage.reason(object_storage.root_of(error)),
                )
            raise

    def _pieces(
        self, save: Save, name: str, taken: snapshot.Snapshot, count: WorkCount
    ) -> Iterator[tuple[Shard, Tensor]]:
        """What `taken` reads, as long as no newer checkpoint is needed. Raises Superseded."""
        for index, piece in enumerate(taken.read()):
            if self._is_superseded:
                raise Superseded(name, "a newer one is needed")
            if index == len(taken.pieces) // 2:
                self._note("save_mid", save.generation, save.step_version)
            yield piece
            count.add(piece[1].nbytes)

    def _complete(
        self, target: Folder, save: Save, content: Content, must_stop: Callable[[], bool]
    ) -> int:
        """Wait until all indexes are there, then complete the checkpoint. Returns its bytes."""
        self._is_waiting = True
        try:
            found = [self._wait_for(target, save, place, must_stop) for place in save.saving]
            return share_files.complete(target, found, content.common, content.model)
        except (*WRITE_ERRORS, ValueError, NotSaved) as error:
            target.discard()
            if isinstance(error, ValueError):
                raise NotSaved(target.name, str(error)) from None
            raise
        finally:
            self._is_waiting = False

    def _wait_for(
        self, target: Folder, save: Save, place: int, must_stop: Callable[[], bool]
    ) -> Index:
        """The index of the member at `place`. Raises NotSaved if it has not written its share, and
        Superseded if it is not to be waited for."""
        begin_s = moved_s = time.monotonic()
        written_bytes = 0
        while True:
            index = read_index(target.read(target.index_name(place)))
            if index is not None and index.error:
                raise NotSaved(
                    target.name, f"the member at {place} did not write its share: {index.error}"
                )
            if index is not None and index.step_version == save.step_version:
                return index
            now_s = time.monotonic()
            if self._is_given_up or self._is_superseded or must_stop():
                raise Superseded(target.name, f"the share of the member at {place} is missing")
            before, written_bytes = written_bytes, target.written_bytes(target.data_name(place))
            if written_bytes > before:
                moved_s = now_s
            others = self._others
            moved_s = max(moved_s, others.wrote_s)
            done_s = max(others.done_s, moved_s if moved_s > begin_s else 0.0)
            is_late = others.done_s > 0 and now_s - done_s > INDEX_S_MAX
            if is_late or now_s - moved_s > SHARES_S_MAX:
                limit_s = INDEX_S_MAX if is_late else SHARES_S_MAX
                raise NotSaved(
                    target.name,
                    f"the member at {place} did not write its share: no progress for {limit_s:g} s",
                )
            time.sleep(POLL_S)

    def _succeeded(self, save: Save, name: str, *, is_first: bool) -> None:
        if self._reports.worked(name, save.generation, save.step_version, is_whole=is_first):
            log.info("checkpoints are saved again", iteration=save.step_version)

    def _failed(
        self,
        save: Save,
        place: int,
        error: NotSaved,
        *,
        is_ordered: bool = False,
        final: bool = False,
    ) -> None:
        """Log and report a failure that is new, and each one of a save that is repeated until it
        works: that one by the first member alone."""
        is_new = self._reports.failed(
            error,
            save.generation,
            save.step_version,
            final=final,
            is_repeated=is_ordered and place == save.saving[0],
        )
        if is_new or is_ordered:
            then = "" if is_ordered else "; training continues"
            log.warning(f"checkpoint not saved{then}", iteration=save.step_version, why=str(error))


def _is_same(one: Save, other: Save) -> bool:
    """Whether both are the same checkpoint, perhaps of other members."""
    return one[:2] == other[:2]


def can_save(trainee: TrainingModel, saving: Sequence[int]) -> bool:
    """Whether the members at these positions together have the whole state of this layout."""
    return trainee.place in saving and has_every_part(
        trainee.axes, trainee.train.parallel.optimizer, saving
    )

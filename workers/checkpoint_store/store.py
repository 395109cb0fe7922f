"""In-memory checkpoint store: the two newest complete checkpoints per task, in bounded memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ...events.records.types import CHECKPOINTS_NUM_MAX
from .protocol import CheckpointRequest, Offer

ENDED_NUM_MAX = 1024
"""The store remembers this many ended tasks."""


class StoreRefused(Exception):
    """A checkpoint is refused; `str()` says why."""


class StoredCheckpoint(Struct, frozen=True, kw_only=True, eq=False):
    """A complete checkpoint. A reader of `memory` may continue after the store has removed it."""

    offer: Offer
    checksum: str
    memory: mmap.mmap


class CheckpointStore:
    """At most `bytes_max` bytes of checkpoints, complete and incoming. Thread-safe.

    `lost` is called with a task that has not ended and has no checkpoint left; `first` is called
    when the very first checkpoint is complete, before its rank gets the reply. `start` is the
    store's start number: a later store of its node has a higher number.
    """

    def __init__(self, bytes_max: int, lost: Callable[[int], None],
                 first: Callable[[], None] = lambda: None, *, start: int = 0) -> None:
        self.bytes_max = bytes_max
        self.start = start
        self._lost = lost
        self._first = first
        self._is_new = True
        self._stored: list[StoredCheckpoint] = []
        """In order of arrival."""
        self._incoming: dict[int, Offer] = {}
        """Incoming checkpoints, by the id of their memory."""
        self._without_checkpoint: set[int] = set()
        """Tasks whose only checkpoint made room for an incoming one."""
        self._newest: dict[int, int] = {}
        """By task: the highest generation that offered a checkpoint."""
        self._ended: dict[int, None] = {}
        """The last ended tasks, because an orphaned rank may still send checkpoints of them."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of complete and incoming checkpoints."""
        return sum(offer.copy_bytes for offer in (
            *(one.offer for one in self._stored), *self._incoming.values()))

    def reserve(self, offer: Offer) -> mmap.mmap:
        """Reserve memory for an incoming checkpoint. Raises StoreRefused.

        If memory is short, checkpoints are removed: first those whose task has a newer one, in
        order of arrival; then the last one of this task. The last checkpoint of another task is
        never removed. If the new checkpoint is refused, none is removed.
        """
        with self._lock:
            if offer.task in self._ended:
                raise StoreRefused(f"task {offer.task} has ended")
            self._check_generation(offer)
            if not 0 < offer.copy_bytes <= self.bytes_max:
                raise StoreRefused(f"checkpoint of {offer.copy_bytes} bytes does not fit into "
                                   f"{self.bytes_max}")
            removed = self._to_remove_for(offer)
            try:
                memory = mmap.mmap(-1, offer.copy_bytes)
            except OSError as error:
                raise StoreRefused(f"no memory for {offer.copy_bytes} bytes: {error}") from None
            for old in removed:
                self._stored.remove(old)
            if removed and not self._of(offer.task):
                self._without_checkpoint.add(offer.task)
            self._newest[offer.task] = offer.generation
            self._incoming[id(memory)] = offer
            return memory

    def add(self, stored: StoredCheckpoint) -> None:
        """Add a complete checkpoint. The task keeps only its newest CHECKPOINTS_NUM_MAX. Raises
        StoreRefused if the task has ended meanwhile, or has a newer checkpoint."""
        offer = stored.offer
        with self._lock:
            if id(stored.memory) not in self._incoming:
                raise StoreRefused(f"task {offer.task} has ended")
            self._check_generation(offer)
            there = self._of(offer.task)
            if there and _age(there[-1].offer) > _age(offer):
                raise StoreRefused(f"task {offer.task} has a newer checkpoint than generation "
                                   f"{offer.generation} step {offer.step_version}")
            del self._incoming[id(stored.memory)]
            self._stored.append(stored)
            self._without_checkpoint.discard(offer.task)
            for old in self._of(offer.task)[:-CHECKPOINTS_NUM_MAX]:
                self._stored.remove(old)
            is_first, self._is_new = self._is_new, False
        if is_first:
            self._first()

    def cancel(self, offer: Offer, memory: mmap.mmap) -> None:
        """Cancel an incoming checkpoint; no effect if it is complete."""
        with self._lock:
            is_known = self._incoming.pop(id(memory), None) is not None
            is_lost = is_known and offer.task in self._without_checkpoint
            if is_lost:
                self._without_checkpoint.discard(offer.task)
        if is_lost:
            self._lost(offer.task)

    def of(self, task: int) -> list[StoredCheckpoint]:
        """The complete checkpoints of a task, the newest last."""
        with self._lock:
            return self._of(task)

    def find(self, request: CheckpointRequest) -> StoredCheckpoint | None:
        """The newest checkpoint that matches the request."""
        with self._lock:
            fit = [one for one in self._of(request.task)
                   if request.fits(one.offer.generation, one.offer.step_version)]
            return fit[-1] if fit else None

    def forget(self, task: int) -> None:
        """Remove all checkpoints of a task that has ended."""
        with self._lock:
            self._stored = [one for one in self._stored if one.offer.task != task]
            self._incoming = {key: one for key, one in self._incoming.items() if one.task != task}
            self._newest.pop(task, None)
            self._without_checkpoint.discard(task)
            self._ended[task] = None
            if len(self._ended) > ENDED_NUM_MAX:
                del self._ended[next(iter(self._ended))]

    def _of(self, task: int) -> list[StoredCheckpoint]:
        return [one for one in self._stored if one.offer.task == task]

    def _check_generation(self, offer: Offer) -> None:
        newest = self._newest.get(offer.task, 0)
        if offer.generation < newest:
            raise StoreRefused(f"generation {offer.generation} of task {offer.task} is over: "
                               f"it has checkpoints of generation {newest}")

    def _to_remove_for(self, offer: Offer) -> list[StoredCheckpoint]:
        """The checkpoints to remove for `offer`. Raises StoreRefused if that is not enough."""
        older = [one for one in self._stored if one is not self._of(one.offer.task)[-1]]
        removed: list[StoredCheckpoint] = []
        over_bytes = self.used_bytes + offer.copy_bytes - self.bytes_max
        for one in (*older, *self._of(offer.task)[-1:]):
            if over_bytes <= 0:
                break
            removed.append(one)
            over_bytes -= one.offer.copy_bytes
        if over_bytes > 0:
            raise StoreRefused(f"checkpoint of {offer.copy_bytes} bytes does not fit beside the "
                               f"{self.used_bytes} of {self.bytes_max} in use")
        return removed


def _age(offer: Offer) -> tuple[int, int]:
    return offer.generation, offer.step_version


# --- Available memory of the machine, or of the container ---


class _Files(NamedTuple):
    """File names of a cgroup: its limit, its usage, and the keys of its page cache."""

    limit: str
    used: str
    cache: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes",
             ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of MemAvailable and of the free memory of each cgroup of this process.

    `proc` and `cgroups` are the kernel's folders. Their files are described in proc(5), and in
    "Control Group v2" and "Memory Resource Controller" (v1) in the kernel's documentation.
    """
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return max(0, min(available_kib * 1024, *_left_bytes(proc, cgroups)))


def _left_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """Free bytes of each cgroup with a limit. In a container the path may be the host's; then only
    the root is read. The page cache counts as free, as in MemAvailable: the kernel can drop it."""
    yield 1 << 62
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files, root = (_V1, cgroups / "memory") if controllers else (_V2, cgroups)
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents[: len(inner.parts) - len(root.parts)]):
            try:
                limit = int((folder / files.limit).read_text(encoding="ascii"))
                used = int((folder / files.used).read_text(encoding="ascii"))
                stat = dict(entry.split() for entry in
                            (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            yield limit - used + sum(int(stat.get(name, 0)) for name in files.cache)

"""In-memory checkpoint store: the newest complete shares of each task, in bounded memory."""

import mmap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from ...events.errors import UsageError
from ...events.records.types import CHECKPOINTS_NUM_MAX
from ...events.whole_numbers import whole_number
from ..host.memory_cgroups import CGROUPS, folders_of, limit_and_free
from .protocol import Manifest, Offer, ShareRequest

BYTES_MAX = "UNICRON_COPIES_BYTES_MAX"
"""Environment variable of agents and stores: the memory for checkpoints."""
AVAILABLE_SHARE = 0.25
ENDED_NUM_MAX = 1024
"""The store remembers this many ended tasks."""


class StoreRefused(Exception):
    """A checkpoint is refused; `str()` says why."""


class StoredCheckpoint(Struct, frozen=True, kw_only=True, eq=False):
    """A complete share. `memory`: manifest and pieces. A reader may go on after its removal."""

    offer: Offer
    manifest: Manifest
    sums: bytes
    checksum: str
    memory: mmap.mmap

    def pieces(self) -> list[memoryview]:
        begin, found = self.offer.manifest_bytes, list[memoryview]()
        for piece in self.manifest.pieces:
            found.append(memoryview(self.memory)[begin : begin + piece.num_bytes])
            begin += piece.num_bytes
        return found


class CheckpointStore:
    """At most `bytes_max` bytes of shares, complete and incoming. Thread-safe.

    Of each share, the store keeps the newest and the one before. As soon as an offer says that a
    version is whole, that version counts as the one before, and all older ones of the task are
    removed, whichever share they are of.

    `lost` is called with a task that has not ended and has no share left; `first` is called when
    the very first share is complete, before its rank gets the reply. `start` is the store's start
    number: a later store of its node has a higher number.
    """

    def __init__(
        self,
        bytes_max: int,
        lost: Callable[[int], None],
        first: Callable[[], None] = lambda: None,
        *,
        start: int = 0,
    ) -> None:
        self.bytes_max = bytes_max
        self.start = start
        self._lost = lost
        self._first = first
        self._is_new = True
        self._stored: list[StoredCheckpoint] = []
        """In order of arrival."""
        self._incoming: dict[int, Offer] = {}
        """Incoming shares, by the id of their memory."""
        self._without_checkpoint: set[int] = set()
        """Tasks whose last share made room for an incoming one."""
        self._newest: dict[int, int] = {}
        """By task: the highest generation that offered a share."""
        self._whole: dict[int, tuple[int, int]] = {}
        """By task: the newest version that is whole, as the members have said."""
        self._ended: dict[int, None] = {}
        """The last ended tasks, because an orphaned rank may still send shares of them."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of complete and incoming shares."""
        return sum(
            offer.copy_bytes
            for offer in (*(one.offer for one in self._stored), *self._incoming.values())
        )

    def reserve(self, offer: Offer) -> mmap.mmap:
        """Reserve memory for an incoming share. If memory is short, shares are removed: first those
        that have a newer one of the same number, in order of arrival; then the last one of this
        number of this task. The last share of another number or task is never removed. If the new
        one is refused (StoreRefused), none is removed."""
        with self._lock:
            if offer.task in self._ended:
                raise StoreRefused(f"task {offer.task} has ended")
            self._check_generation(offer)
            if not 0 <= offer.share < offer.num_shares:
                raise StoreRefused(f"share {offer.share} of {offer.num_shares}")
            bytes_max = min(self.bytes_max, offer.bytes_max or self.bytes_max)
            if not 0 < offer.manifest_bytes <= offer.copy_bytes <= bytes_max:
                raise StoreRefused(
                    f"share of {offer.copy_bytes} bytes does not fit into {bytes_max}"
                )
            removed = self._to_remove_for(offer, bytes_max)
            try:
                # Private, because new pages of shared memory cost more.
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                memory = mmap.mmap(-1, offer.copy_bytes, flags=flags)
            except OSError as error:
                raise StoreRefused(f"no memory for {offer.copy_bytes} bytes: {error}") from None
            for old in removed:
                self._stored.remove(old)
            if removed and not self._of(offer.task):
                self._without_checkpoint.add(offer.task)
            self._newest[offer.task] = offer.generation
            self._whole[offer.task] = max(offer.whole, self._whole.get(offer.task, (0, 0)))
            self._incoming[id(memory)] = offer
            return memory

    def add(self, stored: StoredCheckpoint) -> None:
        """Add a complete share. At most CHECKPOINTS_NUM_MAX of its number remain. Raises
        StoreRefused if the task has ended meanwhile, or has a newer one."""
        offer = stored.offer
        with self._lock:
            if id(stored.memory) not in self._incoming:
                raise StoreRefused(f"task {offer.task} has ended")
            self._check_generation(offer)
            there = self._same(offer)
            if there and there[-1].offer.version > offer.version:
                raise StoreRefused(
                    f"task {offer.task} has a newer checkpoint than generation "
                    f"{offer.generation} step {offer.step_version}"
                )
            del self._incoming[id(stored.memory)]
            self._without_checkpoint.discard(offer.task)
            whole = self._whole.get(offer.task, (0, 0))
            # A version that is not known to be whole is worth less than the one that is.
            others = [
                one
                for one in there
                if (one.offer.version, one.offer.num_shares) != (offer.version, offer.num_shares)
            ]
            kept = [one for one in others if one.offer.version == whole] or others
            kept = kept[1 - CHECKPOINTS_NUM_MAX :]
            self._stored = [
                one
                for one in self._stored
                if (one not in there or one in kept)
                # no newer version is whole
                and one.offer.version >= self._whole.get(one.offer.task, (0, 0))
            ]
            self._stored.append(stored)
            is_first, self._is_new = self._is_new, False
        if is_first:
            self._first()

    def cancel(self, offer: Offer, memory: mmap.mmap) -> None:
        """Cancel an incoming share; no effect if it is complete."""
        with self._lock:
            is_known = self._incoming.pop(id(memory), None) is not None
            is_lost = is_known and offer.task in self._without_checkpoint
            if is_lost:
                self._without_checkpoint.discard(offer.task)
        if is_lost:
            self._lost(offer.task)

    def of(self, task: int) -> list[StoredCheckpoint]:
        """The complete shares of a task, the newest last."""
        with self._lock:
            return self._of(task)

    def find(self, request: ShareRequest) -> StoredCheckpoint | None:
        with self._lock:
            for one in self._of(request.task):
                offer = one.offer
                if (offer.version, offer.share, offer.num_shares) == (
                    (request.generation, request.step_version),
                    request.share,
                    request.num_shares,
                ):
                    return one
            return None

    def forget(self, task: int) -> None:
        """Remove all shares of a task that has ended."""
        with self._lock:
            self._stored = [one for one in self._stored if one.offer.task != task]
            self._incoming = {key: one for key, one in self._incoming.items() if one.task != task}
            self._newest.pop(task, None)
            self._whole.pop(task, None)
            self._without_checkpoint.discard(task)
            self._ended[task] = None
            if len(self._ended) > ENDED_NUM_MAX:
                del self._ended[next(iter(self._ended))]

    def _of(self, task: int) -> list[StoredCheckpoint]:
        return [one for one in self._stored if one.offer.task == task]

    def _same(self, offer: Offer) -> list[StoredCheckpoint]:
        return [one for one in self._of(offer.task) if one.offer.share == offer.share]

    def _check_generation(self, offer: Offer) -> None:
        newest = self._newest.get(offer.task, 0)
        if offer.generation < newest:
            raise StoreRefused(
                f"generation {offer.generation} of task {offer.task} is over: "
                f"it has checkpoints of generation {newest}"
            )

    def _to_remove_for(self, offer: Offer, bytes_max: int) -> list[StoredCheckpoint]:
        """The shares to remove for `offer`. Raises StoreRefused if that is not enough."""
        last = {(one.offer.task, one.offer.share): one for one in self._stored}
        older = [
            one
            for one in self._stored
            if one is not last[one.offer.task, one.offer.share]
            or (one.offer.task == offer.task and one.offer.version < offer.whole)
        ]
        removed: list[StoredCheckpoint] = []
        over_bytes = self.used_bytes + offer.copy_bytes - bytes_max
        for one in (*older, *(one for one in self._same(offer)[-1:] if one not in older)):
            if over_bytes <= 0:
                break
            removed.append(one)
            over_bytes -= one.offer.copy_bytes
        if over_bytes > 0:
            raise StoreRefused(
                f"share of {offer.copy_bytes} bytes does not fit beside the "
                f"{self.used_bytes} of {bytes_max} in use"
            )
        return removed


# --- Available memory of the machine, or of the container ---


def bytes_max(environment: Mapping[str, str]) -> int:
    """Bytes of memory for checkpoints; by default a quarter of what is available, within the
    container if there is one. Raises UsageError."""
    if BYTES_MAX in environment:
        text = environment[BYTES_MAX]
        if (given := whole_number(text)) is None:
            raise UsageError(f"{BYTES_MAX} is {text[:40]!r}", "a number of bytes, as in 4000000000")
        return given
    return int(AVAILABLE_SHARE * available_bytes())


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int:
    """The least of MemAvailable and of the free memory of each cgroup of this process."""
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    free = [
        found[1]
        for folders, is_v1 in folders_of(proc / "self", cgroups)
        for folder in folders
        if (found := limit_and_free(folder, ("inactive_file", "active_file"), is_v1=is_v1))
    ]
    return max(0, min([available_kib * 1024, *free]))

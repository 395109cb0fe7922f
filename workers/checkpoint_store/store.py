"""What a keeper holds: of each task the two newest copies, whole, in bounded memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ...events.records.types import NUM_COPIES_MAX
from .protocol import Offer, Wish

ENDED_NUM_MAX = 1024
"""Of how many tasks it is known that they have ended."""


class NoRoom(Exception):
    """A copy is not taken; `str()` says why."""


class Stored(Struct, frozen=True, kw_only=True, eq=False):
    """A whole copy. Whoever reads `memory` may go on when it is not on the shelf any more."""

    offer: Offer
    checksum: str
    memory: mmap.mmap


class Shelf:
    """At most `bytes_max` bytes of copies, whole ones and those on their way. Safe for threads.

    `lost` hears of a task of which nothing is left although it has not ended; `first` is called
    when the first copy of all is there, before anybody is told so. `start` is the keeper's number:
    a later one of its node has a higher one.
    """

    def __init__(self, bytes_max: int, lost: Callable[[int], None],
                 first: Callable[[], None] = lambda: None, *, start: int = 0) -> None:
        self.bytes_max = bytes_max
        self.start = start
        self._lost = lost
        self._first = first
        self._is_new = True
        self._stored: list[Stored] = []
        """In the order of their arrival."""
        self._coming: dict[int, Offer] = {}
        """What is on its way, by the id of its memory."""
        self._bare: set[int] = set()
        """Tasks whose only copy made room for one that is on its way."""
        self._newest: dict[int, int] = {}
        """By task: the highest generation that offered a copy."""
        self._ended: dict[int, None] = {}
        """Tasks that were forgotten last: who still sends of them was given up, and lives."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """By whole copies and by those on their way."""
        return sum(offer.copy_bytes for offer in (
            *(one.offer for one in self._stored), *self._coming.values()))

    def reserve(self, offer: Offer) -> mmap.mmap:
        """Memory for a copy that is about to come. Raises NoRoom.

        Where memory is short, copies go of which there is a newer one, the oldest first; then the
        task's own. Another task's only copy never does. Where none is taken, none goes.
        """
        with self._lock:
            if offer.task in self._ended:
                raise NoRoom(f"task {offer.task} has ended")
            self._check_generation(offer)
            if not 0 < offer.copy_bytes <= self.bytes_max:
                raise NoRoom(f"a copy of {offer.copy_bytes} bytes does not fit into "
                             f"{self.bytes_max}")
            going = self._room_for(offer)
            try:
                memory = mmap.mmap(-1, offer.copy_bytes)
            except OSError as error:
                raise NoRoom(f"no memory for {offer.copy_bytes} bytes: {error}") from None
            for out in going:
                self._stored.remove(out)
            if going and not self._of(offer.task):
                self._bare.add(offer.task)
            self._newest[offer.task] = offer.generation
            self._coming[id(memory)] = offer
            return memory

    def add(self, stored: Stored) -> None:
        """The copy is whole. What the task has beyond the newest is forgotten.

        Raises NoRoom where the task has ended meanwhile, or is further.
        """
        offer = stored.offer
        with self._lock:
            if id(stored.memory) not in self._coming:
                raise NoRoom(f"task {offer.task} has ended")
            self._check_generation(offer)
            there = self._of(offer.task)
            if there and _age(there[-1].offer) > _age(offer):
                raise NoRoom(f"there is a copy of task {offer.task} that is newer than generation "
                             f"{offer.generation} step {offer.step_version}")
            del self._coming[id(stored.memory)]
            self._stored.append(stored)
            self._bare.discard(offer.task)
            for old in self._of(offer.task)[:-NUM_COPIES_MAX]:
                self._stored.remove(old)
            is_first, self._is_new = self._is_new, False
        if is_first:
            self._first()

    def give_up(self, offer: Offer, memory: mmap.mmap) -> None:
        """The copy did not become whole; nothing if it did."""
        with self._lock:
            is_known = self._coming.pop(id(memory), None) is not None
            is_lost = is_known and offer.task in self._bare
            if is_lost:
                self._bare.discard(offer.task)
        if is_lost:
            self._lost(offer.task)

    def of(self, task: int) -> list[Stored]:
        """The whole copies of a task, the newest last."""
        with self._lock:
            return self._of(task)

    def find(self, wish: Wish) -> Stored | None:
        """The newest copy that is wanted."""
        with self._lock:
            fit = [one for one in self._of(wish.task)
                   if wish.fits(one.offer.generation, one.offer.step_version)]
            return fit[-1] if fit else None

    def forget(self, task: int) -> None:
        """The task has ended."""
        with self._lock:
            self._stored = [one for one in self._stored if one.offer.task != task]
            self._coming = {key: one for key, one in self._coming.items() if one.task != task}
            self._newest.pop(task, None)
            self._bare.discard(task)
            self._ended[task] = None
            if len(self._ended) > ENDED_NUM_MAX:
                del self._ended[next(iter(self._ended))]

    def _of(self, task: int) -> list[Stored]:
        return [one for one in self._stored if one.offer.task == task]

    def _check_generation(self, offer: Offer) -> None:
        newest = self._newest.get(offer.task, 0)
        if offer.generation < newest:
            raise NoRoom(f"generation {offer.generation} of task {offer.task} is over: "
                         f"there are copies of generation {newest}")

    def _room_for(self, offer: Offer) -> list[Stored]:
        """The copies that must go for it, in their order. Raises NoRoom if that is not enough."""
        older = [one for one in self._stored if one is not self._of(one.offer.task)[-1]]
        going: list[Stored] = []
        over_bytes = self.used_bytes + offer.copy_bytes - self.bytes_max
        for one in (*older, *self._of(offer.task)[-1:]):
            if over_bytes <= 0:
                break
            going.append(one)
            over_bytes -= one.offer.copy_bytes
        if over_bytes > 0:
            raise NoRoom(f"a copy of {offer.copy_bytes} bytes does not fit beside the "
                         f"{self.used_bytes} of {self.bytes_max} in use")
        return going


def _age(offer: Offer) -> tuple[int, int]:
    return offer.generation, offer.step_version


# --- How much memory there is to take: the machine's, or what a container may have of it. ---


class _Files(NamedTuple):
    """Of a cgroup: its bound, what it uses, and what its pages of files are called."""

    bound: str
    used: str
    cache: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes",
             ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of MemAvailable and of what each cgroup that this process is in has left.

    `proc` and `cgroups` are where Linux shows them: proc(5), and "Control Group v2" and "Memory
    Resource Controller" (v1) in the kernel's documentation.
    """
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return max(0, min(available_kib * 1024, *_left_bytes(proc, cgroups)))


def _left_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """Of each cgroup with a bound. In a container the path may be the host's: then the root is it.

    Pages of files count as left, as they do in MemAvailable: they go when they are in the way.
    """
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
                bound = int((folder / files.bound).read_text(encoding="ascii"))
                used = int((folder / files.used).read_text(encoding="ascii"))
                stat = dict(entry.split() for entry in
                            (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):  # none of that here, or "max"
                continue
            yield bound - used + sum(int(stat.get(name, 0)) for name in files.cache)

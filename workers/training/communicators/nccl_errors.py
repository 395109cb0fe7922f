"""Asks NCCL's communicators for their asynchronous errors: NCCL knows of a lost peer before anyone.

A collective on NCCL is enqueued and returns; if a peer goes, the device waits for ever, and torch's
watchdog is told to keep still (ipc/rank_variables.py). So a thread of this process asks, twice a
second: torch for the error of each group, and the library for that of the communicator behind it
(`ncclCommGetAsyncError`), which also says in words what happened and with which peer
(`ncclGetLastError`, NCCL 2.13). Interface: "Communicator Creation and Management Functions" and
"Fault Tolerance" in NCCL's user guide.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..dependencies import private_torch

ASK_S = 0.5
"""Time between two questions."""
SUCCESS_CODE, IN_PROGRESS_CODE = 0, 7
"""ncclSuccess; ncclInProgress: an operation of a communicator that does not block is not done."""
LIBRARY = "libnccl.so"
WORDS_CHARS_MAX = 1000


class NcclError(NamedTuple):
    """The error of the group of some role."""

    role: str
    words: str
    """As NCCL and torch say it, with the peer if NCCL names one."""


class Library(Protocol):
    """What is asked of NCCL. `communicator`: its address. Neither call blocks."""

    def error_of(self, communicator: int) -> str:
        """The asynchronous error in words; "": none."""
        ...


class NcclLibrary:
    """NCCL at `path`, which this process has loaded already. Raises OSError, AttributeError."""

    def __init__(self, path: str) -> None:
        nccl = ctypes.CDLL(path)
        self._get_error = nccl.ncclCommGetAsyncError
        self._get_error.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self._in_words = nccl.ncclGetErrorString
        self._in_words.argtypes, self._in_words.restype = (ctypes.c_int,), ctypes.c_char_p
        self._last = getattr(nccl, "ncclGetLastError", None)
        if self._last is not None:
            self._last.argtypes, self._last.restype = (ctypes.c_void_p,), ctypes.c_char_p

    def error_of(self, communicator: int) -> str:
        code = ctypes.c_int(SUCCESS_CODE)
        answer = self._get_error(communicator, ctypes.byref(code))
        number = answer or code.value  # an answer that is no success is of the communicator, too
        if number in (SUCCESS_CODE, IN_PROGRESS_CODE):
            return ""
        words = _text(self._in_words(number))
        last = _text(self._last(communicator)) if self._last is not None else ""
        return f"NCCL error {number}: {words}" + (f"; last error: {last}" if last else "")


def _text(words: bytes | None) -> str:
    return " ".join((words or b"").decode("utf-8", "replace").split())[:WORDS_CHARS_MAX]


def loaded_library(maps: Path = Path("/proc/self/maps")) -> NcclLibrary | None:
    """The NCCL that this process has loaded; None: it is part of torch's own library, or there is
    none."""
    try:
        lines = [
            line for line in maps.read_text("utf-8", "replace").splitlines() if LIBRARY in line
        ]
        paths = [line.split(maxsplit=5)[5] for line in lines]
        return NcclLibrary(paths[0].strip()) if paths else None
    except (OSError, AttributeError, IndexError):
        return None


class NcclErrors:
    """Watches the groups of one generation at a time. `tell` is called once for each, in another
    thread, with the first error. `find_library` is called when NCCL is loaded, in that thread."""

    def __init__(
        self,
        tell: Callable[[int, NcclError], None],
        device: torch.device,
        find_library: Callable[[], Library | None] = loaded_library,
        ask_s: float = ASK_S,
    ) -> None:
        self._tell = tell
        self._device = device
        self._find_library = find_library
        self._ask_s = ask_s
        self._lock = threading.Lock()
        self._watched: _Watched | None = None

    def watch(self, generation: int, groups: Mapping[str, Any]) -> None:
        """Ask for the errors of these groups, by role, from now on."""
        watched = _Watched(generation, _distinct(groups), self._device)
        with self._lock:
            self._watched = watched
        threading.Thread(
            target=self._ask_always, args=(watched,), name="NCCL errors", daemon=True
        ).start()

    def forget(self) -> None:
        """The groups are about to be aborted or destroyed. When this returns, no communicator of
        theirs is used here any more."""
        with self._lock:
            watched, self._watched = self._watched, None
        if watched is not None:
            watched.end()

    def _ask_always(self, watched: "_Watched") -> None:
        library: Library | None = None
        if watched.device.type == "cuda":  # torch gives the communicator of the thread's device
            torch.cuda.set_device(watched.device)
        while not watched.ended.wait(self._ask_s):
            library = library or self._find_library()
            if (error := watched.ask(library)) is not None:
                self._tell(watched.generation, error)
                return


class _Watched:
    """The groups of a generation."""

    def __init__(self, generation: int, groups: Sequence[tuple[str, Any]], device: Any) -> None:
        self.generation = generation
        self.ended = threading.Event()
        self.device = device
        self._groups = groups
        self._using = threading.Lock()
        """Held while a communicator is used: an abort frees its memory."""

    def end(self) -> None:
        self.ended.set()
        with self._using:
            self._groups = ()

    def ask(self, library: Library | None) -> NcclError | None:
        """The first error of a group; None: there is none, or the generation has ended."""
        for role, group in self._groups:
            words = private_torch.error_of_group(group, self.device)
            if library is not None:
                words = self._ask_library(library, group) or words
            if words and not self.ended.is_set():
                return NcclError(role, words)
        return None

    def _ask_library(self, library: Library, group: Any) -> str:
        # torch may wait here for a lock of its own: not while an abort waits for ours.
        communicator = private_torch.communicator_of_group(group, self.device)
        with self._using:
            if not communicator or self.ended.is_set():
                return ""
            return library.error_of(communicator)


def _distinct(groups: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each group once, by its first role."""
    distinct: dict[int, tuple[str, Any]] = {}
    for role, group in groups.items():
        distinct.setdefault(id(group), (role, group))
    return list(distinct.values())

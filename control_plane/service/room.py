"""Room on the disk of the log: the leader looks at it, and its changes are reports."""

from collections.abc import Iterator
from pathlib import Path

from ...events import file_space
from ...events.detached_thread import BlockingCalls, Late
from ...events.log.reserve import ROOM_BACK, ROOM_MIN
from ...events.records.reports import RoomChanged
from ..state.cluster import ClusterState

LOOK_S = 1.0
LOOK_S_MAX = 5.0
"""How long one look may take: the file system may hang."""


class Room:
    """The free room of the folder of the log's server. None: it is on another host, so nothing is
    known, and nothing held."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._calls = BlockingCalls[file_space.Room]("room")
        self._free: file_space.Room | None = None

    async def look(self) -> None:
        """Measure. What cannot be measured is as it was."""
        if self._folder is None:
            return
        folder = self._folder
        try:
            self._free = await self._calls.call(lambda: file_space.room(folder), LOOK_S_MAX)
        except (Late, OSError):
            return

    def verdicts(self, state: ClusterState) -> Iterator[RoomChanged]:
        """What has changed since the state's last record about it."""
        free, was_full = self._free, bool(state.no_room)
        if self._folder is None:
            if was_full:  # a former leader has seen another disk
                yield RoomChanged(is_full=False, folder="", free_bytes=0)
        elif free is not None and was_full != (
            is_full := free.is_below(ROOM_BACK if was_full else ROOM_MIN)
        ):
            has_files = free.num_files >= ROOM_MIN.num_files
            yield RoomChanged(
                is_full=is_full,
                folder=str(self._folder),
                free_bytes=free.num_bytes,
                free_files=None if has_files else int(free.num_files),
            )

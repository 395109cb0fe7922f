"""Room on the disk of the log: the leader looks at it, and its changes are reports."""

from collections.abc import Iterator
from pathlib import Path

from ...events import file_space
from ...events.detached_thread import BlockingCalls, Late
from ...events.log.reserve import ROOM_BACK, ROOM_MIN
from ...events.records.reports import RoomChanged
from ..state.cluster import ClusterState

LOOK_S = 1.0
BACK_NUM_LOOKS = 8
"""So many looks in a row have to find room before it is back: an agent whose check has taken the
slots of this disk out needs up to 6 s, and a plan without them would stop ranks that train."""
LOOK_S_MAX = 5.0
"""How long one look may take: the file system may hang."""


class Room:
    """The free room of the folder of the log's server. None: it is on another host, so nothing is
    known, and nothing held."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._calls = BlockingCalls[file_space.Room]("room")
        self._free: file_space.Room | None = None
        self._num_back = 0
        """Looks in a row that have found room."""

    async def look(self) -> None:
        """Measure. What cannot be measured is as it was."""
        if self._folder is None:
            return
        folder = self._folder
        try:
            self.see(await self._calls.call(lambda: file_space.room(folder), LOOK_S_MAX))
        except (Late, OSError):
            return

    def see(self, free: file_space.Room) -> None:
        """Take a measurement."""
        self._free = free
        self._num_back = 0 if free.is_below(ROOM_BACK) else self._num_back + 1

    def verdicts(self, state: ClusterState) -> Iterator[RoomChanged]:
        """What has changed since the state's last record about it."""
        free, was_full = self._free, bool(state.no_room)
        if self._folder is None:
            if was_full:  # a former leader has seen another disk
                yield RoomChanged(is_full=False, folder="", free_bytes=0)
        elif free is not None and was_full != (
            is_full := self._num_back < BACK_NUM_LOOKS if was_full else free.is_below(ROOM_MIN)
        ):
            has_files = free.num_files >= ROOM_MIN.num_files
            yield RoomChanged(
                is_full=is_full,
                folder=str(self._folder),
                free_bytes=free.num_bytes,
                free_files=None if has_files else int(free.num_files),
            )

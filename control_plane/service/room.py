"""Room on the disk of the log: the leader looks at it, and its changes are reports."""

from collections.abc import Iterator
from pathlib import Path

from ...events.detached_thread import BlockingCalls, Late
from ...events.file_space import free_bytes
from ...events.log.reserve import BACK_BYTES, FREE_BYTES_MIN
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
        self._calls = BlockingCalls[int]("room")
        self._free_bytes: int | None = None

    async def look(self) -> None:
        """Measure. What cannot be measured is as it was."""
        if self._folder is None:
            return
        folder = self._folder
        try:
            self._free_bytes = await self._calls.call(lambda: free_bytes(folder), LOOK_S_MAX)
        except (Late, OSError):
            return

    def verdicts(self, state: ClusterState) -> Iterator[RoomChanged]:
        """What has changed since the state's last record about it."""
        free, was_full = self._free_bytes, bool(state.no_room)
        if self._folder is None:
            if was_full:  # a former leader has seen another disk
                yield RoomChanged(is_full=False, folder="", free_bytes=0)
        elif free is not None and was_full != (
            is_full := free < (BACK_BYTES if was_full else FREE_BYTES_MIN)
        ):
            yield RoomChanged(is_full=is_full, folder=str(self._folder), free_bytes=free)

"""When the leader says that the disk of the log is full, and when that it has room again."""

from __future__ import annotations

from pathlib import Path

from decider import Driver
from unicron.control_plane.service.room import BACK_NUM_LOOKS, Room
from unicron.events import file_space
from unicron.events.log.reserve import ROOM_BACK, ROOM_MIN
from unicron.events.records.reports import RoomChanged

PLENTY = file_space.Room(1 << 40, 1 << 20)


def seen(d: Driver, room: Room, free: file_space.Room) -> RoomChanged | None:
    """What a look that finds this changes."""
    room.see(free)
    found = next(iter(room.verdicts(d.state)), None)
    if found is not None:
        d.tell(f"leader/{d.state.nonce}", found)
    return found


def test_bytes_and_files_are_room(d: Driver) -> None:
    room = Room(Path("/s"))
    assert seen(d, room, PLENTY) is None
    assert seen(d, room, file_space.Room(1 << 40)) is None, "btrfs has no number of files"
    assert seen(d, room, file_space.Room(*ROOM_MIN)) is None
    told = seen(d, room, file_space.Room(1 << 40, ROOM_MIN.num_files - 1))
    assert told is not None
    assert (told.is_full, told.free_files) == (True, ROOM_MIN.num_files - 1)


def test_room_is_back_when_it_stays(d: Driver) -> None:
    """Before that, agents say that their disks are healthy: their slots are in the next plan."""
    room = Room(Path("/s"))
    assert seen(d, room, file_space.Room(0)) is not None
    between = file_space.Room(*ROOM_MIN)
    for free in (*[PLENTY] * (BACK_NUM_LOOKS - 1), between, *[ROOM_BACK] * (BACK_NUM_LOOKS - 1)):
        assert seen(d, room, free) is None, free
    told = seen(d, room, PLENTY)
    assert told is not None
    assert not told.is_full
    assert d.state.no_room == ""

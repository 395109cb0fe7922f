"""Where a rank's state came from."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Origin = Literal["", "own", "peer", "copy", "checkpoint", "seed"]
"""Whence a member's state is, from the nearest to the farthest ("": not told)."""


class Taken(Struct, frozen=True):
    """Bytes of state, from rank `rank` on `node`."""

    rank: int
    node: str
    taken_bytes: int

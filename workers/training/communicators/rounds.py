"""Rounds among the members of a generation: each tells the first one something, and it answers.

They go through the generation's store. A member sets one key and reads one; the first member reads
the keys of all by one request, and writes the answers by one. So a round costs a member the same
few requests, however many members there are. A collective would hand each the data of all.
"""

import datetime
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ....events.decoding import from_msgpack

PROTOCOL_VERSION = 1
"""The form of all that the members of a generation tell each other. Whoever changes it raises this:
ranks of two releases then do not wait for each other (`RankReady.protocol`). Release 0.3.0: 0."""
WAIT_S_MAX = 20 * 86400.0
"""Members recover state of any size between two rounds: whoever started them ends a wait in which
nothing moves. torch hands poll(2) the milliseconds in 32 bits."""
LEAVE_S_MAX = 5.0
"""How long the first member waits until the others have read its last answer."""


class Rounds:
    """The members of one generation, as one of them sees them. All call the same methods in the
    same order. Each raises RuntimeError if a member is missing after `wait_s`, or if the wait is
    interrupted. `store`: torch's store of this generation; `name` begins the names of its keys."""

    def __init__(
        self, store: Any, place: int, num: int, name: str, wait_s: float = WAIT_S_MAX
    ) -> None:
        self.store, self.place, self.num = store, place, num
        self._wait_s, self._name = wait_s, name
        self._count = 0

    def gather(self, data: bytes) -> list[bytes]:
        """The data of all members, by place."""
        return unpack(self.agree(data, pack))

    def agree(self, data: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """What `answer` makes of the data of all members, by place. Every member gets it; only the
        first one calls `answer`."""
        key, told = self._tell(data)
        if told is None:
            return self._read(f"{key}/answer")
        answered = answer(told)
        if self.num > 1:
            self.store.set(f"{key}/answer", answered)
        return answered

    def scatter(self, data: bytes, answers: Callable[[Sequence[bytes]], Sequence[bytes]]) -> bytes:
        """This member's own of the `answers` to the data of all members, both by place. Only the
        first member calls `answers`."""
        key, told = self._tell(data)
        if told is None:
            return self._read(f"{key}/answer/{self.place}")
        first, *others = answers(told)
        if others:
            places = range(1, self.num)
            self.store.multi_set([f"{key}/answer/{place}" for place in places], others)
        return first

    def leave(self) -> None:
        """Call it before this process ends because of the last answer: the first member has the
        store, and waits here until the others have read that answer, LEAVE_S_MAX at most."""
        self._wait_s = LEAVE_S_MAX
        with suppress(RuntimeError):
            self._tell(b"")

    def _tell(self, data: bytes) -> tuple[str, list[bytes] | None]:
        """Tell the first member; the round's key, and on the first member what all have told."""
        key = f"{self._name}/{self._count}"
        self._count += 1
        if self.place:
            self.store.set(f"{key}/{self.place}", data)
            return key, None
        keys = [f"{key}/{place}" for place in range(1, self.num)]
        if not keys:
            return key, [data]
        self._wait(keys)
        return key, [data, *self.store.multi_get(keys)]

    def _read(self, key: str) -> bytes:
        self._wait([key])
        data: bytes = self.store.get(key)
        return data

    def _wait(self, keys: list[str]) -> None:
        self.store.wait(keys, datetime.timedelta(seconds=self._wait_s))


def pack(values: Sequence[bytes]) -> bytes:
    """The values of all members as one. Each distinct one is in it once: most are alike."""
    index = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return zlib.compress(
        msgspec.msgpack.encode((list(index), [index[value] for value in values])), level=1
    )


def unpack(data: bytes) -> list[bytes]:
    """The values that were packed; equal ones are one object."""
    distinct, numbers = from_msgpack(zlib.decompress(data), tuple[list[bytes], list[int]])
    return [distinct[number] for number in numbers]

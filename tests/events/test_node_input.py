"""What a node may write to its own keys of the server ends nothing and has a bound."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import redis
from unicron.events.log.embedded_server import Server
from unicron.events.log.port import REPORT_BYTES_MAX, Rejected
from unicron.events.log.redis_streams import (
    LIST_NUM_MAX,
    LOOK_AT_ALL_S,
    LOOKS_NUM,
    NODE_KEY_BYTES_MAX,
    RedisLog,
)

INBOX, BELL = "{unicron:c}:inbox:", "{unicron:c}:bell"
BEAT, READ, OTHER = "{unicron:c}:beat:n1", "{unicron:c}:read:n1", "{unicron:c}:beat:n2"
NODES = ["n1", "n2"]
Redis: Any = redis.Redis
VALUES: list[bytes] = [
    *(b"", b"text", b"nan", b"inf", b"-inf", b"1e308", b"1e400", b"0x10", b"-5", b"1.5", b" 7 "),
    *(b"\xff\xfe", b"\0", b"%s%d", str(2**70).encode(), 5_000 * b"9"),
]


async def test_a_hostile_heartbeat_is_none(own_server: Server) -> None:
    log = RedisLog(own_server.url, "c")
    try:
        with Redis.from_url(own_server.url) as node:
            for value, other in itertools.product(VALUES, VALUES):
                for fields in ({"i": value}, {"i": value, "s": other}, {value: other}):
                    node.xadd(BEAT, fields)
                    node.xadd(OTHER, {"i": 7, "s": other})
                    assert [(beat.node, beat.incarnation) for beat in await log.beats(NODES)] == [
                        ("n2", 7)
                    ]
            node.xadd(BEAT, {"i": 5}, id=f"{2**64 - 1}-1")
            (beat,) = await log.beats(["n1"])
            assert (beat.incarnation, beat.num_spooled, beat.age_s) == (5, 0, 0.0)
            assert await log.beats(["n1"]) == []
    finally:
        await log.close()


@pytest.mark.parametrize(
    "fields", [{"i": 8, "s": NODE_KEY_BYTES_MAX * b"9"}, dict.fromkeys(range(200_000), 1)]
)
async def test_the_keys_of_a_node_have_a_bound(own_server: Server, fields: Any) -> None:
    """A large entry, one of many fields, and many entries; the node is heard again afterwards."""
    log = RedisLog(own_server.url, "c")
    try:
        with Redis.from_url(own_server.url) as node:
            node.xadd(BEAT, fields)
            for _ in range(300):
                node.rpush(READ, 10_000 * b"x")
            for _ in range(40 * LOOKS_NUM):
                assert await log.beats(["n1"]) == []
            assert (node.exists(BEAT), node.exists(READ)) == (0, 0)
            node.xadd(BEAT, {"i": 9})
            assert [beat.incarnation for beat in await log.beats(["n1"])] == [9]
            pipe = node.pipeline()
            for _ in range(40_000):
                pipe.xadd(BEAT, {"i": 9})
            pipe.execute()
            await log.beats(["n1"])
            assert node.exists(BEAT) == 0
    finally:
        await log.close()


async def test_an_entry_of_any_size_is_a_dead_letter_or_refused(own_server: Server) -> None:
    """Of a large one only the beginning is read; the server takes none above 64 MiB."""
    log = RedisLog(own_server.url, "c", lambda node: b"key")
    try:
        await log.admit({"n1": 1})
        with Redis.from_url(own_server.url) as node:
            node.rpush("{unicron:c}:inbox:n1", bytes(REPORT_BYTES_MAX + 1), b"small")
            with pytest.raises((redis.exceptions.RedisError, OSError)):
                node.rpush("{unicron:c}:inbox:n1", bytes((64 << 20) + 1))
        # Each has more than a node may have in one turn, or comes behind it.
        (large,) = (await log.take(after="0-0", num_max=9, wait_s=0.0)).entries
        (small,) = (await log.take(after=large.cursor, num_max=9, wait_s=0.0)).entries
        assert (large.node, len(large.data), large.num_bytes) == ("n1", 1024, REPORT_BYTES_MAX + 1)
        assert (small.data, small.num_bytes) == (b"small", 5)
        why = log.read_report(large)
        assert isinstance(why, Rejected)
        assert why.why == f"it has {REPORT_BYTES_MAX + 1} bytes, and at most 1048576 are read"
        assert why.num_bytes == REPORT_BYTES_MAX + 1
    finally:
        await log.close()


async def test_a_server_that_does_not_tell_sizes_is_read(own_server: Server) -> None:
    """Managed services refuse MEMORY. Lists have the bound of their number of entries then."""
    log = RedisLog(own_server.url, "c", lambda node: b"key")
    try:
        await log.admit({"n1": 1})
        with Redis.from_url(own_server.url) as server:
            server.execute_command("ACL", "SETUSER", "default", "-memory")
            server.rpush("{unicron:c}:inbox:n1", *([b"x"] * (LIST_NUM_MAX + 40)))
            server.xadd(BEAT, {"i": 7})
            taken = await log.take(after="0-0", num_max=9, wait_s=0.0)
            assert len(taken.entries) == 9
            assert taken.trimmed == {"n1": 31}
            assert [beat.incarnation for beat in await log.beats(NODES)] == [7]
    finally:
        await log.close()


async def test_a_list_whose_node_has_not_rung_is_read(own_server: Server) -> None:
    """After LOOK_AT_ALL_S; at once without a wait, for a deadline may pass then."""
    log = RedisLog(own_server.url, "c", lambda node: b"key")
    try:
        await log.admit({"n1": 1, "n2": 1})
        with Redis.from_url(own_server.url) as node:
            (await log.take(after="0-0", num_max=9, wait_s=0.0))
            node.rpush(INBOX + "n1", b"first")
            (first,) = (await log.take(after="0-0", num_max=9, wait_s=0.0)).entries
            began_s = time.monotonic()
            node.rpush(INBOX + "n1", b"second")
            while not (taken := await log.take(after=first.cursor, num_max=9, wait_s=0.1)).entries:
                assert time.monotonic() - began_s < LOOK_AT_ALL_S + 5.0
            assert [one.data for one in taken.entries] == [b"second"]
            assert time.monotonic() - began_s > LOOK_AT_ALL_S / 2, "it looks at all lists each time"
            node.rpush(INBOX + "n2", b"third")
            node.rpush(BELL, "n2")
            (third,) = (
                await log.take(after=taken.entries[0].cursor, num_max=9, wait_s=60.0)
            ).entries
            assert (third.node, third.data) == ("n2", b"third")
    finally:
        await log.close()


@pytest.mark.parametrize(
    "rings",
    [
        [b"n9", b"", b"\xff\n", b"n1" * 200],
        [b"n1"] * 100_000,
        [bytes(2 << 20)] * 4,
    ],
    ids=["names of nobody", "many", "large"],
)
async def test_whatever_rings_hides_no_list(own_server: Server, rings: list[bytes]) -> None:
    log = RedisLog(own_server.url, "c", lambda node: b"key")
    try:
        await log.admit({"n1": 1, "n2": 1})
        after = "0-0"
        with Redis.from_url(own_server.url) as node:
            node.rpush(INBOX + "n9", b"of nobody")
            for number in range(20):
                node.rpush(BELL, *rings)
                node.rpush(INBOX + "n2", b"%d" % number)
                node.rpush(BELL, "n2")
                data = list[bytes]()
                while not data:
                    entries = (await log.take(after=after, num_max=9, wait_s=60.0)).entries
                    data = [one.data for one in entries]
                assert data == [b"%d" % number]
                after = entries[-1].cursor
                assert node.llen(BELL) <= len(rings) + 1
            await log.take(after=after, num_max=9, wait_s=0.0)
            assert not node.exists(BELL)
    finally:
        await log.close()


async def test_no_list_waits_behind_others_that_are_never_empty(own_server: Server) -> None:
    """One entry of each, also if a turn takes fewer than there are lists."""
    log, num = RedisLog(own_server.url, "c", lambda node: b"key"), 12
    try:
        await log.admit({f"n{number}": 1 for number in range(num)})
        with Redis.from_url(own_server.url) as node:
            for number in range(num):
                node.rpush(f"{INBOX}n{number}", *([b"x"] * 40))
                node.rpush(BELL, f"n{number}")
            after, taken = "0-0", list[str]()
            for _ in range(num):
                entries = (await log.take(after=after, num_max=5, wait_s=1.0)).entries
                taken += [one.node for one in entries]
                after = entries[-1].cursor
        counts = [taken.count(f"n{number}") for number in range(num)]
        assert sum(counts) == 60
        assert max(counts) - min(counts) <= 1
    finally:
        await log.close()

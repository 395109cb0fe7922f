"""What an agent's credentials allow on the server, and what proves who sent a report or order."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
import redis
import server_users
from intake import take
from redis.exceptions import NoPermissionError, ResponseError
from structlog.testing import capture_logs
from unicron.events.errors import LogError, Unavailable, UsageError
from unicron.events.log import embedded_server, identity
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import (
    SECRET_BYTES,
    Identities,
    only_key,
    store_key,
    store_secret,
    with_credentials,
)
from unicron.events.log.port import FilePart, FileRequest, Rejected
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import codec, decisions, orders, reports
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import KINDS, Record, Report
from unicron.events.records.types import Body, MemoryCheckpoint, NodeStores, StoreEndpoint

CLUSTER = "c"
KEY = f"{{unicron:{CLUSTER}}}:"
N1, N2 = 1700000000001, 1700000000002
"""Incarnations of n1 and n2."""
IDENTITIES = Identities(bytes(range(SECRET_BYTES)), CLUSTER)
NO_KEYS = b"\x80"
Redis: Any = redis.Redis


def report(
    node: str = "n1", source_seq: int = 1, body: Body | None = None, source: str = ""
) -> Report:
    return Report(
        source=source or f"{node}/{N1}",
        source_seq=source_seq,
        occurred_s=1.0,
        body=body or reports.NodeLeft(node=node, incarnation=N1, reason=""),
    )


def order(seq: int, epoch: int, *nodes: str) -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1.0,
        occurred_s=1.0,
        source="heart",
        source_seq=0,
        cause=0,
        incident=0,
        body=orders.Resume(nodes=nodes, task=1, generation=1, progress_from=0),
    )


def url_of(server: Server, node: str, incarnation: int) -> str:
    return with_credentials(
        server.url, identity.user_name(CLUSTER, node), IDENTITIES.password(node, incarnation)
    )


def agent(server: Server, node: str, incarnation: int) -> RedisLog:
    return RedisLog(
        url_of(server, node, incarnation), CLUSTER, only_key(node, IDENTITIES.key(node))
    )


@asynccontextmanager
async def leader_of(server: Server) -> AsyncGenerator[RedisLog]:
    log = RedisLog(server.url, CLUSTER, IDENTITIES.key, IDENTITIES)
    try:
        await log.check_users()
        await log.admit({"n1": N1, "n2": N2})
        await log.mark_admitted()
        yield log
    finally:
        await log.close()


async def taken(leader: RedisLog, after: str = "0-0") -> list[Report]:
    return list(await take(leader, after))


async def test_an_agent_can_do_what_it_must(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        one = agent(own_server, "n1", N1)
        waiting = asyncio.create_task(take(leader, wait_s=20.0))
        await one.beat("n1", N1)
        await one.send([report(source_seq=1), report(source_seq=2)])
        assert [r.source_seq for r in await waiting] == [1, 2]
        assert [beat.node for beat in await leader.beats(["n1", "n2"])] == ["n1"]
        assert await leader.beats(["n1", "n2"]) == [], "a heartbeat is returned once"
        epoch = await leader.start_epoch("x")
        await leader.append(
            [order(1, epoch, "n1", "n2")], epoch=epoch, expect=0, cursor="", acked={f"n1/{N1}": 2}
        )
        assert await one.acked(f"n1/{N1}") == 2
        (sent,) = await one.orders("n1", after="0-0", wait_s=5.0)
        assert sent.record.seq == 1
        assert await one.orders("n1", after=sent.cursor, wait_s=0.01) == []
        await one.close()


async def test_an_agent_reads_a_file_for_the_control_plane(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        one = agent(own_server, "n1", N1)

        async def answer() -> FileRequest:
            request = await one.file_request("n1", 20.0)
            assert request is not None
            await one.send_file("n1", FilePart(number="of an earlier request", data=b"old"))
            await one.send_file("n1", FilePart(number=request.number, data=b"\xff\0"))
            return request

        answering = asyncio.create_task(answer())
        part = await leader.ask_file("n1", "/a", offset=7, wait_s=20.0)
        request = await answering
        assert (request.path, request.offset, part.data, part.error) == ("/a", 7, b"\xff\0", "")
        with pytest.raises(Unavailable, match="the agent of n2 does not answer"):
            await leader.ask_file("n2", "/a", offset=0, wait_s=0.1)
        await asyncio.sleep(0.2)
        two = agent(own_server, "n2", N2)
        assert await two.file_request("n2", 0.1) is None, "nobody waits for it any more"
        for log in (one, two):
            await log.close()


def forbidden_of_lists() -> list[tuple[Any, ...]]:
    """An agent may append to its list and nothing else."""
    inbox, bell = KEY + "inbox:n2", KEY + "bell"
    return [
        ("XADD", inbox, "*", "r", "x"),
        ("LRANGE", inbox, 0, -1),
        ("LPOP", inbox),
        ("DEL", inbox),
        ("LTRIM", inbox, 1, 0),
        ("LMOVE", inbox, inbox, "LEFT", "RIGHT"),
        ("LPUSH", inbox, "x"),
        ("RPUSH", KEY + "inbox:n1", "x"),
        ("LPOP", KEY + "inbox"),
        ("BLPOP", bell, 1),
        ("DEL", bell),
        ("SADD", KEY + "senders", "n3"),
        ("SREM", KEY + "senders", "n1"),
    ]


def forbidden() -> list[tuple[Any, ...]]:
    """Each step of an attack with the credentials of n2's agent."""
    log, mine, his = KEY + "log", KEY + "orders:n2", KEY + "orders:n1"
    stream = KEY + "reports"
    return [
        ("XRANGE", log, "-", "+"),
        ("XREAD", "STREAMS", log, "0"),
        ("XLEN", log),
        ("DEL", log),
        ("XADD", log, "*", "r", "x"),
        ("XTRIM", log, "MAXLEN", 0),
        ("XREAD", "STREAMS", his, "0"),
        ("XADD", his, "*", "r", "x"),
        ("XADD", mine, "*", "r", "x"),
        ("DEL", mine),
        ("XREAD", "STREAMS", mine, his, "0", "0"),
        *forbidden_of_lists(),
        ("XREAD", "STREAMS", stream, "0"),
        ("XADD", stream, "*", "r", "x"),
        ("XADD", stream, "18446744073709551615-18446744073709551615", "r", "x"),
        ("XADD", stream, "MAXLEN", 0, "*", "r", "x"),
        ("RPUSH", stream, "x"),
        ("RPUSH", KEY + "moved", "x"),
        ("XADD", KEY + "beat:n1", "*", "i", N1),
        ("XREAD", "STREAMS", KEY + "beat:n1", "0"),
        ("HSET", KEY + "acked", f"n1/{N1}", 9),
        ("HGETALL", KEY + "acked"),
        ("HGET", KEY + "epoch", "nonce"),
        ("HSET", KEY + "epoch", "number", 99),
        ("GET", KEY + "cursor"),
        ("SET", KEY + "cursor", "9-9"),
        ("SADD", KEY + "nodes", "x"),
        ("EVAL", "return redis.call('GET', KEYS[1])", 1, KEY + "cursor"),
        ("EVAL", "while true do end", 0),
        ("EVALSHA", "0" * 40, 0),
        ("SCRIPT", "FLUSH"),
        ("FUNCTION", "LIST"),
        ("CONFIG", "GET", "dir"),
        ("CONFIG", "SET", "dir", "/tmp"),
        ("ACL", "LIST"),
        ("ACL", "SETUSER", "x"),
        ("ACL", "GETUSER", "default"),
        ("ACL", "SETUSER", identity.user_name(CLUSTER, "n2"), "+@all", "~*"),
        ("INFO",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("SHUTDOWN", "NOSAVE"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("MONITOR",),
        ("SAVE",),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("MIGRATE", "h", 1, "k", 0, 9),
        ("BLPOP", KEY + "asked:n1", 1),
        ("RPUSH", KEY + "asked:n1", "x"),
        ("RPUSH", KEY + "read:n1", "x"),
        ("BLPOP", KEY + "read:n2", 1),
        ("SUBSCRIBE", "x"),
        ("PUBLISH", "x", "y"),
        ("SWAPDB", 0, 1),
        ("MODULE", "LIST"),
    ]


async def test_an_agents_credentials_allow_nothing_else(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        epoch = await leader.start_epoch("x")
        await leader.append(
            [order(1, epoch, "n1", "n2")],
            epoch=epoch,
            expect=0,
            cursor="1-1",
            acked={f"n1/{N1}": 2},
        )
        await agent(own_server, "n1", N1).send([report()])
        with Redis.from_url(own_server.url) as master:
            before = {key: master.dump(key) for key in sorted(master.keys("*"))}
            with Redis.from_url(url_of(own_server, "n2", N2), max_connections=1) as attacker:
                attacker.xadd(KEY + "beat:n2", {"i": N2})  # it is connected, as n2
                allowed: list[tuple[Any, ...]] = []
                for command in forbidden():
                    try:
                        attacker.execute_command(*command)
                    except NoPermissionError:
                        continue
                    except ResponseError as error:  # nobody may: the server does not know it
                        if "unknown command" in str(error):
                            continue
                    allowed.append(command)
                assert allowed == []
            assert {key: master.dump(key) for key in before} == before


async def test_an_agent_cannot_speak_for_another(own_server: Server) -> None:
    """Each forged report enters the intake, as any agent may add to it, and is dropped there."""
    async with leader_of(own_server) as leader:
        two = agent(own_server, "n2", N2)
        with_own_key: list[Report] = [
            report("n1"),  # its source is n1
            report("n2", body=reports.NodeLeft(node="n1", incarnation=N1, reason="")),
            report("n2", body=reports.TaskCancelRequested(task=1)),
            report("n2", body=reports.NodeDrained(node="n1", who="n2", role="node")),
            report("n2", body=reports.NodeDrained(node="n2", who="ana", role="operate")),
            report("n2", body=reports.NodeDrained(node="n2")),
            report("n2", body=reports.NodeUnreachable(node="n2", incarnation=N2, silence_s=9.0)),
            report("n2", body=order(1, 1, "n1").body),
            report("n2", body=decisions.TaskPlaced(task=1, seats=(), why="")),
            report("n2", source="operator/7"),
            report("n2", source="leader/7"),
            report("n2", source="heart"),
            report("n2", source="n2/x"),
            report("n2", source="n2/"),
            report("n2", source="/7"),
            report("n2", source="\u0661/\u0661"),
        ]
        key = IDENTITIES.key("n2")
        wires = [identity.sign_report(key, codec.encode_report(one)) for one in with_own_key]
        good = codec.encode_report(report("n2"))
        wires += [
            b"",
            b"\xff" * 90,
            good,
            bytes(32) + good,
            IDENTITIES.key("n1") + good,
            identity.sign_order(key, "1-1", good) + good,
        ]
        cursor = "0-0"
        for inbox in ("inbox:n2", "inbox"):
            with Redis.from_url(url_of(own_server, "n2", N2)) as attacker:
                attacker.rpush(KEY + inbox, *wires)
            found = list[Report | Rejected]()
            while batch := (await leader.take(after=cursor, num_max=99, wait_s=0)).entries:
                cursor = batch[-1].cursor
                found += map(leader.read_report, batch)
            rejected = [one for one in found if isinstance(one, Rejected)]
            assert [one.data for one in rejected] == wires == [one.data for one in found]
            assert not any(
                secret in str([one.why for one in rejected])
                for secret in (key.hex(), repr(key), IDENTITIES.password("n2", N2))
            )
        await two.send([report("n2")])
        assert await taken(leader, cursor) == [report("n2")], "the cursor is behind the dropped"
        await two.close()


def test_every_kind_of_record_is_an_agents_or_is_not() -> None:
    """A new kind must be added to AGENT_REPORTS, or to this list of what agents never report."""
    others = {
        "EpochStarted",
        "PolicySet",
        "OutageEnded",
        "RoomChanged",
        "DeadlineReached",
        "NodeUnreachable",
        "NodeReachable",
        "TaskSubmitted",
        "TaskCancelRequested",
        "TaskWeightSet",
        "TaskOutputSet",
        "HealingFrozen",
        "HealingResumed",
        "NodeUndrained",
        "FaultRequested",
        "QuarantineLifted",
        "IncidentAcknowledged",
        "PersonNotified",
        "TokenChanged",
        "DeadLettersHandled",
    }
    agents = {kind.__name__ for kind in identity.AGENT_REPORTS if kind is not UnknownBody}
    of_reports = {name for name, kind in KINDS.items() if kind.__module__ == reports.__name__}
    assert agents | others == of_reports
    assert not agents & others


async def test_an_agent_executes_only_what_the_leader_gave_to_it(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        epoch = await leader.start_epoch("x")
        await leader.append(
            [order(1, epoch, "n1"), order(2, epoch, "n2")],
            epoch=epoch,
            expect=0,
            cursor="",
            acked={},
        )
        one = agent(own_server, "n1", N1)
        first = (await one.orders("n1", after="0-0", wait_s=5.0))[-1].cursor
        forged = codec.encode_record(order(1 << 53, epoch, "n1"))
        other = IDENTITIES.key("n2")
        with Redis.from_url(own_server.url) as master, capture_logs() as logged:
            ((_, of_two),) = master.xrange(KEY + "orders:n2")
            ((_, of_one),) = master.xrange(KEY + "orders:n1")
            # Without the leader's secret, but with the rights of the server's password.
            for place, fields in enumerate(
                (
                    {"r": forged},
                    {"r": forged, "s": b""},
                    {"r": forged, "s": bytes(32)},
                    {
                        "r": forged,
                        "s": identity.sign_order(other, f"{epoch}-13", forged, NO_KEYS),
                        "k": NO_KEYS,
                    },
                    of_two,  # an order for another node
                    of_one,  # an order given before, at another place
                    {"x": forged, "s": bytes(32)},
                ),
                start=10,
            ):
                master.xadd(KEY + "orders:n1", fields, id=f"{epoch}-{place}")
            assert await one.orders("n1", after=first, wait_s=0.2) == []
            assert len(logged) == 1
            await leader.append(
                [*(order(seq, epoch, "n2") for seq in range(3, 21)), order(21, epoch, "n1")],
                epoch=epoch,
                expect=2,
                cursor="",
                acked={},
            )
            for after in ("0-0", first):
                found = await one.orders("n1", after=after, wait_s=5.0)
                assert found[-1].record.seq == 21, "the forged records have muted nothing"
                assert {sent.record.seq for sent in found} <= {1, 21}
        await one.close()


def reconfigure(seq: int, epoch: int) -> Record:
    """An order for n1 and n2, whose ranks store their shares on n2 and n3, resp. on n3 and n1."""
    stores = [StoreEndpoint(name, "h:1") for name in ("n1", "n2", "n3")]
    body = orders.Reconfigure(
        nodes=("n1", "n2"),
        task=5,
        generation=4,
        members=(),
        store="",
        dp=2,
        checkpoint="",
        copies=(
            MemoryCheckpoint(
                node="n9",
                endpoint="h:1",
                rank=0,
                generation=3,
                step_version=1,
                copy_bytes=1,
                checksum="",
            ),
        ),
        keepers=tuple(stores),
        stores=(NodeStores("n1", ("n2", "n3")), NodeStores("n2", ("n3", "n1"))),
    )
    return msgspec.structs.replace(order(seq, epoch), body=body)


async def test_the_keys_of_stores_come_with_an_order_and_are_not_in_the_log(
    own_server: Server,
) -> None:
    async with leader_of(own_server) as leader:
        epoch = await leader.start_epoch("x")
        record = reconfigure(1, epoch)
        await leader.append([record], epoch=epoch, expect=0, cursor="", acked={})
        for again in (False, True):
            if again:
                await leader.rebuild_orders([record], epoch=epoch, acked={})
            for node, incarnation, stores in (("n1", N1, {"n2", "n3"}), ("n2", N2, {"n3", "n1"})):
                one = agent(own_server, node, incarnation)
                (sent,) = await one.orders(node, after="0-0", wait_s=5.0)
                assert sent.record == record
                assert sent.store_keys == {
                    name: store_key(store_secret(IDENTITIES.key(name)), 5, 4)
                    for name in stores | {"n9"}
                }
                await one.close()
        with Redis.from_url(own_server.url) as master:
            assert sent.store_keys["n9"].key not in b"".join(
                value for _, fields in master.xrange(KEY + "log") for value in fields.values()
            )
        assert sent.store_keys["n9"].key.hex() not in str(await leader.read(after=0, num_max=9))


def test_the_keys_of_stores_are_signed_with_the_order() -> None:
    signed = identity.sign_order(b"key", "1-1", b"order", b"keys")
    assert identity.is_order_signed(b"key", "1-1", b"order", b"keys", signed)
    for wire, keys in (
        (b"order", b"other"),
        (b"order", b""),
        (b"orderkeys", b""),
        (b"orde", b"rkeys"),
    ):
        assert not identity.is_order_signed(b"key", "1-1", wire, keys, signed)


async def test_open_orders_are_signed_anew_by_the_next_leader(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        first = await leader.start_epoch("a")
        await leader.append([order(1, first, "n1")], epoch=first, expect=0, cursor="", acked={})
        second = await leader.start_epoch("b")
        await leader.rebuild_orders([order(1, first, "n1")], epoch=second, acked={})
        one = agent(own_server, "n1", N1)
        (sent,) = await one.orders("n1", after="0-0", wait_s=5.0)
        assert (sent.record.seq, sent.cursor) == (1, f"{second}-1")
        await one.close()


async def test_a_new_incarnation_takes_the_access_of_the_last(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        old, other = agent(own_server, "n1", N1), agent(own_server, "n2", N2)
        waiting = asyncio.create_task(old.orders("n1", after="0-0", wait_s=20.0))
        await old.beat("n1", N1)
        await other.beat("n2", N2)
        await leader.admit({"n1": N1})
        await old.beat("n1", N1)
        await leader.admit({"n1": N1 + 1})
        for call in (lambda: old.beat("n1", N1), lambda: waiting):
            with pytest.raises((UsageError, LogError)) as refused:
                await call()
            assert IDENTITIES.password("n1", N1) not in str(refused.value)
        new = agent(own_server, "n1", N1 + 1)
        await new.beat("n1", N1 + 1)
        await other.beat("n2", N2)
        for log in (old, new, other):
            await log.close()


async def test_the_users_as_the_server_lists_them(own_server: Server) -> None:
    async with leader_of(own_server):
        with Redis.from_url(own_server.url) as master:
            users = sorted(line for line in master.acl_list() if "unicron" in line)
    hashes = [
        identity.password_hash(IDENTITIES.password(*of)) for of in (("", 0), ("n1", N1), ("n2", N2))
    ]
    assert [line.split()[1] for line in users] == ["unicron:c:", "unicron:c:n1", "unicron:c:n2"]
    assert [word.lstrip("#") for line in users for word in line.split() if word[0] == "#"] == hashes
    assert users[0].split()[2] == "off"
    for line, node in zip(users[1:], ("n1", "n2"), strict=True):
        rights = line.partition(" -@all ")[2]
        assert rights.replace(" resetchannels -@all", "") == (
            f"+select (%W~{KEY}inbox:{node} %W~{KEY}bell %W~{KEY}inbox +rpush) "
            f"(%W~{KEY}beat:{node} +xadd) "
            f"(%R~{KEY}orders:{node} +xread) (%R~{KEY}acked +hget) "
            f"(~{KEY}asked:{node} +blpop) (%W~{KEY}read:{node} +rpush)"
        ), line


async def test_a_restarted_server_has_no_users(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        assert await leader.has_users()
        one = agent(own_server, "n1", N1)
        await one.beat("n1", N1)
        own_server.stop()
        await asyncio.to_thread(embedded_server.start, Path(own_server.directory))
        assert not await leader.has_users()
        with pytest.raises((UsageError, LogError)):
            await one.beat("n1", N1)
        await leader.admit({"n1": N1})
        assert not await leader.has_users(), "not before all are admitted"
        await leader.mark_admitted()
        assert await leader.has_users()
        await one.beat("n1", N1)
        await one.close()


async def test_a_server_that_lets_no_users_be_made(own_server: Server) -> None:
    with Redis.from_url(own_server.url) as master:
        master.execute_command("ACL", "SETUSER", "managed", "on", ">x", "~*", "+@all", "-acl")
    log = RedisLog(
        with_credentials(own_server.url, "managed", "x"), CLUSTER, IDENTITIES.key, IDENTITIES
    )
    with pytest.raises(UsageError, match="cannot give each agent its own rights") as refused:
        await log.check_users()
    assert "--shared-password" in refused.value.hint
    await log.close()


async def test_a_server_without_a_password_is_told(own_server: Server) -> None:
    with Redis.from_url(own_server.url) as master:
        master.execute_command("ACL", "SETUSER", "default", "nopass")
        try:
            url = "unix://" + own_server.url.partition("@")[2]
            log = RedisLog(url, CLUSTER, IDENTITIES.key, IDENTITIES)
            with capture_logs() as logged:
                await log.check_users()
            await log.close()
        finally:  # without a password the server refuses that of the fixture, which stops it
            password = unquote(urlsplit(own_server.url).password or "")
            master.execute_command("ACL", "SETUSER", "default", "resetpass", f">{password}")
        assert [line["event"] for line in logged] == [
            "the log's server asks for no password: who reaches it may do anything"
        ]


async def test_damaged_heartbeats_hurt_only_their_node(own_server: Server) -> None:
    async with leader_of(own_server) as leader:
        two = agent(own_server, "n2", N2)
        await two.beat("n2", N2)
        with Redis.from_url(url_of(own_server, "n1", N1)) as one:
            for value in ("x", "1e999", "nan", "-1", "1e300", "", "\xff", "9" * 400):
                one.xadd(KEY + "beat:n1", {"i": value})
            one.xadd(KEY + "beat:n1", {"i": N1}, id="18446744073709551614-1")
        assert "n2" in [beat.node for beat in await leader.beats(["n1", "n2"])]
        await two.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:p@h:1/0", "redis://u%3Ax:w@h:1/0"),
        ("redis://h", "redis://u%3Ax:w@h"),
        (
            "rediss://a:b@[::1]:5/2?ssl_cert_reqs=none",
            "rediss://u%3Ax:w@[::1]:5/2?ssl_cert_reqs=none",
        ),
        ("unix://:p@/run/x.sock?db=1", "unix://u%3Ax:w@/run/x.sock?db=1"),
        ("redis://a:p%40@h/0", "redis://u%3Ax:w@h/0"),
    ],
)
def test_credentials_in_a_url(url: str, expected: str) -> None:
    assert with_credentials(url, "u:x", "w") == expected
    assert unquote(urlsplit(expected).username or "") == "u:x"


def test_identities_differ() -> None:
    """By secret, cluster, node and purpose; passwords also by incarnation."""
    other = Identities(bytes(SECRET_BYTES), CLUSTER)
    elsewhere = Identities(bytes(range(SECRET_BYTES)), "d")
    makes: list[Callable[[], bytes | str]] = [
        lambda: IDENTITIES.key("n1"),
        lambda: IDENTITIES.key("n2"),
        lambda: other.key("n1"),
        lambda: elsewhere.key("n1"),
        lambda: IDENTITIES.password("n1", 1),
        lambda: IDENTITIES.password("n1", 11),
        lambda: IDENTITIES.password("n11", 1),
        lambda: elsewhere.password("n1", 1),
    ]
    made = [make() for make in makes]
    assert len(set(made)) == len(makes)
    assert [make() for make in makes] == made
    with pytest.raises(AssertionError):
        only_key("n1", b"")("n2")


def hmac_of(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\n".join(parts), hashlib.sha256).digest()


def test_keys_and_signatures_are_those_of_hmac() -> None:
    """Each by the standard library, from the secret and the texts that identity.py documents."""
    secret = bytes(range(SECRET_BYTES))
    key = hmac_of(secret, b"key", b"n1", b"c")
    assert IDENTITIES.key("n1") == key
    assert IDENTITIES.password("n1", N1) == (
        hmac_of(secret, b"password", b"n1", str(N1).encode(), b"c").hex()
    )
    assert identity.password_hash("p") == hashlib.sha256(b"p").hexdigest()
    assert identity.sign_report(key, b"wire") == hmac_of(key, b"report", b"wire") + b"wire"
    assert identity.sign_order(key, "3-7", b"wire", b"keys") == (
        hmac_of(key, b"order", b"3-7", b"4", b"wirekeys")
    )
    store = hmac_of(key, b"store", b"")
    assert store_secret(key) == store
    assert store_key(store, 5, 2).key == hmac_of(store, b"task", b"5", b"2")


async def test_the_threat_model_shows_the_users_that_a_server_has(own_server: Server) -> None:
    shown = server_users.BLOCK.findall(server_users.PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 1
    now = await server_users.block_of(own_server)
    assert server_users.plain(shown[0]) == server_users.plain(now), server_users.REFRESH
    assert len(server_users.plain(now)) == 4, "default, the mark, n1 and n2"
    for changed in (now.replace("+hget", "+hgetall"), now.replace(":beat:n1", ":beat:n2")):
        assert server_users.plain(changed) != server_users.plain(now)

"""Whatever is in the inbox, the leader leads: what is malformed is counted, kept, passed over."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import stat
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from rank_bodies import body_of
from structlog.testing import capture_logs
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.service import leader as leader_module
from unicron.control_plane.service.coordinator import Coordinator
from unicron.control_plane.service.dead_letters import FILE_BYTES_MAX, DeadLetters
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.events.errors import TooLarge, UsageError
from unicron.events.log import archive, port
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import (
    AGENT_REPORTS,
    RESERVED_NAMES,
    SECRET_BYTES,
    Identities,
    sign_report,
)
from unicron.events.log.intake import report_fault
from unicron.events.log.port import Batch, Rejected
from unicron.events.log.redis_streams import LIST_NUM_MAX, RedisLog
from unicron.events.records import codec
from unicron.events.records import reports as r
from unicron.events.records.bounds import SENTENCE_CHARS_MAX
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import Record, Report
from unicron.events.records.types import Body, OperatorRequest
from unicron.events.spec.policy import Policy

from .test_coordinator import job, leading, real_clock
from .test_serve import Running, control_plane
from .test_serve import records as records_of

CLUSTER, KEY = "serve", "{unicron:serve}:"
TASK = 3
GOLDEN = Path(__file__).parents[2] / "golden"
NUM_CASES, SEED = 300, 48
encode = msgspec.msgpack.encode
Redis: Any = redis.Redis


def joined(node: str = "n1", **changes: Any) -> r.NodeJoined:
    values: dict[str, Any] = {"incarnation": 1, "host": "h", "pid": 1, "num_slots": 2}
    return r.NodeJoined(node=node, **(values | changes))


def reported(body: Body, source: str = "n1/1", number: int = 1) -> Report:
    return Report(source=source, source_seq=number, occurred_s=1.0, body=body)


def signed(identities: Identities, report: Report) -> bytes:
    return sign_report(
        identities.key(report.source.rpartition("/")[0]), codec.encode_report(report)
    )


def nested(depth: int) -> bytes:
    """A report of an unknown kind whose body is a map in a map, and so on."""
    head = {"kind": "Foo", "v": 1, "source": "n1/1", "source_seq": 1, "occurred_s": 1.0}
    return (
        bytes([0x86])
        + b"".join(encode(name) + encode(value) for name, value in head.items())
        + encode("body")
        + b"\x81\xa1a" * depth
        + b"\xc0"
    )


def malformed(identities: Identities) -> list[bytes]:
    """What has ended a control plane: unsigned and too deep; a source of many digits; an
    incarnation with which the state can compute no more. Then their siblings."""
    deep, key = nested(5_000), identities.key("n1")
    return [
        bytes(32) + deep,
        signed(identities, reported(joined(), "n1/" + 5_000 * "9")),
        signed(identities, reported(joined(incarnation=2**64 - 1))),
        b"",
        b"\xff" * 40,
        sign_report(key, deep),
        sign_report(key, nested(500)),
        signed(identities, reported(joined(), number=2**63)),
        signed(identities, reported(r.ReportsLost(node="n1", num_lost=2**64 - 1), number=9)),
        signed(
            identities,
            reported(
                UnknownBody(kind="Foo", version=1, raw=encode({"a": msgspec.msgpack.Ext(5, b"x")}))
            ),
        ),
        signed(identities, reported(UnknownBody(kind="Foo", version=1, raw=encode({"a": 2**63})))),
    ]


def push(server: Server, entries: list[bytes], node: str = "") -> None:
    """Into the list of a node that was let in; "": into the one that older agents share."""
    with Redis.from_url(server.url) as client:
        if node:
            client.sadd(KEY + "senders", node)
        for begin in range(0, len(entries), 500):
            client.rpush(
                KEY + f"inbox:{node}" if node else KEY + "inbox", *entries[begin : begin + 500]
            )
        client.rpush(KEY + "bell", "")


def get(running: Running, path: str) -> bytes:
    note = running.note()
    request = urllib.request.Request(
        note["url"] + path, headers={"Authorization": f"Bearer {note['token']}"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: bytes = reply.read()
        return found


def wait_for_node(server: Server, node: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while not any(
        isinstance(one.body, r.NodeJoined) and one.body.node == node
        for one in records_of(server.url, CLUSTER)
    ):
        assert time.monotonic() < deadline_s, f"{node} has not joined"
        time.sleep(0.05)


def test_a_malformed_report_ends_no_control_plane_and_no_successor(
    own_server: Server, tmp_path: Path
) -> None:
    """It runs, starts again, and starts while such a report waits; healthy nodes join each time."""
    state, evil = tmp_path / "state", list[bytes]()
    for number in range(3):
        if number == 2:
            push(own_server, evil)
        with control_plane(state, own_server.url, cluster=CLUSTER) as running:
            running.wait_leading()
            identities = Identities((state / "secret").read_bytes(), CLUSTER)
            evil = malformed(identities)
            healthy = f"healthy{number}"
            node = "n1" if number == 1 else ""
            good = signed(identities, reported(joined(healthy), f"{healthy}/1"))
            push(own_server, evil, node)
            push(own_server, [good], healthy if node else "")
            push(own_server, evil, node)
            wait_for_node(own_server, healthy)
            shown = json.loads(get(running, "/v1/state"))
            assert healthy in [node["id"] for node in shown["nodes"]]
            deadline_s = time.monotonic() + 30.0
            expected = (2 + (number == 2)) * len(evil)
            while (
                f"unicron_reports_rejected_total {expected:.1f}"
                not in get(running, "/metrics").decode()
            ):
                assert time.monotonic() < deadline_s, get(running, "/metrics").decode()
                time.sleep(0.1)
            running.process.terminate()
            assert running.end() == 0, running.words()
            words = running.words()
            assert "dropped a report" in words
            assert "Traceback" not in words
    letters = state / "dead-letters.jsonl"
    assert stat.S_IMODE(letters.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in letters.read_text().splitlines()]
    assert len(lines) >= 7 * len(evil)
    assert lines[0]["num_bytes"] == len(evil[0])
    assert base64.b64decode(lines[0]["data"]) == evil[0]
    assert "recursion depth" in lines[0]["why"]
    assert lines[1]["why"] == "its source is not a node"
    assert lines[2]["why"] == "it is about another incarnation of its node"
    own = [line["why"] for line in lines[2 * len(evil) :]][: len(evil)]
    assert own[0] == "its signature is not the node's", "nothing is decoded before"
    assert own[:2] == [own[0], "its source is not a node"]


def changed(chance: random.Random, wire: bytes) -> bytes:
    """Some bytes replaced, inserted or removed."""
    data = bytearray(wire)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 4))
    return bytes(data)


def any_bytes(chance: random.Random, identities: Identities, number: int) -> bytes:
    """Random bytes; reports of all kinds, changed and signed; wild values in bodies; depth."""
    which, node = chance.random(), chance.choice(["n1", f"x{number}", f"x{number}"])
    key = identities.key(node)
    if which < 0.1:
        return chance.randbytes(chance.randint(0, 300))
    if which < 0.15:
        return sign_report(key, chance.randbytes(chance.randint(0, 100)))
    if which < 0.2:
        return sign_report(key, nested(chance.randint(1, 3_000)))
    wild = [
        0,
        -1,
        2**31,
        2**53 - 1,
        2**53,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        1e308,
        -1e308,
        5e-324,
        "",
        "n1",
        "\n",
        "x" * 1_000,
        None,
        True,
        [],
        {},
        [[1]],
        {"a": 1},
        "n1/1",
    ]
    kind = chance.choice([one for one in AGENT_REPORTS if one is not UnknownBody])
    fields: dict[str, Any] = {"node": node, "incarnation": 1, "task": TASK, "rank": 7, "attempt": 1}
    body = {
        name: fields.get(name, value) if chance.random() < 0.95 else chance.choice(wild)
        for name, value in msgspec.to_builtins(body_of(kind)).items()
    }
    for name in body if chance.random() < 0.5 else ():
        if isinstance(body[name], int | float) and name not in fields:
            body[name] = chance.choice([2**52, -1, 0, 2**53 - 1])
    sources = [f"{node}/1"] * 18 + ["n1/2", "n2/1", "/", f"{node}/" + "9" * 17]
    wire = encode(
        {
            "kind": kind.__name__,
            "v": chance.choice([1, 1, 1, 1, 0, -1, 99]),
            "body": body,
            "source": chance.choice(sources),
            "source_seq": chance.choice([2, 2, 2, chance.randint(1, 30), 2**62]),
            "occurred_s": chance.choice([1.0, 0.0, -1e300, 1e300]),
        }
    )
    return sign_report(key, changed(chance, wire) if which < 0.4 else wire)


async def test_any_bytes_in_the_inbox_leave_the_leader_leading(own_server: Server) -> None:
    """It never folds the log again either; the log is good afterwards, and can be exported."""
    identities, chance = Identities(bytes(SECRET_BYTES), CLUSTER), random.Random(SEED)
    log = RedisLog(own_server.url, CLUSTER, identities.key)
    try:
        entries = list[bytes]()
        for number in range(NUM_CASES):
            joins = reported(joined(f"x{number}"), f"x{number}/1")
            entries += [signed(identities, joins), any_bytes(chance, identities, number)]
        with capture_logs() as logged:
            async with leading(log, clock=real_clock) as leader:
                await log.admit({"n1": 1})
                assert await leader.write("x", job()) == TASK
                await log.send([reported(joined(), number=1)])
                push(own_server, entries[1::2], "n1")
                last = reported(joined("n9"), "n9/1")
                push(own_server, [*entries, signed(identities, last)])
                state = await joined_state(leader, "n9")
                assert (leader.leading, leader.epoch) == (True, 1)
                encode_state(state)
        assert {line["event"] for line in logged} <= {
            "leading",
            "dropped a report",
        }
        records = await log.read(after=0, num_max=99_999)
        assert {one.source for one in records} >= {"n1/1", "n9/1"}
        assert len({one.kind for one in records if one.source[0] in "nx"}) > 15
        async with leading(log, "b", clock=real_clock) as successor:
            await joined_state(successor, "n9")
    finally:
        await log.close()
    for one in records:
        assert codec.from_plain(json.loads(msgspec.json.encode(codec.to_plain(one)))).seq == one.seq


async def test_a_flood_of_one_node_holds_up_no_other(own_server: Server) -> None:
    """Its list is trimmed, which a record tells; deadlines and other nodes' reports do not wait."""
    identities = Identities(bytes(SECRET_BYTES), CLUSTER)
    log = RedisLog(own_server.url, CLUSTER, identities.key)
    policy = Policy(start_s_max=2.0, silence_s_max=1e6)
    try:
        async with leading(log, clock=real_clock, policy=policy) as leader:
            await log.admit({"evil": 1, "n1": 1})
            await log.send([reported(joined("evil"), "evil/1")])
            await joined_state(leader, "evil")
            errs = r.HealthChanged(
                node="evil", incarnation=1, check="x", health="degraded", why="y" * 200
            )
            flood = [signed(identities, reported(errs, "evil/1", 2 + n)) for n in range(20_000)]
            for _ in range(4 * LIST_NUM_MAX // len(flood)):
                push(own_server, flood, "evil")
            began_s = time.monotonic()
            await log.send([reported(joined("n1"))])
            await joined_state(leader, "n1")
            heard_s = time.monotonic() - began_s
            assert await leader.write("x", job()) > 0
            async with asyncio.timeout(30.0):  # the ordered processes do not start
                while not any(one.restarts for one in (await leader.settled()).tasks.values()):
                    await asyncio.sleep(0.1)
            dropped = (await leader.settled()).reports_lost
            with Redis.from_url(own_server.url) as client:
                left = client.llen(KEY + "inbox:evil")
    finally:
        await log.close()
    assert left > 1_000, "the flood was not over"
    assert heard_s < 5.0
    assert dropped >= 2 * LIST_NUM_MAX


async def joined_state(leader: Coordinator, node: str) -> ClusterState:
    async with asyncio.timeout(60.0):
        while node not in (state := await leader.settled()).nodes:
            await asyncio.sleep(0.05)
    return state


async def test_a_report_on_which_the_decider_fails_is_passed_over(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many in one batch; their source goes on, with the number of what it has lost."""
    advance, num_failed = leader_module.advance, 0

    def failing(state: ClusterState, report: Report, **named: Any) -> list[Record]:
        made = advance(state, report, **named)  # what it changes has to be forgotten
        if isinstance(report.body, r.NodeLeft):
            nonlocal num_failed
            num_failed += 1
            raise KeyError("a fault of the decider")
        return made

    monkeypatch.setattr(leader_module, "advance", failing)
    identities, letters = Identities(bytes(SECRET_BYTES), CLUSTER), tmp_path / "letters.jsonl"
    log = RedisLog(own_server.url, CLUSTER, identities.key)
    left = r.NodeLeft(node="n1", incarnation=1, reason="")
    leader = Coordinator(
        log,
        clock=real_clock,
        nonce="a",
        code="test",
        policy=Policy(),
        dead_letters=DeadLetters(letters),
    )
    leads = asyncio.create_task(leader.run())
    try:
        assert await leader.find_leader() == ""
        await log.admit({"n1": 1, "n2": 1})
        await log.send(
            [reported(joined()), *(reported(left, number=number) for number in range(2, 62))]
        )
        push(own_server, [b"junk"])
        await log.send([reported(joined("n2"), "n2/1")])
        state = await joined_state(leader, "n2")
        assert (state.nodes["n1"].health, state.reports_lost) == ("healthy", 60)
        assert await log.acked("n1/1") == 61
        leader.stop()
        await leads
    finally:
        leads.cancel()
        await log.close()
    lines = [json.loads(line) for line in letters.read_text().splitlines()]
    assert [line["why"].partition("raises")[0] for line in lines] == [
        *(f"NodeLeft {number}: it " for number in range(2, 62)),
        lines[-1]["why"],
    ]
    assert (num_failed, base64.b64decode(lines[-1]["data"])) == (60, b"junk")


async def test_a_lack_of_memory_while_it_reads_ends_no_leader(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RedisLog(own_server.url, CLUSTER, Identities(bytes(SECRET_BYTES), CLUSTER).key)
    take, num_failed = log.take, 0

    async def failing(**named: Any) -> Batch:
        nonlocal num_failed
        num_failed += 1
        if num_failed < 3:
            raise MemoryError
        return await take(**named)

    try:
        async with leading(log, clock=real_clock) as leader:
            monkeypatch.setattr(log, "take", failing)
            await log.admit({"n1": 1})
            await log.send([reported(joined())])
            await joined_state(leader, "n1")
            assert leader.epoch == 1
    finally:
        await log.close()
    assert num_failed >= 3


async def test_an_agent_of_the_former_release_is_named_until_it_leaves(own_server: Server) -> None:
    identities = Identities(bytes(SECRET_BYTES), CLUSTER)
    log = RedisLog(own_server.url, CLUSTER, identities.key)
    left = reported(r.NodeLeft(node="n1", incarnation=1, reason=""), number=2)
    try:
        async with leading(log, clock=real_clock) as leader:
            push(own_server, [signed(identities, reported(joined()))])
            await joined_state(leader, "n1")
            assert leader.old_agents == {"n1"}
            push(own_server, [signed(identities, left)])
            async with asyncio.timeout(10.0):
                while (await leader.settled()).nodes["n1"].health != "left":
                    await asyncio.sleep(0.05)
            assert not leader.old_agents
    finally:
        await log.close()


async def test_a_report_that_raises_is_one_dead_letter_also_in_turns_that_end_early(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn after it ends before it: decisions take long then."""
    advance, num_failed = leader_module.advance, 0

    def failing(state: ClusterState, report: Report, **named: Any) -> list[Record]:
        nonlocal num_failed
        if isinstance(report.body, r.NodeLeft):
            num_failed += 1
            raise KeyError("a fault of the decider")
        if num_failed:
            time.sleep(0.15)
        return advance(state, report, **named)

    monkeypatch.setattr(leader_module, "advance", failing)
    log = RedisLog(own_server.url, CLUSTER, Identities(bytes(SECRET_BYTES), CLUSTER).key)
    left = r.NodeLeft(node="n1", incarnation=1, reason="")
    errs = r.HealthChanged(node="n1", incarnation=1, check="x", health="degraded", why="")
    try:
        async with leading(log, clock=real_clock) as leader:
            await log.admit({"n1": 1})
            healthy = [reported(errs, number=number) for number in (2, 3)]
            await log.send([reported(joined()), *healthy, reported(left, number=4)])
            async with asyncio.timeout(20.0):
                while await log.acked("n1/1") < 4:
                    await asyncio.sleep(0.05)
            assert (await leader.settled()).reports_lost == 1
    finally:
        await log.close()
    assert num_failed == 1


async def test_texts_without_a_bound_are_dead_letters_and_stop_no_leader(
    own_server: Server, tmp_path: Path
) -> None:
    """64 failed checks with names of 1 MB made a plan that the log's server did not take: the
    leader tried it for ever, also after a restart."""
    identities, letters = Identities(bytes(SECRET_BYTES), CLUSTER), tmp_path / "letters.jsonl"
    log = RedisLog(own_server.url, CLUSTER, identities.key)
    errs = r.HealthChanged(node="n1", incarnation=1, check="x", health="unhealthy", why="y" * 9000)
    long = [msgspec.structs.replace(errs, check=f"{n}" + "y" * 1_000_000) for n in range(3)]
    options: dict[str, Any] = {"nonce": "a", "code": "test", "policy": Policy()}
    dead = DeadLetters(letters)
    leader = Coordinator(log, clock=real_clock, dead_letters=dead, **options)
    leads = asyncio.create_task(leader.run())
    try:
        assert await leader.find_leader() == ""
        await log.admit({"n1": 1})
        sent = [joined(), *long, errs]
        await log.send([reported(body, number=at) for at, body in enumerate(sent, 1)])
        async with asyncio.timeout(20.0):
            while await log.acked("n1/1") < len(sent):
                await asyncio.sleep(0.05)
        state = await leader.settled()
        records = await log.read(after=0, num_max=1000)
        leader.stop()
        await leads
    finally:
        leads.cancel()
        await log.close()
    assert (state.reports_lost, dead.num, len(encode_state(state)) < 20_000) == (3, 3, True)
    assert [one.check for one in state.nodes["n1"].checks] == ["x"]
    assert "check has 1000001 characters, at most 256 are taken" in letters.read_text()
    (told,) = [one.body for one in records if isinstance(one.body, r.HealthChanged)]
    assert len(told.why) == SENTENCE_CHARS_MAX, "a sentence is cut, as its agent should have"


async def test_what_the_server_would_not_take_is_not_sent_to_it(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows from a report of a node is a dead letter, from a request an error; an append
    that is too large ends its leader, which could only repeat it."""
    monkeypatch.setattr(port, "RECORD_BYTES_MAX", 20_000)
    log = RedisLog(own_server.url, CLUSTER, Identities(bytes(SECRET_BYTES), CLUSTER).key)
    large = UnknownBody(kind="Foo", version=1, raw=encode({"a": "x" * 30_000}))
    counted: list[int] = []
    dead = DeadLetters(None, counted.append)
    try:
        async with leading(log, clock=real_clock, dead_letters=dead) as leader:
            await log.admit({"n1": 1})
            left = r.NodeLeft(node="n1", incarnation=1, reason="")
            sent = [joined(), large, left]
            await log.send([reported(body, number=at) for at, body in enumerate(sent, 1)])
            with pytest.raises(UsageError, match=r"a record has 30\d+ bytes, and at most 20000"):
                await leader.write("x", r.HealingFrozen(reason="x" * 30_000))
            assert await leader.write("y", r.HealingFrozen(reason="")) > 0
            async with asyncio.timeout(20.0):
                while await log.acked("n1/1") < len(sent):
                    await asyncio.sleep(0.05)
            state = await leader.settled()
            assert (state.nodes["n1"].health, state.reports_lost) == ("left", 1)
            assert counted == [1]
            seq, epoch = state.seq + 1, state.epoch
            record = Record(
                seq=seq,
                epoch=epoch,
                at_s=1.0,
                occurred_s=1.0,
                source="n1/1",
                source_seq=4,
                cause=0,
                incident=0,
                body=large,
            )
            with pytest.raises(TooLarge, match="and at most 20000 are written"):
                await log.append([record], epoch=epoch, expect=seq - 1, cursor="", acked={})
    finally:
        await log.close()


class Failing:
    """The decider, which fails on every seventh report of an agent or so, always on the same ones:
    in the middle of the fold, of the decisions, or with a record that no log can hold."""

    def __init__(self, seed: int) -> None:
        self._seed, self.advance = seed, leader_module.advance
        self.failed = set[tuple[str, int]]()

    def __call__(self, state: ClusterState, report: Report, **named: Any) -> list[Record]:
        chance = random.Random(f"{self._seed} {report.source} {report.source_seq}")
        if isinstance(report.body, r.ReportsLost) or chance.random() > 1 / 7:
            return self.advance(state, report, **named)
        if report.source.partition("/")[0] in RESERVED_NAMES:
            return self.advance(state, report, **named)
        self.failed.add((report.source, report.source_seq))
        made = self.advance(state, report, **named)
        where = chance.randrange(3)
        if where == 0:
            state.nodes.clear()
            state.sources["n1/1"] = 10**6
        if where == 1:
            return [*made[:-1], msgspec.structs.replace(made[-1], at_s=float("nan"))]
        raise chance.choice([KeyError("x"), RecursionError("deep"), OverflowError("large")])


async def test_a_report_that_raises_leaves_leader_and_follower_as_they_were(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever fold or decide fail: the leader's state, that of its follower and that of who folds
    the log are the same bytes, and have none of what such a report has changed."""
    failing, chance = Failing(SEED), random.Random(SEED)
    monkeypatch.setattr(leader_module, "advance", failing)
    identities = Identities(bytes(SECRET_BYTES), CLUSTER)
    log = RedisLog(own_server.url, CLUSTER, identities.key)
    kinds = [  # about the node itself, so that none is dropped
        kind
        for kind in AGENT_REPORTS
        if kind not in (r.NodeJoined, r.NodeLeft, r.ReportsLost)
        and not issubclass(kind, OperatorRequest)
        and "node" in kind.__struct_fields__
        and "task" not in kind.__struct_fields__
    ]
    assert len(kinds) > 3
    last = {"n1/1": 1, "n2/1": 1}
    try:
        async with leading(log, clock=real_clock) as leader, following(log) as follower:
            assert await leader.write("x", job()) == TASK
            await log.admit({"n1": 1, "n2": 1})
            for node in ("n1", "n2"):
                await log.send([reported(joined(node), f"{node}/1", 1)])
            for _ in range(120):
                source = chance.choice(sorted(last))
                last[source] += 1
                body = body_of(chance.choice(kinds), node=source[:2])
                await log.send([reported(body, source, last[source])])
            async with asyncio.timeout(60.0):
                while [await log.acked(source) for source in last] != list(last.values()):
                    await asyncio.sleep(0.05)
                await leader.settled()
                records = await log.read(after=0, num_max=99_999)
                while follower.seq < records[-1].seq:
                    await asyncio.sleep(0.05)
            folded = ClusterState()
            for record in records:
                fold(folded, record)
            states = [encode_state(await one.settled()) for one in (leader, follower)]
            assert states == [encode_state(folded)] * 2
    finally:
        await log.close()
    assert len(failing.failed) > 10
    passed_over = {
        (one.source, one.source_seq) for one in records if isinstance(one.body, r.ReportsLost)
    }
    assert failing.failed <= passed_over


@asynccontextmanager
async def following(log: RedisLog) -> AsyncIterator[Coordinator]:
    """A control plane that follows."""
    follower = Coordinator(log, clock=real_clock, nonce="b", code="test", policy=Policy())
    follows = asyncio.create_task(follower.run("http://follower"))
    try:
        yield follower
    finally:
        follows.cancel()
        await asyncio.wait((follows,))


def test_a_log_with_what_older_leaders_have_let_in_is_folded() -> None:
    state = ClusterState()
    bodies: list[tuple[str, Body]] = [
        ("n1/" + 5_000 * "9", r.ReportsLost(node="n1", num_lost=1)),
        ("n1/1", joined(incarnation=1)),
        ("n1/2", joined(incarnation=2)),
        (f"n1/{2**64 - 1}", joined(incarnation=2**64 - 1)),
    ]
    for seq, (source, body) in enumerate(bodies, 1):
        fold(
            state,
            Record(
                seq=seq,
                epoch=1,
                at_s=1.0,
                occurred_s=1.0,
                source=source,
                source_seq=1,
                cause=0,
                incident=0,
                body=body,
            ),
        )
    assert state.nodes["n1"].incarnation == 2**64 - 1
    encode_state(state)


def test_all_that_agents_have_ever_reported_fits() -> None:
    seen = set[str]()
    for path in sorted(GOLDEN.glob("release-*.jsonl")):
        for one in archive.read(path):
            if isinstance(one.body, tuple(AGENT_REPORTS)):
                seen.add(one.kind)
                assert report_fault(reported(one.body, one.source, one.source_seq)) == ""
    assert len(seen) > 15, seen


def test_dead_letters_are_private_and_bounded(tmp_path: Path) -> None:
    counted: list[int] = []
    letters = DeadLetters(tmp_path / "letters.jsonl", counted.append)
    with capture_logs() as logged:
        for number in range(300):
            letters.keep([Rejected(why="w" * 9_999, source="s" * 9_999, data=bytes(99_999))] * 10)
            assert number != 1 or len((tmp_path / "letters.jsonl").read_text().splitlines()) == 20
    assert len(logged) <= 3, "at most one line a second"
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["letters.1.jsonl", "letters.jsonl"]
    for file in files:
        assert file.stat().st_size <= FILE_BYTES_MAX
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for line in file.read_text().splitlines():
            assert json.loads(line)["num_bytes"] == 99_999
    assert sum(counted) == 3_000
    DeadLetters(tmp_path / "none" / "letters.jsonl").keep([Rejected("", "", b"")])

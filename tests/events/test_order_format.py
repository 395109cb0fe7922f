"""The copies of orders for agents: what release 0.3.0 does not know, what may be ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from decider import spec
from msgspec import inspect
from msgspec.structs import replace
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import codec, order_format, orders
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import Record
from unicron.events.records.order_format import (
    ADDED,
    ADDED_KINDS,
    ORDER_FORMAT_VERSION,
    Added,
    needed_format,
)
from unicron.events.records.types import Slot
from unicron.events.spec.job import JobSpec, Train

FORMAT_0: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "order-format-0.json").read_text()
)
"""By order: every field that release 0.3.0 (commit b0502c4) reads, nested ones by path."""
LOOP = {"micro_batches": 24, "iterations": 5, "output": "/tmp/out"}
COMMAND: dict[str, Any] = {"train": None, "command": ["true"]}
EXACT = spec(train={"iterations": 5, "output": "/o", "reproducible": "bitwise"})
OLD = [spec(), spec(**COMMAND), spec(**COMMAND, heal="in-memory", loop=LOOP)]
NEW = [EXACT, spec(**COMMAND, heal="in-memory", loop=LOOP | {"reproducible": "required"})]


def start(job: JobSpec, seq: int = 1, epoch: int = 1) -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1.0,
        occurred_s=1.0,
        source="heart",
        source_seq=0,
        cause=0,
        incident=0,
        body=orders.StartRank(
            nodes=("n1",),
            task=5,
            rank=3,
            attempt=2,
            slot=Slot(node="n1", index=1),
            spec=job,
            num_seats=4,
            host="",
            port=0,
            checkpoint="",
        ),
    )


def copy_of(job: JobSpec) -> bytes:
    record = start(job)
    return codec.encode_order_copy(record, codec.encode_record(record))


def marked(path: tuple[str, ...], *, optional: bool) -> bytes:
    """The copy of an order with a field that this Unicron does not know."""
    wire = msgspec.msgpack.decode(copy_of(spec()))
    at = wire["body"]
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = "x"
    return msgspec.msgpack.encode(wire | ({"optional": [path]} if optional else {}))


def fields_of(kind: inspect.Type, at: str = "") -> Iterator[str]:
    match kind:
        case inspect.StructType():
            for one in kind.fields:
                yield f"{at}{one.encode_name}"
                yield from fields_of(one.type, f"{at}{one.encode_name}.")
        case inspect.VarTupleType():
            yield from fields_of(kind.item_type, at)
        case inspect.UnionType():
            for each in kind.types:
                yield from fields_of(each, at)
        case _:
            pass


def keys_of(plain: object, at: str = "") -> Iterator[str]:
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield f"{at}{key}"
            yield from keys_of(value, f"{at}{key}.")
    elif isinstance(plain, list):
        for value in plain:
            yield from keys_of(value, at)


def test_every_field_since_the_release_is_in_the_table() -> None:
    """If this fails, add the new field to ADDED, with the next format after a release."""
    assert set(ADDED_KINDS) == {kind for kind in orders.ORDERS if kind.__name__ not in FORMAT_0}, (
        "an agent of an older release does not know a new order"
    )
    now = {
        kind.__name__: set(fields_of(inspect.type_info(kind)))
        for kind in orders.ORDERS
        if kind not in ADDED_KINDS
    }
    assert set(now) == set(FORMAT_0)
    new = {(kind, path) for kind, paths in now.items() for path in paths - set(FORMAT_0[kind])}
    assert {(one.kind.__name__, ".".join(one.path)) for one in ADDED} == new
    gone = {(kind, path) for kind, paths in FORMAT_0.items() for path in set(paths) - now[kind]}
    assert not gone, "agents of an older release need these fields"
    assert max(one.since for one in ADDED) == ORDER_FORMAT_VERSION


@pytest.mark.parametrize("job", OLD)
def test_a_copy_has_only_what_the_release_knows(job: JobSpec) -> None:
    body = msgspec.msgpack.decode(copy_of(job))["body"]
    assert set(keys_of(body)) <= set(FORMAT_0["StartRank"])
    assert needed_format(job) == 0
    assert codec.decode_order_copy(copy_of(job)) == start(job)


@pytest.mark.parametrize("job", NEW)
def test_what_must_be_obeyed_is_in_the_copy(job: JobSpec) -> None:
    assert needed_format(job) == 1
    assert codec.decode_order_copy(copy_of(job)) == start(job)


def test_an_order_without_added_fields_is_its_own_copy() -> None:
    record = replace(
        start(spec()), body=orders.Resume(nodes=("n1",), task=1, generation=2, progress_from=0)
    )
    wire = codec.encode_record(record)
    assert codec.encode_order_copy(record, wire) is wire


def test_a_field_that_is_marked_as_ignorable_is_ignored() -> None:
    for path in (("spec", "train", "hint"), ("spec", "hint"), ("hint",)):
        assert codec.decode_order_copy(marked(path, optional=True)) == start(spec())


def test_an_order_with_another_unknown_field_is_not_decoded() -> None:
    body = codec.decode_order_copy(marked(("spec", "train", "hint"), optional=False)).body
    assert isinstance(body, UnknownBody)
    assert body.kind == "StartRank"
    assert "hint" in body.why


def test_a_field_that_this_agent_knows_is_obeyed_though_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = ("spec", "train", "reproducible")
    table = (
        Added(orders.StartRank, path, Train, 1, ignorable=True),
        *(one for one in ADDED if one.path != path),
    )
    assert needed_format(EXACT, table) == 1, "agents of 0.3.0 do not read marks"
    left_out, optional = order_format.changes(start(EXACT).body, table)
    assert optional == [path]
    assert path not in left_out
    wire = msgspec.msgpack.decode(copy_of(EXACT)) | {"optional": [path]}
    assert codec.decode_order_copy(msgspec.msgpack.encode(wire)) == start(EXACT)


async def test_an_agent_reads_the_signed_copy_and_the_log_keeps_all_fields(redis_log: Any) -> None:
    opened: AbstractAsyncContextManager[RedisLog] = redis_log()
    async with opened as log:
        epoch = await log.start_epoch("x")
        first, second = start(spec(), 1, epoch), start(EXACT, 2, epoch)
        await log.append([first, second], epoch=epoch, expect=0, cursor="", acked={})
        for _ in range(2):
            sent = await log.orders("n1", after="0-0", wait_s=0)
            assert [one.record for one in sent] == [first, second]
            stream = await log._ask([("XRANGE", *log._keys("orders:n1"), "-", "+")])
            plain = [
                msgspec.msgpack.decode(fields[1])["body"]["spec"]["train"]
                for _, fields in stream[0]
            ]
            assert "reproducible" not in plain[0]
            assert plain[1]["reproducible"] == "bitwise"
            await log.rebuild_orders([first, second], epoch=epoch, acked={})
        kept = await log._ask([("XRANGE", *log._keys("log"), "-", "+")])
        assert [fields[1] for _, fields in kept[0]] == [
            codec.encode_record(first),
            codec.encode_record(second),
        ]

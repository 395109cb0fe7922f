"""Every record kind round-trips by wire and by JSON, and logs of earlier versions stay readable."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from unicron.cli.commands.tail import kind_named
from unicron.events.errors import CorruptLog
from unicron.events.records import codec, decisions, orders, reports
from unicron.events.records.codec import UnknownBody, not_finite
from unicron.events.records.envelope import (
    FORMER_NAMES,
    IGNORABLE,
    KINDS,
    VERSIONS,
    Record,
    Report,
)
from unicron.events.records.types import Body
from unicron.events.spec import policy
from unicron.events.spec.job import parse

GOLDEN = Path(__file__).parents[1] / "data" / "wire.jsonl"
SPEC = {
    "apiVersion": "unicron/v1",
    "name": "golden",
    "weight": 2.5,
    "slots": {"min": 1, "max": 4},
    "throughput": {1: 1e12, 4: 3.5e12},
    "train": {"iterations": 3, "output": "out", "data": ["a", "ü"]},
}


def record(body: Body, seq: int = 1) -> Record:
    return Record(
        seq=seq,
        epoch=2,
        at_s=1700000000.5,
        occurred_s=1699999999.25,
        source="n1/17",
        source_seq=9,
        cause=3,
        incident=4,
        body=body,
    )


# --- a random body of a kind, from its annotations -----------------------------------------------
def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.StructType():
            return st.builds(kind.cls, **{one.name: values_of(one.type) for one in kind.fields})
        case inspect.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*(values_of(one) for one in kind.item_types))
        case inspect.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of(*(values_of(one) for one in kind.types))
        case _:
            raise AssertionError(f"this test has no values for the type {kind}")


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_kind_round_trips_by_wire_and_json(kind: str, data: st.DataObject) -> None:
    body: Body = data.draw(values_of(inspect.type_info(KINDS[kind])))
    assert not_finite(body) == ""
    there = record(body)
    assert codec.decode_record(codec.encode_record(there)) == there
    line = msgspec.json.encode(codec.to_plain(there))
    assert codec.from_plain(msgspec.json.decode(line)) == there
    report = Report(source="n1/1", source_seq=1, occurred_s=0.0, body=body)
    assert codec.decode_report(codec.encode_report(report)) == report


def test_each_kind_is_a_report_an_order_or_a_decision() -> None:
    assert set(KINDS) == {
        name
        for name in KINDS
        if sum(
            hasattr(module, name) and getattr(module, name).__module__ == module.__name__
            for module in (reports, orders, decisions)
        )
        == 1
    }
    assert KINDS["RankExited"].__module__ == reports.__name__


# --- golden bytes --------------------------------------------------------------------------------
def example_value(kind: inspect.Type, hint: str = "x") -> Any:
    """One fixed value of a type, as in the golden file."""
    match kind:
        case inspect.FloatType():
            return 0.1 + len(hint)
        case inspect.IntType():
            return len(hint)
        case inspect.StrType():
            return f"{hint}-é"
        case inspect.BoolType():
            return True
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StructType():
            if kind.cls is type(parse(SPEC)):
                return parse(SPEC)
            return kind.cls(**{one.name: example_value(one.type, one.name) for one in kind.fields})
        case inspect.VarTupleType():
            return (example_value(kind.item_type, hint), example_value(kind.item_type, hint + "2"))
        case inspect.TupleType():
            return tuple(example_value(one, hint) for one in kind.item_types)
        case inspect.DictType():
            return {example_value(kind.key_type, hint): example_value(kind.value_type, hint)}
        case inspect.UnionType():
            return example_value(kind.types[0], hint)
        case _:
            raise AssertionError(f"this test has no values for the type {kind}")


def example(kind: str) -> Record:
    body: Body = example_value(inspect.type_info(KINDS[kind]))
    return record(body)


def test_golden_records_are_readable() -> None:
    """A failure here means that existing logs cannot be read any more. Give the body a default
    for a new field, or a new version with an upcaster. WRITE_GOLDEN=1 adds lines for new kinds.
    """
    if os.environ.get("WRITE_GOLDEN"):
        write_golden()
    lines = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    have = {FORMER_NAMES.get(line["kind"], line["kind"]) for line in lines}
    assert have >= set(KINDS), "run with WRITE_GOLDEN=1 to add new kinds"
    for line in lines:
        back = codec.decode_record(bytes.fromhex(line["wire"]))
        assert not isinstance(back.body, UnknownBody), f"{line['kind']} is no longer decoded"
        assert codec.from_plain(line["plain"]) == back
        told = codec.to_plain(back)
        body = msgspec.to_builtins(told, str_keys=True)["body"]
        assert _contains(body, line["plain"]["body"]), line["kind"]
        today = FORMER_NAMES.get(line["kind"], line["kind"])
        assert told.pop("ignorable", False) == (today in IGNORABLE)
        line["plain"].pop("ignorable", None)
        assert {**told, "body": 0, "v": 0} == {**line["plain"], "kind": today, "body": 0, "v": 0}


def _contains(told: Any, written: Any) -> bool:
    """True if all written values were read, at every depth; newer fields may be added."""
    if isinstance(written, dict):
        return isinstance(told, dict) and all(
            key in told and _contains(told[key], value) for key, value in written.items()
        )
    if isinstance(written, list):
        told = list(told)
        return len(told) == len(written) and all(map(_contains, told, written))
    return bool(told == written)


def write_golden() -> None:
    """Add lines for new kinds; existing lines are never rewritten."""
    lines = GOLDEN.read_text().splitlines() if GOLDEN.exists() else []
    named = [json.loads(line)["kind"] for line in lines]
    have = {FORMER_NAMES.get(kind, kind) for kind in named}
    for kind in sorted(set(KINDS) - have):
        there = example(kind)
        plain = json.loads(msgspec.json.encode(codec.to_plain(there)))
        lines.append(
            json.dumps(
                {"kind": kind, "plain": plain, "wire": codec.encode_record(there).hex()},
                ensure_ascii=False,
            )
        )
    GOLDEN.write_text("\n".join(lines) + "\n")


# --- ignorable records ---------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["GpuMelted", *sorted(IGNORABLE)])
def test_an_ignorable_record_keeps_its_mark(kind: str) -> None:
    """On the wire and in JSON lines; a reader that knows the kind writes the mark anew."""
    unknown = UnknownBody(kind=kind, version=99, raw=b"\x80", ignorable=True)
    for there in (record(unknown), *([example(kind)] if kind in KINDS else [])):
        assert codec.decode_record(codec.encode_record(there)) == there
        assert codec.from_plain(codec.to_plain(there)) == there
        assert msgspec.msgpack.decode(codec.encode_record(there))["ignorable"] is True
        assert codec.to_plain(there)["ignorable"] is True


def test_other_records_have_no_mark() -> None:
    """So logs are byte by byte what they were before there was one."""
    there = record(UnknownBody(kind="GpuMelted", version=1, raw=b"\x80"))
    for one in (there, example("NodeLeft")):
        assert "ignorable" not in msgspec.msgpack.decode(codec.encode_record(one))
        assert "ignorable" not in codec.to_plain(one)
    with pytest.raises(CorruptLog, match="not a record"):
        codec.from_plain({**codec.to_plain(there), "ignorable": "yes"})


# --- former names --------------------------------------------------------------------------------
def test_former_names_map_to_current_kinds() -> None:
    assert not FORMER_NAMES.keys() & KINDS.keys()
    assert set(FORMER_NAMES.values()) <= set(KINDS)


@pytest.mark.parametrize("former", sorted(FORMER_NAMES))
def test_a_former_name_is_read_and_the_current_one_written(former: str) -> None:
    """By wire, by JSON lines, and as a report of an agent that is not upgraded yet."""
    today = FORMER_NAMES[former]
    there = example(today)
    assert there.kind == today
    wire = msgspec.msgpack.decode(codec.encode_record(there))
    assert wire["kind"] == today
    old = msgspec.msgpack.encode({**wire, "kind": former})
    assert codec.decode_record(old) == there
    assert codec.encode_record(codec.decode_record(old)) == codec.encode_record(there)
    assert codec.from_plain({**codec.to_plain(there), "kind": former}) == there
    report = Report(source="n1/1", source_seq=1, occurred_s=0.0, body=there.body)
    sent = msgspec.msgpack.decode(codec.encode_report(report))
    assert codec.decode_report(msgspec.msgpack.encode({**sent, "kind": former})) == report


@pytest.mark.parametrize(("former", "today"), sorted(FORMER_NAMES.items()))
def test_tail_takes_both_names(former: str, today: str) -> None:
    for name in (former, former.lower(), today):
        assert kind_named(name) == today


FIELDS = {
    "PlanChosen": "trigger num_slots allocations waf objective alternatives ideal_waf input "
    "objective_flop transition_flop running_s bound bound_tasks why paid_back_s "
    "alpha short spare kept",
    "Reconfigured": "task rank attempt generation step_version kept todo dealt source "
    "received_bytes down_s up_s settle_s origin origin_node taken damaged built_s "
    "mirrored_params mirrored_bytes",
}
"""The wire names, in order, of kinds whose Python field names differ from the wire."""


def test_a_renamed_field_keeps_its_wire_name() -> None:
    assert set(FIELDS) == {
        kind
        for kind, body in KINDS.items()
        if body.__struct_fields__ != body.__struct_encode_fields__
    }
    for kind, names in FIELDS.items():
        body = example(kind).body
        values = (getattr(body, name) for name in body.__struct_fields__)
        before = msgspec.msgpack.encode(dict(zip(names.split(), values, strict=True)))
        assert codec.encode_body(body) == (kind, 1, before)
        assert codec.decode_body(kind, 1, before) == body
        assert list(codec.to_plain(example(kind))["body"]) == names.split()


# --- versions ------------------------------------------------------------------------------------
def test_a_kind_of_a_newer_version_keeps_its_bytes() -> None:
    odd = msgspec.msgpack.encode({"z": 1, "a": [1.5, None, b"\x00"], "m": {"k": "v"}})
    wire = msgspec.msgpack.encode(
        {
            "kind": "GpuMelted",
            "v": 4,
            "body": msgspec.Raw(odd),
            "source": "n/1",
            "source_seq": 1,
            "occurred_s": 1.0,
            "seq": 5,
            "epoch": 1,
            "at_s": 2.0,
            "cause": 0,
            "incident": 0,
        }
    )
    back = codec.decode_record(wire)
    assert back.body == UnknownBody(kind="GpuMelted", version=4, raw=odd)
    assert codec.encode_record(back) == wire
    again = codec.decode_report(
        codec.encode_report(Report(source="n/1", source_seq=1, occurred_s=1.0, body=back.body))
    )
    assert again.body == back.body


@pytest.mark.parametrize("body", [1, None, [1], "text"])
def test_a_body_without_fields_is_no_record_whatever_its_kind(body: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.decode_body("GpuMelted", 4, msgspec.msgpack.encode(body))
    plain = {**codec.to_plain(example("NodeLeft")), "v": 99, "body": body}
    with pytest.raises(CorruptLog, match="not a record"):
        codec.from_plain(plain)


def test_a_newer_version_of_a_known_kind_keeps_its_bytes() -> None:
    body = reports.NodeLeft(node="n1", incarnation=1, reason="r")
    kind, v, raw = codec.encode_body(body)
    newer = codec.decode_body(kind, v + 1, raw)
    assert newer == UnknownBody(kind="NodeLeft", version=v + 1, raw=raw)
    assert codec.encode_body(newer) == (kind, v + 1, raw)


def test_an_old_version_is_upcast_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "node": data["host"]}

    def add(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "reason": f"was {data['why']}"}

    monkeypatch.setitem(VERSIONS, "NodeLeft", 3)
    monkeypatch.setitem(codec.UPCASTERS, ("NodeLeft", 1), rename)
    monkeypatch.setitem(codec.UPCASTERS, ("NodeLeft", 2), add)
    old = {"host": "n1", "incarnation": 7, "why": "x"}
    today = reports.NodeLeft(node="n1", incarnation=7, reason="was x")
    assert codec.decode_body("NodeLeft", 1, msgspec.msgpack.encode(old)) == today
    plain = {**codec.to_plain(record(today)), "v": 1, "body": old}
    assert codec.from_plain(plain).body == today
    assert codec.encode_body(today)[1] == 3
    for v in (0, -1):
        with pytest.raises(msgspec.MsgspecError):
            codec.decode_body("NodeLeft", v, msgspec.msgpack.encode(old))
    with pytest.raises(msgspec.MsgspecError):
        codec.decode_body("NodeLeft", 1, msgspec.msgpack.encode({"no": "host"}))


def test_an_unknown_field_is_ignored() -> None:
    raw = msgspec.msgpack.encode({"node": "n", "incarnation": 1, "reason": "", "new": [1]})
    assert codec.decode_body("NodeLeft", 1, raw) == reports.NodeLeft(
        node="n", incarnation=1, reason=""
    )


# --- finite floats -------------------------------------------------------------------------------
def progressed(**changed: Any) -> reports.TaskProgressed:
    whole: dict[str, Any] = {
        "task": 1,
        "generation": 1,
        "first_iteration": 0,
        "losses": (1.0, 2.0),
        "step_s": (0.1, 0.2),
        "rate_flops": 1e12,
        "micro_batches": 8,
    }
    return reports.TaskProgressed(**{**whole, **changed})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_neither_written_nor_read(number: float) -> None:
    spec = msgspec.structs.replace(parse(SPEC), throughput={1: 1.0, 4: number})
    plan = decisions.PlanChosen(
        trigger="",
        num_slots=1,
        allocations=(),
        waf=1.0,
        objective=1,
        alternatives=(decisions.Alternative(what="", slots=((1, 2),), waf=number, objective=1),),
    )
    bodies: list[tuple[Body, str]] = [
        (progressed(losses=(1.0, number)), "losses[1] is"),
        (progressed(rate_flops=number), "rate_flops is"),
        (reports.TaskSubmitted(spec=spec), "spec.throughput[4] is"),
        (plan, "alternatives[0].waf is"),
        (reports.PolicySet(policy=policy.Policy(stop_s_max=number)), "policy.stop_s_max is"),
    ]
    for body, where in bodies:
        assert not_finite(body).startswith(where)
        with pytest.raises(ValueError, match=r"is (nan|-?inf)"):
            codec.encode_record(record(body))
        name = type(body).__name__
        with pytest.raises(msgspec.MsgspecError):  # from a writer without this check
            codec.decode_body(name, 1, msgspec.msgpack.encode(body))
    good = record(progressed())
    for field in ("at_s", "occurred_s"):
        with pytest.raises(ValueError, match=field):
            codec.encode_record(msgspec.structs.replace(good, **{field: number}))


# --- invalid bytes and data ----------------------------------------------------------------------
def test_broken_bytes_raise_only_msgspec_errors() -> None:
    draw = random.Random(5)
    wires = [codec.encode_record(example(kind)) for kind in sorted(KINDS)]
    for _ in range(20000):
        wire = bytearray(draw.choice(wires))
        for _ in range(draw.randint(1, 3)):
            wire[draw.randrange(len(wire))] = draw.randrange(256)
        for decode in (codec.decode_record, codec.decode_report):
            try:
                decode(bytes(wire))
            except msgspec.MsgspecError:
                pass


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 7},
        {"kind": []},
        {"v": "1"},
        {"body": None},
        {"body": {}},
        {"seq": "x"},
        {"at_s": None},
        {"v": 0},
    ],
)
def test_plain_data_that_is_no_record_is_corrupt(change: dict[str, Any]) -> None:
    plain = {**codec.to_plain(example("NodeLeft")), "seq": 12, **change}
    with pytest.raises(CorruptLog) as raised:
        codec.from_plain(plain)
    assert raised.value.seq == (12 if "seq" not in change else 0)
    with pytest.raises(CorruptLog):
        codec.from_plain({})

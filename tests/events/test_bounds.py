"""Each text and list of a node's report has a bound, which its agent keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect
from msgspec.structs import replace
from rank_bodies import body_of
from unicron.events.log import archive
from unicron.events.log.identity import AGENT_REPORTS
from unicron.events.records import bounds
from unicron.events.records import reports as r
from unicron.events.records.bounds import cut, excess
from unicron.events.records.codec import UnknownBody
from unicron.events.records.types import Body, Labels
from unicron.workers.agent.delivery.spool import Spool

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = [kind for kind in AGENT_REPORTS if kind is not UnknownBody]
FREE = "y" * 600_000
"""More than any text may have, in a report that is small enough to be read."""


def _free(kind: inspect.Type) -> Any:
    """A value of the type that is as long as a report allows; None: the type has a fixed size."""
    match kind:
        case inspect.StrType():
            return FREE
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return (FREE,)
        case inspect.VarTupleType(item_type=inspect.StructType(cls=cls)):
            return (_least(cls),) * 10_000
        case inspect.VarTupleType(item_type=inspect.FloatType()):
            return (1.0,) * 100_000
        case inspect.VarTupleType():
            return (1,) * 100_000
        case inspect.DictType():
            return dict.fromkeys(range(100_000), "x")
        case inspect.StructType(cls=cls) if cls is Labels:
            return Labels(rack=FREE)
        case _:
            return None


def _least(cls: type[Any]) -> Any:
    """A value of a struct with little in it, but one that is no default."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    small: dict[type[inspect.Type], Any] = {
        inspect.IntType: 1,
        inspect.FloatType: 1.0,
        inspect.StrType: "n1",
        inspect.VarTupleType: (),
    }
    return cls(**{field.name: small[type(field.type)] for field in info.fields})


def _fields() -> list[tuple[type[Body], str, Any]]:
    found: list[tuple[type[Body], str, Any]] = []
    for kind in KINDS:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        found += [
            (kind, field.name, value)
            for field in info.fields
            if (value := _free(field.type)) is not None
        ]
    return found


@pytest.mark.parametrize(("kind", "name", "value"), _fields())
def test_each_field_of_each_report_has_a_bound(kind: type[Body], name: str, value: Any) -> None:
    """What explains is cut, all else is refused: no name of 1 MB gets into the state."""
    body = body_of(kind, **{name: value})
    assert excess(body_of(kind)) == ""
    if name in bounds.MICRO_BATCHES:  # as many as the task has
        assert excess(body) == ""
    else:
        assert excess(body).startswith(f"its {name} ")
        is_cut = name in (*bounds.SENTENCES, *bounds.OUTPUTS)
        assert (excess(cut(body)) == "") == is_cut


def test_the_bounds_of_an_unknown_body_and_of_a_list_of_texts() -> None:
    raw = bytes(bounds.UNKNOWN_BYTES_MAX + 1)
    assert excess(UnknownBody(kind="Foo", version=1, raw=raw[1:])) == ""
    assert excess(UnknownBody(kind="Foo", version=1, raw=raw))
    assert excess(UnknownBody(kind="F" * 257, version=1, raw=b"")).startswith("its kind has 257")
    dropped = body_of(r.RankReportsDropped, kinds=("x",) * 65)
    assert excess(dropped)
    assert excess(cut(dropped)) == ""


def test_all_that_agents_have_ever_reported_is_within_the_bounds() -> None:
    num = 0
    for path in sorted(GOLDEN.glob("release-*.jsonl")):
        for one in archive.read(path):
            if isinstance(one.body, tuple(AGENT_REPORTS)):
                num += 1
                assert excess(one.body) == ""
                assert cut(one.body) is one.body
    assert num > 100


def test_an_agent_cuts_what_explains_and_loses_what_it_must_not_send(tmp_path: Path) -> None:
    spool = Spool("n1/1", "n1", lambda: 1.0, file=tmp_path / "spool")
    exited = body_of(r.RankExited, tail="a" * 20_000 + "the last line", cause="b" * 5000)
    sent = spool.put(exited).body
    assert sent == replace(
        exited,
        tail=exited.tail[-bounds.OUTPUT_CHARS_MAX :],
        cause="b" * bounds.SENTENCE_CHARS_MAX,
    )
    long = body_of(r.CheckpointSaved, path="p" * 5000)
    assert spool.put(long).body == r.ReportsLost(node="n1", num_lost=1)
    spool.close(forget=True)

"""A record of each kind that a rank or an agent may send, made from its declaration."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect
from unicron.events.records.types import Body
from unicron.workers.agent.processes.report_limits import KINDS

IDENTITY = ("task", "rank", "attempt")


def body_of(kind: type[Body], **changes: Any) -> Body:
    """A valid body with the smallest values; integers are 1."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    values = {field.name: _least(field.type) for field in info.fields if field.required}
    return kind(**(values | changes))


def lies() -> list[tuple[type[Body], str]]:
    """Each kind with each of its fields that name the sender."""
    return [(kind, name) for kind in KINDS for name in IDENTITY if name in kind.__struct_fields__]


def counts() -> list[tuple[type[Body], str]]:
    """Each kind with each of its integers that does not name the sender."""
    found: list[tuple[type[Body], str]] = []
    for kind in KINDS:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        found += [
            (kind, field.name)
            for field in info.fields
            if isinstance(field.type, inspect.IntType) and field.name not in IDENTITY
        ]
    return found


def _least(kind: inspect.Type) -> Any:
    match kind:
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 1.0
        case inspect.BoolType():
            return False
        case inspect.StrType():
            return "x"
        case inspect.VarTupleType():
            return ()
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.UnionType():
            return _least(kind.types[0])
        case _:
            raise msgspec.ValidationError(f"no value of {kind}")

"""The law of finite floats: finds the first NaN or infinity in a body.

One checker per struct type, made once from its annotations, so that a kind without floats costs
nothing. Source: msgspec writes NaN as null in JSON and cannot read it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

Checker = Callable[[Any], str]
"""Where in a value the first float that is not finite lies: a path, "" if there is none."""


def not_finite(body: msgspec.Struct) -> str:
    """The path of the first NaN or infinity in `body`, or "" when every float is finite."""
    checker = _of_struct(type(body))
    return checker(body) if checker else ""


@cache
def _of_struct(cls: type[msgspec.Struct]) -> Checker | None:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    checkers = [(field.name, checker) for field in info.fields
                if (checker := _of(field.type)) is not None]

    def check(value: Any) -> str:
        for name, checker in checkers:
            if where := checker(getattr(value, name)):
                return f"{name}{where}" if where[0] in "[ " else f"{name}.{where}"
        return ""

    return check if checkers else None


def _of(kind: inspect.Type) -> Checker | None:
    match kind:
        case inspect.FloatType():
            return _number
        case inspect.StructType():
            return _of_struct(kind.cls)
        case inspect.VarTupleType() | inspect.ListType():
            inner = _of(kind.item_type)
            return _items(inner) if inner else None
        case inspect.DictType():
            inner = _of(kind.value_type)
            return _values(inner) if inner else None
        case inspect.TupleType():
            return _places([_of(one) for one in kind.item_types])
        case inspect.UnionType():
            return _one_of(kind)
        case _:
            return None


def _number(value: Any) -> str:
    return "" if math.isfinite(value) else f" is {value}"


def _items(inner: Checker) -> Checker:
    def check(value: Any) -> str:
        for index, item in enumerate(value):
            if where := inner(item):
                return _at(index, where)
        return ""

    return check


def _values(inner: Checker) -> Checker:
    def check(value: Any) -> str:
        for key, item in value.items():
            if where := inner(item):
                return _at(key, where)
        return ""

    return check


def _places(inner: list[Checker | None]) -> Checker | None:
    def check(value: Any) -> str:
        for index, (checker, item) in enumerate(zip(inner, value, strict=True)):
            if checker and (where := checker(item)):
                return _at(index, where)
        return ""

    return check if any(inner) else None


def _one_of(kind: inspect.UnionType) -> Checker | None:
    """Floats and structs beside None; a union of anything else holds no float of ours."""
    inner = [checker for one in kind.types if (checker := _of(one)) is not None]
    assert len(inner) <= 1, f"two kinds of floats in {kind}"
    if not inner:
        return None
    only = inner[0]

    def check(value: Any) -> str:
        return "" if value is None or isinstance(value, int | str) else only(value)

    return check


def _at(key: object, where: str) -> str:
    return f"[{key}]{where}" if where[0] in "[ " else f"[{key}].{where}"

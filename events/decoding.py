"""Decodes msgpack and JSON, which others may have written: all that is wrong is one DecodeError."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, overload

import msgspec

T = TypeVar("T")
Data = bytes | bytearray | memoryview
Convert = Callable[[type, Any], Any]
"""Makes a value of a type that msgspec does not know from a plain value."""


@contextmanager
def _one_error() -> Generator[None]:
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as error:
        raise _as_one(error) from None


def _as_one(error: Exception) -> msgspec.MsgspecError:
    """msgspec raises other errors too: for text that is not UTF-8, numbers that are too large, and
    data that is nested too deeply."""
    return error if isinstance(error, msgspec.MsgspecError) else msgspec.DecodeError(str(error))


class Decoder(Generic[T]):
    """Decodes msgpack of one type, again and again."""

    @overload
    def __init__(self, kind: type[T]) -> None: ...
    @overload
    def __init__(self, kind: Any) -> None: ...
    def __init__(self, kind: Any) -> None:
        self._decode: Callable[[Data], T] = msgspec.msgpack.Decoder(kind).decode

    def decode(self, data: Data) -> T:
        """Raises msgspec.MsgspecError."""
        try:  # not by the context manager, which takes longer than msgspec does
            return self._decode(data)
        except (ValueError, OverflowError, RecursionError) as error:
            raise _as_one(error) from None


@overload
def from_msgpack(data: Data, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: Data, kind: Any = Any) -> Any: ...
def from_msgpack(data: Data, kind: Any = Any) -> Any:
    """The value of type `kind` that is encoded as msgpack. Raises msgspec.MsgspecError."""
    with _one_error():
        return msgspec.msgpack.decode(data, type=kind)


@overload
def from_json(data: Data | str, kind: type[T], convert: Convert | None = None) -> T: ...
@overload
def from_json(data: Data | str, kind: Any = Any, convert: Convert | None = None) -> Any: ...
def from_json(data: Data | str, kind: Any = Any, convert: Convert | None = None) -> Any:
    """The value of type `kind` that is encoded as JSON. Raises msgspec.MsgspecError."""
    with _one_error():
        return msgspec.json.decode(data, type=kind, dec_hook=convert)


def from_loose_json(data: str) -> Any:
    """As `from_json`, but NaN and Infinity are numbers, as many programs print them."""
    with _one_error():
        value: Any = json.loads(data)
        return value


def from_strict_json(data: bytes) -> Any:
    """As `from_json`, but no object has a name twice, and no text has a lone surrogate: that is
    JSON (`"\\ud800"`), but neither the log nor an answer can hold it."""
    with _one_error():
        value = json.loads(data, object_pairs_hook=_unique_names, parse_constant=_not_finite)
        json.dumps(value, ensure_ascii=False).encode()
        return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name, value in pairs:
        if name in whole:
            raise ValueError(f"{name!r} is given twice")
        whole[name] = value
    return whole


def _not_finite(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")

"""Checks of a spec, and its error messages: the path, the problem, a suggested key."""

import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from ..errors import SpecError

PLAIN = re.compile(r"[\w./-]{1,60}\Z", re.ASCII)
"""Text that needs no quotes in a YAML list."""
KEY_CHARS_MAX = 100
COUNT_NUM_MAX = 2**31 - 1
DOCS = "see docs/reference/job-spec.md"
UNION = re.compile(r"`(\w+(?: \| \w+)+)`")
WORDS = (
    ("`object`", "a mapping"),
    ("`array`", "a list"),
    ("`str`", "text"),
    ("got `float`", "got a fraction"),
    ("`bool`", "true or false"),
    ("`int`", "a whole number"),
    ("`float`", "a number"),
)


def need(holds: bool, path: str, message: str, hint: str = DOCS) -> None:
    """Raise SpecError for the job spec's field `path` unless the condition holds."""
    if not holds:
        raise SpecError(path, message, hint)


def need_count(count: int, path: str, least: int = 1) -> None:
    """Raise SpecError unless `count` is from `least` to COUNT_NUM_MAX."""
    need(count >= least, path, f"must be at least {least}")
    need(count <= COUNT_NUM_MAX, path, f"must be at most {COUNT_NUM_MAX}")


def spec_error(
    text: str,
    root: type[Struct],
    hint: str,
    *,
    given: object = None,
    excluded: Collection[str] = (),
) -> SpecError:
    """Turn msgspec's error `text` about `given` into a SpecError: path, one line, a suggestion.
    `root` is the type of the whole document, `hint` the default hint, and `excluded` the fields of
    the root that must not be in `given`."""
    message, _, at = text.partition(" - at ")
    path = at.rpartition(" in ")[2].strip("`").removeprefix("$").removeprefix(".")
    if given is None and message.startswith("Expected `object`"):
        return SpecError(path, "is empty", hint)
    if missing := re.fullmatch("Object missing required field `(.*)`", message):
        return SpecError(_join(path, missing[1]), "is missing", hint)
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", message):
        return SpecError(
            _join(path, _printable(unknown[1])),
            "is not a field",
            _suggestion(unknown[1], path, root, given, excluded) or hint,
        )
    if message.startswith("Invalid enum value"):
        hint = _choices(path, root) or hint
    elif message.startswith("Expected `array"):
        hint = _as_list(given, path) or hint
    elif message.startswith("Expected `int"):
        hint = _as_count(given, path) or hint
    message = UNION.sub(
        lambda found: " or ".join(f"`{one}`" for one in found[1].split(" | ")),
        message.replace(" | null`", "`"),
    )
    for old, new in WORDS:
        message = message.replace(old, new)
    if "`key` in" in at:
        message = f"a key of it: {message}"
    return SpecError(path, message[:1].lower() + message[1:], hint)


def _suggestion(
    key: str, path: str, root: type[Struct], given: Any, excluded: Collection[str]
) -> str:
    """Suggest a key: with another name, at another place, or a similar one; "" for none."""
    parts, at = _types(root), _without_indices(path)
    not_keys: dict[str, str] = getattr(parts.get(at), "NOT_KEYS", {})
    if key in not_keys:
        return not_keys[key]
    names = {
        there: getattr(part, "OTHER_NAMES", {}).get(key)
        for there, part in parts.items()
        if there.partition(".")[0] in _given(given, "")
    }
    for there, name in names.items():
        if name is not None:
            return f"did you mean {name if there == at else _join(there, name)}?"
    keys = {
        there: [name for name in _fields(part) if there or name not in excluded]
        for there, part in parts.items()
        if there.partition(".")[0] not in excluded
    }
    if paths := [there for there, names in keys.items() if key in names]:
        return "it belongs " + " or ".join(
            f"under {there}:" if there else "at the top level" for there in paths
        )
    if barred := [there for there, part in parts.items() if there and key in _fields(part)]:
        return f"it is a key of {barred[0]}:, which this file must not have"
    present: dict[Any, Any] = {**_given(given, path)}  # a key may be a number
    free = [name for name in keys.pop(at, ()) if name not in present]
    if near := difflib.get_close_matches(key, free, n=1):
        return f"did you mean {near[0]}?"
    others = [name for name in present if isinstance(name, str) and name != key]
    if near := difflib.get_close_matches(key, others, n=1, cutoff=0.8):
        return f"{near[0]} is already given"
    full = {name: _join(there, name) for there, names in reversed(keys.items()) for name in names}
    near = difflib.get_close_matches(key, full, n=1)
    return f"did you mean {full[near[0]]}?" if near else ""


def _choices(path: str, root: type[Struct]) -> str:
    """The permitted values of a Literal field; "" for any other field."""
    parent, _, name = _without_indices(path).rpartition(".")
    part = _types(root).get(parent)
    kind = _fields(part).get(name) if part is not None else None
    words = [
        word
        for one in (kind, *get_args(kind))
        if get_origin(one) is Literal
        for word in get_args(one)
    ]
    return f"one of {', '.join(map(str, words))}" if words else ""


def _as_list(given: Any, path: str) -> str:
    """How to write the single value at a path as a list; "" if it is not plain."""
    parent, _, name = path.rpartition(".")
    value = _given(given, parent).get(name)
    return f"write [{value}]" if type(value) in (int, str) and PLAIN.match(str(value)) else ""


def _as_count(given: Any, path: str) -> str:
    """How to write a whole number that is given as `1e9` or with a unit; "" if it is neither."""
    parent, _, name = path.rpartition(".")
    value = _given(given, parent).get(name)
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and value[:1].isdigit():
        return "write digits alone, without quotes or a unit" + (
            ", in bytes" if "_bytes" in name else ""
        )
    return ""


def _given(given: object, path: str) -> dict[str, Any]:
    """The given mapping at a path; empty if there is none or the path goes through a list."""
    at = given
    for name in path.split(".") if path else ():
        at = cast("dict[str, Any]", at).get(name) if isinstance(at, dict) else None
    return cast("dict[str, Any]", at) if isinstance(at, dict) else {}


def _types(root: type[Struct]) -> dict[str, type[Struct]]:
    """The path of every struct in the document -> its type; outer ones first."""
    found = [("", root)]
    for path, part in found:  # the loop appends to it
        found += [
            (_join(path, name), inner)
            for name, kind in _fields(part).items()
            for inner in _structs(kind)
        ]
    return dict(found)


def _fields(part: type[Struct]) -> dict[str, Any]:
    """Key -> type of each field."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(part)}


def _structs(kind: Any) -> Iterator[type[Struct]]:
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind
    for inner in get_args(kind):
        yield from _structs(inner)


def _without_indices(path: str) -> str:
    """The path without list indices."""
    return re.sub(r"\[[^]]*\]", "", path)


def _printable(key: str) -> str:
    """The user's key, cut and escaped so that it is safe to print on one line."""
    cut = key[:KEY_CHARS_MAX]
    return cut if cut.isprintable() else repr(cut)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

"""What a file's strict reader refused, in words: where, what, and the key that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from ..errors import SpecError

PLAIN = re.compile(r"[\w./-]{1,60}\Z", re.ASCII)
"""Text that stands in a list as it is."""
KEY_CHARS_MAX = 100
UNION = re.compile(r"`(\w+(?: \| \w+)+)`")
WORDS = (("`object`", "a mapping"), ("`array`", "a list"), ("`str`", "text"),
         ("got `float`", "got a fraction"), ("`bool`", "true or false"),
         ("`int`", "a whole number"), ("`float`", "a number"))


def refused(said: str, root: type[Struct], hint: str, *, given: object = None,
            without: Collection[str] = ()) -> SpecError:
    """What msgspec said of `given`, as a path, one line, and what is perhaps meant.

    `root` is what the whole is read as, and `hint` what to say when nothing is near; of the root's
    fields those in `without` cannot stand in what was given.
    """
    message, _, at = said.partition(" - at ")
    path = at.rpartition(" in ")[2].strip("`").removeprefix("$").removeprefix(".")
    if missing := re.fullmatch("Object missing required field `(.*)`", message):
        return SpecError(_join(path, missing[1]), "is missing", hint)
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", message):
        return SpecError(_join(path, _shown(unknown[1])), "is not a field",
                         _meant(unknown[1], path, root, given, without) or hint)
    if message.startswith("Invalid enum value"):
        hint = _words(path, root) or hint
    elif message.startswith("Expected `array"):
        hint = _listed(given, path) or hint
    message = UNION.sub(lambda found: " or ".join(f"`{one}`" for one in found[1].split(" | ")),
                        message.replace(" | null`", "`"))
    for theirs, ours in WORDS:
        message = message.replace(theirs, ours)
    if "`key` in" in at:
        message = f"a key of it: {message}"
    return SpecError(path, message[:1].lower() + message[1:], hint)


def _meant(key: str, path: str, root: type[Struct], given: Any,
           without: Collection[str]) -> str:
    """Which key was perhaps meant: the same elsewhere, one like it that may stand at that place
    and does not yet, or elsewhere; empty for none."""
    parts, at = _places(root), _plain(path)
    not_keys: dict[str, str] = getattr(parts.get(at), "NOT_KEYS", {})
    if key in not_keys:
        return not_keys[key]
    keys = {place: [name for name in _kinds(part) if place or name not in without]
            for place, part in parts.items() if place.partition(".")[0] not in without}
    if places := [place for place, names in keys.items() if key in names]:
        return "it belongs " + " or ".join(f"under {place}:" if place else "at the top level"
                                           for place in places)
    if barred := [place for place, part in parts.items() if place and key in _kinds(part)]:
        return f"it is of {barred[0]}:, which cannot stand in this file"
    there = _given(given, path)
    free = [name for name in keys.pop(at, ()) if name not in there]
    if near := difflib.get_close_matches(key, free, n=1):
        return f"did you mean {near[0]}?"
    of = {name: _join(place, name) for place, names in reversed(keys.items()) for name in names}
    near = difflib.get_close_matches(key, of, n=1)
    return f"did you mean {of[near[0]]}?" if near else ""


def _words(path: str, root: type[Struct]) -> str:
    """Those that may stand at a path which takes one of a few; empty if it does not."""
    place, _, name = _plain(path).rpartition(".")
    part = _places(root).get(place)
    kind = _kinds(part).get(name) if part is not None else None
    words = [word for one in (kind, *get_args(kind)) if get_origin(one) is Literal
             for word in get_args(one)]
    return f"one of {', '.join(map(str, words))}" if words else ""


def _listed(given: Any, path: str) -> str:
    """How to write what stands alone at a path as a list; empty where that is not plain."""
    above, _, name = path.rpartition(".")
    alone = _given(given, above).get(name)
    return f"write [{alone}]" if type(alone) in (int, str) and PLAIN.match(str(alone)) else ""


def _given(given: object, path: str) -> dict[str, Any]:
    """The mapping that was given at a path; empty where there is none, or it is in a list."""
    at = given
    for name in path.split(".") if path else ():
        at = cast("dict[str, Any]", at).get(name) if isinstance(at, dict) else None
    return cast("dict[str, Any]", at) if isinstance(at, dict) else {}


def _places(root: type[Struct]) -> dict[str, type[Struct]]:
    """Every place that has keys of its own, and what it is read as; the outer ones first."""
    found = [("", root)]
    for place, part in found:  # it grows meanwhile
        found += [(_join(place, name), inner) for name, kind in _kinds(part).items()
                  for inner in _structs(kind)]
    return dict(found)


def _kinds(part: type[Struct]) -> dict[str, Any]:
    """What each key is read as."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(part)}


def _structs(kind: Any) -> Iterator[type[Struct]]:
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind
    for inner in get_args(kind):
        yield from _structs(inner)


def _plain(path: str) -> str:
    """Without the places in lists."""
    return re.sub(r"\[[^]]*\]", "", path)


def _shown(key: str) -> str:
    """A stranger's word, so that it stands in a line and does nothing to a screen."""
    cut = key[:KEY_CHARS_MAX]
    return cut if cut.isprintable() else repr(cut)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

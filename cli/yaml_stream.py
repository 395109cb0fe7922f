"""Large files of plain data: the job file's YAML, from libyaml's stream of events.

What is read is the same; whatever is refused, or cannot be told apart here, is read again by the
job file's own reader, which has the words for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from .job_file import EXAMPLES, RESOLVERS, read_yaml

LOADER: Any = getattr(yaml, "CSafeLoader", None)
DIGITS_NUM_MAX = 19
_NUMBERS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:int": int, "tag:yaml.org,2002:float": float}
_WORDS = {"true": True, "false": False}


class _Doubtful(Exception):
    """Something that the other reader must judge."""


def read_large(text: str, docs: str = EXAMPLES) -> Any:
    """One YAML document as plain data, several times faster than `read_yaml` where PyYAML has
    libyaml. Raises SpecError with line and column, and the hint `docs`.
    """
    if LOADER is not None:
        try:
            return _document(iter(yaml.parse(text, Loader=LOADER)))
        except (yaml.YAMLError, _Doubtful, RecursionError):
            pass
    return read_yaml(text, docs)


def _document(events: Iterator[Any]) -> Any:
    _expect(next(events), yaml.StreamStartEvent)
    if isinstance(event := next(events), yaml.StreamEndEvent):
        return None
    _expect(event, yaml.DocumentStartEvent)
    found = _node(next(events), events)
    _expect(next(events), yaml.DocumentEndEvent)
    _expect(next(events), yaml.StreamEndEvent)
    return found


def _expect(event: Any, kind: type[Any]) -> None:
    if not isinstance(event, kind):
        raise _Doubtful


def _node(event: Any, events: Iterator[Any]) -> Any:
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if isinstance(event, yaml.AliasEvent) or event.tag is not None:
        raise _Doubtful
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(one := next(events), yaml.SequenceEndEvent):
            items.append(_node(one, events))
        return items
    found: dict[Any, Any] = {}
    while not isinstance(one := next(events), yaml.MappingEndEvent):
        _expect(one, yaml.ScalarEvent)
        key = _scalar(one)
        if key in found:
            raise _Doubtful
        found[key] = _node(next(events), events)
    return found


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.tag is not None:
        raise _Doubtful
    if not event.implicit[0]:
        return text
    for tag, pattern in RESOLVERS.get(text[:1], ()):
        if pattern.match(text):
            return _value(tag, text)
    return text


def _value(tag: str, text: str) -> Any:
    if tag in _NUMBERS:
        if len(text) > DIGITS_NUM_MAX or not text[-1].isdigit():  # too large, .inf, .nan, or 1.
            raise _Doubtful
        return _NUMBERS[tag](text)
    return _WORDS.get(text.lower())

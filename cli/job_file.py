"""A job file: strict YAML to a checked job spec.

Stricter than YAML 1.1 where that surprises: a key may stand once, `1e-3` is a number, `no` and
`2026-01-01` are text, `010` is ten, and there are no aliases.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ..events.errors import SpecError, UsageError
from ..events.spec import JobSpec, is_url, parse
from ..workers import urls

FILE_BYTES_MAX = 1 << 20
EXAMPLES = "see deploy/examples/"
MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML's core schema: null, true and false, integers, floats, text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (as its base declares it)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark: yaml.Mark | None = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _refuse(mark,  # pyright: ignore[reportUnknownArgumentType]
                          "an alias (*) is not supported", "write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == MERGE:
                raise _refuse(key_node.start_mark, "a key is a plain word or a number", EXAMPLES)
            key = self.construct_object(key_node)  # pyright: ignore[reportUnknownMemberType]
            line = key_node.start_mark.line + 1
            if key in lines:
                raise SpecError(f"line {line}",
                                f"duplicate key {key!r}, first given in line {lines[key]}",
                                "delete one of the two")
            lines[key] = line
        return super().construct_mapping(node, deep)


_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", rf"(?:{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", list("-+0123456789.")),
):
    _Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > 19:
        raise _refuse(node.start_mark, f"{text[:12]}... is too large a number", EXAMPLES)
    return int(text)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


RESOLVERS = _Loader.yaml_implicit_resolvers
"""By a plain scalar's first character: the tags that it may have, each with its pattern."""
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def _refuse(mark: yaml.Mark | None, message: str, hint: str) -> SpecError:
    at = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return SpecError(at, message, hint)


def load(path: Path) -> JobSpec:
    """Read, check and normalise a job file; relative paths in it become absolute here.

    Raises UsageError or SpecError, each with a hint, prefixed by the file's name.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{path}: larger than {FILE_BYTES_MAX} bytes", EXAMPLES)
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", EXAMPLES) from None
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or 'cannot be read').lower()}",
                         "name a job file; examples are in deploy/examples/") from None
    try:
        spec = anchored(parse(read_yaml(text)))
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None
    # Without fsspec here nobody can tell: the ranks will, where they start.
    if spec.train is not None and is_url(spec.train.output) and urls.is_installed():
        urls.check_driver(spec.train.output)
    return spec


def read_yaml(text: str) -> Any:
    """One YAML document as plain data. Raises SpecError with line and column."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        what = error.problem or error.context or "not YAML"
        raise _refuse(error.problem_mark or error.context_mark, what, EXAMPLES) from None
    except yaml.YAMLError as error:
        raise SpecError("", " ".join(str(error).split()), EXAMPLES) from None
    except RecursionError:
        raise SpecError("", "nested too deeply", EXAMPLES) from None
    finally:
        if loader is not None:
            loader.dispose()


def anchored(spec: JobSpec) -> JobSpec:
    """The spec with its paths absolute: agents run in folders of their own."""
    train = spec.train
    if train is None:
        return spec
    output = (train.output if is_url(train.output)
              else str(Path(train.output).expanduser().absolute()))
    data = tuple(str(Path(path).expanduser().absolute()) for path in train.data)
    return msgspec.structs.replace(
        spec, train=msgspec.structs.replace(train, output=output, data=data))

"""Reads a job file or a policy file, which are strict YAML, into a checked spec or policy.

The format differs from YAML 1.1 where YAML 1.1 is error-prone: no duplicate keys, `1e-3` is a
number, `no` and `2026-01-01` are text, `010` is ten, and there are no aliases.
"""

import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from ...events import object_storage
from ...events.errors import SpecError, UsageError
from ...events.spec import policy
from ...events.spec.job import JobSpec, Loop, Train, is_url, parse
from . import megatron_command

T = TypeVar("T", Train, Loop)

FILE_BYTES_MAX = 1 << 20
FAST_LEVELS_NUM_MAX = 500
"""libyaml overflows a stack of 8 MiB at a depth of 20,000 to 30,000."""
REREAD_CHARS_MAX = 1 << 18
"""To read them again in Python takes about 3 s."""
EXAMPLES = "see deploy/examples/"
STDIN = Path("-")
MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML's core schema: null, true and false, integers, floats, text."""

    docs = EXAMPLES
    """The hint of errors: where the format is documented."""
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (as its base declares it)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark: yaml.Mark | None = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _refuse(
                mark,  # pyright: ignore[reportUnknownArgumentType]
                "an alias (*) is not supported",
                "repeat the value itself",
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == MERGE:
                raise _refuse(key_node.start_mark, "a key is a plain word or a number", self.docs)
            key = self.construct_object(key_node)  # pyright: ignore[reportUnknownMemberType]
            line = key_node.start_mark.line + 1
            if key in lines:
                raise SpecError(
                    f"line {line}",
                    f"duplicate key {key!r}, first given in line {lines[key]}",
                    "delete one of the two",
                )
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
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > 19:
        raise _refuse(node.start_mark, f"{text[:12]}... is too large a number", loader.docs)
    return int(text)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def _refuse(mark: yaml.Mark | None, message: str, hint: str) -> SpecError:
    at = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return SpecError(at, message, hint)


def _of_yaml(error: yaml.MarkedYAMLError, docs: str) -> SpecError:
    what = error.problem or error.context or "not YAML"
    return _refuse(error.problem_mark or error.context_mark, what, docs)


def load(path: Path) -> JobSpec:
    """Read, check and normalise a job file; its paths become absolute. Raises UsageError."""
    text = read_text(
        path, FILE_BYTES_MAX, "name a job file; examples are in deploy/examples/", EXAMPLES
    )
    try:
        spec = with_absolute_paths(parse(read_yaml(text)))
        megatron_command.check(spec)
        # If fsspec is not installed here, the ranks check the URL when they start.
        training = spec.training
        if training is not None and is_url(training.output) and object_storage.is_installed():
            object_storage.check_driver(
                training.output, "loop.output" if spec.loop is not None else "train.output"
            )
    except UsageError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None
    return spec


def load_policy(path: Path) -> policy.Policy:
    """The policy in a YAML or JSON file; an empty file means the defaults. Raises UsageError."""
    text = read_text(path, FILE_BYTES_MAX, "name a policy file, YAML", policy.DOCS)
    try:
        given: Any = read_yaml(text, policy.DOCS)
        if not isinstance(given, dict | None):
            raise SpecError("", "a policy is a mapping, for example silence_s_max: 5", policy.DOCS)
        return policy.parse({**(given or {})})
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def shown_name(path: Path) -> str:
    """The file's name in errors; `-` is standard input."""
    return "standard input" if path == STDIN else str(path)


def read_text(path: Path, bytes_max: int, name_it: str, docs: str, shorten_it: str = "") -> str:
    """The text of a file or of standard input, at most `bytes_max`: a device file may have no end.
    Raises UsageError with the hint `name_it` (unreadable), `shorten_it` (too long) or `docs`."""
    try:
        with sys.stdin.buffer if path == STDIN else path.open("rb") as file:
            found = file.read(bytes_max + 1)
    except OSError as error:
        raise UsageError(
            f"{shown_name(path)}: {(error.strerror or 'cannot be read').lower()}", name_it
        ) from None
    if len(found) > bytes_max:
        raise UsageError(f"{shown_name(path)}: larger than {bytes_max} bytes", shorten_it or docs)
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{shown_name(path)}: not UTF-8 text", docs) from None


def read_yaml(text: str, docs: str = EXAMPLES) -> Any:
    """One YAML document as plain data. Raises SpecError with line, column and the hint `docs`."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        loader.docs = docs
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        raise _of_yaml(error, docs) from None
    except yaml.YAMLError as error:
        raise SpecError("", " ".join(str(error).split()), docs) from None
    except RecursionError:
        raise SpecError("", "nested too deeply", docs) from None
    finally:
        if loader is not None:
            loader.dispose()


def read_large(text: str, docs: str = EXAMPLES) -> Any:
    """As `read_yaml`, many times faster if PyYAML has libyaml and the text has no error.

    libyaml names other places and other reasons than the Python reader, accepts an alias, and
    overflows the stack where text is nested too deeply. So text with a `*`, that may be nested
    deeply, or (up to REREAD_CHARS_MAX) that libyaml refuses, is read by `read_yaml`.
    """
    if yaml.__with_libyaml__ and "*" not in text and _depth_bound(text) < FAST_LEVELS_NUM_MAX:

        class FastLoader(yaml.CSafeLoader, _Loader):
            pass

        try:
            return FastLoader(text).get_single_data()
        except (yaml.YAMLError, SpecError, RecursionError) as error:
            if len(text) > REREAD_CHARS_MAX and isinstance(error, yaml.MarkedYAMLError):
                raise _of_yaml(error, docs) from None
    return read_yaml(text, docs)


def _depth_bound(text: str) -> int:
    """The text is nested at most so deeply. Brackets in quoted text count, so it may be less."""
    steps = (1 if sign[0] in "[{" else -1 for sign in re.finditer(r"[\[\]{}]", text))
    indents = (len(line[0]) for line in re.finditer(r"^[ ?:-]+", text, re.MULTILINE))
    return max(accumulate(steps), default=0) + max(indents, default=0)


def with_absolute_paths(spec: JobSpec) -> JobSpec:
    """The spec with absolute paths, because agents run in other folders."""
    train, loop = spec.train, spec.loop
    if spec.command:  # it starts where its relative paths begin
        spec = msgspec.structs.replace(spec, folder=_absolute(spec.folder))
    if loop is not None:
        spec = msgspec.structs.replace(spec, loop=_with_absolute_folders(loop))
    if train is None:
        return spec
    data = tuple(map(_absolute, train.data))
    return msgspec.structs.replace(
        spec, train=msgspec.structs.replace(_with_absolute_folders(train), data=data)
    )


def _with_absolute_folders(training: T) -> T:
    begin_from = training.begin_from and _absolute_output(training.begin_from)
    return msgspec.structs.replace(
        training, output=_absolute_output(training.output), begin_from=begin_from
    )


def _absolute_output(output: str) -> str:
    return output if is_url(output) else _absolute(output)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())

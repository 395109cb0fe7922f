"""How long the texts and lists of a node's report may be, by field: its agent cuts to that, the
leader takes no more."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from .codec import UnknownBody
from .types import Body

B = TypeVar("B", bound=Body)

NAME_CHARS_MAX = 256
"""Of a name, an endpoint, a digest, a number as text: of every text that is not listed below."""
PATH_CHARS_MAX = 4096
"""Linux's PATH_MAX; a URL of an object store is shorter."""
SENTENCE_CHARS_MAX = 4096
OUTPUT_CHARS_MAX = 16 << 10
TEXTS_NUM_MAX = 64
"""Of a list of texts."""
ITEMS_NUM_MAX = 4096
"""Of any other list: slots of a node, peers, iterations since the last report of them."""
GROUPS_NUM_MAX = 64
"""Of a rank's groups: the rows of its progress page."""
UNKNOWN_BYTES_MAX = 64 << 10
"""Of a body of a later version, which has no effect."""

PATHS = ("path", "log_path", "output")
SENTENCES = (
    "cause",
    "damaged",
    "error",
    "mark",
    "nccl_ras",
    "reason",
    "rounding_why",
    "text",
    "what",
    "why",
)
OUTPUTS = ("stack", "tail")
TEXTS = ("kinds", "silent_peers")
MICRO_BATCHES = (
    "kept_micro_batches",
    "micro_batches",
    "reassigned_micro_batches",
    "remaining_micro_batches",
)
"""As many as the task has: only the size of the report bounds their number."""

_EXPLAINS: dict[str, int] = {
    **dict.fromkeys(SENTENCES, SENTENCE_CHARS_MAX),
    **dict.fromkeys(OUTPUTS, OUTPUT_CHARS_MAX),
}
_CHARS_MAX: dict[str, int] = {**_EXPLAINS, **dict.fromkeys(PATHS, PATH_CHARS_MAX)}
_ITEMS_MAX: dict[str, int] = {
    **dict.fromkeys(TEXTS, TEXTS_NUM_MAX),
    "groups": GROUPS_NUM_MAX,
    **dict.fromkeys(MICRO_BATCHES, 1 << 20),
}
_CUT: dict[str, int] = {**_EXPLAINS, **dict.fromkeys(TEXTS, TEXTS_NUM_MAX)}
_PLAIN = {int, float, bool, type(None)}


def cut(body: B) -> B:
    """The body with what explains it cut to the bounds: a shorter sentence is still true. A name or
    a path would be another one."""
    if isinstance(body, UnknownBody):
        return body
    shorter = dict[str, Any]()
    for name in body.__struct_fields__:
        if (limit := _CUT.get(name)) is None:
            continue
        value: str | tuple[str, ...] = getattr(body, name)
        if len(value) > limit:
            shorter[name] = value[-limit:] if name == "tail" else value[:limit]
    return replace(body, **shorter) if shorter else body


def excess(body: Body) -> str:
    """What of a node's report is longer than it may be, and how long that may be; "": nothing."""
    if isinstance(body, UnknownBody):
        if len(body.raw) > UNKNOWN_BYTES_MAX:
            return f"its body has {len(body.raw)} bytes, at most {UNKNOWN_BYTES_MAX} are taken"
        where = _too_long("kind", body.kind)
        return f"its kind{where}" if where else ""
    where = _excess_of(body)
    return f"its{where}" if where else ""


def _excess_of(value: Struct) -> str:
    for name in value.__struct_fields__:
        item = getattr(value, name)
        if type(item) not in _PLAIN and (where := _too_long(name, item)):
            return f" {name}{where}"
    return ""


def _too_long(name: str, value: object) -> str:
    if isinstance(value, str):
        most = _CHARS_MAX.get(name, NAME_CHARS_MAX)
        return f" has {len(value)} characters, at most {most} are taken" * (len(value) > most)
    if isinstance(value, Struct):
        return _excess_of(value)
    if not isinstance(value, tuple | list | dict):
        return ""
    items = cast("tuple[object, ...] | list[object] | dict[object, object]", value)
    most = _ITEMS_MAX.get(name, ITEMS_NUM_MAX)
    if len(items) > most:
        return f" has {len(items)} items, at most {most} are taken"
    inner = items.values() if isinstance(items, Mapping) else items
    if _PLAIN.issuperset(map(type, inner)):  # there may be a million micro-batches
        return ""
    return next((where for item in inner if (where := _too_long("", item))), "")

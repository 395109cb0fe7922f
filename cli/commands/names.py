"""Tasks and nodes by name, id and pattern."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ...events.errors import UsageError
from ..terminal.format import Plain, listed

SHOWN_NUM = 8
NONE = {
    "task": "there are none yet: unicron submit deploy/examples/demo.yaml",
    "node": "there are none yet: unicron up, or unicron agent --url URL",
}


def pick(items: Sequence[Plain], wanted: str, what: str = "task") -> Plain:
    """The task or node of that name or id, of several the newest. Raises UsageError, with the known
    ones."""
    found = [one for one in items if _name(one) == wanted] or [
        one for one in items if wanted in (str(one["id"]), f"task-{one['id']}")
    ]
    if not found:
        raise UsageError(f"no {what} {wanted!r}", _known(items) or NONE[what])
    return max(found, key=lambda one: one["id"])


def chosen(
    words: Sequence[str], items: Sequence[Plain], of_patterns: Sequence[Plain], what: str = "task"
) -> list[Plain]:
    """The items that the words name, each once. Commas separate words; one with `*`, `?` or `[` is
    a pattern of names, of `of_patterns` only. Raises UsageError."""
    found: dict[object, Plain] = {}
    for word in ",".join(words).split(","):
        same = (
            [one for one in of_patterns if fnmatchcase(_name(one), word)]
            if is_pattern(word)
            else [pick(items, word, what)]
        )
        if not same:
            raise UsageError(
                f"no {what} has a name like {word!r}",
                _known(of_patterns) or "unicron status shows what there is",
            )
        found |= {one["id"]: one for one in same}
    return list(found.values())


def is_pattern(word: str) -> bool:
    """Whether it stands for the names that it matches."""
    return bool(set(word) & set("*?["))


def _name(one: Plain) -> str:
    return str(one.get("name", one["id"]))


def _known(items: Sequence[Plain]) -> str:
    names = sorted(set(map(_name, items)))
    return f"there is {listed(names, SHOWN_NUM)}" if names else ""

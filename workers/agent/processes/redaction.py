"""Removes secrets from what a rank prints or reports, before it leaves the agent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from msgspec import structs

from ....events.records.types import Body

WORD = "[redacted]"
SECRET_CHARS_MIN = 6
"""A shorter value is no secret: TOKENIZERS_PARALLELISM=false must not hide every "false"."""
TEXTS = ("error", "text", "why")
"""The fields of a rank's reports that hold free text."""
B = TypeVar("B", bound=Body)


class Redactor:
    """Replaces the values of those variables of `environment` whose names match one of `patterns`,
    in any case, by WORD. It finds a value as it is and as Python's repr writes it."""

    def __init__(self, environment: Mapping[str, str], patterns: Iterable[str]) -> None:
        upper = [pattern.upper() for pattern in patterns]
        values = {value for name, value in environment.items() if len(value) >= SECRET_CHARS_MIN
                  and any(fnmatchcase(name.upper(), pattern) for pattern in upper)}
        values |= {repr(value)[1:-1] for value in values}
        # The longest first: one value may begin with another.
        found = sorted(values, key=lambda value: (-len(value), value))
        self._secret = re.compile("|".join(map(re.escape, found))) if found else None

    def text(self, text: str) -> str:
        return self._secret.sub(WORD, text) if self._secret is not None else text

    def body(self, body: B) -> B:
        """The body with its free text redacted."""
        changes = {name: new for name in TEXTS
                   if (old := getattr(body, name, "")) and (new := self.text(old)) != old}
        return structs.replace(body, **changes) if changes else body

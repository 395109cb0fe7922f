"""Changes to the text of a script, whatever its layout: blanks, line breaks, last commas."""

from __future__ import annotations

import re
from collections.abc import Iterable

TOKEN = re.compile(r"\w+|[^\w\s]")


def changed(text: str, changes: Iterable[tuple[str, str]]) -> str:
    """The text with these replacements (old, new). Raises AssertionError if one does not apply."""
    for old, new in changes:
        pattern = _pattern(old)
        assert pattern.search(text), f"the script has no {old!r}"
        text = pattern.sub(lambda _, new=new: new, text)
    return text


def _pattern(old: str) -> re.Pattern[str]:
    """Blanks at both ends count as they are: they are the indentation of a statement."""
    inner = old.strip()
    before, _, after = old.partition(inner)
    parts = ""
    for token in TOKEN.findall(inner):
        if parts:
            both_words = re.match(r"\w", token) and re.search(r"\w$", parts)
            parts += r"\s+" if both_words else r",?\s*" if token in ")]}" else r"\s*"
        parts += re.escape(token)
    return re.compile(re.escape(before) + parts + re.escape(after))

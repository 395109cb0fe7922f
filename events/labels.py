"""Labels of a node: its rack and its switch, as whoever starts its agent says."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from .errors import UsageError

HINT = "for example --label rack=r1 --label switch=s3"
VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


class Labels(Struct, frozen=True, kw_only=True):
    """Where a node stands; empty: nobody said. What fails together has the same rack."""

    rack: str = ""
    switch: str = ""


KEYS = Labels.__struct_fields__


def parse(texts: Iterable[str]) -> Labels:
    """From `KEY=VALUE` texts. Raises UsageError for all that is no label, and for one said twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--label {text!r} is not KEY=VALUE", HINT)
        if key in found:
            raise UsageError(f"--label {key} is given twice", HINT)
        found[key] = value
        if why := wrong(key, value):
            raise UsageError(f"--label {text!r}: {why}", HINT)
    return Labels(**found)


def wrong(key: str, value: str) -> str:
    """What is wrong with a label, in words; empty where nothing is."""
    if key not in KEYS:
        return f"{key!r} is no label; there are {' and '.join(KEYS)}"
    if not VALUE.match(value):
        return f"{value!r} is not 1 to 63 of A-Z a-z 0-9 . _ -, a letter or digit at both ends"
    return ""

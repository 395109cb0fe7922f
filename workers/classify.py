"""Error text to a row of the paper's table: what failed, by which rule, and whose fault it is."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..events.statuses import CONNECTION_REFUSED, CONNECTION_RESET, NCCL_TIMEOUT


class Verdict(NamedTuple):
    """What a text says. `status` is a row of the table, "" for text that means nothing."""

    status: str
    rule: str
    """The rule that matched; "": none did."""
    second_hand: bool = False
    """It tells of a peer's end, or of a wait for it, not of what this process did."""
    line: str = ""
    """The line of the text that decided."""
    peer: str = ""
    """Whom it names at the other end, as host:port or host; "": nobody."""
    code: int = 0
    """The XID; 0: it names none."""
    device: str = ""
    """The GPU's PCI address, or its index; "": it names none."""


NOTHING = Verdict("", "")

_RULES: tuple[tuple[str, str, bool, re.Pattern[str]], ...] = (
    (CONNECTION_RESET, "connection-reset", True,
     re.compile(r"connection reset|reset by peer|closed by peer|broken pipe", re.I)),
    (CONNECTION_REFUSED, "connection-refused", False, re.compile(r"connection refused", re.I)),
    (NCCL_TIMEOUT, "collective-timeout", True, re.compile(r"timed out|timeout|time out", re.I)),
)


def classify(text: str) -> Verdict:
    """The verdict on one error: a line of a log, or a traceback with all that it carries.

    Linear in the text's length. Where several rules match, the innermost cause decides: a
    watchdog's line only carries it.
    """
    for status, rule, second_hand, pattern in _RULES:
        for line in text.splitlines():
            if pattern.search(line):
                return Verdict(status, rule, second_hand, line.strip())
    return NOTHING

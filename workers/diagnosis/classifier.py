"""Error text to a row of the paper's table: what failed, by which rule, and whose fault it is.

Each line is judged alone: an XID by its number, else by the first rule that matches (error_rule.py
has their order of depth), unless a quiet rule says that such a line means nothing. Of many lines
the deepest cause wins, then the first: a watchdog's line only carries what it tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .rules.hardware import MACHINE_RULES, row_of
from .rules.ignored import LAST_TRY, LEVEL, LEVEL_COLUMNS, QUIET_RULES, Quiet
from .rules.network import NETWORK_RULES
from .rules.rule import HARDWARE, KILLED, Rule
from .rules.software import ENDED_RULES, PROCESS_RULES


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

RULES: tuple[Rule, ...] = (*MACHINE_RULES, *ENDED_RULES, *NETWORK_RULES,
                            *PROCESS_RULES)
"""In the order in which they are tried on a line."""
_PLACES = {rule.name: at for at, rule in enumerate(RULES)}
LINE_CHARS_MAX = 4096
"""A longer line is judged in pieces of this length."""
OVERLAP_CHARS = 1024
"""What two neighbouring pieces share: no rule looks at so much at once."""
SHOWN_CHARS_MAX = 500
EXCEPTION = "exception"

_XID = re.compile(
    r"\bxid\b(?: ?\([^)]{0,40}\) ?:|s?[\"']?(?:[ _-]?(?:errors?|code|event|number|is|of)){0,3}"
    r"[\"']? ?[:=#]? ?)\s?(\d{1,4})(?!\d|:\d)")
_PREVIOUS_XID = re.compile(r"caused by previous xid (\d{1,4})")
_PCI = re.compile(
    r"\b([0-9a-f]{3,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?|(?<=gpu )[0-9a-f]{2}:[0-9a-f]{2}"
    r"\.[0-9a-f])(?!\w|:\w)")
_GPU_WORDS = ("xid", "nvrm", "gpu", "nvidia ")
_INDEX = re.compile(r"\b(?:gpu|device(?: ordinal)?|cuda:)[ =:#]{0,2}(\d{1,3})\b(?![.\w]|:\w)")
_PEER = re.compile(
    r"(?:peer|(?:read|write) error|remote|from|connect(?:ed)? to|connecting to|host|server"
    r"|recv from|send to)"
    r"[ =:]{0,2}(?:"
    r"\[?(?:::ffff:)?(?P<plain>[\w.%-]{2,100}|[0-9a-f:]{2,45}(?:%\w{1,15})?)\]?[<:]"
    r"(?P<port>\d{1,5})>?"
    r"|\((?P<pair>[\w.%:-]{1,100}), (?P<pair_port>\d{1,5})\)"
    r"|(?P<alone>\d{1,3}(?:\.\d{1,3}){3}))")
_FRAME = re.compile(r"file \"[^\"]{1,300}\", line \d")
_GROUP = "sub-exception"
_MEMBER = re.compile(r"\+-{16}(?: (?:\d{1,9}|\.{3}) -{16}|-{20})[ \t]*$", re.MULTILINE)
"""What Python prints before, between and behind the members of an exception group."""


def classify(text: str) -> Verdict:
    """The verdict on one error: a line of a log, or a traceback with all that it carries.

    Linear in the text's length. Where several rules match, the innermost cause decides: a
    watchdog's line only carries it. Where two lie equally deep, the first: Python prints a chain
    from its root. The members of an exception group stand each alone: there what one did itself
    comes before what tells of a peer, and the group's own message, its wrapper, says nothing.
    """
    best, best_depth = NOTHING, len(RULES)
    for member in _MEMBER.split(text) if _GROUP in text else [text]:
        found, depth = _deepest(member)
        if found.rule and (depth, found.second_hand) < (best_depth, best.second_hand):
            best, best_depth = found, depth
    return best


def _deepest(text: str) -> tuple[Verdict, int]:
    """The verdict of the line that lies deepest, of these the first, and how deep."""
    best, best_depth = NOTHING, len(RULES)
    for pieces in _spoken(text):
        # A rule that a piece cuts short may match in the next: the line's is the first of all.
        found, depth = min(map(_line_verdict, pieces), key=lambda one: (one[1], _place(one[0])))
        if found.rule and depth < best_depth:
            best, best_depth = found, depth
            if depth == HARDWARE:
                break
    return best, best_depth


def _place(verdict: Verdict) -> int:
    """Where its rule stands among those that are tried; an XID before them."""
    return _PLACES.get(verdict.rule, -1)


def _spoken(text: str) -> Iterator[list[str]]:
    """The lines that somebody said: no source code that a traceback quotes. A long one in pieces.

    The code stands below its frame and further in, behind the same prefix (a rank, the margin of
    an exception group). Without its source a frame is followed by the next frame or the error.
    """
    column = -1
    for line in text.splitlines():
        quoted = column >= 0 and line[column:column + 2] == "  "
        frame = _FRAME.search(line[:LINE_CHARS_MAX].lower()) if '", line ' in line else None
        column = frame.start() if frame is not None else -1
        if frame is not None or quoted or not line or line.isspace():
            continue
        step = LINE_CHARS_MAX if len(line) <= LINE_CHARS_MAX else LINE_CHARS_MAX - OVERLAP_CHARS
        yield [line[start:start + LINE_CHARS_MAX] for start in range(0, len(line), step)]


def _line_verdict(line: str) -> tuple[Verdict, int]:
    """What one line says, and how deep that cause lies; a quiet line lies deeper than none."""
    lowered = line.lower()
    if len(lowered) != len(line):  # a letter that grows, as the Turkish I does
        line = lowered
    if "xid" in lowered:
        number = _XID.search(lowered)
        if number is not None:
            return _xid_verdict(line, lowered, number)
    heard = KILLED + len(RULES)
    quiet = _quiet(line, lowered)
    if quiet is not None:
        heard = quiet.heard
    if heard >= 0:
        for rule in RULES:
            if rule.depth <= heard:
                at = _match(rule, line, lowered)
                if at >= 0:
                    return _told(rule, line, lowered, at), rule.depth
    if quiet is not None:
        return Verdict("", quiet.name, line=_shown(line, 0)), len(RULES) - 1
    return NOTHING, len(RULES)


def _match(rule: Rule, line: str, lowered: str) -> int:
    """Where the rule matches; below 0: nowhere."""
    for word in rule.words:
        if word in lowered:
            if rule.pattern is None:
                return lowered.find(word)
            found = rule.pattern.search(line if rule.name == EXCEPTION else lowered)
            return -1 if found is None else found.start()
    return -1


def _quiet(line: str, lowered: str) -> Quiet | None:
    """The quiet rule that this line falls under."""
    if "retrying (" in lowered and LAST_TRY.search(lowered) is not None:
        return None
    if LEVEL.search(line[:LEVEL_COLUMNS]) is not None:
        return _LEVEL_RULE
    for rule in QUIET_RULES:
        if any(word in lowered for word in rule.words) and (
                rule.pattern is None or rule.pattern.search(lowered) is not None):
            return rule
    return None


_LEVEL_RULE = Quiet("level", (), None)


def _xid_verdict(line: str, lowered: str, number: re.Match[str]) -> tuple[Verdict, int]:
    """Of an XID that names an earlier one as its cause, as 45 does: the cause's row."""
    xid = int(number[1])
    text = lowered[number.end():number.end() + 200]
    cause = _PREVIOUS_XID.search(lowered)
    status = (row_of(int(cause[1]), text) if cause is not None else "") or row_of(xid, text)
    return Verdict(status, f"xid-{xid}" if xid else "xid-none", second_hand=cause is not None,
                   line=_shown(line, number.start()), code=xid, device=_device(lowered)
                   ), HARDWARE if status else len(RULES) - 1


def _told(rule: Rule, line: str, lowered: str, at: int) -> Verdict:
    peer = _PEER.search(lowered) if rule.depth > KILLED else None
    return Verdict(rule.status, rule.name, rule.second_hand, _shown(line, at),
                   _peer(peer, line) if peer is not None else "",
                   device=_device(lowered) if rule.depth <= KILLED else "")


def _shown(line: str, at: int) -> str:
    """The line, or what surrounds its match."""
    if len(line) <= SHOWN_CHARS_MAX:
        return line.strip()
    start = max(0, min(at - SHOWN_CHARS_MAX // 4, len(line) - SHOWN_CHARS_MAX))
    return line[start:start + SHOWN_CHARS_MAX].strip()


def _device(lowered: str) -> str:
    if any(word in lowered for word in _GPU_WORDS):
        address = _PCI.search(lowered)
        if address is not None:
            return address[1]
    index = _INDEX.search(lowered)
    return index[1] if index is not None else ""


def _peer(found: re.Match[str], line: str) -> str:
    for host, port in (("plain", "port"), ("pair", "pair_port")):
        if found[host]:
            name = line[found.start(host):found.end(host)]
            return f"[{name}]:{found[port]}" if ":" in name else f"{name}:{found[port]}"
    return found["alone"] or ""

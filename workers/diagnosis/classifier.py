"""Classifies error text: finds its status in the paper's table, the rule, the device or peer.

Each line is classified separately, unless it only quotes an error: an XID by its number, any other
line by the first rule that matches, unless an ignore rule applies. The line with the deepest cause
(rules/rule.py) decides, because a watchdog, for example, only repeats another error; of equally
deep ones the first.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from .rules.hardware import MACHINE_RULES, xid_status
from .rules.ignored import (
    IGNORE_RULES,
    LAST_TRY,
    LEVEL,
    LEVEL_COLUMNS,
    NOT_FOUND,
    NOT_FOUND_WORDS,
    QUOTE_RULES,
    IgnoreRule,
)
from .rules.kernel import KERNEL_RULES
from .rules.network import NETWORK_RULES
from .rules.node import NODE_RULES
from .rules.rule import HARDWARE, KILLED, Rule
from .rules.software import ENDED_RULES, PROCESS_RULES
from .rules.start import START_RULES


class Verdict(NamedTuple):
    """The result for a text. `status` is from the paper's table; "": harmless or unknown text."""

    status: str
    rule: str
    """The rule that matched; "": none did."""
    second_hand: bool = False
    """Indirect evidence: the error is not about this process, but about a peer or a wait for it."""
    line: str = ""
    """The deciding line of the text."""
    peer: str = ""
    """The peer that the line names, as host:port or host; "": none."""
    code: int = 0
    """The XID; 0: none."""
    device: str = ""
    """The GPU's PCI address or index; "": none."""
    can_pass: bool = False
    """Whether the fault can end by itself within minutes (rules/rule.py)."""


NOTHING = Verdict("", "")

RULES: tuple[Rule, ...] = (
    *MACHINE_RULES,
    *KERNEL_RULES,
    *NODE_RULES,
    *ENDED_RULES,
    *START_RULES,
    *NETWORK_RULES,
    *PROCESS_RULES,
)
"""In the order in which they are tried on a line."""
_BY_WORDS = tuple((rule.words, rule) for rule in RULES)
_ORDER = {rule.name: at for at, rule in enumerate(RULES)}
LINE_CHARS_MAX = 4096
"""A longer line is classified in pieces of this length."""
OVERLAP_CHARS = 1024
"""Overlap of neighbouring pieces; no rule matches more characters."""
SHOWN_CHARS_MAX = 500
EXCEPTION = "exception"

_XID = re.compile(
    r"\bxid\b(?: ?\([^)]{0,40}\) ?:|s?[\"']?(?:[ _-]?(?:errors?|code|event|number|is|of)){0,3}"
    r"[\"']? ?[:=#]? ?)\s?(\d{1,4})(?!\d|:\d)"
)
_PREVIOUS_XID = re.compile(r"caused by previous xid (\d{1,4})")
_PCI = re.compile(
    r"\b([0-9a-f]{3,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?|(?<=gpu )[0-9a-f]{2}:[0-9a-f]{2}"
    r"\.[0-9a-f])(?!\w|:\w)"
)
_GPU_WORDS = ("xid", "nvrm", "gpu", "nvidia ")
_INDEX = re.compile(r"\b(?:gpu|device(?: ordinal)?|cuda:)[ =:#]{0,2}(\d{1,3})\b(?![.\w]|:\w)")
_PEER = re.compile(
    r"(?:peer|(?:read|write) error|remote|from|connect(?:ed)? to|connecting to|host|server"
    r"|recv from|send to)"
    r"[ =:]{0,2}(?:"
    r"\[?(?:::ffff:)?(?P<plain>[\w.%-]{2,100}|[0-9a-f:]{2,45}(?:%\w{1,15})?)\]?[<:]"
    r"(?P<port>\d{1,5})>?"
    r"|\((?P<pair>[\w.%:-]{1,100}), (?P<pair_port>\d{1,5})\)"
    r"|(?P<alone>\d{1,3}(?:\.\d{1,3}){3}))"
)
_FRAME = re.compile(r"file \"[^\"]{1,300}\", line \d")
_GROUP = "sub-exception"
_MEMBER = re.compile(r"\+-{16}(?: (?:\d{1,9}|\.{3}) -{16}|-{20})[ \t]*$", re.MULTILINE)
"""Python prints this before, between and after the members of an exception group."""


def classify(text: str) -> Verdict:
    """Classify one error: a log line, or a complete traceback. Linear in the length of the text.

    Of equally deep causes the first decides, because Python prints the root of a chain of
    exceptions first. The members of an exception group are classified separately: direct evidence
    decides before indirect evidence. The message of the group itself is ignored.
    """
    best, best_depth = NOTHING, len(RULES)
    for member in _MEMBER.split(text) if _GROUP in text else [text]:
        found, depth = _deepest(member)
        if found.rule and (depth, found.second_hand) < (best_depth, best.second_hand):
            best, best_depth = found, depth
    return best


def _deepest(text: str) -> tuple[Verdict, int]:
    """The verdict of the first line with the deepest cause, and that depth."""
    best, best_depth = NOTHING, len(RULES)
    for pieces in _messages(text):
        # A rule may match only in a later piece, so the best verdict of all pieces counts.
        found, depth = min(
            map(_line_verdict, pieces), key=lambda one: (one[1], _ORDER.get(one[0].rule, -1))
        )  # -1: not in RULES, as an XID
        if found.rule and depth < best_depth:
            best, best_depth = found, depth
            if depth == HARDWARE:
                break
    return best, best_depth


def _messages(text: str) -> Iterator[list[str]]:
    """Yield each line, in pieces if it is long, without the frames and code of tracebacks. A line
    of code follows the line of its frame, has the same prefix (a rank, the margin of an exception
    group), and is indented further. A frame may have no code."""
    column = -1
    for line in text.splitlines():
        quoted = column >= 0 and line[column : column + 2] == "  "
        frame = _FRAME.search(line[:LINE_CHARS_MAX].lower()) if '", line ' in line else None
        column = frame.start() if frame is not None else -1
        if frame is not None or quoted or not line or line.isspace():
            continue
        step = LINE_CHARS_MAX if len(line) <= LINE_CHARS_MAX else LINE_CHARS_MAX - OVERLAP_CHARS
        yield [line[start : start + LINE_CHARS_MAX] for start in range(0, len(line), step)]


def _line_verdict(line: str) -> tuple[Verdict, int]:
    """The verdict of one line, and its depth. An ignored line comes before an unknown line."""
    lowered = line.lower()
    if len(lowered) != len(line):  # the lower case of some letters is longer (Turkish I)
        line = lowered
    quoted = _first(QUOTE_RULES, lowered)
    if quoted is not None:
        return Verdict("", quoted.name, line=_excerpt(line, 0)), len(RULES) - 1
    if any(word in lowered for word in NOT_FOUND_WORDS):
        lowered = NOT_FOUND.sub(_blanks, lowered)
    if "xid" in lowered:
        number = _XID.search(lowered)
        if number is not None:
            return _xid_verdict(line, lowered, number)
    depth_max = KILLED + len(RULES)
    ignored = _ignored_by(line, lowered)
    if ignored is not None:
        depth_max = ignored.depth_max
    if depth_max >= 0:
        for words, rule in _BY_WORDS:
            for word in words:
                if word in lowered:
                    at = _match(rule, word, line, lowered) if rule.depth <= depth_max else -1
                    if at >= 0:
                        return _verdict(rule, line, lowered, at), rule.depth
                    break
    if ignored is not None:
        return Verdict("", ignored.name, line=_excerpt(line, 0)), len(RULES) - 1
    return NOTHING, len(RULES)


def _blanks(words: re.Match[str]) -> str:
    """As many blanks: offsets stay the same."""
    return " " * len(words[0])


def _match(rule: Rule, word: str, line: str, lowered: str) -> int:
    """The offset at which the rule matches, of which the line has this word; -1: it does not."""
    if rule.pattern is None:
        return lowered.find(word)
    found = rule.pattern.search(line if rule.name == EXCEPTION else lowered)
    return -1 if found is None else found.start()


def _ignored_by(line: str, lowered: str) -> IgnoreRule | None:
    if "retrying (" in lowered and LAST_TRY.search(lowered) is not None:
        return None
    if LEVEL.search(line[:LEVEL_COLUMNS]) is not None:
        return _LEVEL_RULE
    return _first(IGNORE_RULES, lowered)


def _first(ignore: tuple[IgnoreRule, ...], lowered: str) -> IgnoreRule | None:
    """The first of these rules that matches."""
    for rule in ignore:
        for word in rule.words:  # any() with a generator takes three times as long
            if word in lowered:
                if rule.pattern is None or rule.pattern.search(lowered) is not None:
                    return rule
                break
    return None


_LEVEL_RULE = IgnoreRule("level", (), None)


def _xid_verdict(line: str, lowered: str, number: re.Match[str]) -> tuple[Verdict, int]:
    """The verdict of an XID; if the line names an earlier one as its cause (45 does), of that."""
    xid = int(number[1])
    text = lowered[number.end() : number.end() + 200]
    cause = _PREVIOUS_XID.search(lowered)
    status = (xid_status(int(cause[1]), text) if cause is not None else "") or xid_status(xid, text)
    return Verdict(
        status,
        f"xid-{xid}" if xid else "xid-none",
        second_hand=cause is not None,
        line=_excerpt(line, number.start()),
        code=xid,
        device=_device(lowered),
    ), HARDWARE if status else len(RULES) - 1


def _verdict(rule: Rule, line: str, lowered: str, at: int) -> Verdict:
    peer = _PEER.search(lowered) if rule.depth > KILLED else None
    return Verdict(
        rule.status,
        rule.name,
        rule.second_hand,
        _excerpt(line, at),
        _peer(peer, line) if peer is not None else "",
        device=_device(lowered) if rule.depth <= KILLED else "",
        can_pass=rule.can_pass,
    )


def _excerpt(line: str, at: int) -> str:
    """The line, cut to SHOWN_CHARS_MAX around the match."""
    if len(line) <= SHOWN_CHARS_MAX:
        return line.strip()
    start = max(0, min(at - SHOWN_CHARS_MAX // 4, len(line) - SHOWN_CHARS_MAX))
    return line[start : start + SHOWN_CHARS_MAX].strip()


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
            name = line[found.start(host) : found.end(host)]
            return f"[{name}]:{found[port]}" if ":" in name else f"{name}:{found[port]}"
    return found["alone"] or ""

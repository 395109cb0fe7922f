"""Random changes of bytes and of plain data. The same generator state gives the same change."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TOKENS = (
    b"\0",
    b"\xff\xfe",
    b"\n",
    b"\r\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"-",
    b"*a",
    b"&a",
    b"<<: *a",
    b"!!python/object:os.system",
    b"NaN",
    b"1e999",
    b"-Infinity",
    b"null",
    b"true",
    b"1" * 40,
    b"\\ud800",
    b"\xf0\x9f\x92\xa9",
    b"\xed\xa0\x80",
    b"%s%n",
    b"../..",
    b"[" * 2000,
    b"a" * 5000,
    b" " * 300,
)
EXTREMES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    63,
    2**31,
    2**53,
    2**63,
    -(2**63),
    10**30,
    0.0,
    -0.0,
    1.5,
    1e-320,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    "a",
    "0",
    "-1",
    "1e999",
    "no",
    "\0",
    "\n",
    "\ud800",
    "\u202e",
    "a" * 300,
    "../../etc",
    "s3://",
    "file:///",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0] * 100,
    {"a": {"b": {"c": 1}}},
)
CHANGES_NUM_MAX = 4


def bytes_of(rng: random.Random, data: bytes) -> bytes:
    """The data with a few random changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, CHANGES_NUM_MAX)):
        at, end = sorted(rng.randint(0, len(changed)) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 64, 4096)))
        match rng.randrange(7):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                changed[at:end] = b""
            case 2:
                changed[at:at] = rng.choice(TOKENS)
            case 3:
                changed[at:end] = rng.choice(TOKENS)
            case 4:
                changed[at:at] = changed[at:end] * rng.randint(1, 3)
            case 5:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
            case _:
                if rng.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


def lines_of(rng: random.Random, data: bytes) -> bytes:
    """The data with lines that are dropped, repeated, swapped or changed."""
    lines = data.splitlines(keepends=True)
    for _ in range(rng.randint(1, CHANGES_NUM_MAX)):
        if not lines:
            break
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(5):
            case 0:
                del lines[at]
            case 1:
                lines.insert(other, lines[at])
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                lines[at] = bytes_of(rng, lines[at])
            case _:
                del lines[at:]
    return b"".join(lines)


def plain_of(rng: random.Random, value: Any) -> Any:
    """A copy of plain data with a few random changes somewhere inside."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, CHANGES_NUM_MAX)):
        holder, key = rng.choice(list(_places(root)))
        match rng.randrange(6):
            case 0 | 1:
                holder[key] = copy.deepcopy(rng.choice(EXTREMES))
            case 2 if holder is not root:
                del holder[key]
            case 3 if isinstance(holder[key], dict):
                name = str(rng.choice([*holder[key], *range(3)])) + rng.choice(("", "", "x"))
                holder[key][name] = copy.deepcopy(rng.choice(EXTREMES))
            case 4 if isinstance(holder[key], list):
                holder[key] += copy.deepcopy(holder[key] or [rng.choice(EXTREMES)])
            case _:
                other, place = rng.choice(list(_places(root)))
                holder[key] = copy.deepcopy(other[place])
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Each (container, key) below the root, the root's own element first."""
    found: list[tuple[Any, Any]] = [(root, 0)]
    for holder, key in found:
        inner = holder[key]
        if isinstance(inner, dict):
            found += [(inner, name) for name in inner]
        elif isinstance(inner, list):
            found += [(inner, index) for index in range(len(inner))]
    return found


def text_of(rng: random.Random, value: Any) -> bytes:
    """The data as JSON, sometimes not quite: Python writes NaN, and surrogates as escapes."""
    data = json.dumps(value).encode()
    return bytes_of(rng, data) if rng.random() < 0.3 else data

"""Answers of HTTP calls: JSON of a bounded length, and whether a control plane can have said it.

Commands read an answer as plain data. Only if one fails over it, the answer is compared with the
type of its call: so a newer or older control plane is understood as far as possible, and the types
are not imported for each command.
"""

from __future__ import annotations

import json
import re
from collections import deque
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

from ...events.decoding import from_json
from ...events.errors import UnicronError, UsageError

ANSWER_BYTES_MAX, LINE_BYTES_MAX = 1 << 30, 64 << 20
PIECE_BYTES = 1 << 20
KEPT_NUM = 4
_SHOWN_CHARS = 120


class Interrupted(UnicronError):
    """The response ended early."""

    exit_code = 3


class NotAControlPlane(UsageError):
    """What answers is no control plane, or one of another version."""

    def __init__(self, url: str, why: object) -> None:
        words = " ".join(str(why).split())[:_SHOWN_CHARS]
        super().__init__(
            f"what answers at {url} is no control plane that this version knows: {words}",
            "check --url or $UNICRON_URL, and unicron --version there",
        )


class _Answer(NamedTuple):
    url: str
    method: str
    path: str
    plain: Any


_answers: deque[_Answer] = deque(maxlen=KEPT_NUM)
"""The newest ones."""


def read(response: HTTPResponse, url: str, method: str, path: str) -> Any:
    """The plain data of a response. Raises Interrupted, NotAControlPlane."""
    is_delimited = response.length is not None or response.chunked
    data = bytearray()
    try:
        while piece := response.read(PIECE_BYTES):
            data += piece
            if len(data) > ANSWER_BYTES_MAX:
                raise NotAControlPlane(url, f"{method} {path}: more than {ANSWER_BYTES_MAX} bytes")
    except (OSError, HTTPException) as error:
        raise interrupted(error) from None
    if response.length:  # read by pieces, http.client takes a broken response for its end
        raise interrupted(HTTPException(f"{response.length} bytes are missing"))
    try:
        plain = from_json(data)
    except ValueError as error:
        if not is_delimited:
            raise interrupted(error) from None
        raise NotAControlPlane(url, f"{method} {path}: {error}") from None
    _answers.append(_Answer(url, method, path, plain))
    return plain


def read_record(line: bytes, url: str) -> dict[str, Any]:
    """A line of the log, or the problem that ends it. Raises NotAControlPlane."""
    try:
        plain = from_json(line)
    except ValueError as error:
        raise NotAControlPlane(url, f"GET /v1/log: {error}") from None
    if not isinstance(plain, dict):
        raise NotAControlPlane(url, "GET /v1/log: a line is not a record")
    _answers.append(_Answer(url, "GET", "/v1/log", plain))
    return plain  # pyright: ignore[reportUnknownVariableType]


def refusal() -> NotAControlPlane | None:
    """The error for the newest answer that is not of its call's type; None: all are."""
    from ...control_plane.api.routes import ROUTES
    from ...events.errors import CorruptLog
    from ...events.records.codec import from_plain

    for url, method, path, plain in reversed(_answers):
        try:
            if path == "/v1/log":
                from_plain(plain)
                continue
            for route in ROUTES:
                form = re.sub(r"{\w+}", "[^/]+", route.path)
                if route.method == method and re.fullmatch(form, path.partition("?")[0]):
                    from_json(json.dumps(plain), route.answer)
                    break
        except (CorruptLog, ValueError) as error:
            return NotAControlPlane(url, f"{method} {path}: {error}")
    return None


def interrupted(error: Exception) -> Interrupted:
    """The error for a response that broke off."""
    return Interrupted(f"the control plane's response was interrupted ({reason(error)})")


def reason(error: Exception) -> str:
    """Why a connection failed, in lower case."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).lower()

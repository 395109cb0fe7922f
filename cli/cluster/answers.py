"""Answers of HTTP calls: JSON of a bounded length, and whether a control plane can have said it.

Commands read an answer as plain data. Only if one fails over it, the answer is compared with the
type of its call: so a newer or older control plane is understood as far as possible, and the types
are not imported for each command.
"""

from __future__ import annotations

import io
import json
import re
import socket
import time
from collections import deque
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

from ...events.decoding import from_json
from ...events.errors import UnicronError, UsageError

ANSWER_BYTES_MAX, LINE_BYTES_MAX = 1 << 30, 64 << 20
PIECE_BYTES = 1 << 20
HEAD_S_MAX, BODY_S_MAX, BODY_BYTES_MIN = 120.0, 30.0, 1024
"""The whole head of an answer comes within so long, or within the limit of its call. Of the body so
many bytes come while so long, or as long as that limit, is waited for them."""
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


class Response(HTTPResponse):
    """An answer that comes within its limits: see HEAD_S_MAX. Its reads raise TimeoutError else."""

    def __init__(self, sock: socket.socket, *, limit_s: float | None, method: str) -> None:
        """`limit_s`: of the call; None: the body may take any time."""
        super().__init__(sock, method=method)
        self.fp.close()
        self.pace = _Pace(sock, limit_s)
        self.fp = io.BufferedReader(self.pace)

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        self.pace.end_head()

    def check_chunks(self, num_bytes: int, url: str) -> None:
        """Check that its chunks bring more than their own heads; `num_bytes` have been read of the
        body. Raises NotAControlPlane."""
        if self.pace.num_bytes > 2 * num_bytes + PIECE_BYTES:
            raise NotAControlPlane(url, "its answer has chunks of a few bytes")


class _Pace(io.RawIOBase):
    """Reads a socket, and measures how fast that goes. Only the time of a read counts for the body:
    whoever takes it may rest in between."""

    def __init__(self, sock: socket.socket, limit_s: float | None) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._limit_s = limit_s
        self._head_s = HEAD_S_MAX if limit_s is None else limit_s
        self._head_until_s: float | None = time.monotonic() + self._head_s
        self._body_s = None if limit_s is None else min(limit_s, BODY_S_MAX)
        self._waited_s, self._part_bytes = 0.0, 0
        self.num_bytes = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def end_head(self) -> None:
        """What comes now is the body."""
        self._head_until_s = None

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase. Raises OSError."""
        began_s = time.monotonic()
        if self._head_until_s is not None:
            left_s: float | None = self._head_until_s - began_s
            too_slow = f"the head of the answer did not come within {self._head_s:g} s"
        else:
            left_s = None if self._body_s is None else self._body_s - self._waited_s
            too_slow = f"less than {BODY_BYTES_MIN} bytes came in {self._body_s or 0:g} s"
        if left_s is not None and left_s <= 0:
            raise TimeoutError(too_slow)
        self._sock.settimeout(left_s)
        try:
            num = self._raw.readinto(buffer) or 0
        except TimeoutError:
            raise TimeoutError(too_slow) from None
        self.num_bytes += num
        self._waited_s += time.monotonic() - began_s
        self._part_bytes += num
        if self._part_bytes >= BODY_BYTES_MIN:
            self._waited_s, self._part_bytes = 0.0, 0
        return num

    def close(self) -> None:
        """Release the socket."""
        self._raw.close()
        super().close()


class _Answer(NamedTuple):
    url: str
    method: str
    path: str
    plain: Any


_answers: deque[_Answer] = deque(maxlen=KEPT_NUM)
"""The newest ones."""


def read(response: Response, url: str, method: str, path: str) -> Any:
    """The plain data of a response. Raises Interrupted, NotAControlPlane."""
    is_delimited = response.length is not None or response.chunked
    data = bytearray()
    try:
        while piece := response.read(PIECE_BYTES):
            data += piece
            if len(data) > ANSWER_BYTES_MAX:
                raise NotAControlPlane(url, f"{method} {path}: more than {ANSWER_BYTES_MAX} bytes")
            response.check_chunks(len(data), url)
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


def lines(response: Response, url: str) -> Iterator[bytes]:
    """The lines of a response that has one for each record. Raises Interrupted, NotAControlPlane.
    Not by readline(), which takes a broken stream for its end."""
    begun, num_bytes, idle_bytes = bytearray(), 0, 0
    try:
        while part := response.read1():
            num_bytes += len(part)
            idle_bytes += len(part)
            whole, newline, rest = part.rpartition(b"\n")
            if newline:
                begun += whole
                for line in filter(None, begun.split(b"\n")):
                    idle_bytes = 0
                    yield bytes(line)
                begun = bytearray()
            begun += rest
            if idle_bytes > LINE_BYTES_MAX:
                raise NotAControlPlane(url, f"a line has more than {LINE_BYTES_MAX} bytes")
            response.check_chunks(num_bytes, url)
    except (OSError, HTTPException) as error:
        raise interrupted(error) from None


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

"""Joins the control plane: POST /v1/join with the token returns the address of the log.

An agent of another host exchanges its token, once, for an identity: a secret that it makes and
keeps in a file. The control plane keeps its hash alone.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from ....events import tls, unix_socket
from ....events.decoding import from_json
from ....events.errors import Leased, UsageError
from ....events.log.identity import new_secret
from ....events.private_files import read_private, write_private
from ....events.records.types import Labels
from ....events.secret_environment import checked_token
from ....events.spec.policy import OUTPUT_BYTES_MAX, REDACT
from .log_link import backoff_s

JOIN_S_MAX = 60.0
"""How long the join is retried while the server is unreachable or has no leader."""
ANSWER_BYTES_MAX, PIECE_BYTES = 16 << 20, 1 << 16
NOT_OURS = "does --url name a unicron control plane?"
ANSWER_S_MAX = 5.0
RETRY_S_MAX = 1.0


Others = Callable[[], Iterable[tuple[str, str]]]


class Joined(Struct, frozen=True, kw_only=True):
    """The control plane's answer."""

    redis_url: str
    cluster: str
    node: str
    epoch: int
    key: str
    """Signs this node's reports, and the orders for it; in hex digits."""
    redact: tuple[str, ...] = REDACT
    agent_gone_s_max: float = 60.0
    output_bytes_max: int = OUTPUT_BYTES_MAX
    rank_pids_max: int = 0
    rank_memory_bytes_max: int = 0
    version: str = ""
    cluster_id: str = ""
    """Distinguishes clusters of the same name; "": told by an older control plane."""
    has_lists: bool = False
    """Whether it reads a list of each node; one of release 0.3.0 reads one list of all."""


class _Problem(Struct, frozen=True):
    detail: str
    hint: str = ""


class TokenRefused(UsageError):
    """The control plane does not know the token."""


class NodeRevoked(TokenRefused):
    """The token was the identity of this node until it was revoked. A service manager does not
    start the agent again after this exit code: deploy/systemd."""

    exit_code = os.EX_NOPERM


class IdentityFile:
    """The identity of a node, in the folder of its agent; its name ends in `.new` until enrolled,
    so that an agent that was killed enrols with the same one. Raises UsageError if others may read
    it."""

    def __init__(self, folder: Path, node: str) -> None:
        self.path = folder / f"{node}.identity"
        self._new = folder / f"{node}.identity.new"
        self.is_enrolled = self.path.exists()
        try:
            self.secret = read_private(self.path if self.is_enrolled else self._new).decode()
        except FileNotFoundError:
            self.secret = new_secret()
            write_private(self._new, self.secret.encode())

    def enrolled(self) -> None:
        """The control plane knows it now."""
        if not self.is_enrolled:
            self._new.replace(self.path)
            self.is_enrolled = True


async def join(
    url: str,
    token: str,
    *,
    node: str,
    host: str,
    incarnation: int,
    labels: Labels,
    socket: str = "",
    others: Others = tuple,
    ca: str = "",
    identity: str = "",
    insecure: bool = False,
    s_max: float = JOIN_S_MAX,
) -> Joined:
    """Send the join request until the leader answers, for at most `s_max` seconds, but at least
    once to each control plane. Raises UsageError if one rejects it, or all stay unreachable.
    `socket`: used instead of the address in `url`. `others`: url and socket of more control planes.
    `ca`: authorities (PEM) at https://; "": the system's. `identity`: enrol the node with it.
    `insecure`: the token may cross a network unencrypted where another control plane leads."""
    deadline = time.monotonic() + s_max
    body = {
        "node": node,
        "host": host,
        "incarnation": incarnation,
        "labels": {key: value for key, value in msgspec.to_builtins(labels).items() if value},
        **({"identity": identity} if identity else {}),
    }
    bearer = f"Bearer {checked_token(token)}"
    headers = {"Authorization": bearer, "Idempotency-Key": f"join-{node}-{incarnation}"}
    num_tries, pointer = 0, ""
    limit = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    while True:
        sockets = dict([(url, socket), *others()])
        at = pointer or list(sockets)[num_tries % len(sockets)]
        path, pointer = sockets.get(at, ""), ""
        try:
            async with aiohttp.ClientSession(
                timeout=limit, connector=_link(at, path, ca)
            ) as session:
                return await _post(session, at, headers, body)
        except Leased as error:
            why = str(error)
            if error.url in sockets:
                pointer = error.url
            elif tls.is_plain(error.url) and not insecure:
                why += ", without TLS, and this agent has no --insecure"
            elif tls.may_follow(error.url, at, by_socket=bool(path)):
                pointer = error.url
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
        wait_s = backoff_s(num_tries, RETRY_S_MAX)
        num_tries += 1
        if num_tries >= len(sockets) + bool(pointer) and time.monotonic() + wait_s > deadline:
            raise UsageError(
                f"cannot join {at}: {why}",
                "is the control plane up? try: unicron up, or another --url",
            )
        await asyncio.sleep(wait_s)


def _link(url: str, path: str, ca: str) -> aiohttp.BaseConnector:
    """Trusted certificates take 20 ms to load: only a URL that needs them has them loaded."""
    if path:
        return aiohttp.UnixConnector(unix_socket.address(path))
    if not url.startswith("https:"):
        return aiohttp.TCPConnector()
    return aiohttp.TCPConnector(ssl=tls.client_context(ca))


async def _post(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], body: Mapping[str, object]
) -> Joined:
    """Send one request. Raises UsageError if a retry is useless, else ClientError, TimeoutError."""
    try:
        reply = await session.post(
            f"{url.rstrip('/')}/v1/join", json=body, headers=headers, allow_redirects=False
        )
    except aiohttp.InvalidURL:
        raise UsageError(f"{url!r} is not a URL", "give --url http://HOST:PORT") from None
    data = bytearray()
    async for piece in reply.content.iter_chunked(PIECE_BYTES):
        data += piece
        if len(data) > ANSWER_BYTES_MAX:
            raise UsageError(f"{url} sends more than {ANSWER_BYTES_MAX} bytes", NOT_OURS)
    if reply.status == 307 and (leader := reply.headers.get("Unicron-Follows")):
        raise Leased(leader)
    if reply.status in (401, 403, 410):
        refused = NodeRevoked if reply.status == 410 else TokenRefused
        raise refused(
            f"{url} does not accept the token: {_problem(data).detail}",
            "an admin: unicron token create --join",
        )
    if reply.status >= 500:
        raise aiohttp.ClientError(f"{reply.status} {_problem(data).detail}".strip())
    if reply.status != 200:
        problem = _problem(data)
        raise UsageError(
            f"{url} refuses to let {body['node']} join: {problem.detail}",
            problem.hint or NOT_OURS,
        )
    try:
        return from_json(data, Joined)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{url} sends an invalid answer: {error}",
            "is it a unicron control plane of this version?",
        ) from None


def _problem(data: bytearray) -> _Problem:
    """The decoded error body. If it cannot be decoded, the first line of the text."""
    try:
        return from_json(data, _Problem)
    except msgspec.MsgspecError:
        return _Problem(detail=data[:200].decode(errors="replace").strip().partition("\n")[0])

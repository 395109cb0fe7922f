"""What a rank and a keeper say to each other: copies of state over TCP, checked on both sides.

A conversation is one connection. Both prove first that they know the cluster's secret, each by its
answer to the other's nonce, so that the secret itself is never sent: Greeting, Proof, Proof. Then
the rank says one of

- Offer: the keeper answers Go, takes `copy_bytes` bytes and a Sum, and answers Kept;
- Wish: the keeper answers with the Offer of what it has, its bytes, and their Sum.

Refused stands for each answer. A message is 4 bytes of length, the higher first, and msgpack.
Nothing is encrypted: the network between the nodes is trusted as it is for the tensors themselves.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

TASK_BYTES = 8
"""Of a task as agent and keeper name it: which has ended, which has lost its copies."""
FIRST_CODE = 0
"""What a keeper says in its place when it has its first copy."""
SECRET = "UNICRON_COPIES_SECRET"
"""Names, in the environment of keepers and ranks, what they prove to know: hex digits."""
MESSAGE_BYTES_MAX = 64 << 10
CHUNK_BYTES = 1 << 20
"""Summed up and sent while it is still in the processor's cache."""
NONCE_LENGTH = 32
CHECKSUM = "crc32"
CONNECT_S_MAX = 2.0
STALL_S_MAX = 10.0
"""How long the other side may take for the next bytes, and for each answer."""
GREET_S_MAX = 2.0
"""How long in all somebody may take who has not proved yet that he may be here."""


class Failed(Exception):
    """The conversation came to nothing; `str()` says why, in one line."""


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """Root of all messages."""


class Greeting(Message, frozen=True, kw_only=True):
    nonce: bytes


class Proof(Message, frozen=True, kw_only=True):
    """`answer` proves the secret; the first one brings the nonce that the second one answers."""

    answer: bytes
    nonce: bytes = b""


class Offer(Message, frozen=True, kw_only=True):
    """A copy: whose state, after how many steps, in which layout, and how many bytes it has.

    The last `numbers_bytes` of them are what is not tensors.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    layout: str
    copy_bytes: int
    numbers_bytes: int


class Wish(Message, frozen=True, kw_only=True):
    """The newest copy of this generation, of `step_version` steps or more.

    But of no more than `step_version_max`, if that is not below 0.
    """

    task: int
    generation: int
    step_version: int
    step_version_max: int = -1

    def fits(self, generation: int, step_version: int) -> bool:
        """Whether a copy of that generation, after so many steps, is what is wanted."""
        return generation == self.generation and self.step_version <= step_version and (
            self.step_version_max < 0 or step_version <= self.step_version_max)


class Go(Message, frozen=True, kw_only=True):
    """There is room: send."""


class Sum(Message, frozen=True, kw_only=True):
    """Follows the bytes: what their sender takes them to come to."""

    checksum: str


class Kept(Message, frozen=True, kw_only=True):
    """The copy is there, whole. `start` is the keeper's: what ends with it."""

    start: int


class Refused(Message, frozen=True, kw_only=True):
    why: str


_decoder = msgspec.msgpack.Decoder(
    Greeting | Proof | Offer | Wish | Go | Sum | Kept | Refused)


def secret_of(token: str, cluster: str) -> str:
    """What all nodes of a cluster can derive, and nobody who does not know its token."""
    return hmac.new(token.encode(), f"copies of {cluster}".encode(), "sha256").hexdigest()


# --- messages and bytes -------------------------------------------------------------------------
def send(connection: socket.socket, message: Message) -> None:
    """Raises OSError."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "big") + data)


def receive(connection: socket.socket, *kinds: type[Message],
            until_s: float = math.inf) -> Message:
    """The next message, one of these kinds, whole before `until_s`. Raises OSError, Failed."""
    head = bytearray(4)
    fill(connection, memoryview(head), until_s)
    size = int.from_bytes(head, "big")
    if size > MESSAGE_BYTES_MAX:
        raise Failed(f"a message of {size} bytes")
    data = bytearray(size)
    fill(connection, memoryview(data), until_s)
    try:
        message = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Failed(f"a message that is not understood: {error}") from None
    if isinstance(message, kinds):
        return message
    if isinstance(message, Refused):
        raise Failed(message.why)
    raise Failed(f"{type(message).__name__} out of turn")


def fill(connection: socket.socket, target: memoryview, until_s: float = math.inf) -> None:
    """Read exactly as much as `target` holds, before `until_s` (monotonic). Raises OSError."""
    while target:
        if until_s < math.inf:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
        num_bytes = connection.recv_into(target)
        if not num_bytes:
            raise ConnectionResetError("the other side hung up")
        target = target[num_bytes:]


def pour(connection: socket.socket, parts: Iterable[memoryview],
         goes_on: Callable[[], None] = lambda: None) -> str:
    """Send the parts one after the other; the checksum of all. Raises OSError.

    `goes_on` is asked before each chunk, and raises to leave off.
    """
    code = 0
    for part in parts:
        for begin in range(0, len(part), CHUNK_BYTES):
            goes_on()
            chunk = part[begin : begin + CHUNK_BYTES]
            code = zlib.crc32(chunk, code)
            connection.sendall(chunk)
    return named(code)


def take(connection: socket.socket, target: memoryview) -> str:
    """Receive as many bytes as `target` holds; their checksum. Raises OSError."""
    code = 0
    for begin in range(0, len(target), CHUNK_BYTES):
        chunk = target[begin : begin + CHUNK_BYTES]
        fill(connection, chunk)
        code = zlib.crc32(chunk, code)
    return named(code)


def named(code: int) -> str:
    """A checksum as it is told: `crc32:89abcdef`."""
    return f"{CHECKSUM}:{code:08x}"


# --- who is there -------------------------------------------------------------------------------
def knock(endpoint: str, secret: str, wait_s: float = STALL_S_MAX) -> socket.socket:
    """A connection to the keeper at `endpoint`, each side known to the other.

    No wait on it is longer than `wait_s`. Raises OSError, Failed.
    """
    host, _, port = endpoint.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=min(CONNECT_S_MAX, wait_s))
    try:
        connection.settimeout(min(STALL_S_MAX, wait_s))
        greeting = receive(connection, Greeting)
        assert isinstance(greeting, Greeting)
        nonce = secrets.token_bytes(NONCE_LENGTH)
        send(connection, Proof(answer=_answer(secret, "rank", greeting.nonce), nonce=nonce))
        proof = receive(connection, Proof)
        assert isinstance(proof, Proof)
        if not hmac.compare_digest(proof.answer, _answer(secret, "keeper", nonce)):
            raise Failed(f"{endpoint} does not know this cluster's secret")
    except BaseException:
        connection.close()
        raise
    return connection


def let_in(connection: socket.socket, secret: str) -> bool:
    """The keeper's side of it: whether the other one may go on. Raises OSError, Failed."""
    until_s = time.monotonic() + GREET_S_MAX
    connection.settimeout(GREET_S_MAX)
    nonce = secrets.token_bytes(NONCE_LENGTH)
    send(connection, Greeting(nonce=nonce))
    proof = receive(connection, Proof, until_s=until_s)
    assert isinstance(proof, Proof)
    connection.settimeout(STALL_S_MAX)
    if not hmac.compare_digest(proof.answer, _answer(secret, "rank", nonce)):
        send(connection, Refused(why="this keeper is of another cluster, or its token has changed"))
        return False
    send(connection, Proof(answer=_answer(secret, "keeper", proof.nonce)))
    return True


def _answer(secret: str, who: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), who.encode() + b" " + nonce, "sha256")


# --- what a rank does ---------------------------------------------------------------------------
def put(connection: socket.socket, offer: Offer, parts: Iterable[memoryview],
        goes_on: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """Have the keeper take a copy; its checksum, and the keeper's start. Raises OSError, Failed."""
    send(connection, offer)
    receive(connection, Go)
    checksum = pour(connection, parts, goes_on)
    send(connection, Sum(checksum=checksum))
    kept = receive(connection, Kept)
    assert isinstance(kept, Kept)
    return checksum, kept.start


def get(connection: socket.socket, wish: Wish, room: Callable[[Offer], memoryview]
        ) -> tuple[Offer, str]:
    """Receive a copy into what `room` gives for it; what it is, and its checksum.

    Raises OSError, and Failed where it is not there, is not what was wished for, or was altered.
    """
    send(connection, wish)
    offer = receive(connection, Offer)
    assert isinstance(offer, Offer)
    if offer.task != wish.task or not wish.fits(offer.generation, offer.step_version):
        raise Failed(f"a copy of task {offer.task} generation {offer.generation} "
                     f"step {offer.step_version} is not what was asked for")
    checksum = take(connection, room(offer))
    told = receive(connection, Sum)
    assert isinstance(told, Sum)
    if told.checksum != checksum:
        raise Failed(f"the copy was altered: it comes to {checksum}, and was {told.checksum}")
    return offer, checksum

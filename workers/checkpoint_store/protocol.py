"""The protocol between a rank and a checkpoint store: in-memory checkpoints over TCP.

One request per connection. First, both sides prove that they know the cluster's secret: Greeting,
Proof, Proof. Each side answers the nonce of the other, so the secret itself is never sent. Then the
rank sends one of:

- Offer: the store replies Go, receives `copy_bytes` bytes and a Checksum, and replies StoredReply;
- CheckpointRequest: the store replies with an Offer, the checkpoint's bytes, and a Checksum.

Refused may replace each reply. A message is 4 bytes of length, big-endian, and msgpack. Nothing is
encrypted. The network between the nodes is trusted, as training trusts it with its tensors.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from msgspec import Struct

TASK_BYTES = 8
"""Length of a task number between agent and store: the task ended, or lost its checkpoints."""
FIRST_CHECKPOINT_CODE = 0
"""The store sends this in place of a task number when it has its first checkpoint."""
SECRET = "UNICRON_COPIES_SECRET"
"""Environment variable of stores and ranks: the shared secret, in hex digits."""
MESSAGE_BYTES_MAX = 64 << 10
CHUNK_BYTES = 1 << 20
"""A chunk is sent while it is still in the processor's cache from the checksum."""
NONCE_LENGTH = 32
CHECKSUM = "crc32"
CONNECT_S_MAX = 2.0
STALL_S_MAX = 10.0
"""Time limit for the other side's next bytes, and for each reply."""
GREET_S_MAX = 2.0
"""Limit of the total time in which a client must authenticate."""


M = TypeVar("M", bound="Message")


class TransferError(Exception):
    """The transfer failed; `str()` says why, in one line."""


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages."""


class Greeting(Message, frozen=True, kw_only=True):
    nonce: bytes


class Proof(Message, frozen=True, kw_only=True):
    """`answer` proves the secret. The rank's Proof has a nonce, which the store's Proof answers."""

    answer: bytes
    nonce: bytes = b""


class Offer(Message, frozen=True, kw_only=True):
    """An in-memory checkpoint: its task, rank, step and layout, and its size.

    The last `numbers_bytes` of the checkpoint are not tensors.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    layout: str
    copy_bytes: int
    numbers_bytes: int


class CheckpointRequest(Message, frozen=True, kw_only=True, tag="Wish"):
    """A request for the newest checkpoint of this generation, of `step_version` steps or more.

    The checkpoint has at most `step_version_max` steps, unless this limit is negative.
    """

    task: int
    generation: int
    step_version: int
    step_version_max: int = -1

    def fits(self, generation: int, step_version: int) -> bool:
        """Whether a checkpoint of that generation and step matches the request."""
        return generation == self.generation and self.step_version <= step_version and (
            self.step_version_max < 0 or step_version <= self.step_version_max)


class Go(Message, frozen=True, kw_only=True):
    """Memory is reserved: send."""


class Checksum(Message, frozen=True, kw_only=True, tag="Sum"):
    """Follows the bytes: the checksum that the sender computed."""

    checksum: str


class StoredReply(Message, frozen=True, kw_only=True, tag="Kept"):
    """The checkpoint is complete. `start`: the start number of the store that has it."""

    start: int


class Refused(Message, frozen=True, kw_only=True):
    why: str


_decoder = msgspec.msgpack.Decoder(
    Greeting | Proof | Offer | CheckpointRequest | Go | Checksum | StoredReply | Refused)


def secret_of(token: str, cluster: str) -> str:
    """The secret that all nodes of a cluster derive from its token."""
    return hmac.new(token.encode(), f"copies of {cluster}".encode(), "sha256").hexdigest()


# --- messages and bytes ---
def send(connection: socket.socket, message: Message) -> None:
    """Raises OSError."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "big") + data)


def receive(connection: socket.socket, *kinds: type[M], until_s: float = math.inf) -> M:
    """Receive a message, one of `kinds`, before `until_s`. Raises OSError, TransferError."""
    head = bytearray(4)
    read_exactly(connection, memoryview(head), until_s)
    size = int.from_bytes(head, "big")
    if size > MESSAGE_BYTES_MAX:
        raise TransferError(f"a message of {size} bytes")
    data = bytearray(size)
    read_exactly(connection, memoryview(data), until_s)
    try:
        message = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferError(f"invalid message: {error}") from None
    if isinstance(message, kinds):
        return message
    if isinstance(message, Refused):
        raise TransferError(message.why)
    raise TransferError(f"{type(message).__name__} unexpected")


def read_exactly(connection: socket.socket, target: memoryview, until_s: float = math.inf) -> None:
    """Fill `target` before `until_s` (monotonic). Raises OSError."""
    while target:
        if until_s < math.inf:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left_s)
        num_bytes = connection.recv_into(target)
        if not num_bytes:
            raise ConnectionResetError("connection closed by the other side")
        target = target[num_bytes:]


def send_parts(connection: socket.socket, parts: Iterable[memoryview],
               check_active: Callable[[], None] = lambda: None) -> str:
    """Send the parts; returns the checksum of all. Raises OSError.

    `check_active` is called before each chunk, and raises to abort.
    """
    code = 0
    for part in parts:
        for begin in range(0, len(part), CHUNK_BYTES):
            check_active()
            chunk = part[begin : begin + CHUNK_BYTES]
            code = zlib.crc32(chunk, code)
            connection.sendall(chunk)
    return format_checksum(code)


def receive_into(connection: socket.socket, target: memoryview) -> str:
    """Fill `target`; returns the checksum. Raises OSError."""
    code = 0
    for begin in range(0, len(target), CHUNK_BYTES):
        chunk = target[begin : begin + CHUNK_BYTES]
        read_exactly(connection, chunk)
        code = zlib.crc32(chunk, code)
    return format_checksum(code)


def format_checksum(code: int) -> str:
    """Format a checksum: `crc32:89abcdef`."""
    return f"{CHECKSUM}:{code:08x}"


# --- authentication ---
def connect(endpoint: str, secret: str, wait_s: float = STALL_S_MAX) -> socket.socket:
    """Connect to the store at `endpoint`; both sides authenticate.

    No single wait on the connection is longer than `wait_s`. Raises OSError, TransferError.
    """
    host, _, port = endpoint.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=min(CONNECT_S_MAX, wait_s))
    try:
        connection.settimeout(min(STALL_S_MAX, wait_s))
        greeting = receive(connection, Greeting)
        nonce = secrets.token_bytes(NONCE_LENGTH)
        send(connection, Proof(answer=_answer(secret, "rank", greeting.nonce), nonce=nonce))
        proof = receive(connection, Proof)
        if not hmac.compare_digest(proof.answer, _answer(secret, "keeper", nonce)):
            raise TransferError(f"{endpoint} does not know this cluster's secret")
    except BaseException:
        connection.close()
        raise
    return connection


def authenticate(connection: socket.socket, secret: str) -> bool:
    """The store's side: whether the client is authenticated. Raises OSError, TransferError."""
    until_s = time.monotonic() + GREET_S_MAX
    connection.settimeout(GREET_S_MAX)
    nonce = secrets.token_bytes(NONCE_LENGTH)
    send(connection, Greeting(nonce=nonce))
    proof = receive(connection, Proof, until_s=until_s)
    connection.settimeout(STALL_S_MAX)
    if not hmac.compare_digest(proof.answer, _answer(secret, "rank", nonce)):
        send(connection, Refused(why="this checkpoint store is of another cluster, or its "
                                 "token has changed"))
        return False
    send(connection, Proof(answer=_answer(secret, "keeper", proof.nonce)))
    return True


def _answer(secret: str, role: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), role.encode() + b" " + nonce, "sha256")


# --- requests of a rank ---
def put(connection: socket.socket, offer: Offer, parts: Iterable[memoryview],
        check_active: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """Store a checkpoint. Returns checksum and store start. Raises OSError, TransferError."""
    send(connection, offer)
    receive(connection, Go)
    checksum = send_parts(connection, parts, check_active)
    send(connection, Checksum(checksum=checksum))
    return checksum, receive(connection, StoredReply).start


def get(connection: socket.socket, request: CheckpointRequest,
        allocate: Callable[[Offer], memoryview]) -> tuple[Offer, str]:
    """Receive a checkpoint into the memory from `allocate`; returns its Offer and its checksum.

    Raises OSError, and TransferError if it is missing, does not match the request, or was altered.
    """
    send(connection, request)
    offer = receive(connection, Offer)
    if offer.task != request.task or not request.fits(offer.generation, offer.step_version):
        raise TransferError(f"checkpoint of task {offer.task} generation {offer.generation} "
                            f"step {offer.step_version} does not match the request")
    checksum = receive_into(connection, allocate(offer))
    sent = receive(connection, Checksum)
    if sent.checksum != checksum:
        raise TransferError(f"checkpoint altered: received {checksum}, sent {sent.checksum}")
    return offer, checksum

"""The protocol between a rank and a checkpoint store: shares of in-memory checkpoints over TCP.

First, both sides prove that they know the key of the rank's task: Greeting, Claim, Proof. The store
has a secret, from which it derives the key that belongs to a claim; an order gave it to the rank.
Each side answers the nonce of the other, so the key itself is never sent. What the rank sends next
must be about that task, and about a generation that the key opens. It is one of:

- Offer: a share to keep. The store replies Go, receives the share, and replies StoredReply.
- ListRequest: the store replies with a List of the task's shares.
- ShareRequest: the store replies with the Offer, the manifest and the checksums of that share. Then
  the rank sends PiecesRequest any number of times, each answered with the bytes of these pieces.

A share is sent as its manifest, the bytes of its pieces, one checksum for each piece (4 bytes,
big-endian), and a Checksum over manifest and checksums. So a rank can verify each piece by itself.
Refused may replace each reply. A message is 4 bytes of length, big-endian, and msgpack. Nothing is
encrypted. The network between the nodes is trusted, as training trusts it with its tensors.
"""

import hmac
import math
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import msgspec
from msgspec import Struct

from ...events import network_address
from ...events.decoding import Decoder
from ...events.log.identity import StoreKey, store_key

TASK_BYTES = 8
"""Length of a task number between agent and store: the task ended, or lost its checkpoints."""
FIRST_CHECKPOINT_CODE = 0
"""The store sends this in place of a task number when it has its first checkpoint."""
MESSAGE_BYTES_MAX = 1 << 20
CHUNK_BYTES = 1 << 20
"""A chunk is sent while it is still in the processor's cache from the checksum."""
NONCE_LENGTH = 32
CHECKSUM = "crc32"
SUM_BYTES = 4
INDICES_NUM_MAX = 1000
"""Pieces of one request."""
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


class Claim(Message, frozen=True, kw_only=True):
    """The rank: `answer` proves that it has the key for this task and generation. `nonce` is what
    the store's Proof answers."""

    task: int
    generation: int
    answer: bytes
    nonce: bytes


class Proof(Message, frozen=True, kw_only=True):
    """The store: `answer` proves that it can make the key that was claimed."""

    answer: bytes


class Piece(Struct, frozen=True, array_like=True):
    """A region of a tensor, as a Shard of the training code; pieces of a share are in sequence."""

    key: str
    kind: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    num_bytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """A share's pieces in order, and as msgpack `numbers`: one share of a version has them."""

    pieces: tuple[Piece, ...]
    numbers: bytes = b""


class Request(Message, frozen=True, kw_only=True):
    """What a rank sends first, with the key of this task."""

    task: int


class Offer(Request, frozen=True, kw_only=True):
    """A share of an in-memory checkpoint, number `share` of `num_shares`.

    `shape` and `part`: how the sender's layout splits the model, and which part the sender has, so
    that a rank of this layout reads the shares of its own part first. `copy_bytes` includes
    `manifest_bytes`. `whole`: the newest generation and step version of which all shares are
    stored, as the members have agreed. `bytes_max`: the memory that the store may use for all
    tasks; 0: its own limit.
    """

    rank: int
    attempt: int
    generation: int
    step_version: int
    share: int
    num_shares: int
    copy_bytes: int
    manifest_bytes: int
    shape: tuple[int, ...] = ()
    part: tuple[int, ...] = ()
    whole: tuple[int, int] = (0, 0)
    bytes_max: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """Generation and step version."""
        return self.generation, self.step_version


class ListRequest(Request, frozen=True, kw_only=True):
    """A request for the list of a task's shares."""


class List(Message, frozen=True, kw_only=True):
    """The shares that the store has of the task, the newest last."""

    offers: tuple[Offer, ...]


class ShareRequest(Request, frozen=True, kw_only=True):
    """A request for one share: its Offer, its manifest and its checksums."""

    generation: int
    step_version: int
    share: int
    num_shares: int


class PiecesRequest(Message, frozen=True, kw_only=True):
    """A request for pieces of the share, by their index."""

    indices: tuple[int, ...]


class Go(Message, frozen=True, kw_only=True):
    """Memory is reserved: send."""


class Checksum(Message, frozen=True, kw_only=True, tag="Sum"):
    """Follows a share: the checksum over its manifest and its pieces' checksums."""

    checksum: str


class StoredReply(Message, frozen=True, kw_only=True, tag="Kept"):
    """The share is complete. `start`: the start number of the store that has it."""

    start: int


class Refused(Message, frozen=True, kw_only=True):
    why: str


_decoder = Decoder[Message](
    Greeting
    | Claim
    | Proof
    | Offer
    | ListRequest
    | List
    | ShareRequest
    | PiecesRequest
    | Go
    | Checksum
    | StoredReply
    | Refused
)
_manifests = Decoder(Manifest)


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


def receive_or_end(connection: socket.socket, kind: type[M]) -> M | None:
    """Receive a message; None: the other side closed, or is idle. Raises OSError, TransferError."""
    try:
        if not connection.recv(1, socket.MSG_PEEK):
            return None
    except TimeoutError:
        return None
    return receive(connection, kind)


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


def send_bytes(connection: socket.socket, data: memoryview) -> int:
    """Send the data; returns its crc32. Raises OSError."""
    code = 0
    for begin in range(0, len(data), CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        code = zlib.crc32(chunk, code)
        connection.sendall(chunk)
    return code


def receive_bytes(connection: socket.socket, target: memoryview) -> int:
    """Fill `target`; returns its crc32. Raises OSError."""
    code = 0
    for begin in range(0, len(target), CHUNK_BYTES):
        chunk = target[begin : begin + CHUNK_BYTES]
        read_exactly(connection, chunk)
        code = zlib.crc32(chunk, code)
    return code


def encode_sums(sums: Iterable[int]) -> bytes:
    """The checksums of a share's pieces, 4 bytes each."""
    return b"".join(code.to_bytes(SUM_BYTES, "big") for code in sums)


def checksum_of(manifest: bytes, sums: bytes) -> str:
    """The checksum of a share, over its manifest and its pieces' checksums: `crc32:89abcdef`."""
    return f"{CHECKSUM}:{zlib.crc32(sums, zlib.crc32(manifest)):08x}"


def decode_manifest(data: bytes, data_bytes: int) -> Manifest:
    """The manifest of a share whose pieces have `data_bytes` bytes. Raises TransferError."""
    try:
        manifest = _manifests.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferError(f"invalid manifest: {error}") from None
    sizes = [piece.num_bytes for piece in manifest.pieces]
    if min(sizes, default=0) < 0 or sum(sizes) != data_bytes:
        raise TransferError(f"invalid manifest: pieces of {sum(sizes)} bytes, not {data_bytes}")
    return manifest


# --- authentication ---
def connect(
    endpoint: str,
    key: StoreKey | None,
    wait_s: float = STALL_S_MAX,
    within: Callable[[socket.socket], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> socket.socket:
    """Connect to the store at `endpoint`; both sides authenticate. `key`: None if no order gave one
    for this store. No single wait is longer than `wait_s`. `within`: the context in which the
    answers are waited for. Raises OSError, TransferError."""
    if key is None:
        raise TransferError(f"no order has a key of the store at {endpoint}")
    connection = socket.create_connection(
        network_address.split_endpoint(endpoint), timeout=min(CONNECT_S_MAX, wait_s)
    )
    try:
        with within(connection):
            connection.settimeout(min(STALL_S_MAX, wait_s))
            greeting = receive(connection, Greeting)
            nonce = secrets.token_bytes(NONCE_LENGTH)
            send(
                connection,
                Claim(
                    task=key.task,
                    generation=key.generation,
                    nonce=nonce,
                    answer=_answer(key, b"rank", greeting.nonce),
                ),
            )
            proof = receive(connection, Proof)
            if not hmac.compare_digest(proof.answer, _answer(key, b"keeper", nonce)):
                raise TransferError(f"{endpoint} does not know the key of task {key.task}")
    except BaseException:
        connection.close()
        raise
    return connection


def authenticate(connection: socket.socket, secret: bytes) -> StoreKey | None:
    """The store's side: the key that the client has, or None. Raises OSError, TransferError."""
    until_s = time.monotonic() + GREET_S_MAX
    connection.settimeout(GREET_S_MAX)
    nonce = secrets.token_bytes(NONCE_LENGTH)
    send(connection, Greeting(nonce=nonce))
    claim = receive(connection, Claim, until_s=until_s)
    connection.settimeout(STALL_S_MAX)
    key = store_key(secret, claim.task, claim.generation)
    if not hmac.compare_digest(claim.answer, _answer(key, b"rank", nonce)):
        send(
            connection,
            Refused(
                why=f"this is not the key of task {claim.task}, or the control "
                "plane's secret has changed: then restart the agents"
            ),
        )
        return None
    send(connection, Proof(answer=_answer(key, b"keeper", claim.nonce)))
    return key


def violation(key: StoreKey, message: Request) -> str:
    """Why the key does not open what the message asks for; "": it does."""
    if message.task != key.task:
        return f"this is the key of task {key.task}, not of {message.task}"
    if (
        isinstance(message, Offer)
        and key.generation
        and (newest := max(message.generation, message.whole[0])) > key.generation
    ):
        return f"this is the key of generation {key.generation}, not of {newest}"
    return ""


def _answer(key: StoreKey, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key.key, role + b" " + nonce, "sha256")


# --- requests of a rank ---
class ShareSender:
    """Sends one share to a store. All methods raise OSError, TransferError."""

    def __init__(self, connection: socket.socket, offer: Offer, manifest: bytes) -> None:
        self._connection, self._manifest = connection, manifest
        self._sums = bytearray()
        send(connection, offer)
        receive(connection, Go)
        connection.sendall(manifest)

    def send(self, piece: memoryview) -> None:
        self._sums += send_bytes(self._connection, piece).to_bytes(SUM_BYTES, "big")

    def finish(self) -> tuple[str, int]:
        """Complete the share. Returns its checksum and the store's start number."""
        checksum = checksum_of(self._manifest, bytes(self._sums))
        self._connection.sendall(self._sums)
        send(self._connection, Checksum(checksum=checksum))
        return checksum, receive(self._connection, StoredReply).start


def list_shares(connection: socket.socket, task: int) -> tuple[Offer, ...]:
    """The shares that the store has of a task. Raises OSError, TransferError."""
    send(connection, ListRequest(task=task))
    return receive(connection, List).offers


class ShareReader:
    """Reads pieces of one share from a store. All methods raise OSError, TransferError."""

    def __init__(self, connection: socket.socket, request: ShareRequest) -> None:
        self._connection = connection
        send(connection, request)
        offer = receive(connection, Offer)
        data_bytes = offer.copy_bytes - offer.manifest_bytes
        manifest = bytearray(offer.manifest_bytes)
        read_exactly(connection, memoryview(manifest))
        self.manifest = decode_manifest(bytes(manifest), data_bytes)
        sums = bytearray(SUM_BYTES * len(self.manifest.pieces))
        read_exactly(connection, memoryview(sums))
        sent = receive(connection, Checksum).checksum
        if sent != (found := checksum_of(bytes(manifest), bytes(sums))):
            raise TransferError(f"its list of pieces was altered: received {found}, sent {sent}")
        self._sums = [
            int.from_bytes(sums[begin : begin + SUM_BYTES], "big")
            for begin in range(0, len(sums), SUM_BYTES)
        ]

    def read(
        self,
        indices: Sequence[int],
        target: Callable[[Piece], memoryview | None] = lambda piece: None,
    ) -> Iterator[tuple[Piece, memoryview]]:
        """These pieces, each verified. `target`: the memory that a piece is received into, also if
        it is then found altered; None: a buffer, which the next piece uses again."""
        buffer = bytearray()
        for begin in range(0, len(indices), INDICES_NUM_MAX):
            wanted = tuple(indices[begin : begin + INDICES_NUM_MAX])
            send(self._connection, PiecesRequest(indices=wanted))
            for index in wanted:
                piece = self.manifest.pieces[index]
                data = target(piece)
                if data is None:
                    if len(buffer) < piece.num_bytes:
                        buffer = bytearray(piece.num_bytes)
                    data = memoryview(buffer)[: piece.num_bytes]
                if receive_bytes(self._connection, data) != self._sums[index]:
                    raise TransferError(f"checkpoint altered: {piece.key} {piece.offset}")
                yield piece, data

"""The pipe between an agent and a rank: length-prefixed msgpack; and the zygote's messages.

Agent to rank: orders with their seq and epoch, StartRank first; WriteDump and MayAbort, which are
no records. Rank to agent: reports with the rank's clock, numbered; Adopted and WillAbort, which are
no records. A frame that an
agent's successor sends or finds again has the same number. A closed pipe means that the agent and
its shim are gone: the rank exits.
"""

import struct

import msgspec
from msgspec import Raw, Struct

from ...events.decoding import Decoder, from_msgpack
from ...events.log.identity import StoreKeys
from ...events.records.codec import decode_body, encode_body
from ...events.records.types import Body

FD, PULSE = "UNICRON_FD", "UNICRON_PULSE"
"""Environment of a command that recovers in memory: its end of the pipe, and its progress page."""
LOOP = "UNICRON_LOOP"
"""Environment of a command with a `loop:`: its `loop:`, as JSON."""
FRAME_BYTES_MAX = 16 << 20
_HEAD = struct.Struct(">I")


class Frame(Struct, frozen=True, kw_only=True):
    """One message. Orders carry `seq` and `epoch`; reports carry `at_s` (seconds since 1970), and
    as `seq` their number in this pipe, from 1 (0: not numbered)."""

    body: Body
    seq: int = 0
    epoch: int = 0
    at_s: float = 0.0
    num_bytes: int = 0
    """The length of a received frame."""
    store_keys: StoreKeys = {}
    """Of the checkpoint stores that the order names."""


class WriteDump(Body, frozen=True):
    """Agent to a rank that seems to hang: write the flight recorder to `path`, if possible."""

    path: str


class Adopted(Body, frozen=True):
    """From a custom loop: the pid of the process that trains, not of a shell around it: its end is
    that of the rank. 0: a process that will adopt Unicron, but has not connected yet."""

    pid: int


class WillAbort(Body, frozen=True):
    """From a rank that leaves a generation: it is about to abort its NCCL communicators."""

    generation: int


class MayAbort(Body, frozen=True):
    """Agent to such ranks: all ranks of the generation that live on this node are about to."""

    generation: int


_NO_RECORDS: dict[str, type[Body]] = {
    kind.__name__: kind for kind in (WriteDump, Adopted, WillAbort, MayAbort)
}


class _Wire(Struct, frozen=True, kw_only=True):
    kind: str
    v: int
    body: Raw
    seq: int
    epoch: int
    at_s: float
    store_keys: StoreKeys = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = Decoder(_Wire)


def pack(frame: Frame) -> bytes:
    kind, v, raw = encode_body(frame.body)
    data = _encoder.encode(
        _Wire(
            kind=kind,
            v=v,
            body=Raw(raw),
            seq=frame.seq,
            epoch=frame.epoch,
            at_s=frame.at_s,
            store_keys=frame.store_keys,
        )
    )
    assert len(data) <= FRAME_BYTES_MAX, f"{kind} of {len(data)} bytes"
    return _HEAD.pack(len(data)) + data


def whole_bytes(data: bytes, bytes_max: int) -> int:
    """The length of the whole frames at the beginning of `data`; all if one is too long."""
    end = 0
    while len(data) - end >= _HEAD.size:
        (num_bytes,) = _HEAD.unpack_from(data, end)
        after = end + _HEAD.size + num_bytes
        if num_bytes > bytes_max:
            return len(data)
        if after > len(data):
            break
        end = after
    return end


class Unpacker:
    """Splits a byte stream into frames of at most `bytes_max`."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max

    @property
    def has_part(self) -> bool:
        """Whether a part of a frame is held."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes; returns the completed frames. Raises ValueError if a frame is too long."""
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _HEAD.size:
            (num_bytes,) = _HEAD.unpack_from(self._buffer)
            if num_bytes > self._bytes_max:
                raise ValueError(f"a frame of {num_bytes} bytes, above {self._bytes_max}")
            end = _HEAD.size + num_bytes
            if len(self._buffer) < end:
                break
            wire = _decoder.decode(bytes(self._buffer[_HEAD.size : end]))
            del self._buffer[:end]
            frames.append(
                Frame(
                    body=_body(wire),
                    seq=wire.seq,
                    epoch=wire.epoch,
                    at_s=wire.at_s,
                    num_bytes=num_bytes,
                    store_keys=wire.store_keys,
                )
            )
        return frames


def _body(wire: _Wire) -> Body:
    own = _NO_RECORDS.get(wire.kind)
    return (
        from_msgpack(wire.body, own)
        if own is not None
        else decode_body(wire.kind, wire.v, bytes(wire.body))
    )


# --- Between an agent and its zygote: one message each way, over SOCK_SEQPACKET ---
FDS_NUM_MAX = 3
"""Files that come with a ForkRequest: log, end of the pipe, and the progress page if monitored."""
REQUEST_BYTES_MAX = 128 << 10
"""Size limit of an environment in one message. With a larger one, the rank is started by exec."""


class ForkRequest(Struct, frozen=True, kw_only=True):
    """Fork a rank with exactly this environment, contained in this cgroup ("": by adoption)."""

    env: dict[str, str]
    cgroup: str = ""


class ForkReply(Struct, frozen=True, kw_only=True):
    """The zygote's reply: 0 when it is ready to fork, then the pid of each rank."""

    pid: int = 0

"""One function decodes: whatever others have written, readers get one kind of error, or None."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unicron.cli.cluster.state_dir import read_json
from unicron.events.decoding import Decoder, from_json, from_msgpack, from_strict_json
from unicron.events.file_lock import Owner
from unicron.events.log import embedded_server
from unicron.workers.agent.delivery.spool import load_spool
from unicron.workers.agent.processes import torch_files
from unicron.workers.host.checkpoint_index import read_index

DEEP = 10_000
BAD_MSGPACK: dict[str, bytes] = {
    "nothing": b"",
    "deep list": b"\x91" * DEEP,
    "deep map": b"\x81\xa1a" * DEEP,
    "no UTF-8": b"\x81\xa1a\xa1\xff",
    "a long list": b"\xdd\xff\xff\xff\xff",
    "more behind": b"\xc0\xc0",
    "a time that no clock has": b"\xc7\x0c\xff" + b"\xff" * 12,
    "a map as key": b"\x81\x81\x01\x01\x01",
}
BAD_JSON: dict[str, bytes] = {
    "nothing": b"",
    "deep list": b"[" * DEEP,
    "deep map": b'{"a":' * DEEP,
    "no UTF-8": b'"\xff"',
    "a lone surrogate": b'"\\ud800"',
    "many digits": b"9" * 5_000,
    "more behind": b"1 1",
}
STRICT: dict[str, bytes] = {"twice": b'{"a": 1, "a": 2}', "nan": b"[NaN]", "infinite": b"-Infinity"}


@pytest.mark.parametrize("kind", [Any, dict[str, Any], Owner, list[float], str])
def test_what_is_wrong_is_one_error(kind: Any) -> None:
    decoder = Decoder[Any](kind)
    for data in BAD_MSGPACK.values():
        for decode in (decoder.decode, lambda data: from_msgpack(data, kind)):
            with pytest.raises(msgspec.DecodeError):
                decode(data)
    for data in BAD_JSON.values():
        with pytest.raises(msgspec.DecodeError):
            from_json(data, kind)


@pytest.mark.parametrize("data", [*(BAD_JSON | STRICT).items()], ids=lambda item: item[0])
def test_strict_json(data: tuple[str, bytes]) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_strict_json(data[1])


def test_any_bytes_are_a_value_or_that_error() -> None:
    chance = random.Random(7)
    for _ in range(20_000):
        data = chance.choice([b"\x91", b"\x81", b"[", b'{"a":', b""]) * chance.choice([1, 1, 500])
        data += chance.randbytes(chance.randrange(12))
        for decode in (from_msgpack, from_json, from_strict_json):
            try:
                decode(data)
            except msgspec.DecodeError:
                pass


def _spool(data: bytes, folder: Path) -> object:
    path = folder / "spool"
    path.write_bytes(len(data).to_bytes(4, "little") + data)
    return load_spool(path, "n1/1", "n1", lambda: 0.0)


@pytest.mark.parametrize("data", BAD_MSGPACK.values(), ids=BAD_MSGPACK)
def test_readers_of_msgpack(data: bytes, tmp_path: Path) -> None:
    assert read_index(data) is None
    assert _spool(data, tmp_path) is None


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON)
def test_readers_of_json(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "server.json").write_bytes(data)
    assert read_json(tmp_path / "server.json") is None
    assert torch_files.parse(data) is None
    assert embedded_server.adopt(tmp_path) is None

"""Snapshots: a thread reads live memory, and sees the values of the moment that it was taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain, islice

import pytest
import torch
from torch import Tensor
from unicron.workers.training.checkpoint import snapshot
from unicron.workers.training.checkpoint.snapshot import Snapshot, SnapshotLost, buffer_bytes
from unicron.workers.training.recovery.regions import State, cut, kind_of
from unicron.workers.training.recovery.resharding import Region, Shard

PIECE_BYTES = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", PIECE_BYTES)


def state() -> State:
    tensors = {
        "model.a": torch.randn(10, 4),
        "model.b": torch.randn(6, 40),
        "buffer.c": torch.tensor(3.0),
        "model.d": torch.randn(30),
    }
    return {
        Shard(
            key,
            kind_of(tensor, tuple(tensor.shape)),
            Region((0,) * tensor.dim(), tuple(tensor.shape)),
        ): tensor
        for key, tensor in tensors.items()
    }


def whole(state: State, read: Iterator[tuple[Shard, Tensor]]) -> dict[str, Tensor]:
    """The values that `read` yields, put together; each element once."""
    found = {shard.key: torch.full_like(tensor, torch.nan) for shard, tensor in state.items()}
    regions = {shard.key: shard.region for shard in state}
    num = 0
    for shard, tensor in read:
        cut(found[shard.key], regions[shard.key], shard.region).copy_(tensor)
        num += tensor.numel()
    assert num == sum(tensor.numel() for tensor in state.values())
    return found


def values(state: State) -> dict[str, Tensor]:
    return {shard.key: tensor.clone() for shard, tensor in state.items()}


def overwrite(state: State) -> None:
    for tensor in state.values():
        tensor.fill_(-1)


@pytest.mark.parametrize("num_read", [0, 1, 3, 11])
@pytest.mark.parametrize("limit_bytes", [None, 0, 300])
def test_what_is_read_later_has_the_values_of_the_snapshot(
    num_read: int, limit_bytes: int | None
) -> None:
    live = state()
    before, taken = values(live), Snapshot(live, limit_bytes)
    reader = taken.read()
    first = [(shard, tensor.clone()) for shard, tensor in islice(reader, num_read)]
    assert taken.num_bytes == sum(tensor.nbytes for tensor in live.values())
    done = threading.Event()

    def change() -> None:
        taken.detach()
        overwrite(live)
        done.set()

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    if limit_bytes is None:
        assert done.wait(10), "it need not wait: everything is copied"
    elif limit_bytes == 0:
        time.sleep(0.1)
        assert not done.is_set(), "changed before it was read"
    found = whole(live, chain(first, reader))
    assert done.wait(10)
    assert all(found[key].equal(tensor) for key, tensor in before.items())


def test_pieces_are_small_and_own_their_memory() -> None:
    live = state()
    for shard, tensor in Snapshot(live, None).read():
        row_bytes = tensor.nbytes // max(shard.region.shape[:1] or (1,))
        assert tensor.nbytes <= max(PIECE_BYTES, row_bytes)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_reader_that_hangs_loses_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "STALLED_S", 0.1)
    live = state()
    taken = Snapshot(live, 0)
    reader = taken.read()
    next(reader)
    taken.detach()
    with pytest.raises(SnapshotLost, match="nothing was written for"):
        list(reader)


def test_no_one_waits_for_a_reader_that_has_ended() -> None:
    taken = Snapshot(state(), 0)
    reader = taken.read()
    next(reader)
    reader.close()
    taken.detach()


def test_a_copy_without_memory_loses_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Snapshot(state(), None)

    def fails(index: int) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(taken, "_copy", fails)
    taken.detach()
    with pytest.raises(SnapshotLost, match="MemoryError"):
        next(taken.read())


def test_the_buffer_is_a_part_of_the_state() -> None:
    assert buffer_bytes(state()) == snapshot.BUFFER_BYTES_MIN
    big = torch.empty(1 << 30, dtype=torch.uint8, device="meta")
    assert buffer_bytes({Shard("model.a", "uint8", Region((0,), (1 << 30,))): big}) == 64 << 20

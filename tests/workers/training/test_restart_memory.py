"""The state of a process that restarts from memory: its encoding, its shares in a store."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from checkpoint_stores import NODE_KEY, TASK, LocalKeeper, alter, named, wait
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from unicron.events.log.identity import store_keys
from unicron.events.records.orders import SetCheckpointStores, StartRank
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.records.types import MemoryCheckpoint, Slot
from unicron.events.spec.job import JobSpec, Loop
from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.training.checkpoint.process_state import (
    NotEncodable,
    decode,
    encode,
    generators,
    meshes_of,
    set_generators,
)
from unicron.workers.training.checkpoint.restart_memory import RestartMemory
from unicron.workers.training.process.control_thread import Control


# --- encoding -------------------------------------------------------------------------------------
def again(tree: object, meshes: Any = ()) -> Any:
    shards, data = encode(tree)
    return decode(data, {shard.key: tensor.clone() for shard, tensor in shards.items()}, meshes)


def test_a_tree_is_decoded_as_it_was() -> None:
    weight = torch.arange(6.0).view(2, 3)
    tree = {
        "a": [1, -2.5, "x", b"y", None, True],
        3: (torch.Size([2]), {4}),
        "t": weight.t(),
        "half": weight.bfloat16(),
        "empty": torch.empty(0, 2),
        "number": torch.tensor(7),
        "type": torch.float16,
        "array": numpy.arange(3),
        "large": 1 << 80,
    }
    found = again(tree)
    assert list(found) == list(tree)
    for key in ("a", 3, "type", "large"):
        assert found[key] == tree[key]
    for key in ("t", "half", "empty", "number"):
        assert found[key].dtype == tree[key].dtype
        assert found[key].shape == tree[key].shape
        assert torch.equal(found[key], tree[key])
    assert found["array"].tolist() == [0, 1, 2]


def test_a_tensor_that_is_twice_in_a_tree_is_stored_once() -> None:
    weight = torch.ones(4)
    shards, _ = encode({"a": weight, "b": [weight]})
    assert len(shards) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "state.x\\[0\\] is a builtins.object"),
        (torch.ones(2).to_sparse(), "state.x\\[0\\] is a tensor of type Tensor, torch.sparse_coo"),
    ],
)
def test_what_cannot_be_encoded_is_named(value: Any, words: str) -> None:
    with pytest.raises(NotEncodable, match=words):
        encode({"x": [value]})


def test_damaged_data_is_refused() -> None:
    _, data = encode({"a": torch.ones(2)})
    for bad in (b"\xc1", data[:-1], data):
        with pytest.raises(ValueError, match="cannot be decoded"):
            decode(bad, {})


def test_a_distributed_tensor_keeps_its_mesh(alone: Any) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    made = [
        distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [one])
        for one in (Shard(1), Replicate())
    ]
    found = again(made, meshes_of({"x": made}))
    for one, before in zip(found, made, strict=True):
        assert isinstance(one, DTensor)
        assert one.placements == before.placements
        assert torch.equal(one.full_tensor(), before.full_tensor())
    with pytest.raises(ValueError, match="cannot be decoded"):
        again(made)
    with pytest.raises(NotEncodable, match="state is placed as"):
        encode(DTensor.from_local(torch.ones(2), mesh, [Partial()]))


def test_the_generators_continue() -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    states = again(generators())
    expected = drawn()
    drawn()
    set_generators(states)
    assert drawn() == expected


# --- in a store -----------------------------------------------------------------------------------
class Process:
    """Process `place` of a task of `num`, in its attempt `attempt`."""

    def __init__(
        self,
        keeper: LocalKeeper,
        place: int = 0,
        num: int = 1,
        attempt: int = 1,
        copies: tuple[MemoryCheckpoint, ...] = (),
    ) -> None:
        loop = Loop(micro_batches=1, iterations=9, output="/tmp/t", copy_every=1)
        start = StartRank(
            nodes=("n1",),
            task=TASK,
            rank=place,
            attempt=attempt,
            slot=Slot("n1", place),
            num_seats=num,
            host="",
            port=0,
            checkpoint="",
            copies=copies,
            spec=JobSpec(
                api_version="unicron/v1", name="t", command=("x",), heal="in-memory", loop=loop
            ),
        )
        order = SetCheckpointStores(
            nodes=("n1",), task=TASK, generation=0, keepers=(keeper.keeper,)
        )
        keys = store_keys(lambda node: NODE_KEY, start, "n1") | store_keys(
            lambda node: NODE_KEY, order, "n1"
        )
        ours, self._agent = socket.socketpair()
        self._agent.setblocking(False)
        self._told: list[Any] = []
        control = Control(ours, place, Unpacker())
        control.keep, control.store_keys = order, keys
        self.memory = RestartMemory(start, control, place, num)

    def told(self) -> list[Any]:
        """The reports so far."""
        with suppress(BlockingIOError):
            self._told += [frame.body for frame in Unpacker().feed(self._agent.recv(1 << 16))]
        return self._told

    def store(self, tree: Any, iterations: int) -> MemoryCheckpointStored:
        self.memory.copy(lambda: tree, iterations, is_whole=True)
        self.memory.detach()
        self.memory.wait()
        found: MemoryCheckpointStored = self.told()[-1]
        return found


@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    made = LocalKeeper("n2")
    yield made
    made.close()


def test_a_process_continues_with_its_own_state(keeper: LocalKeeper) -> None:
    first = Process(keeper)
    weight = torch.rand(1000, 7)
    before = weight.clone()
    told = first.store({"weight": weight, "iterations": 4}, 4)
    weight.zero_()
    assert (told.generation, told.step_version, told.num_shares) == (1, 4, 1)
    copies = (named([keeper], told),)
    second = Process(keeper, attempt=2, copies=copies)
    found = second.memory.restore()
    assert found is not None
    assert found.step_version == found.tree["iterations"] == 4
    assert torch.equal(found.tree["weight"], before)
    assert Process(keeper, attempt=2, copies=copies).memory.restore(after=4) is None
    assert second.store({"weight": weight, "iterations": 5}, 5).generation == 2


def test_a_state_of_another_number_of_processes_is_not_used(
    keeper: LocalKeeper, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [Process(keeper, place, 2).store({"x": 1}, 4) for place in range(2)]
    copies = tuple(named([keeper], one) for one in told)
    assert Process(keeper, attempt=2, copies=copies).memory.restore() is None
    assert "it was stored by 2 processes, and these are 1" in capsys.readouterr().out


def test_a_damaged_state_gives_way_to_the_one_before(keeper: LocalKeeper) -> None:
    first = Process(keeper)
    told = first.store({"weight": torch.rand(5000), "at": 1}, 1)
    first.store({"weight": torch.rand(5000), "at": 2}, 2)
    wait(lambda: len(keeper.stored(TASK)) == 2, "both are stored")
    alter(keeper.stored(TASK)[-1])
    found = Process(keeper, attempt=2, copies=(named([keeper], told),)).memory.restore()
    assert found is not None
    assert found.tree["at"] == 1


def test_a_state_that_cannot_be_encoded_is_not_stored(
    keeper: LocalKeeper, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Process(keeper)
    process.memory.copy(lambda: {"x": object()}, 1, is_whole=True)
    process.memory.wait()
    assert process.told() == keeper.stored(TASK) == []
    assert "state.state.x is a builtins.object" in capsys.readouterr().out

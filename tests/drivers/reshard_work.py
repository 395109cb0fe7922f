"""The work of the members in test_resharding.py: changes of layout with state transfer.

A gradient depends only on the parameter's name and the step, and Adam works on each element
separately. So after the same steps every layout has the same complete state, bit by bit.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import structlog
import torch
import torch.distributed as dist
from msgspec.structs import replace
from unicron.events.spec.job import Model, Optimizer, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel, num_positions
from unicron.workers.training import rank
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.communicators.group_handles import Handles
    from unicron.workers.training.dependencies import private_megatron
    from unicron.workers.training.model import optimizers, training_state
    from unicron.workers.training.model import trainee as model
    from unicron.workers.training.process.history import History
    from unicron.workers.training.recovery import state_exchange, state_shards, state_transfer
    from unicron.workers.training.recovery.peers import World
    from unicron.workers.training.recovery.regions import State, cut, kind_of
    from unicron.workers.training.recovery.resharding import Missing, Region, Shard
    from unicron.workers.training.recovery.state_sources import WHOLE, HeldState

rank.ignore_warnings()
LIMIT_S = 60.0
TRAIN = Train(
    model=Model(num_layers=6, hidden=16, num_heads=2, sequence=8),
    iterations=1000,
    optimizer=Optimizer(lr=1e-2, warmup_iterations=50, clip_grad=0.0),
    output="unused",
)


class Layout(NamedTuple):
    axes: Axes
    optimizer: Any = "whole"


def seat(layout: Layout, place: int) -> HeldState:
    """The part of the model at a position; of a standby, any."""
    if place >= num_positions(layout.axes):
        return WHOLE
    return HeldState(axes=layout.axes, optimizer=layout.optimizer, place=place)


Stop = tuple[Layout, int, tuple[int, ...]]
"""The arguments of Walker.go."""


class Walker:
    """One member of the world, with its state. Its position is its number plus `turn`."""

    def __init__(self, number: int, train: Train) -> None:
        self.number, self.num_members = number, dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        self.train = train
        self.generation = self.turn = self.step_version = 0
        self.layout = Layout(Axes(dp=0))
        self.have: State = {}
        self.numbers: training_state.Numbers | None = None
        self.history = History()
        with self.up(Axes(dp=self.num_members)) as made:
            self.whole = self.build(Layout(Axes()), 0, made)
            _take_handles(self.whole, made)
        self.expected = _pieces_of(training_state.tensors(self.whole))
        gc.freeze()  # a collection then has to search only the objects of a training model

    @contextmanager
    def up(self, axes: Axes) -> Generator[Any]:
        """The groups of a new generation of all members."""
        self.generation += 1
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(self.generation), self.store),
            rank=(self.number + self.turn) % self.num_members,
            world_size=self.num_members,
        )
        made = process_groups.build(axes, LIMIT_S)
        try:
            yield made
            dist.barrier()
        finally:
            vars(made).clear()
            private_megatron.clear_globals()
            dist.destroy_process_group()
            dist.distributed_c10d._world.group_count = 0

    def build(self, layout: Layout, place: int, made: Any) -> model.TrainingModel:
        train = replace(self.train, parallel=Parallel(optimizer=layout.optimizer))
        trainee = model.build(train, torch.device("cpu"), made, layout.axes, place)
        trainee.clear()  # allocates the gradients
        return trainee

    def go(self, layout: Layout, turn: int = 0, lost: Collection[int] = ()) -> dict[int, int]:
        """Take over the state into the next layout, and step; the source of each part of the state.

        `lost`: positions of the last layout whose members have lost their state.
        """
        last = (self.number + self.turn) % self.num_members
        seated = range(num_positions(self.layout.axes))
        holders = {
            (place + turn) % self.num_members: seat(self.layout, place)
            for place in seated
            if place not in lost
        }
        self.turn = (self.turn + turn) % self.num_members
        has = last in seated and last not in lost
        with self.up(layout.axes) as made:
            place = dist.get_rank()
            trainee, want = None, {}
            if place < num_positions(layout.axes):
                trainee = self.build(layout, place, made)
                want = state_shards.list_shards(trainee)
            if holders:
                found = self.exchange(
                    self.have if has else {},
                    want,
                    self.numbers if has else None,
                    holders,
                    seat(layout, place),
                )
            if trainee is not None:
                if holders:
                    training_state.load(trainee, found.numbers, self.history)
                self.check(want, "taken over")
                _step(trainee, want, self.step_version)
            _step(self.whole, self.expected, self.step_version)
            self.step_version += 1
            self.have, self.layout, self.numbers = want, layout, None
            if trainee is not None:
                self.check(want, "stepped")
                self.numbers = training_state.numbers(trainee, self.step_version, self.history)
                _take_handles(trainee, made)
        del trainee
        gc.collect()
        return found.taken if holders else {}

    def exchange(
        self,
        have: State,
        want: State,
        told: training_state.Numbers | None,
        holders: dict[int, HeldState],
        wanted: HeldState = WHOLE,
        *,
        staged: bool = False,
    ) -> state_exchange.ExchangeResult:
        return state_exchange.exchange(
            World.of_torch(),
            have,
            want,
            told,
            step_version=self.step_version,
            held=holders,
            seat=wanted,
            nodes=["a"] * self.num_members,
            staged=staged,
        )

    def check(self, held: State, when: str) -> None:
        """Assert that all of it equals the whole model's state."""
        by_key = {piece.key: (piece, tensor) for piece, tensor in self.expected.items()}
        odd = []
        for piece, tensor in held.items():
            whole, there = by_key[piece.key]
            assert whole.kind == piece.kind
            if not cut(there, whole.region, piece.region).equal(tensor):
                odd.append(piece)
        assert not odd, f"{len(odd)} of {len(held)} pieces are wrong when {when}: {odd[:3]}"


def _step(trainee: model.TrainingModel, held: State, step: int) -> None:
    """A step with gradients that do not depend on the layout."""
    params = {f"model.{name}": param for name, param in trainee.named_parameters()}
    for piece, tensor in held.items():
        if piece.key not in params:
            continue
        param = params[piece.key]
        shape = _whole(piece).region.shape
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.blake2b(f"{piece.key} {step}".encode(), digest_size=6).digest())
        )
        drawn = torch.randn(shape, generator=generator)
        begin = tensor.storage_offset() - param.storage_offset()
        param.main_grad.as_strided(
            tensor.shape, tensor.stride(), param.main_grad.storage_offset() + begin
        ).copy_(cut(drawn, Region((0,) * len(shape), shape), piece.region))
    if trainee.mirror is not None:
        optimizers.sync_mirror(trainee.mirror, trainee.optimizer)
    assert all(optimizer.step()[0] for optimizer in trainee.optimizers)
    trainee.scheduler.step(trainee.train.batch.global_)
    for ddp in trainee.ddps:
        if ddp.ddp_config.use_distributed_optimizer:
            ddp.start_param_sync(force_sync=True)


def _pieces_of(tensors: dict[str, torch.Tensor]) -> State:
    """Each tensor as one whole shard, by key."""
    return {
        _whole(Shard(key, kind_of(tensor, tuple(tensor.shape)), Region((), ()))): tensor
        for key, tensor in tensors.items()
    }


def _whole(piece: Shard) -> Shard:
    """The whole tensor of which this is a shard."""
    shape = tuple(int(size) for size in piece.kind.partition(" ")[2].split("x") if size)
    return piece._replace(region=Region((0,) * len(shape), shape))


def _take_handles(trainee: model.TrainingModel, made: Any) -> None:
    Handles().take(trainee.roots, process_groups.by_role(made))


def walk(number: int, train: Train, path: Sequence[Stop]) -> list[dict[int, int]]:
    """Go along a path of layouts; return the sources of the state at each."""
    walker = Walker(number, train)
    return [walker.go(*stop) for stop in path]


def gated(number: int, train: Train, path: Sequence[Stop]) -> None:
    """The same with Megatron's gated linear unit, whose two halves lie in one tensor."""
    config_of = model._config

    def config(train: Train, axes: Axes) -> Any:
        made = config_of(train, axes)
        made.gated_linear_unit = True
        return made

    model._config = config
    # Megatron's own random initialisation, too: Unicron's does not support the two halves.
    model.without_initialisation = nullcontext
    model.draw_weights = lambda *given, **named: None
    walk(number, train, path)


def gather(number: int, train: Train, layout: Layout) -> list[str]:
    """Gather the whole state at the first member, as for a copy, and give it back to all."""
    walker = Walker(number, train)
    walker.go(layout)
    with walker.up(layout.axes):
        want = (
            {}
            if number
            else {piece: torch.empty_like(tensor) for piece, tensor in walker.expected.items()}
        )
        holders = {place: seat(layout, place) for place in range(num_positions(layout.axes))}
        walker.exchange(walker.have, want, walker.numbers, holders)
        walker.check(want, "gathered")
        for tensor in walker.have.values():
            tensor.zero_()
        result = walker.exchange(
            want,
            walker.have,
            walker.numbers if number == 0 else None,
            {0: WHOLE},
            seat(layout, number),
        )
        walker.check(walker.have, "given back")
        assert result.numbers is not None
        assert result.numbers.adam_step == 1
    return sorted(piece.key for piece in want)


def lose(number: int, train: Train, layout: Layout, lost: int) -> tuple[str, ...]:
    """A member of a layout has lost its state; returns the keys that no member has."""
    walker = Walker(number, train)
    walker.go(layout)
    with pytest.raises(Missing) as raised:
        walker.go(Layout(Axes(dp=2)), 0, (lost,))
    return raised.value.keys


def refuse(number: int, train: Train, what: str) -> tuple[dict[int, int], set[str]]:
    """One of three replicas sends invalid state; what each member took, and what was logged."""
    walker = Walker(number, train)
    walker.go(Layout(Axes(dp=3)))
    if number == 0:
        assert walker.numbers is not None
        match what:
            case "checksum":
                right = state_transfer._seal
                state_transfer._seal = lambda chunk: right(chunk).index_fill_(
                    0, torch.tensor([5]), 7
                )
            case "step":
                walker.numbers.step_version -= 1
            case _:
                walker.have = {
                    piece._replace(kind=f"{piece.kind}x1"): tensor
                    for piece, tensor in walker.have.items()
                }
    with structlog.testing.capture_logs() as logged:
        took = walker.go(Layout(Axes(dp=4)))
    return took, {str(line["why"]) for line in logged}


def die(number: int, train: Train) -> None:
    """The sender dies during the transfer: the receiver keeps its state. A second transfer
    succeeds."""
    walker = Walker(number, train)
    walker.go(Layout(Axes(dp=2)))
    right, packed = state_transfer._pack, 0

    def pack(tensors: Sequence[Any], chunk: Any) -> Any:
        nonlocal packed
        packed += 1
        if packed == 4:
            raise RuntimeError("dies")
        return right(tensors, chunk)

    def give() -> state_exchange.ExchangeResult:
        with walker.up(Axes(dp=2)):
            return walker.exchange(
                {} if number else walker.have,
                walker.have,
                None if number else walker.numbers,
                {0: WHOLE},
                staged=True,
            )

    for tensor in walker.have.values():
        tensor += number
    before = {piece: tensor.clone() for piece, tensor in walker.have.items()}
    state_transfer.CHUNK_BYTES = 2048
    if number == 0:
        state_transfer._pack = pack
    with pytest.raises(RuntimeError):
        give()
    assert packed == (0 if number else 4)
    assert all(tensor.equal(before[piece]) for piece, tensor in walker.have.items())
    state_transfer._pack = right
    found = give()
    assert all(tensor.equal(before[piece]) for piece, tensor in walker.have.items()), "not staged"
    found.activate()
    walker.check(walker.have, "in force")
    assert found.numbers.step_version == 1

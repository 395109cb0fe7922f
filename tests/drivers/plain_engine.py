"""A small Engine over plain torch: two linear layers and AdamW, the same on every member.

It has nothing of Megatron, so that model/engine.py is not the shadow of one implementation.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from unicron.events.spec.job import Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates
from unicron.workers.training.communicators.operations import Operations, Works
from unicron.workers.training.model.engine import (
    Backward,
    Begin,
    NotePass,
    Passes,
    Sample,
    SideSums,
    Watch,
)
from unicron.workers.training.model.losses import Losses
from unicron.workers.training.process.trace import Note

WIDTH, HIDDEN = 8, 16


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)
    )


def optimizer_of(module: torch.nn.Module, train: Train) -> torch.optim.AdamW:
    spec = train.optimizer
    return torch.optim.AdamW(
        module.parameters(),
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        weight_decay=spec.weight_decay,
    )


def squared_errors(module: torch.nn.Module, rows: Tensor) -> Tensor:
    """The loss of a micro-batch [rows, WIDTH + 1]: the last column is to be predicted."""
    out: Tensor = module(rows[:, :-1]).squeeze(-1)
    return (out - rows[:, -1]).square().sum()


class Rows:
    """The data (Samples): random rows, the same for the same iteration and micro-batch."""

    digest = "rows"

    def sample(
        self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
    ) -> Tensor:
        random = torch.Generator().manual_seed(seed + 1_000 * iteration + micro_batch)
        return torch.randn(rows, WIDTH + 1, generator=random)


class PlainGradients:
    """Gradients (engine.py): a flat fp32 tensor for each layer, the last layer first. `param.grad`
    is a part of it."""

    def __init__(self, module: torch.nn.Sequential, *, has_backup: bool) -> None:
        self.has_backup = has_backup
        self.flat: list[Tensor] = []
        self._layers = [list(module[2].parameters()), list(module[0].parameters())]
        self._copies: dict[int, Tensor] = {}
        self._begun: set[int] = set()
        self._launches = True
        self._missing = [len(layer) for layer in self._layers]

    @property
    def num_buckets(self) -> int:
        return len(self._layers)

    def use(self, flat: list[Tensor]) -> None:
        """Make these the local sum."""
        self.flat = flat
        for layer, own in zip(self._layers, flat, strict=bool(flat)):
            at = 0
            for param in layer:
                param.grad = own[at : at + param.numel()].view_as(param)
                at += param.numel()

    def clear(self) -> None:
        if not self.flat:
            self.use([torch.empty(sum(param.numel() for param in layer)) for layer in self._layers])
        for own in self.flat:
            own.zero_()  # in place, as Megatron's are: what still writes there would be seen

    def release(self) -> None:
        self.flat = []
        for layer in self._layers:
            for param in layer:
                param.grad = None

    def keep(self, bucket: int) -> None:
        self._begun.add(bucket)
        if self.has_backup:
            self._copies[bucket] = self.flat[bucket].clone()

    def restore(self) -> bool:
        if not self._begun:
            return True
        if self.has_backup:
            self.use([self._copies.get(at, own.clone()) for at, own in enumerate(self.flat)])
        else:
            self.release()
        self.drop()
        return self.has_backup

    def drop(self) -> None:
        self._copies, self._begun = {}, set()

    def free(self) -> None:
        return

    def reduce(self, operations: Operations, watch: Watch) -> None:
        for bucket in range(self.num_buckets):
            watch.bucket_begins(bucket)
            operations.all_reduce(self.flat[bucket], "dp_cp")
            watch.bucket_ends(bucket)

    def launch(self, bucket: int, operations: Operations) -> Works:
        return operations.start_all_reduce(self.flat[bucket], "dp_cp")

    def finish(self, operations: Operations, watch: Watch) -> None:
        return

    def on_complete(self, ready: Callable[[int], None]) -> None:
        def took(bucket: int) -> None:
            if self._launches:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    ready(bucket)

        for bucket, layer in enumerate(self._layers):
            for param in layer:
                param.register_post_accumulate_grad_hook(lambda _, bucket=bucket: took(bucket))

    @contextmanager
    def without_launch(self) -> Generator[None]:
        self._launches = False
        yield
        self._launches = True

    def reset(self) -> None:
        self._missing = [len(layer) for layer in self._layers]


class PlainEngine:
    """An Engine: each member is a whole replica."""

    exact, exact_gradients, loss_scale = None, None, None
    replica_size, is_sharded, gathers_in_forward, is_gathered = 1, False, False, True

    def __init__(self, train: Train, axes: Axes, place: int) -> None:
        self.train, self.axes, self.place = train, axes, place
        self.device = torch.device("cpu")
        self.module = network(train.seed)
        self.optimizer = optimizer_of(self.module, train)
        self.gradients = PlainGradients(self.module, has_backup=train.kept_sum)
        self.micro_batch = -1
        self.shards: dict[Any, Tensor] = {}

    @property
    def has_gradients(self) -> bool:
        return bool(self.gradients.flat)

    def clear(self) -> None:
        self.gradients.clear()
        self.gradients.reset()

    def release_gradients(self) -> None:
        self.gradients.release()

    def take_gradients(self, other: PlainEngine) -> None:
        self.gradients.use([own.clone() for own in other.gradients.flat])

    def release(self) -> None:
        self.release_gradients()

    def begin_iteration(self) -> None:
        return

    def run(
        self,
        operations: Operations,
        iteration: int,
        items: Sequence[int],
        sample: Sample,
        note: NotePass,
        *,
        must_stop: Callable[[], bool] | None,
        begin: Begin | None,
        backward: Backward,
    ) -> Passes:
        losses = Losses()
        for item in items:
            note("micro_batch", item)
            self.micro_batch = item
            rows = sample(item)
            note("forward", item)
            loss = squared_errors(self.module, rows)
            losses.add(item, loss, len(rows))
            if begin is not None:
                begin(losses)
            note("backward", item)
            with backward():
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return Passes(len(items), losses)

    def side_sums(self, operations: Operations) -> SideSums:
        return ()

    def watch(self, note: Note) -> None:
        return

    def rejection(self, error: str) -> str | None:
        return None

    def divisor(self, num_tokens: float) -> float:
        return max(num_tokens, 1.0)

    def step_barrier(self, *, dp: int | None = None) -> Tensor:
        whole = torch.cat(self.gradients.flat).double()
        own = whole.square().sum() * (
            not (coordinates(self.axes, self.place).dp if dp is None else dp)
        )
        return torch.stack((own, (~whole.isfinite().all()).double()))

    def step(
        self,
        num_tokens: float,
        side_sums: SideSums,
        note: Note,
        *,
        norm_square: float | None = None,
        found_inf: bool = False,
        scale: float | None = None,
        skips: bool = False,
    ) -> float | None:
        note("scale")
        if skips:
            return None
        for own in self.gradients.flat:
            own.div_(self.divisor(num_tokens))
        note("step")
        self.optimizer.step()
        note("stepped")
        note("done")
        return math.sqrt(sum(own.double().square().sum().item() for own in self.gradients.flat))

    def set_gathered(self, *, is_gathered: bool) -> None:
        assert is_gathered, "a whole replica has nothing to gather"

    def expect_gather(self) -> None:
        return

    def gather(self, operations: Operations) -> None:
        return

    def take_gathers(self) -> Works:
        return []

    def counted(self) -> list[bool]:
        return []

    def parameter_names(self, indices: Sequence[int]) -> list[str]:
        return []

    # --- the state, for a member that lacks it ---
    def state(self) -> bytes:
        data = io.BytesIO()
        torch.save([self.module.state_dict(), self.optimizer.state_dict()], data)
        return data.getvalue()

    def load(self, data: bytes) -> None:
        module, optimizer = torch.load(io.BytesIO(data))
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)


def undisturbed(train: Train) -> tuple[list[float], list[Tensor]]:
    """What torch alone trains in one process: the losses, and the parameters at the end. It shares
    with the engine the network, the data and the loss of a row."""
    module, losses = network(train.seed), list[float]()
    optimizer, data = optimizer_of(module, train), Rows()
    rows = train.batch.micro
    for iteration in range(train.iterations):
        optimizer.zero_grad()
        whole = [
            data.sample(train.seed, iteration, item, rows=rows, sequence=0)
            for item in range(train.num_micro_batches)
        ]
        loss = squared_errors(module, torch.cat(whole)) / train.batch.global_
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        losses.append(loss.item())
    return losses, [param.detach() for param in module.parameters()]

"""What a member trains: what its spec says, or what a loop of somebody's own does (own.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from ....events.spec.job import Train
from ....events.spec.model import Axes
from ....events.spec.parallelism import Parallel
from . import text_data
from . import trainee as model
from .trainee import Trainee


class Samples(Protocol):
    """The data, by random access. `digest` names it."""

    digest: str

    def sample(self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
               ) -> Any:
        """A micro-batch, the same whoever asks."""
        ...


class Work(Protocol):
    """What is trained. `train` says how many iterations and micro-batches, and where state goes;
    `flops` are those of one iteration."""

    train: Train
    flops: float

    def on_groups(self, groups: Any) -> None:
        """A generation's groups are up; None: they go down."""
        ...

    def load(self) -> Samples:
        """The data. Raises UsageError."""
        ...

    def build(self, device: torch.device, groups: Any, axes: Axes, place: int, *,
              begins: bool = True) -> Trainee:
        """What stands at a place of a layout, the same whoever builds it; nobody else is asked.

        Unless it `begins`, it is to take a state: its weights may be anything.
        """
        ...

    def build_whole(self, device: torch.device, groups: Any) -> Trainee:
        """A whole replica, which copies and checkpoints are of; `groups` are of one member."""
        ...

    def begin(self, trainee: Trainee, whole: Callable[[], Trainee]) -> None:
        """Nobody has a state: give this one, built for its place, that of the first iteration.

        `whole` builds a whole replica, as it begins.
        """
        ...


class House:
    """The GPT of a spec's `train:`."""

    def __init__(self, train: Train) -> None:
        self.train = train
        self.flops = model.iteration_flops(train.model, train.batch.global_)

    def on_groups(self, groups: Any) -> None:
        pass

    def load(self) -> Samples:
        return text_data.load(self.train.data, self.train.model.sequence)

    def build(self, device: torch.device, groups: Any, axes: Axes, place: int, *,
              begins: bool = True) -> Trainee:
        return model.build(self.train, device, groups, axes, place, draws=begins)

    def build_whole(self, device: torch.device, groups: Any) -> Trainee:
        return model.build(replace(self.train, parallel=Parallel()), device, groups, draws=False)

    def begin(self, trainee: Trainee, whole: Callable[[], Trainee]) -> None:
        """It is built with it: the seed and the names of parameters say all of it."""

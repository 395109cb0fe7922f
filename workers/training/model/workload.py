"""The workload of a member: the GPT of its spec, or a custom loop (adopt/custom_loop.py)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ....events.spec.job import Train
from ....events.spec.model import Axes
from ...ipc.work_row import UNCOUNTED, WorkCount
from . import text_data
from . import trainee as model
from .trainee import Size, TrainingModel

BuildPart = Callable[[Axes, int], TrainingModel]
"""(axes, place) -> the part of a position in any layout, with its initial weights."""


class Samples(Protocol):
    """The data with random access; `digest` identifies it."""

    digest: str

    def sample(
        self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
    ) -> Any:
        """A micro-batch, equal on every rank."""
        ...


class Beginning(Protocol):
    """A stored state in place of the initial weights. Each method raises UsageError. `count`: of
    what is read."""

    def newest(self) -> int:
        """The iterations in the state; 0: none, or weights only. Others may see a later state."""
        ...

    def begin(self, trainee: TrainingModel, count: WorkCount = UNCOUNTED) -> bool:
        """Set this part to stored weights, for the first iteration. False: there are none."""
        ...

    def read(
        self,
        trainee: TrainingModel,
        step_version: int,
        history: Any,
        count: WorkCount = UNCOUNTED,
    ) -> None:
        """Read this member's part of that state."""


class Workload(Protocol):
    """What a member trains. `flops`: of one iteration. `beginning`: where training begins, if not
    at the initial weights. `exports`: further formats of checkpoints (saver.Format).
    `rounding_why`: why `reproducible: bitwise` is not kept, once a model is built; "": it is."""

    train: Train
    flops: float
    rounding_why: str = ""
    beginning: Beginning | None = None
    exports: Sequence[Any] = ()

    def on_groups(self, groups: Any) -> None:
        """Called with each generation's groups, and with None before they are destroyed."""
        return

    def load(self) -> Samples:
        """The data. Raises UsageError."""
        ...

    def build(
        self, device: torch.device, groups: Any, axes: Axes, place: int, *, begins: bool = True
    ) -> TrainingModel:
        """Build the model at a position of a layout, deterministically and without communication.
        With `begins=False` the weights are undefined; the caller loads a state."""
        ...

    def whole_size(self, trainee: TrainingModel, groups: Any) -> Size:
        """The size of the whole model, of which `trainee` is a part. `groups` have one member."""
        ...

    def begin(
        self, trainee: TrainingModel, build_part: BuildPart, count: WorkCount = UNCOUNTED
    ) -> None:
        """If no member has a state: set a new model to the first one, unless `build` has."""
        return


class SpecWorkload(Workload):
    """The GPT of a spec's `train:`. `build` draws it from the seed and the parameters' names."""

    def __init__(self, train: Train) -> None:
        self.train = train
        self.flops = model.iteration_flops(train.model, train.batch.global_)

    def load(self) -> Samples:
        return text_data.load(self.train.data, self.train.model.sequence)

    def build(
        self, device: torch.device, groups: Any, axes: Axes, place: int, *, begins: bool = True
    ) -> TrainingModel:
        return model.build(self.train, device, groups, axes, place, draws=begins)

    def whole_size(self, trainee: TrainingModel, groups: Any) -> Size:
        return model.whole_size(self.train, groups)

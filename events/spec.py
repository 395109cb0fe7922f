"""The job spec: what a user asks for, strict and normalised."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from .errors import SpecError

API_VERSION = "unicron/v1"
NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")


class Slots(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many slots (GPUs) a task may hold; `min` is T_necessary of the paper."""

    min: int = 1
    max: int = 1


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPT; the vocabulary is the 256 bytes."""

    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 4
    sequence: int = 128
    dropout: float = 0.0
    tie_embeddings: bool = True


class Batch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
            rename={"global_": "global"}):
    """Samples per iteration and per micro-batch; the global batch never changes."""

    global_: int = 16
    micro: int = 2


class Optimizer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW with a linear warm-up, then a cosine (or constant) schedule to `min_lr`."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_iterations: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


class Train(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training task that heals in memory.

    `data` empty means the byte-level text of the running Python's own documentation.
    `output` is a folder: it receives `gen-G/iter-N/` in torch's distributed checkpoint format,
    and a link `latest` that is moved only to what the log has published.
    `checkpoint_every` is in iterations; 0 writes the final model alone.
    """

    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    iterations: int
    data: tuple[str, ...] = ()
    seed: int = 1234
    output: str
    checkpoint_every: int = 0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one iteration, over all ranks."""
        return self.batch.global_ // self.batch.micro


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task. Exactly one of `train` and `command` is given.

    `weight` is w(t) of the paper. `throughput` maps a number of slots to the achieved aggregate
    FLOP/s declared for it; sizes in between earn what the next smaller declared size earns.
    """

    api_version: str = field(name="apiVersion")
    name: str
    weight: float = 1.0
    slots: Slots = field(default_factory=Slots)
    train: Train | None = None
    command: tuple[str, ...] = ()
    throughput: dict[int, float] = field(default_factory=dict[int, float])


def parse(data: object) -> JobSpec:
    """Turn plain data (from YAML or JSON) into a checked, normalised spec.

    Raises SpecError with the path and a hint.
    """
    if not isinstance(data, dict):
        raise SpecError("", "a job spec is a mapping", "see deploy/examples/")
    version: Any = data.get("apiVersion")  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if version != API_VERSION:
        raise SpecError("apiVersion", f"is {version!r}", f"write apiVersion: {API_VERSION}")
    try:
        spec = msgspec.convert(data, JobSpec, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at ")
        raise SpecError(at.strip("`").removeprefix("$.").replace("$", ""), message,
                        "see docs/reference/job-spec.md") from None
    _check(spec)
    return spec


def _check(spec: JobSpec) -> None:
    _need(bool(NAME.match(spec.name)), "name", f"{spec.name!r} is not a name",
          "lower-case letters, digits, '-' and '.', at most 63")
    _need(math.isfinite(spec.weight) and spec.weight > 0, "weight", "must be above 0")
    _need(spec.slots.min >= 1, "slots.min", "must be at least 1")
    _need(spec.slots.max >= spec.slots.min, "slots.max", "must be at least slots.min")
    _need((spec.train is None) != (not spec.command), "",
          "give exactly one of train: and command:")
    for size, rate in spec.throughput.items():
        path = f"throughput[{size}]"
        _need(size >= 1, path, "the size is a number of slots, at least 1")
        _need(math.isfinite(rate) and rate >= 0, path, "the rate is FLOP/s, at least 0")
    if spec.train is not None:
        _check_train(spec.train, spec.slots)


def _check_train(train: Train, slots: Slots) -> None:
    model, batch, optimizer = train.model, train.batch, train.optimizer
    for name in ("num_layers", "hidden", "num_heads", "sequence"):
        _need(getattr(model, name) >= 1, f"train.model.{name}", "must be at least 1")
    _need(model.hidden % model.num_heads == 0, "train.model.hidden",
          f"{model.hidden} is not divisible by num_heads {model.num_heads}")
    _need(0 <= model.dropout < 1, "train.model.dropout", "must be in [0, 1)")
    _need(batch.micro >= 1, "train.batch.micro", "must be at least 1")
    _need(batch.global_ >= 1 and batch.global_ % batch.micro == 0, "train.batch.global",
          f"{batch.global_} is not a multiple of micro {batch.micro}")
    _need(slots.max <= train.num_micro_batches, "slots.max",
          f"{slots.max} ranks, but an iteration has {train.num_micro_batches} micro-batches",
          "raise train.batch.global, lower train.batch.micro or slots.max")
    _need(train.iterations >= 1, "train.iterations", "must be at least 1")
    _need(train.checkpoint_every >= 0, "train.checkpoint_every", "must be at least 0")
    _need(train.output != "", "train.output", "must name a folder")
    for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
        value = getattr(optimizer, name)
        _need(math.isfinite(value) and value >= 0, f"train.optimizer.{name}", "must be at least 0")
    for name in ("beta1", "beta2"):
        _need(0 <= getattr(optimizer, name) < 1, f"train.optimizer.{name}", "must be in [0, 1)")
    _need(optimizer.eps > 0, "train.optimizer.eps", "must be above 0")
    _need(0 <= optimizer.warmup_iterations < train.iterations, "train.optimizer.warmup_iterations",
          "must be at least 0 and below train.iterations")


def _need(holds: bool, path: str, message: str,
          hint: str = "see docs/reference/job-spec.md") -> None:
    if not holds:
        raise SpecError(path, message, hint)

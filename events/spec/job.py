"""The job spec: what a user asks for, strict and normalised."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from ..errors import SpecError
from .model import MegatronModel, check_model
from .parallelism import Parallel, check_fits, check_parallel, check_sizes
from .validation import refused

# --- The loss scale of 16-bit training, as a spec asks for it: constant, or one that finds itself.
# ---

COUNT_NUM_MAX = 2**31 - 1
LOSS_SCALE_RATIO_MAX = 3e38
"""It and its inverse are numbers in fp32."""
LOSS_SCALE_RATIO_MIN = 1e-30
Need = Callable[..., None]


class DynamicLossScale(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss scale of fp16 that finds itself: halved by overflows, doubled after quiet.

    The names are those of Megatron's `--initial-loss-scale`, `--min-loss-scale`,
    `--loss-scale-window` (iterations without overflow before it is doubled) and `--hysteresis`
    (overflows before it is halved).
    """

    initial: float = 2.0**32
    min: float = 1.0
    window: int = 1000
    hysteresis: int = 2


def check_loss_scale(precision: Literal["fp32", "bf16", "fp16"], constant: float | None,
                     dynamic: DynamicLossScale, need: Need) -> None:
    """Tell `need` what has to hold; it raises where something does not."""
    if constant is not None:
        _need_scale(constant, "train.loss_scale", need)
        need(precision != "fp32", "train.loss_scale",
              "is of no use in fp32, where no gradient is too small to be seen",
              "leave it out, or set train.precision")
    _need_scale(dynamic.initial, "train.dynamic_loss_scale.initial", need)
    _need_scale(dynamic.min, "train.dynamic_loss_scale.min", need)
    need(dynamic.min <= dynamic.initial, "train.dynamic_loss_scale.min",
          f"{dynamic.min:g} is above initial {dynamic.initial:g}")
    for name in ("window", "hysteresis"):
        path, count = f"train.dynamic_loss_scale.{name}", getattr(dynamic, name)
        need(count >= 1, path, "must be at least 1")
        need(count <= COUNT_NUM_MAX, path, f"must be at most {COUNT_NUM_MAX}")
    need(dynamic == DynamicLossScale() or (precision == "fp16" and constant is None),
          "train.dynamic_loss_scale",
          f"is not used in {precision} with a loss_scale of its own" if constant is not None
          else f"is not used in {precision}",
          "it is for train.precision: fp16 without train.loss_scale")


def _need_scale(value: float, path: str, need: Need) -> None:
    need(LOSS_SCALE_RATIO_MIN <= value <= LOSS_SCALE_RATIO_MAX, path,
          f"must be between {LOSS_SCALE_RATIO_MIN:g} and {LOSS_SCALE_RATIO_MAX:g}")


# --- Where a task's checkpoints go: a folder, or an fsspec URL. ---

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
"""A colon in its scheme makes it a chain of them."""


def is_url(output: str) -> bool:
    """Whether this is an fsspec URL; else it is a path."""
    return URL.match(output) is not None


def check_output(output: str, path: str, need: Callable[..., None]) -> None:
    """Tell `need` what has to hold of what stands at `path`; it raises where something does not."""
    need(output != "", path, "must name a folder")
    if found := URL.match(output):
        scheme, rest = found.groups()
        need(rest.strip("/") != "", path, f"{output} names no folder")
        need("::" not in output, path, "is a chain of URLs", "name one store")
        need(scheme != "memory", path, "memory:// is the memory of one process alone")
        need(not re.match(r"[^/]*:[^/]*@", rest), path,
             "has a password in it, and a spec is kept in the log",
             "leave it to fsspec's configuration on each node (~/.config/fsspec)")


# --- A loop of one's own that heals in memory: a spec's `loop:`, beside `command:` and `heal:`. ---


class Loop(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the cluster has to know of a loop that a command runs, and that has adopted Unicron.

    All else is the script's own business (workers/training/adopt/adoption.py). `micro_batches` are
    those of one iteration, over all ranks: the batch never changes. `output`, `checkpoint_every`
    and
    `copy_every` are as in `train:`. `parallel`: the layouts in which the script can build what it
    trains.
    """

    micro_batches: int
    iterations: int
    output: str
    checkpoint_every: int = 0
    copy_every: int = 10
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def num_micro_batches(self) -> int:
        """The same word as in `train:`."""
        return self.micro_batches


def check_loop(loop: Loop, counts: Sequence[int], floor: int, need: Need,
               need_count: Need) -> None:
    """Tell `need` what has to hold of a loop on one of these numbers of slots, ascending; it raises
    where something does not."""
    need_count(loop.micro_batches, "loop.micro_batches")
    need_count(loop.iterations, "loop.iterations")
    for name in ("checkpoint_every", "copy_every"):
        need_count(getattr(loop, name), f"loop.{name}", least=0)
    check_output(loop.output, "loop.output", need)
    check_sizes(loop.parallel, "loop.parallel", need)
    need(loop.parallel.optimizer != "mirrored", "loop.parallel.optimizer",
         "a mirror is the optimizer built a second time, and a script builds it once",
         "write sharded: who alone has a shard takes the task back to its last copy")
    need(not loop.parallel.is_plain or counts[-1] <= loop.micro_batches, "slots.max",
         f"{counts[-1]} ranks, but an iteration has {loop.micro_batches} micro-batches",
         "lower slots.max, or make micro-batches smaller")
    check_fits(loop.parallel, loop.micro_batches, counts, floor, "loop.parallel", need)

API_VERSION = "unicron/v1"
DOCS = "see docs/reference/job-spec.md"
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?\Z")
TAKEN_NAMES = ("nodes",)
"""What a command takes for something else where a task may stand."""
SLOTS_NUM_MAX = 100_000
WEIGHT_RATIO_MAX = 1e6
"""Weights lie between its inverse and it: the plan adds their products exactly."""
PRIORITY_NUM_MAX = 9
RATE_FLOPS_MAX = 1e24
"""A million GPUs of 1e18 FLOP/s."""
SEED_MAX = 2**53
HANG_AFTER_S_MAX = 1e6


class Slots(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many slots (GPUs) a task may hold; `min` is T_necessary of the paper.

    Each number from `min` to `max`, or its multiples of `multiple_of` alone (whole nodes), or what
    `sizes` names: then `min` and `max` are its ends. The plan gives no fewer than `floor`, one of
    these numbers, unless the floors of all tasks do not fit together; 0 is none.
    """

    min: int = 1
    max: int = 1
    multiple_of: int = 1
    sizes: tuple[int, ...] = ()
    floor: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Every number that a plan may give, ascending."""
        return self.sizes or tuple(range(self.min, self.max + 1, self.multiple_of))


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
    and a link `latest` that is moved only to what the log has published. Or an fsspec URL, where
    `latest` is a small object that names it.
    `checkpoint_every` is in iterations; 0 writes the final model alone. `copy_every` too: so often
    the state is copied into the memory of two nodes; 0 never.
    `precision` is that of the model and its passes; beside bf16 and fp16 the optimizer keeps fp32
    masters, and gradients are summed in fp32. `loss_scale` is constant; none means no scale in fp32
    and bf16, and in fp16 the dynamic one.
    `loss` says what the gradient is of. per_token: the sum over the tokens of the batch, divided
    by their number. per_micro_batch: the mean over micro-batches of each one's mean over its own.
    `overlap` reduces gradients while the last backward is still making them, in buckets of about
    `bucket_params` parameters; 0 is Megatron's own size, 40 million. `parallel`: the layouts that
    the plan may choose from, data-parallel alone where it is left out.
    """

    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    iterations: int
    data: tuple[str, ...] = ()
    seed: int = 1234
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: float | None = None
    dynamic_loss_scale: DynamicLossScale = field(default_factory=DynamicLossScale)
    loss: Literal["per_token", "per_micro_batch"] = "per_token"
    output: str
    checkpoint_every: int = 0
    copy_every: int = 10
    overlap: bool = False
    bucket_params: int = 0
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one iteration, over all ranks."""
        return self.batch.global_ // self.batch.micro


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task. Exactly one of `train` and `command` is given.

    `heal` says that the command's processes have adopted Unicron and heal in memory, as `train`
    does; `loop` is what the cluster has to know of them.

    `weight` is w(t) of the paper. A higher `priority` comes first, whatever the others would earn.
    The policy may give a `team` a quota of slots. `throughput` maps a number of slots to the
    achieved aggregate FLOP/s declared for it; sizes in between earn what the next smaller declared
    size earns.
    `model` is what a command trains with Megatron: its throughput is then modelled, and a declared
    point sets the model's level. `hang_after_s`: a command that has printed no line of progress for
    so long, and is told to stand, starts again; none: it is only told.
    """

    api_version: str = field(name="apiVersion")
    name: str
    weight: float = 1.0
    priority: int = 0
    team: str = ""
    slots: Slots = field(default_factory=Slots)
    train: Train | None = None
    command: tuple[str, ...] = ()
    heal: Literal["in-memory"] | None = None
    loop: Loop | None = None
    throughput: dict[int, float] = field(default_factory=dict[int, float])
    model: MegatronModel | None = None
    hang_after_s: float | None = None

    @property
    def training(self) -> Train | Loop | None:
        """What heals in memory; None: a command that is supervised and restarted only."""
        return self.train if self.heal is None else self.loop


NOT_BESIDE = {"train": ("heal", "loop", "model", "hang_after_s"), "command": ("train",),
              "loop": ("model", "hang_after_s")}
"""By a key: those that cannot stand in the same spec."""


def parse(data: object) -> JobSpec:
    """Turn plain data (from YAML or JSON) into a checked, normalised spec.

    Raises SpecError with the path and a hint.
    """
    if not isinstance(data, dict):
        raise SpecError("", "a job spec is a mapping", "see deploy/examples/")
    given: dict[Any, Any] = {**data}
    version = given.get("apiVersion")
    if "apiVersion" not in given:
        raise SpecError("apiVersion", "is missing", f"write apiVersion: {API_VERSION}")
    if version != API_VERSION:
        raise SpecError("apiVersion", f"is {version!r}", f"write apiVersion: {API_VERSION}")
    try:
        spec = msgspec.convert(data, JobSpec, strict=True, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        without = {name for key, names in NOT_BESIDE.items()
                   if given.get(key) is not None for name in names}
        raise refused(str(error), JobSpec, DOCS, given=given, without=without) from None
    _need(spec.train is not None or bool(spec.command) or "command" not in given, "command",
          "is empty", "name a program and its arguments, for example [python, train.py]")
    spec = msgspec.structs.replace(spec, slots=_normal(spec.slots, given.get("slots", {})))
    _check(spec)
    _check_writable(spec)
    return spec


def _normal(slots: Slots, given: Any) -> Slots:
    """With the `min` and `max` that follow from what was `given`."""
    low, high = slots.min, slots.max
    if slots.sizes:
        low = low if "min" in given else slots.sizes[0]
        high = high if "max" in given else slots.sizes[-1]
    elif "min" not in given:
        low = slots.multiple_of
    return msgspec.structs.replace(slots, min=low, max=high)


def _check_slots(slots: Slots) -> None:
    for at, (size, before) in enumerate(zip(slots.sizes, (0, *slots.sizes), strict=False)):
        _need(size > before, f"slots.sizes[{at}]",
              f"{size} is not above {before}" if at else "must be at least 1",
              "name each size once, the smallest first")
    _need(slots.multiple_of >= 1, "slots.multiple_of", "must be at least 1")
    _need(slots.multiple_of == 1 or not slots.sizes, "slots.multiple_of",
          "is of no use beside slots.sizes", "give one of them")
    _need(slots.min >= 1, "slots.min", "must be at least 1")
    _need(slots.max >= slots.min, "slots.max", f"{slots.max} is below slots.min {slots.min}")
    _need(slots.max <= SLOTS_NUM_MAX, "slots.max", f"must be at most {SLOTS_NUM_MAX}")
    for name, value in (("min", slots.min), ("max", slots.max)):
        _need(value % slots.multiple_of == 0, f"slots.{name}",
              f"{value} is not a multiple of slots.multiple_of {slots.multiple_of}")
    for name, value, end in (("min", slots.min, slots.sizes[:1]),
                             ("max", slots.max, slots.sizes[-1:])):
        _need(not end or value == end[0], f"slots.{name}",
              f"{value} is not that of slots.sizes, {' '.join(map(str, end))}", "leave it out")
    _need(slots.floor == 0 or slots.floor in slots.counts, "slots.floor",
          f"{slots.floor} is no number of slots that the task may have",
          "name one of them, or leave it out")


def _check(spec: JobSpec) -> None:
    _need(bool(NAME.match(spec.name)), "name", f"{spec.name!r} is not a name",
          "lower-case letters, digits, '-' and '.', at most 63")
    _need(spec.name not in TAKEN_NAMES, "name", f"{spec.name!r} is no task's name",
          f"unicron status {spec.name} shows something else; give it another name")
    _need(1 / WEIGHT_RATIO_MAX <= spec.weight <= WEIGHT_RATIO_MAX, "weight",
          f"must be between {1 / WEIGHT_RATIO_MAX:g} and {WEIGHT_RATIO_MAX:g}")
    _need(0 <= spec.priority <= PRIORITY_NUM_MAX, "priority",
          f"must be between 0 and {PRIORITY_NUM_MAX}")
    _need(spec.team == "" or bool(NAME.match(spec.team)), "team", f"{spec.team!r} is not a name",
          "lower-case letters, digits, '-' and '.', at most 63")
    _check_slots(spec.slots)
    for name, value in (("loop", spec.loop), ("heal", spec.heal)):
        _need(value is None or spec.train is not None or bool(spec.command), "command",
              f"is missing beside {name}:", "name the program that has adopted Unicron, "
              "for example [python, train.py]")
    _need((spec.train is None) != (not spec.command), "",
          "give exactly one of train: and command:")
    for size, rate in spec.throughput.items():
        path = f"throughput[{size}]"
        _need(1 <= size <= SLOTS_NUM_MAX, path,
              f"the size is a number of slots, at least 1 and at most {SLOTS_NUM_MAX}")
        _need(0 <= rate <= RATE_FLOPS_MAX, path,
              f"the rate is FLOP/s, at least 0 and at most {RATE_FLOPS_MAX:g}")
    least = min((size for size, rate in spec.throughput.items() if rate), default=0)
    _need(least <= spec.slots.max or spec.model is not None, f"throughput[{least}]",
          f"size {least} is above slots.max {spec.slots.max}, and smaller ones earn nothing",
          "declare a size that the task may have, or raise slots.max")
    if spec.train is not None:
        _check_train(spec.train, spec.slots)
    for name, value in (("heal", spec.heal), ("loop", spec.loop)):
        _need(value is None or bool(spec.command), name, "is of a command",
              "leave it out: train: heals in memory")
    _need((spec.heal is None) == (spec.loop is None), "heal" if spec.heal is None else "loop",
          "is missing", "heal: in-memory and loop: belong together")
    if spec.loop is not None:
        check_loop(spec.loop, spec.slots.counts, spec.slots.floor, _need, _need_count)
    if spec.model is not None:
        _need(spec.training is None, "model", "is of a command that is restarted only",
              "leave it out: what heals in memory is measured")
        check_model(spec.model, _need)
    if spec.hang_after_s is not None:
        _need(spec.training is None, "hang_after_s", "is of a command that is restarted only",
              "leave it out: who heals in memory is watched closely")
        _need(0 < spec.hang_after_s <= HANG_AFTER_S_MAX, "hang_after_s",
              f"must be above 0 and at most {HANG_AFTER_S_MAX:g}")


def _check_train(train: Train, slots: Slots) -> None:
    model, batch, optimizer = train.model, train.batch, train.optimizer
    for name in ("num_layers", "hidden", "num_heads", "sequence"):
        _need_count(getattr(model, name), f"train.model.{name}")
    _need(model.hidden % model.num_heads == 0, "train.model.hidden",
          f"{model.hidden} is not divisible by num_heads {model.num_heads}")
    _need(0 <= model.dropout < 1, "train.model.dropout", "must be in [0, 1)")
    _need_count(batch.micro, "train.batch.micro")
    _need_count(batch.global_, "train.batch.global")
    _need(batch.global_ % batch.micro == 0, "train.batch.global",
          f"{batch.global_} is not a multiple of micro {batch.micro}")
    # Megatron counts the tokens that it divides by in 32 bits.
    _need(train.loss != "per_token" or batch.global_ * model.sequence <= COUNT_NUM_MAX,
          "train.batch.global", f"{batch.global_} samples of {model.sequence} tokens are more than "
          f"the {COUNT_NUM_MAX} of an iteration that can be counted",
          "lower it or train.model.sequence, or write loss: per_micro_batch")
    _need(not train.parallel.is_plain or slots.max <= train.num_micro_batches, "slots.max",
          f"{slots.max} ranks, but an iteration has {train.num_micro_batches} micro-batches",
          "raise train.batch.global, lower train.batch.micro or slots.max")
    _need_count(train.iterations, "train.iterations")
    for name in ("checkpoint_every", "copy_every", "bucket_params"):
        _need_count(getattr(train, name), f"train.{name}", least=0)
    _need(train.overlap or not train.bucket_params, "train.bucket_params",
          "without overlap there is one bucket", "write overlap: true, or leave it out")
    _need(0 <= train.seed < SEED_MAX, "train.seed", f"must be at least 0 and below {SEED_MAX}")
    check_output(train.output, "train.output", _need)
    check_loss_scale(train.precision, train.loss_scale, train.dynamic_loss_scale, _need)
    check_parallel(train.parallel, model.num_layers, model.num_heads, overlap=train.overlap,
                   need=_need)
    check_fits(train.parallel, train.num_micro_batches, slots.counts, slots.floor,
               "train.parallel", _need)
    for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
        value = getattr(optimizer, name)
        _need(math.isfinite(value) and value >= 0, f"train.optimizer.{name}",
              "must be a number, at least 0")
    for name in ("beta1", "beta2"):
        _need(0 <= getattr(optimizer, name) < 1, f"train.optimizer.{name}", "must be in [0, 1)")
    _need(optimizer.min_lr <= optimizer.lr, "train.optimizer.min_lr",
          f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}", "lower min_lr, or raise lr")
    _need(math.isfinite(optimizer.eps) and optimizer.eps > 0, "train.optimizer.eps",
          "must be above 0")
    _need(0 <= optimizer.warmup_iterations < train.iterations, "train.optimizer.warmup_iterations",
          "must be at least 0 and below train.iterations")


def _check_writable(spec: JobSpec) -> None:
    """The spec goes into records and onto command lines: no NUL, no half of a character."""
    texts = [(f"command[{index}]", text) for index, text in enumerate(spec.command)]
    if spec.train is not None:
        texts += [(f"train.data[{index}]", text) for index, text in enumerate(spec.train.data)]
        texts.append(("train.output", spec.train.output))
    if spec.loop is not None:
        texts.append(("loop.output", spec.loop.output))
    for path, text in texts:
        whole = not any("\ud800" <= sign <= "\udfff" for sign in text)
        _need("\0" not in text and whole, path, "is not plain text")
    _need(not spec.command or spec.command[0] != "", "command[0]", "must name a program")


def _need_count(count: int, path: str, least: int = 1) -> None:
    _need(count >= least, path, f"must be at least {least}")
    _need(count <= COUNT_NUM_MAX, path, f"must be at most {COUNT_NUM_MAX}")


def _need(holds: bool, path: str, message: str, hint: str = DOCS) -> None:
    if not holds:
        raise SpecError(path, message, hint)

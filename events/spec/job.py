"""The job spec: strict parsing, validation and normalisation."""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from ..errors import SpecError
from .launchers import check_launcher
from .model import MegatronModel, check_model
from .parallelism import Parallel, check_fits, check_parallel, check_sizes, check_splits
from .validation import COUNT_NUM_MAX, DOCS, need, need_count, spec_error

# --- Loss scale of 16-bit training: constant or dynamic ---

LOSS_SCALE_RATIO_MAX = 3e38
"""The value and its inverse are finite in fp32."""
LOSS_SCALE_RATIO_MIN = 1e-30


class DynamicLossScale(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dynamic loss scale of fp16: halved after overflows, doubled after a run without one.

    The names are those of Megatron's `--initial-loss-scale`, `--min-loss-scale`,
    `--loss-scale-window` (iterations without overflow before it is doubled) and `--hysteresis`
    (overflows before it is halved).
    """

    initial: float = 2.0**32
    min: float = 1.0
    window: int = 1000
    hysteresis: int = 2


def _check_loss_scale(
    precision: Literal["fp32", "bf16", "fp16"], constant: float | None, dynamic: DynamicLossScale
) -> None:
    if constant is not None:
        _need_scale(constant, "train.loss_scale")
        need(
            precision != "fp32",
            "train.loss_scale",
            "has no effect in fp32, which does not need a loss scale",
            "leave it out, or set train.precision",
        )
    _need_scale(dynamic.initial, "train.dynamic_loss_scale.initial")
    _need_scale(dynamic.min, "train.dynamic_loss_scale.min")
    need(
        dynamic.min <= dynamic.initial,
        "train.dynamic_loss_scale.min",
        f"{dynamic.min:g} is above initial {dynamic.initial:g}",
    )
    for name in ("window", "hysteresis"):
        need_count(getattr(dynamic, name), f"train.dynamic_loss_scale.{name}")
    need(
        dynamic == DynamicLossScale() or (precision == "fp16" and constant is None),
        "train.dynamic_loss_scale",
        f"is not used in {precision} with a constant loss_scale"
        if constant is not None
        else f"is not used in {precision}",
        "use it with train.precision: fp16 and without train.loss_scale",
    )


def _need_scale(value: float, path: str) -> None:
    need(
        LOSS_SCALE_RATIO_MIN <= value <= LOSS_SCALE_RATIO_MAX,
        path,
        f"must be between {LOSS_SCALE_RATIO_MIN:g} and {LOSS_SCALE_RATIO_MAX:g}",
    )


# --- Checkpoint destination: a folder or an fsspec URL ---

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
"""A colon in the scheme indicates a chain of URLs."""
_SECRET = re.compile(
    r"[^/]*:[^/]*@|.*[?&;#][^/=&;]*(?:sig|token|secret|pass|pwd|key|cred|auth)"
    r"[^/=&;]*=",
    re.DOTALL | re.IGNORECASE,
)
"""A password before the host, or a parameter that has a secret, as a signed URL's."""


def is_url(output: str) -> bool:
    """Whether this is an fsspec URL rather than a path."""
    return URL.match(output) is not None


def check_output(output: str, path: str) -> None:
    """Raises SpecError for a destination that cannot be used. `path`: its key."""
    need(output != "", path, "must name a folder")
    if url := URL.match(output):
        scheme, rest = url.groups()
        need(rest.strip("/") != "", path, f"{output} names no folder")
        need("::" not in output, path, "is a chain of URLs", "name one store")
        need(scheme != "memory", path, "memory:// is visible to one process only")
        need(
            not _SECRET.match(rest),
            path,
            "contains a password or a signature, and the log stores the spec",
            "put it into fsspec's configuration on each node (~/.config/fsspec)",
        )


# --- A custom training loop that recovers in memory: `loop:`, with `command:` and `heal:` ---

Reproducible = Literal["rounding", "bitwise", "required"]


class Loop(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the control plane needs to know about the loop of a command that has adopted Unicron.

    The script decides the rest (workers/training/adopt/adoption.py). `micro_batches` is the number
    of micro-batches of one iteration over all ranks; it never changes. `output`,
    `checkpoint_every`, `checkpoint_keep`, `begin_from`, `copy_every`, `kept_sum`,
    `skip_not_finite`, `reproducible` and what belongs to it are as in `train:`. `parallel`: the
    layouts in which the script can build its model. `model`: the GPT that it builds. The throughput
    is then modelled, and a layout is only chosen if it fits into the GPU's memory.
    `micro_batch`, `zero1` and `kept_sum` of the model follow from the other keys of the loop.
    """

    micro_batches: int
    iterations: int
    output: str
    checkpoint_every: int = 0
    checkpoint_keep: int | Literal["all"] = 3
    begin_from: str = ""
    copy_every: int = 10
    kept_sum: bool = True
    skip_not_finite: bool = False
    reproducible: Reproducible = "rounding"
    reproducible_bits: Literal[64, 32] = 64
    digest_every: int = 100
    parallel: Parallel = field(default_factory=Parallel)
    model: MegatronModel | None = None

    @property
    def num_micro_batches(self) -> int:
        """Alias of `micro_batches`, the name that Train uses."""
        return self.micro_batches


def _check_loop(loop: Loop, counts: Sequence[int], floor: int) -> None:
    """Check a loop for slot counts `counts` (ascending)."""
    need_count(loop.micro_batches, "loop.micro_batches")
    need_count(loop.iterations, "loop.iterations")
    for name in ("checkpoint_every", "copy_every"):
        need_count(getattr(loop, name), f"loop.{name}", least=0)
    _check_stored(loop, "loop")
    check_sizes(loop.parallel, "loop.parallel")
    need(
        not loop.parallel.is_plain or counts[-1] <= loop.micro_batches,
        "slots.max",
        f"{counts[-1]} ranks, but an iteration has {loop.micro_batches} micro-batches",
        "lower slots.max, or use smaller micro-batches",
    )
    check_fits(loop.parallel, loop.micro_batches, counts, floor, "loop.parallel")
    check_reproducible(loop, "loop")
    if loop.model is not None:
        _check_loop_model(loop.model, loop)


def _check_loop_model(model: MegatronModel, loop: Loop) -> None:
    check_model(model, "loop.model")
    need(
        model.global_batch % loop.micro_batches == 0,
        "loop.model.global_batch",
        f"{model.global_batch} is not a multiple of loop.micro_batches {loop.micro_batches}",
        "micro-batches must all have the same size",
    )
    micro = model.global_batch // loop.micro_batches
    need(
        model.micro_batch in (0, micro),
        "loop.model.micro_batch",
        f"is {model.micro_batch}, but {model.global_batch} samples in {loop.micro_batches} "
        f"micro-batches make {micro}",
        "leave it out",
    )
    need(not model.kept_sum, "loop.model.kept_sum", "is loop.kept_sum", "write it there")
    need(
        not model.exact_sum_bits,
        "loop.model.exact_sum_bits",
        "follows from loop.reproducible",
        "write it there",
    )
    need(
        model.recompute != "any",
        "loop.model.recompute",
        "is missing: the script decides it, not the layout search",
        "write none, selective or full, as the script does",
    )
    check_splits(loop.parallel, model, "loop.parallel")


API_VERSION = "unicron/v1"
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?\Z")
RESERVED_NAMES = ("nodes", "tasks")
"""Words that have another meaning where a command takes the name of a task."""
SLOTS_NUM_MAX = 100_000
WEIGHT_RATIO_MAX = 1e6
"""Largest weight; its inverse is the smallest. Within these the planner adds products exactly."""
PRIORITY_NUM_MAX = 9
RATE_FLOPS_MAX = 1e24
"""A million GPUs of 1e18 FLOP/s."""
SEED_MAX = 2**53
HANG_AFTER_S_MAX = 1e6


class Slots(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many slots (GPUs) a task may hold; `min` is T_necessary of the Unicron paper.

    Each number from `min` to `max` that is a multiple of `multiple_of` (whole nodes) is permitted;
    with `sizes`, only the numbers in that list, whose ends are `min` and `max`. The plan gives at
    least `floor`, a permitted number or 0, unless the floors of all tasks do not fit together.
    """

    min: int = 1
    max: int = 1
    multiple_of: int = 1
    sizes: tuple[int, ...] = ()
    floor: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Every permitted number of slots, ascending."""
        return self.sizes or tuple(range(self.min, self.max + 1, self.multiple_of))


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPT whose vocabulary is the 256 byte values."""

    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 4
    sequence: int = 128
    dropout: float = 0.0
    tie_embeddings: bool = True


class Batch(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"global_": "global"}
):
    """Samples per iteration (`global`) and per micro-batch. The global batch never changes."""

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
    """A training task that recovers in memory.

    `data` empty: the byte-level text of the documentation of the running Python.
    `output` is a folder or an fsspec URL. It receives `gen-G/iter-N/` in torch's distributed
    checkpoint format, and `latest`, which is moved only to a checkpoint published in the log.
    `latest` is a link in a folder, and at a URL a small object that names the checkpoint.
    `checkpoint_every` is in iterations; 0 writes only the final model. `checkpoint_keep`: how many
    of the task's checkpoints stay; older ones are removed once a newer one is published and was
    read back. all: every one. `begin_from`: a checkpoint, as a folder or a URL, from whose state
    the task begins while it has none of its own. `copy_every` is the interval
    in iterations of in-memory checkpoints on two nodes; 0: never. `precision` is that of the model
    in its forward and backward passes. With bf16 and fp16, the optimizer keeps fp32 master copies,
    and gradients are summed in fp32. `loss_scale` is constant; without it there is no scale in fp32
    and bf16, and the dynamic scale in fp16. `loss` selects the loss that is differentiated.
    per_token: the sum over the tokens of the batch, divided by their number. per_micro_batch: each
    micro-batch's mean, averaged over micro-batches. `overlap` reduces gradients during the last
    backward pass, in buckets of about `bucket_params` parameters; 0: Megatron's default, 40
    million. `kept_sum`: each rank keeps a copy of its local gradients during a reduction, 4 bytes a
    parameter; without it, a fault during a reduction redoes the iteration from its start.
    `skip_not_finite`: an iteration whose loss is NaN or infinite takes no step.
    `reproducible` bitwise: gradients are summed exactly, in integers of `reproducible_bits`, so
    that a run through faults ends with the bits of the run without; what cannot do so trains with
    rounding, or with `required` is refused. Bitwise, replicas compare the digests of their states
    every `digest_every` iterations; 0: never.
    `parallel`: the layouts that the planner may choose from; default: data-parallel only.
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
    checkpoint_keep: int | Literal["all"] = 3
    begin_from: str = ""
    copy_every: int = 10
    overlap: bool = False
    bucket_params: int = 0
    kept_sum: bool = True
    skip_not_finite: bool = False
    reproducible: Reproducible = "rounding"
    reproducible_bits: Literal[64, 32] = 64
    digest_every: int = 100
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one iteration, over all ranks."""
        return self.batch.global_ // self.batch.micro


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task. Exactly one of `train` and `command` is given.

    `heal`: the command's processes have adopted Unicron and recover in memory, as with `train`.
    `loop` is what the control plane needs to know about these processes.

    `weight` is w(t) of the Unicron paper. A task of higher `priority` comes first, whatever the
    throughput of the others. The policy may give a `team` a quota of slots. `throughput` maps a
    number of slots to its declared achieved aggregate FLOP/s; a size in between has the rate of the
    next smaller declared size. `model` describes the model that a command trains with Megatron. The
    throughput is then modelled, and a declared point calibrates it. `hang_after_s`: a command is
    restarted if it is reported as stalled and has printed no progress line for this long; none: it
    is only reported. `folder`: where the command starts on every node. `unicron submit` makes it
    absolute, and without it enters the folder where it runs itself; "" starts in the agent's.
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
    folder: str = ""

    @property
    def training(self) -> Train | Loop | None:
        """The part that recovers in memory; None: the command is only supervised and restarted."""
        return self.train if self.heal is None else self.loop


EXCLUDED_BY = {
    "train": ("heal", "loop", "model", "hang_after_s", "folder"),
    "command": ("train",),
    "loop": ("model", "hang_after_s"),
}
"""Key -> the keys that must not be in the same spec."""


def parse(data: object) -> JobSpec:
    """Turn plain data (from YAML or JSON) into a validated, normalised spec. Raises SpecError with
    the path and a hint."""
    if not isinstance(data, dict):
        text = "is empty" if data is None else "a job spec is a mapping"
        raise SpecError("", text, "see deploy/examples/")
    given: dict[Any, Any] = {**data}
    version = given.get("apiVersion")
    if "apiVersion" not in given:
        raise SpecError("apiVersion", "is missing", f"write apiVersion: {API_VERSION}")
    if version != API_VERSION:
        raise SpecError("apiVersion", f"is {version!r}", f"write apiVersion: {API_VERSION}")
    try:
        spec = msgspec.convert(data, JobSpec, strict=True, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        excluded = {
            name
            for key, names in EXCLUDED_BY.items()
            if given.get(key) is not None
            for name in names
        }
        raise spec_error(str(error), JobSpec, DOCS, given=given, excluded=excluded) from None
    need(
        spec.train is not None or bool(spec.command) or "command" not in given,
        "command",
        "is empty",
        "name a program and its arguments, for example [python, train.py]",
    )
    spec = msgspec.structs.replace(spec, slots=_normalised(spec.slots, given.get("slots", {})))
    _check(spec)
    _check_writable(spec)
    return spec


def _normalised(slots: Slots, given: Any) -> Slots:
    """Fill in the `min` and `max` that the user did not give."""
    low, high = slots.min, slots.max
    if slots.sizes:
        low = low if "min" in given else slots.sizes[0]
        high = high if "max" in given else slots.sizes[-1]
    elif "min" not in given:
        low = slots.multiple_of
    return msgspec.structs.replace(slots, min=low, max=high)


def _check_slots(slots: Slots) -> None:
    for at, (size, before) in enumerate(zip(slots.sizes, (0, *slots.sizes), strict=False)):
        need(
            size > before,
            f"slots.sizes[{at}]",
            f"{size} is not above {before}" if at else "must be at least 1",
            "name each size once, the smallest first",
        )
    need(slots.multiple_of >= 1, "slots.multiple_of", "must be at least 1")
    need(
        slots.multiple_of == 1 or not slots.sizes,
        "slots.multiple_of",
        "has no effect with slots.sizes",
        "give one of them",
    )
    need(slots.min >= 1, "slots.min", "must be at least 1")
    need(
        slots.max >= slots.min,
        "slots.max",
        f"{slots.max} is below slots.min {slots.min}",
        "name it: without it a task has one slot",
    )
    need(slots.max <= SLOTS_NUM_MAX, "slots.max", f"must be at most {SLOTS_NUM_MAX}")
    for name, value in (("min", slots.min), ("max", slots.max)):
        need(
            value % slots.multiple_of == 0,
            f"slots.{name}",
            f"{value} is not a multiple of slots.multiple_of {slots.multiple_of}",
        )
    for name, value, end in (
        ("min", slots.min, slots.sizes[:1]),
        ("max", slots.max, slots.sizes[-1:]),
    ):
        need(
            not end or value == end[0],
            f"slots.{name}",
            f"{value} is not that of slots.sizes, {' '.join(map(str, end))}",
            "leave it out",
        )
    need(
        slots.floor == 0 or slots.floor in slots.counts,
        "slots.floor",
        f"{slots.floor} is not a permitted number of slots",
        "name a permitted one, or leave it out",
    )


def _check(spec: JobSpec) -> None:
    _check_names_and_rank(spec)
    _check_slots(spec.slots)
    _check_kind(spec)
    _check_throughput(spec)
    if spec.train is not None:
        _check_train(spec.train, spec.slots)
    _check_healing(spec)
    check_launcher(spec.command, in_memory=spec.heal is not None)
    if spec.loop is not None:
        _check_loop(spec.loop, spec.slots.counts, spec.slots.floor)
    _check_command(spec)


def _check_names_and_rank(spec: JobSpec) -> None:
    need(
        bool(NAME.match(spec.name)),
        "name",
        f"{spec.name!r} is not a name",
        "lower-case letters, digits, '-' and '.', at most 63",
    )
    need(
        spec.name not in RESERVED_NAMES,
        "name",
        f"{spec.name!r} is a reserved name",
        f"unicron status {spec.name} shows something else; give it another name",
    )
    need(
        1 / WEIGHT_RATIO_MAX <= spec.weight <= WEIGHT_RATIO_MAX,
        "weight",
        f"must be between {1 / WEIGHT_RATIO_MAX:g} and {WEIGHT_RATIO_MAX:g}",
    )
    need(
        0 <= spec.priority <= PRIORITY_NUM_MAX,
        "priority",
        f"must be between 0 and {PRIORITY_NUM_MAX}",
    )
    need(
        spec.team == "" or bool(NAME.match(spec.team)),
        "team",
        f"{spec.team!r} is not a name",
        "lower-case letters, digits, '-' and '.', at most 63",
    )


def _check_kind(spec: JobSpec) -> None:
    """Either `train:` or `command:`, and what needs a command has one."""
    for name, value in (("loop", spec.loop), ("heal", spec.heal)):
        need(
            value is None or spec.train is not None or bool(spec.command),
            "command",
            f"is missing; {name}: needs it",
            "name the program that has adopted Unicron, for example [python, train.py]",
        )
    need((spec.train is None) != (not spec.command), "", "give exactly one of train: and command:")


def _check_throughput(spec: JobSpec) -> None:
    for size, rate in spec.throughput.items():
        path = f"throughput[{size}]"
        need(
            1 <= size <= SLOTS_NUM_MAX,
            path,
            f"the size is a number of slots, at least 1 and at most {SLOTS_NUM_MAX}",
        )
        need(
            0 <= rate <= RATE_FLOPS_MAX,
            path,
            f"the rate is FLOP/s, at least 0 and at most {RATE_FLOPS_MAX:g}",
        )
    least = min((size for size, rate in spec.throughput.items() if rate), default=0)
    need(
        least <= spec.slots.max or spec.model is not None,
        f"throughput[{least}]",
        f"size {least} is above slots.max {spec.slots.max}, and smaller sizes have rate 0",
        "declare a size that the task may have, or raise slots.max",
    )


def _check_healing(spec: JobSpec) -> None:
    for name, value in (("heal", spec.heal), ("loop", spec.loop)):
        need(
            value is None or bool(spec.command),
            name,
            "is for a command",
            "leave it out: train: recovers in memory",
        )
    need(
        (spec.heal is None) == (spec.loop is None),
        "heal" if spec.heal is None else "loop",
        "is missing",
        "heal: in-memory and loop: belong together",
    )


def _check_command(spec: JobSpec) -> None:
    """What only a command may have, in part only one that is restarted."""
    if spec.model is not None:
        need(
            spec.training is None,
            "model",
            "is for a command that is only restarted",
            "write it under loop:" if spec.loop is not None else "leave it out: train has its own",
        )
        check_model(spec.model, "model")
        need(
            not spec.model.kept_sum,
            "model.kept_sum",
            "is for a task that heals in memory",
            "leave it out",
        )
    need(
        not spec.folder or bool(spec.command),
        "folder",
        "is for a command",
        "leave it out: relative paths of train: begin where you submit",
    )
    if spec.hang_after_s is not None:
        need(
            spec.training is None,
            "hang_after_s",
            "is for a command that is only restarted",
            "leave it out: hangs of tasks that recover in memory are detected",
        )
        need(
            0 < spec.hang_after_s <= HANG_AFTER_S_MAX,
            "hang_after_s",
            f"must be above 0 and at most {HANG_AFTER_S_MAX:g}",
        )


def _check_train(train: Train, slots: Slots) -> None:
    model, batch, optimizer = train.model, train.batch, train.optimizer
    for name in ("num_layers", "hidden", "num_heads", "sequence"):
        need_count(getattr(model, name), f"train.model.{name}")
    need(
        model.hidden % model.num_heads == 0,
        "train.model.hidden",
        f"{model.hidden} is not divisible by num_heads {model.num_heads}",
    )
    need(0 <= model.dropout < 1, "train.model.dropout", "must be in [0, 1)")
    need_count(batch.micro, "train.batch.micro")
    need_count(batch.global_, "train.batch.global")
    need(
        batch.global_ % batch.micro == 0,
        "train.batch.global",
        f"{batch.global_} is not a multiple of micro {batch.micro}",
    )
    # Megatron counts tokens in 32 bits.
    need(
        train.loss != "per_token" or batch.global_ * model.sequence <= COUNT_NUM_MAX,
        "train.batch.global",
        f"{batch.global_} samples of {model.sequence} tokens exceed the "
        f"{COUNT_NUM_MAX} tokens that Megatron can count in an iteration",
        "lower it or train.model.sequence, or write loss: per_micro_batch",
    )
    need(
        not train.parallel.is_plain or slots.max <= train.num_micro_batches,
        "slots.max",
        f"{slots.max} ranks, but an iteration has {train.num_micro_batches} micro-batches",
        "raise train.batch.global, lower train.batch.micro or slots.max",
    )
    need_count(train.iterations, "train.iterations")
    for name in ("checkpoint_every", "copy_every", "bucket_params"):
        need_count(getattr(train, name), f"train.{name}", least=0)
    _check_stored(train, "train")
    need(
        train.overlap or not train.bucket_params,
        "train.bucket_params",
        "without overlap there is one bucket",
        "write overlap: true, or leave it out",
    )
    check_reproducible(train, "train")
    need(0 <= train.seed < SEED_MAX, "train.seed", f"must be at least 0 and below {SEED_MAX}")
    _check_loss_scale(train.precision, train.loss_scale, train.dynamic_loss_scale)
    check_parallel(train.parallel, model.num_layers, model.num_heads, overlap=train.overlap)
    check_fits(train.parallel, train.num_micro_batches, slots.counts, slots.floor, "train.parallel")
    for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
        value = getattr(optimizer, name)
        need(
            math.isfinite(value) and value >= 0,
            f"train.optimizer.{name}",
            "must be a number, at least 0",
        )
    for name in ("beta1", "beta2"):
        need(0 <= getattr(optimizer, name) < 1, f"train.optimizer.{name}", "must be in [0, 1)")
    need(
        optimizer.min_lr <= optimizer.lr,
        "train.optimizer.min_lr",
        f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}",
        "lower min_lr, or raise lr",
    )
    need(
        math.isfinite(optimizer.eps) and optimizer.eps > 0, "train.optimizer.eps", "must be above 0"
    )
    need(
        0 <= optimizer.warmup_iterations < train.iterations,
        "train.optimizer.warmup_iterations",
        "must be at least 0 and below train.iterations",
    )


def _check_stored(work: Train | Loop, path: str) -> None:
    """Checks where checkpoints are written, and which one is read."""
    check_output(work.output, f"{path}.output")
    if work.begin_from:
        check_output(work.begin_from, f"{path}.begin_from")
    if work.checkpoint_keep != "all":
        need_count(work.checkpoint_keep, f"{path}.checkpoint_keep")


def check_reproducible(work: Train | Loop, path: str) -> None:
    """Raises SpecError if the layouts or the bits do not fit `reproducible`."""
    is_exact = work.reproducible != "rounding"
    need(
        not is_exact or len(work.parallel.tensor) == 1,
        f"{path}.reproducible",
        f"{work.reproducible} keeps the tensor-parallel size, but {path}.parallel.tensor names "
        f"{len(work.parallel.tensor)} sizes: another size computes other bits",
        "name one size there, or leave reproducible out",
    )
    need(
        not (is_exact and work.skip_not_finite),
        f"{path}.skip_not_finite",
        f"with reproducible: {work.reproducible} a gradient that is not finite ends the task",
        "write reproducible: rounding, or leave it out",
    )
    need_count(work.digest_every, f"{path}.digest_every", least=0)
    for name, default in (("reproducible_bits", 64), ("digest_every", 100)):
        need(
            is_exact or getattr(work, name) == default,
            f"{path}.{name}",
            "has no effect with reproducible: rounding",
            "write reproducible: bitwise",
        )


def _check_writable(spec: JobSpec) -> None:
    """Refuse NUL and lone surrogates: the spec is written to records and command lines."""
    texts = [(f"command[{index}]", text) for index, text in enumerate(spec.command)]
    if spec.train is not None:
        texts += [(f"train.data[{index}]", text) for index, text in enumerate(spec.train.data)]
        texts.append(("train.output", spec.train.output))
        texts.append(("train.begin_from", spec.train.begin_from))
    if spec.loop is not None:
        texts.append(("loop.output", spec.loop.output))
        texts.append(("loop.begin_from", spec.loop.begin_from))
    texts.append(("folder", spec.folder))
    for path, text in texts:
        is_whole = not any("\ud800" <= char <= "\udfff" for char in text)
        need("\0" not in text and is_whole, path, "is not plain text")
    need(not spec.command or spec.command[0] != "", "command[0]", "must name a program")

"""The cells of the fault matrix: each is a point, a fault and a variant of training.

The matrix is not the full product. Every point meets every fault on one variant: the base, or the
first variant that has the point. Every point meets SIGKILL on every other variant. Loops meet a
few points: the variants of `train:` cover the rest of the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from unicron.events.spec.job import Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Sharding, num_positions
from unicron.workers.training.process.trace import Event

Fault = Literal["SIGKILL", "SIGSTOP", "exception", "lost agent", "two at once", "two in turn"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
Scene = Literal[
    "start",
    "sum",
    "step",
    "partial",
    "partly",
    "meeting",
    "ready",
    "receive",
    "joined",
    "beside",
    "passed",
]
"""How a run reaches the point; see scenes.py."""

NEWCOMER = -1
"""Stands for the rank that joins: `Variant.newcomer`."""
ITERATIONS = 8
STRUCK = 3
"""The iteration in which the fault strikes. Its learning rate is after the warm-up."""


MICRO_BATCHES = 8
TRAIN: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden": 64, "num_heads": 4, "sequence": 64},
    "batch": {"global": 16, "micro": 2},
    "iterations": ITERATIONS,
    "optimizer": {"lr": 3e-3, "warmup_iterations": 2},
}
"""The base: fp32, loss per token, one reduction, tied embeddings, no dropout. With 8 micro-batches,
three survivors of four get 3, 3 and 2."""


class Variant(NamedTuple):
    """The changes of the spec's `train` against the base, and the layouts.

    The task trains in `axes` until the fault. `after` has the layout for each number of remaining
    ranks; default: data-parallel. If more ranks remain than it needs, those of an intact replica
    come first. With `points` it is a custom loop and meets these alone: the example with `flags`
    (loop_driver.FLAGS), and `train` changes its `loop`.
    """

    name: str
    train: dict[str, Any]
    axes: Axes = Axes(dp=4)
    after: dict[int, Axes] = {}  # noqa: RUF012
    flags: tuple[str, ...] = ()
    points: tuple[str, ...] = ()

    @property
    def is_loop(self) -> bool:
        return bool(self.points)

    @property
    def is_plain(self) -> bool:
        return "parallel" not in self.train

    @property
    def is_exact(self) -> bool:
        """True if its sums are exact. Then each layout has a gate."""
        return "reproducible" in self.train

    @property
    def has_gate(self) -> bool:
        """True if no rank steps before all have entered the gate."""
        return self.is_exact or not self.is_plain

    @property
    def newcomer(self) -> int:
        """The number of the rank that joins."""
        return num_positions(self.axes)

    @property
    def optimizer(self) -> Sharding:
        """How the optimizer state is distributed over the ranks."""
        kept: Sharding = self.train.get("parallel", {}).get("optimizer", "whole")
        return kept

    @property
    def rounds(self) -> bool:
        """True if it rounds to 16 bits in another way than a single process does."""
        precisions = {self.train.get("precision", "fp32"), *self.flags}
        return not self.is_plain and not self.is_exact and bool(precisions & {"bf16", "fp16"})

    @property
    def loses(self) -> bool:
        """True if a lost rank's state exists nowhere else: the task then rolls back to a copy."""
        return self.axes.dp == 1 or self.optimizer == "sharded"

    @property
    def other(self) -> Axes:
        """A layout of as many ranks, or one fewer, in which each has another part of the state."""
        num = num_positions(self.axes)
        return self._data_parallel(num if self.axes.dp < num else num - 1)

    def left(self, num_ranks: int) -> Axes:
        """The layout after the fault, with this number of ranks."""
        return self.after.get(num_ranks, self._data_parallel(num_ranks))

    def _data_parallel(self, num_ranks: int) -> Axes:
        """The data-parallel layout. Exact sums keep the tensor-parallel size."""
        size = self.axes.tp if self.is_exact else 1
        return Axes(tp=size, dp=num_ranks // size)


class Point(NamedTuple):
    """Where in the life of a task the fault strikes: when rank `victim` starts `event`.

    `nth`: which of the victim's own micro-batches; -1: none. `mate`: the second victim. It is
    struck at the point too if all ranks reach the point, else wherever it is then. `only`: the
    variants that have this point, if not all; with mirrors, two victims are no neighbours. `train`
    is added to the spec. `skips`: found-inf makes the struck iteration take no step.
    """

    name: str
    scene: Scene = "sum"
    event: Event = "reduce"
    victim: int = 1
    mate: int = 2
    nth: int = -1
    bucket: int = -1
    all_come: bool = True
    only: tuple[str, ...] = ()
    train: dict[str, Any] = {}  # noqa: RUF012
    skips: bool = False
    absent: str = ""

    @property
    def home(self) -> str:
        """The variant on which the point meets every fault."""
        return self.only[0] if self.only else BASE.name


PARTS = "Megatron adds these up in sequence parallelism alone, for which a job file has no key"
TENSORED = (
    "tp2dp2",
    "tp2dp2 to tp2",
    "tp2",
    "tp2pp2",
    "tp2dp2 bf16",
    "tp2dp2 zero1",
    "tp2dp2 mirrored",
    "tp2dp4",
    "tp2pp2dp2",
    "tp2pp2dp2 mirrored",
)
PIPELINED = (
    "pp2dp2",
    "pp2dp2 to pp2",
    "pp2dp2, 2 chunks",
    "pp2",
    "tp2pp2",
    "pp2dp2 bf16",
    "pp2dp4",
    "pp4dp2",
    "tp2pp2dp2",
    "tp2pp2dp2 mirrored",
)
MIRRORING = ("mirrored", "mirrored bf16", "tp2dp2 mirrored", "tp2pp2dp2 mirrored")
SHARDED = ("zero1", "tp2dp2 zero1", *MIRRORING)
"""`zero1` is what a job is with `mirror: never`; without it, it is submitted as `mirrored`."""
LAYOUTS = tuple(dict.fromkeys((*TENSORED, *PIPELINED, *SHARDED)))
SPLIT_ANEW = tuple(
    name for name in LAYOUTS if " to " not in name and name not in ("tp2dp4", "pp2dp4", "tp2pp2dp2")
)
"""Layouts in which old members stage another part of the model when a newcomer joins: without it,
they trained in replicas of another shape."""
SAVES = {"checkpoint_every": STRUCK}
COPIES = {"copy_every": STRUCK}
OVERFLOWS = {"dynamic_loss_scale": {"initial": 4096.0, "hysteresis": 1}}
"""Measured: the first gradients of this task are not finite at 512, but finite at 256. So
iterations 0 to 3 are skipped."""
EXACT_OVERFLOWS = {"dynamic_loss_scale": {"initial": 8192.0, "hysteresis": 1}}
"""Exact sums also have finite gradients at 512: they round both uses of the tied embedding apart,
and never add them in fp16."""
POINTS = (
    Point("start-up", "start", "start"),
    Point("before the first micro-batch", event="micro_batch", nth=0),
    Point("between micro-batches", event="micro_batch", nth=1),
    Point("before a forward", event="forward", nth=1),
    Point("inside forward", event="forward_mid", nth=1),
    Point("before a backward", event="backward", nth=1),
    Point("inside backward", event="backward_mid", nth=1),
    Point("between tensor-parallel ranks", event="tensor", only=TENSORED),
    Point("between stages", event="stage", only=PIPELINED),
    Point("before the reduction"),
    Point("token count", event="stats"),
    Point("entering a bucket", event="bucket", bucket=0),
    Point("entering the third bucket of four", event="bucket", bucket=2, only=("overlapped",)),
    Point("buckets whole on some ranks", "partial", "bucket_done", bucket=0),
    Point("some buckets whole, on some ranks", "partly", "bucket", bucket=2, only=("overlapped",)),
    Point("embedding gradients", event="embedding", victim=0, mate=1, only=PIPELINED),
    Point("layer-norm gradients", absent=PARTS),
    Point("sending a shard to its mirror", event="mirror", mate=3, only=MIRRORING),
    Point("reduction whole", "step", "reduced"),
    Point("entering the gate", "step", "gate", only=LAYOUTS),
    Point("through the gate", "step", "passed", only=LAYOUTS),
    Point("through the gate on some ranks", "passed", "scale", only=LAYOUTS),
    Point("scaling", "step", "scale"),
    Point("unscale, found-inf", "step", "unscale"),
    Point("scaler update", "step", "scaler", only=("fp16",)),
    Point(
        "scaler update, step skipped", "step", "scaler", only=("fp16",), train=OVERFLOWS, skips=True
    ),
    Point("norm", "step", "norm"),
    Point("clip", "step", "clip"),
    Point("before the optimizer step", "step", "step"),
    Point("inside the optimizer step", "step", "step_mid"),
    Point("after the optimizer step", "step", "stepped"),
    Point("schedule update", "step", "schedule"),
    Point("iteration done", "step", "done"),
    Point("gathering the parameters", "step", "gather", only=SHARDED),
    Point("in-memory copy", event="copy", victim=0, mate=1, all_come=False, train=COPIES),
    Point(
        "in-memory copy half sent",
        "beside",
        "copy_mid",
        victim=0,
        mate=1,
        all_come=False,
        train=COPIES,
    ),
    Point("checkpoint begun", event="save", victim=0, mate=1, all_come=False, train=SAVES),
    Point(
        "checkpoint half written",
        "beside",
        "save_mid",
        victim=0,
        mate=1,
        all_come=False,
        train=SAVES,
    ),
    Point("checkpoint written", "beside", "saved", victim=0, mate=1, all_come=False, train=SAVES),
    Point("reconfiguration: meeting", "meeting", "meet"),
    Point("reconfiguration: settling", "meeting", "settle"),
    Point("reconfiguration: giving state", "meeting", "give", all_come=False),
    Point("reconfiguration: taking state", "meeting", "receive", victim=0, mate=1, all_come=False),
    Point("join: newcomer ready", "ready", "ready", victim=NEWCOMER, all_come=False),
    Point("join: newcomer takes state", "receive", "receive", victim=NEWCOMER, all_come=False),
    Point("join: staged by who was there", "receive", "staged", victim=0, mate=1, only=SPLIT_ANEW),
    Point("join: put in force", "joined", "commit", victim=0, mate=1, only=SPLIT_ANEW),
    Point("join: first micro-batch", "joined", "micro_batch", victim=NEWCOMER, nth=0),
)
TENSOR = {"parallel": {"tensor": [1, 2]}}
PIPELINE = {"parallel": {"pipeline": [1, 2]}}
CHUNKS = {"parallel": {"pipeline": [1, 2], "chunks": 2}, "model": {"num_layers": 4}}
BOTH = {"parallel": {"tensor": [1, 2], "pipeline": [1, 2]}}
ZERO1 = {"parallel": {"optimizer": "sharded"}}
MIRRORED = {"parallel": {"optimizer": "mirrored"}}
DEEP = {"parallel": {"pipeline": [1, 2, 4]}, "model": {"num_layers": 4}}
BOTH_MIRRORED = {"parallel": BOTH["parallel"] | {"optimizer": "mirrored"}}
TENSOR_ZERO1 = {"parallel": TENSOR["parallel"] | {"optimizer": "sharded"}}
TENSOR_MIRRORED = {"parallel": TENSOR["parallel"] | {"optimizer": "mirrored"}}
BF16 = {"precision": "bf16"}
GIVES = ("give", "receive")
EXACT = {"reproducible": "bitwise"}
OFTEN = {"copy_every": 1}
BASE = Variant("base", {})
VARIANTS = (
    BASE,
    Variant("overlapped", {"overlap": True, "bucket_params": 20_000}),
    Variant("bf16", BF16),
    # From Megatron's 2^32 on, a run this short would take no step.
    Variant("fp16", {"precision": "fp16", "dynamic_loss_scale": {"initial": 256.0}}),
    Variant("per micro-batch", {"loss": "per_micro_batch"}),
    Variant("dropout", {"model": {"dropout": 0.1}}),
    Variant("untied", {"model": {"tie_embeddings": False}}),
    Variant("even", {"batch": {"global": 24, "micro": 2}}),
    Variant("tp2dp2", TENSOR, Axes(tp=2, dp=2), {2: Axes(tp=2)}),
    Variant("tp2dp2 to tp2", TENSOR, Axes(tp=2, dp=2), {3: Axes(tp=2), 2: Axes(tp=2)}),
    Variant("pp2dp2", PIPELINE, Axes(pp=2, dp=2), {2: Axes(pp=2)}),
    Variant("pp2dp2 to pp2", PIPELINE, Axes(pp=2, dp=2), {3: Axes(pp=2), 2: Axes(pp=2)}),
    Variant("pp2dp2, 2 chunks", CHUNKS, Axes(pp=2, dp=2, chunks=2), {2: Axes(pp=2, chunks=2)}),
    Variant("tp2", TENSOR, Axes(tp=2)),
    Variant("pp2", PIPELINE, Axes(pp=2)),
    Variant("tp2pp2", BOTH, Axes(tp=2, pp=2), {3: Axes(dp=3)}),
    Variant("tp2dp2 bf16", TENSOR | BF16, Axes(tp=2, dp=2), {2: Axes(tp=2)}),
    Variant("pp2dp2 bf16", PIPELINE | BF16, Axes(pp=2, dp=2), {2: Axes(pp=2)}),
    Variant("zero1", ZERO1),
    Variant("mirrored bf16", MIRRORED | BF16),
    Variant("mirrored", MIRRORED),
    Variant("tp2dp2 zero1", TENSOR_ZERO1, Axes(tp=2, dp=2), {2: Axes(tp=2)}),
    Variant("tp2dp2 mirrored", TENSOR_MIRRORED, Axes(tp=2, dp=2), {2: Axes(tp=2)}),
    Variant("tp2dp4", TENSOR, Axes(tp=2, dp=4), {7: Axes(tp=2, dp=3)}),
    Variant("pp2dp4", PIPELINE, Axes(pp=2, dp=4), {7: Axes(pp=2, dp=3)}),
    Variant("pp4dp2", DEEP, Axes(pp=4, dp=2), {7: Axes(pp=2, dp=3)}),
    Variant("tp2pp2dp2", BOTH, Axes(tp=2, pp=2, dp=2), {7: Axes(tp=2, pp=2)}),
    Variant("tp2pp2dp2 mirrored", BOTH_MIRRORED, Axes(tp=2, pp=2, dp=2), {7: Axes(tp=2, dp=3)}),
)


# --- custom loops ---
AROUND = ("inside backward", "before the reduction")
STEPPED = ("inside the optimizer step", "join: newcomer takes state")
LOOPS = (
    Variant("loop: clipping", {}, flags=("clipping",), points=(*AROUND, "clip", *STEPPED)),
    Variant("loop: per micro-batch", {}, flags=("per micro-batch",), points=(*AROUND, *STEPPED)),
    Variant("loop: dropout", {}, flags=("dropout",), points=(*AROUND, *STEPPED)),
    Variant("loop: fp16", {}, flags=("fp16",), points=(*AROUND, "scaler update", *STEPPED)),
    Variant(
        "loop: selective recomputation",
        TENSOR,
        Axes(tp=2, dp=2),
        {2: Axes(tp=2)},
        ("recompute selectively",),
        (*AROUND, *STEPPED),
    ),
    Variant(
        "loop: sequence parallel",
        TENSOR,
        Axes(tp=2, dp=2),
        {2: Axes(tp=2)},
        ("sequence parallel",),
        (*AROUND, "entering the gate", *STEPPED),
    ),
    Variant(
        "loop: tied embeddings",
        PIPELINE,
        Axes(pp=2, dp=2),
        {2: Axes(pp=2)},
        ("tied embeddings",),
        (*AROUND, "embedding gradients", *STEPPED),
    ),
    Variant(
        "loop: interleaved",
        {"parallel": CHUNKS["parallel"]},
        Axes(pp=2, dp=2, chunks=2),
        {2: Axes(pp=2, chunks=2)},
        (),
        (*AROUND, "between stages", *STEPPED),
    ),
    Variant(
        "loop: both overlaps",
        MIRRORED,
        flags=("bf16", "overlapped gather"),
        points=(*AROUND, "sending a shard to its mirror", "join: newcomer takes state"),
    ),
    Variant(
        "loop: usual flags",
        BOTH_MIRRORED,
        Axes(tp=2, pp=2, dp=2),
        {7: Axes(tp=2, pp=2)},
        ("bf16", "overlapped gather", "sequence parallel", "recompute"),
        (*AROUND, "sending a shard to its mirror", "join: newcomer takes state"),
    ),
)
"""Custom loops. Per-token loss is that of all but one. Both overlaps need the sharded optimizer."""
LOOP_FAULTS = FAULTS[:2]


ONCE = {
    "tp2dp2": "inside backward",
    "tp2dp2 to tp2": "through the gate on some ranks",
    "pp2dp2": "embedding gradients",
    "pp2dp2 to pp2": "between stages",
    "pp2dp2, 2 chunks": "inside the optimizer step",
    "tp2": "between tensor-parallel ranks",
    "pp2": "join: staged by who was there",
    "tp2pp2": "join: put in force",
    "zero1": "gathering the parameters",
    "mirrored": "inside the optimizer step",
    "tp2dp2 zero1": "clip",
    "tp2dp2 mirrored": "gathering the parameters",
    "tp2dp4": "before a backward",
    "pp4dp2": "buckets whole on some ranks",
    "tp2pp2dp2": "through the gate on some ranks",
}
"""The cell of each layout that `make test` runs."""
OTHER_FAULTS = (("join: staged by who was there", "lost agent", "tp2dp2"),)
"""Cells of other faults that `make test` runs. Here the survivors continue from staged states."""
EIGHT = {
    "tp2dp4": "reconfiguration: giving state",
    "pp2dp4": "between stages",
    "pp4dp2": "join: put in force",
    "tp2pp2dp2": "join: newcomer takes state",
    "tp2pp2dp2 mirrored": "buckets whole on some ranks",
}
"""One more cell of each layout of eight ranks: `make test-thorough` runs them."""


class Cell(NamedTuple):
    """One run. `absent`: the reason why it cannot be run, or ""."""

    point: Point
    fault: Fault
    variant: Variant
    absent: str

    @property
    def name(self) -> str:
        return f"{self.point.name} / {self.fault} / {self.variant.name}"

    def train(self) -> dict[str, Any]:
        """The `train` of its spec, or what its `loop` has beside the numbers."""
        often = OFTEN if self.variant.loses else {}
        if self.variant.is_loop:
            return self.variant.train | self.point.train | often
        model = TRAIN["model"] | self.variant.train.get("model", {})
        return TRAIN | self.variant.train | self.point.train | often | {"model": model}


def cells() -> Iterator[Cell]:
    """All cells, including those that cannot be run."""
    for point in POINTS:
        for variant in VARIANTS:
            home = variant.name == point.home
            for fault in FAULTS if home else FAULTS[:1]:
                yield Cell(point, fault, variant, _absent(point, variant))


def exact_cells() -> Iterator[Cell]:
    """The cells of tasks with exact sums, whose result must have the same bits. They keep the
    tensor-parallel size: one of its replicas is needed after the fault."""
    for cell in cells():
        variant, parallel = cell.variant, cell.variant.train.get("parallel", {})
        if "tensor" in parallel:
            if variant.axes.dp == 1 or variant.name == "tp2dp2 to tp2":  # now the same as tp2dp2
                continue
            parallel = parallel | {"tensor": [variant.axes.tp]}
        if not cell.absent:
            cell = cell._replace(absent=_never_comes(cell.point, variant))
        if cell.point.skips:
            cell = cell._replace(point=cell.point._replace(train=EXACT_OVERFLOWS))
        yield cell._replace(
            variant=variant._replace(
                name=f"{variant.name}, bitwise",
                train=variant.train | EXACT | ({"parallel": parallel} if parallel else {}),
            )
        )


def _never_comes(point: Point, variant: Variant) -> str:
    """Why a point is never met with exact sums, though it is without."""
    gives = point.scene == "meeting" and point.event in GIVES
    if gives and variant.is_plain:
        return "a rank that is a step behind has a gate, and steps itself"
    keeps = variant.axes.tp > 1 and variant.axes.pp == 1
    if keeps and (gives or (point.event in ("staged", "commit") and variant.optimizer == "whole")):
        return "a rank keeps its part of the model"
    return ""


def loop_cells() -> Iterator[Cell]:
    """The cells of custom loops."""
    there = {point.name: point for point in POINTS}
    for variant in LOOPS:
        for name in variant.points:
            for fault in LOOP_FAULTS:
                yield Cell(there[name], fault, variant, "")


def exact_once() -> Iterator[Cell]:
    """A cell of each layout with exact sums, each at another point."""
    there = [cell for cell in exact_cells() if not cell.absent and cell.fault == FAULTS[0]]
    for number, name in enumerate(dict.fromkeys(cell.variant.name for cell in there)):
        own = [cell for cell in there if cell.variant.name == name]
        yield own[5 * number % len(own)]


def loops_once() -> Iterator[Cell]:
    """A cell of each custom loop."""
    for variant in LOOPS:
        yield next(cell for cell in loop_cells() if cell.variant is variant)


def once() -> Iterator[Cell]:
    """Every point of the base once, with the faults in turn; then layouts once (ONCE), and
    OTHER_FAULTS."""
    there = [cell for cell in cells() if not cell.absent]
    own = [cell for cell in there if cell.variant is BASE]
    for number, point in enumerate(dict.fromkeys(cell.point.name for cell in own)):
        fault = FAULTS[number % len(FAULTS)]
        yield next(cell for cell in own if (cell.point.name, cell.fault) == (point, fault))
    yield from _of(ONCE)
    yield from (
        cell for cell in there if (cell.point.name, cell.fault, cell.variant.name) in OTHER_FAULTS
    )


def eight() -> Iterator[Cell]:
    """Cells of eight ranks that only `make test-thorough` runs (EIGHT)."""
    yield from _of(EIGHT)


def _of(points: dict[str, str]) -> Iterator[Cell]:
    """The cell of each variant and point, with the first fault."""
    for name, point in points.items():
        yield next(
            cell
            for cell in cells()
            if not cell.absent and (cell.variant.name, cell.point.name) == (name, point)
        )


def _absent(point: Point, variant: Variant) -> str:
    unknown = [name for name in variant.train if name not in Train.__struct_encode_fields__]
    if point.absent:
        return point.absent
    if unknown:
        return f"a job spec has no train.{unknown[0]}"
    if point.only and variant.name not in point.only:
        return f"there is one in {', '.join(point.only)} alone"
    return ""

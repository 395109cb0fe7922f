"""Every cell of the fault matrix: at which point, which fault, under which variant of training.

Not the whole product. Every point meets every fault on the base variant (a point that only one
variant has, on that one), and every point meets SIGKILL on every other variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from unicron.events.spec import Train
from unicron.workers.training.trace import Event

Fault = Literal["SIGKILL", "SIGSTOP", "exception", "lost agent", "two at once", "two in turn"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
Scene = Literal["start", "sum", "step", "partial", "partly", "meeting", "ready", "receive",
                "joined", "beside"]
"""How a point is come to, see scenes.py."""

RANKS = (0, 1, 2, 3)
NEWCOMER = 4
ITERATIONS = 8
STRUCK = 3
"""The iteration that is struck; its learning rate is no longer the warm-up's."""


TRAIN: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden": 64, "num_heads": 4, "sequence": 64},
    "batch": {"global": 16, "micro": 2}, "iterations": ITERATIONS,
    "optimizer": {"lr": 3e-3, "warmup_iterations": 2},
}
"""The base: fp32, per token, reduced at once, tied embeddings, no dropout; and 8 micro-batches, so
that three survivors of four are dealt 3, 3 and 2."""


class Variant(NamedTuple):
    """What its spec has that the base's has not, within `train`."""

    name: str
    train: dict[str, Any]


class Point(NamedTuple):
    """Where in the life of a task a fault strikes: the rank `victim` begins `event`.

    `nth` is which of the victim's own micro-batches; -1: none. `mate` is the second victim, who
    is struck at the point too if all ranks come to it, else wherever it is then. `only` is the
    one variant that has this point. `train` is added to the spec. `skips`: found-inf says that the
    struck iteration takes no step.
    """

    name: str
    scene: Scene = "sum"
    event: Event = "reduce"
    victim: int = 1
    mate: int = 2
    nth: int = -1
    bucket: int = -1
    all_come: bool = True
    only: str = ""
    train: dict[str, Any] = {}  # noqa: RUF012
    skips: bool = False
    absent: str = ""


SINGLE = "a task is data-parallel: this is between pipeline or tensor ranks"
SAVES = {"checkpoint_every": STRUCK}
COPIES = {"copy_every": STRUCK}
OVERFLOWS = {"dynamic_loss_scale": {"initial": 4096.0, "hysteresis": 1}}
"""Measured: at 512 the first gradients of this task are not finite, at 256 they are. So iterations
0 to 3 are skipped."""
POINTS = (
    Point("start-up", "start", "start"),
    Point("before the first micro-batch", event="micro_batch", nth=0),
    Point("between micro-batches", event="micro_batch", nth=1),
    Point("before a forward", event="forward", nth=1),
    Point("inside forward", event="forward_mid", nth=1),
    Point("before a backward", event="backward", nth=1),
    Point("inside backward", event="backward_mid", nth=1),
    Point("before the reduction"),
    Point("token count", event="stats"),
    Point("entering a bucket", event="bucket", bucket=0),
    Point("entering the third bucket of four", event="bucket", bucket=2, only="overlapped"),
    Point("buckets whole on some ranks", "partial", "bucket_done", bucket=0),
    Point("some buckets whole, on some ranks", "partly", "bucket", bucket=2, only="overlapped"),
    Point("embedding gradients", absent=SINGLE),
    Point("layer-norm gradients", absent=SINGLE),
    Point("reduction whole", "step", "reduced"),
    Point("scaling", "step", "scale"),
    Point("unscale, found-inf", "step", "unscale"),
    Point("scaler update", "step", "scaler", only="fp16"),
    Point("scaler update, step skipped", "step", "scaler", only="fp16", train=OVERFLOWS,
          skips=True),
    Point("norm", "step", "norm"),
    Point("clip", "step", "clip"),
    Point("before the optimizer step", "step", "step"),
    Point("inside the optimizer step", "step", "step_mid"),
    Point("after the optimizer step", "step", "stepped"),
    Point("schedule update", "step", "schedule"),
    Point("iteration done", "step", "done"),
    Point("in-memory copy", event="copy", victim=0, mate=1, all_come=False, train=COPIES),
    Point("in-memory copy half sent", "beside", "copy_mid", victim=0, mate=1, all_come=False,
          train=COPIES),
    Point("checkpoint begun", event="save", victim=0, mate=1, all_come=False, train=SAVES),
    Point("checkpoint half written", "beside", "save_mid", victim=0, mate=1, all_come=False,
          train=SAVES),
    Point("checkpoint written", "beside", "saved", victim=0, mate=1, all_come=False, train=SAVES),
    Point("reconfiguration: meeting", "meeting", "meet"),
    Point("reconfiguration: settling", "meeting", "settle"),
    Point("reconfiguration: giving state", "meeting", "give", all_come=False),
    Point("reconfiguration: taking state", "meeting", "receive", victim=0, mate=1,
          all_come=False),
    Point("join: newcomer ready", "ready", "ready", victim=NEWCOMER, all_come=False),
    Point("join: newcomer takes state", "receive", "receive", victim=NEWCOMER, all_come=False),
    Point("join: first micro-batch", "joined", "micro_batch", victim=NEWCOMER, nth=0),
)
BASE = Variant("base", {})
VARIANTS = (
    BASE,
    Variant("overlapped", {"overlap": True, "bucket_params": 20_000}),
    Variant("bf16", {"precision": "bf16"}),
    # From Megatron's 2^32 on, no step of a run this short would be taken.
    Variant("fp16", {"precision": "fp16", "dynamic_loss_scale": {"initial": 256.0}}),
    Variant("per micro-batch", {"loss": "per_micro_batch"}),
    Variant("dropout", {"model": {"dropout": 0.1}}),
    Variant("untied", {"model": {"tie_embeddings": False}}),
    Variant("even", {"batch": {"global": 24, "micro": 2}}),
)


class Cell(NamedTuple):
    """One run. `absent` says why it cannot be, if it cannot."""

    point: Point
    fault: Fault
    variant: Variant
    absent: str

    @property
    def name(self) -> str:
        return f"{self.point.name} / {self.fault} / {self.variant.name}"

    def train(self) -> dict[str, Any]:
        """The `train` of its spec."""
        model = TRAIN["model"] | self.variant.train.get("model", {})
        return TRAIN | self.variant.train | self.point.train | {"model": model}


def cells() -> Iterator[Cell]:
    """All there are, those that cannot be run too."""
    for point in POINTS:
        for variant in VARIANTS:
            home = variant.name == (point.only or BASE.name)
            for fault in FAULTS if home else FAULTS[:1]:
                yield Cell(point, fault, variant, _absent(point, variant))


def once() -> Iterator[Cell]:
    """Every point that the base has, once: the faults in turn."""
    there = [cell for cell in cells() if cell.variant is BASE and not cell.absent]
    for number, point in enumerate(dict.fromkeys(cell.point.name for cell in there)):
        fault = FAULTS[number % len(FAULTS)]
        yield next(cell for cell in there if (cell.point.name, cell.fault) == (point, fault))


def _absent(point: Point, variant: Variant) -> str:
    unknown = [name for name in variant.train if name not in Train.__struct_encode_fields__]
    if point.absent:
        return point.absent
    if unknown:
        return f"a job spec has no train.{unknown[0]}"
    if point.only not in ("", variant.name):
        return f"there is one in {point.only} alone"
    return ""

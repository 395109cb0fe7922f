"""The hang rows of the fault matrix: a rank of a real cluster hangs, in some place of some layout.

`train:` meets each fault in each place, each place in each layout and each layout with each fault:
all pairs. The loop and Megatron-LM's launcher meet each fault, each place and each layout once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

HangFault = Literal[
    "hang: sleeps",
    "hang: loops in Python",
    "hang: holds the GIL",
    "hang: enters a collective alone",
    "hang: enters one of another size",
    "hang: skips a collective",
]
HANGS: tuple[HangFault, ...] = get_args(HangFault)
THEN: dict[HangFault, str] = dict(
    zip(HANGS, ("sleep", "loop", "gil", "alone", "size", "skip"), strict=True)
)
"""What the trace of the rank does (real_cluster.py, `hold`)."""
MISMATCHES = HANGS[3:]
Engine = Literal["train", "loop", "Megatron-LM"]

ITERATIONS = {"train": 36, "loop": 60, "Megatron-LM": 60}
"""By engine. A rank is replaced before the task ends: a script loads its libraries anew."""
HUNG_IN = 12
"""The iteration in which a rank hangs: after the warm-up of what an iteration usually takes, and
not the one behind a checkpoint, whose limit is another."""
MICRO_BATCHES = 8
SAVES_EVERY = HUNG_IN - 2


class Place(NamedTuple):
    """Where a rank hangs: as `event` begins for the `nth` time in an iteration. `iteration` -1: as
    soon as it comes. `is_untimed`: no usual time of an iteration is its limit."""

    name: str
    event: str
    nth: int = 1
    iteration: int = HUNG_IN
    is_untimed: bool = False
    skips_at: str = ""
    """Another event, at which a rank that skips a collective skips that of this place."""


PLACES = (
    Place("first iteration", "forward", iteration=0, is_untimed=True),
    Place("sample", "micro_batch"),
    Place("forward", "forward_mid"),
    Place("backward", "backward_mid"),
    Place("between micro-batches", "micro_batch", nth=2),
    Place("reduction", "bucket", skips_at="reduce"),
    Place("optimizer step", "step"),
    Place("evaluation", "evaluate", iteration=-1, is_untimed=True),
    Place("checkpoint", "save", iteration=-1, is_untimed=True),
)


class Layout(NamedTuple):
    """A layout of `num` ranks. `train`: the changes of a job's `train`. `flags`: those of the loop
    (loop_driver.py). `victim`: the rank that hangs."""

    name: str
    num: int
    train: dict[str, Any]
    victim: int
    flags: tuple[str, ...] = ()

    @property
    def parallel(self) -> dict[str, Any]:
        found: dict[str, Any] = self.train.get("parallel", {})
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether it is Megatron's distributed optimizer. The job is submitted so, and is given
        mirrors: no iteration may be lost."""
        return self.parallel.get("optimizer") == "sharded"

    @property
    def is_plain(self) -> bool:
        """Whether each replica is one rank: one group has all members and all operations."""
        return not {"tensor", "pipeline"} & self.parallel.keys()


TENSOR, PIPELINE = {"tensor": [2]}, {"pipeline": [2]}
LAYOUTS = (
    Layout("DP 4", 4, {}, 3),
    Layout("TP 2 x DP 2", 4, {"parallel": TENSOR}, 1),
    Layout("PP 2 x DP 2", 4, {"parallel": PIPELINE}, 2),
    Layout("PP 2 interleaved x DP 2", 4, {"parallel": PIPELINE | {"chunks": 2}}, 1),
    Layout("TP 2 x PP 2 x DP 2", 8, {"parallel": TENSOR | PIPELINE}, 5),
    Layout(
        "sharded optimizer",
        4,
        {"parallel": {"optimizer": "sharded"}},
        2,
        ("overlapped gather",),
    ),
    Layout(
        "overlapped reduction",
        4,
        {"overlap": True, "bucket_params": 20_000},
        0,
        ("overlapped reduction",),
    ),
)


class Variant(NamedTuple):
    """Engine and layout."""

    name: str


class HangCell(NamedTuple):
    """One run. `absent`: the reason why it cannot be run, or ""."""

    engine: Engine
    point: Place
    fault: HangFault
    layout: Layout
    absent: str = ""

    @property
    def name(self) -> str:
        return f"{self.point.name} / {self.fault} / {self.variant.name}"

    @property
    def variant(self) -> Variant:
        return Variant(f"{self.engine}: {self.layout.name}")

    @property
    def victim(self) -> int:
        """The rank that hangs. The first one saves, whatever the layout."""
        return 0 if self.point.event == "save" else self.layout.victim

    @property
    def is_unnamed(self) -> bool:
        """Whether the counts of operations cannot name the rank: it skips an operation of all, and
        waits for a peer of another group that waits for it. Its circle is named, and repaired in
        place."""
        return self.fault == "hang: skips a collective" and not self.layout.is_plain

    def hold(self) -> dict[str, Any]:
        """What `RealCluster.hold` asks of the victim."""
        place = self.point
        skips = self.fault == "hang: skips a collective" and place.skips_at
        asked = {"event": place.skips_at if skips else place.event, "nth": place.nth}
        if place.iteration >= 0:
            asked |= {"iteration": place.iteration}
        return asked | {"then": THEN[self.fault]}


def pairs() -> Iterator[HangCell]:
    """Each place in each layout, with a fault such that each fault meets each of both, too."""
    for place, layout in itertools.product(range(len(PLACES)), range(len(LAYOUTS))):
        yield _cell("train", place, layout)


def each_once(engine: Engine) -> Iterator[HangCell]:
    """Each fault, each place and each layout of an engine: a row of `pairs` for each place."""
    for place in range(len(PLACES)):
        yield _cell(engine, place, (5 * place + 5) % len(LAYOUTS))


def _cell(engine: Engine, place: int, layout: int) -> HangCell:
    is_absent = engine == "train" and PLACES[place].event == "evaluate"
    return HangCell(
        engine,
        PLACES[place],
        HANGS[(place + layout + 3) % len(HANGS)],
        LAYOUTS[layout],
        "`train:` has no evaluation" if is_absent else "",
    )


def hang_cells() -> Iterator[HangCell]:
    """All cells, including those that cannot be run."""
    yield from pairs()
    yield from each_once("loop")
    yield from each_once("Megatron-LM")


def once() -> Iterator[HangCell]:
    """What `make test` and `make test-real` run: each place, each fault and each layout."""
    for cell in each_once("train"):
        yield cell._replace(engine="loop", absent="") if cell.absent else cell

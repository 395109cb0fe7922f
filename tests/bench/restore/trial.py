"""Real ranks that copy, save, restore and reshard a state of a given size, timed.

Two ranks in plain data parallelism have the whole state each. They stop between two iterations and
save it, in a checkpoint store and in a folder. Both are killed; new processes restore it.
Resharding takes ranks that live: from TP 2 to TP 1, and, with a sharded optimizer, from DP 4 to DP
3.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.memory.trial import WAIT_S, Trial, running
from bench.restore import bare
from bench.restore.bare import Flow
from checkpoint_stores import LocalKeeper, named
from rank_driver import TASK
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.spec.model import Axes

HIDDEN = 1024
LAYER_PARAMS = 12 * HIDDEN**2 + 13 * HIDDEN
PARAM_BYTES = 12
"""In fp32: the parameter and Adam's two moments."""
GRADIENT_BYTES = 4
BASE_BYTES = 450 << 20
"""A rank with nothing but its imports and buffers."""
STORE = 2
"""The number of the process with the checkpoint store, beside those of the ranks 0 and 1."""
STORE_BYTES_MAX = 64 << 30
TWO_RANKS = ("copy", "save", "restore", "folder")
RESHARDS = ("reshard_tp", "reshard_dp")
BEGINS = ("give", "receive", "read")
"""The events with which a rank begins to move state; with `moved` it ends."""
HOW = {
    "copy": "beside sockets, into new memory",
    "save": "beside dd conv=fsync",
    "restore": "beside sockets",
    "folder": "beside dd, each rank all files",
    "reshard_tp": "beside sockets",
    "reshard_dp": "beside sockets",
}


class Moved(NamedTuple):
    """What all ranks have moved at once, from the first that begins to the last that ends. `flows`:
    from process to process. `beside_s`: the rest of the settlement; `why`: what it is."""

    num_bytes: int
    took_s: float
    flows: Sequence[Flow]
    beside_s: float | None = None
    why: str = ""


class Measured(NamedTuple):
    """`moved`, and the seconds in which the machine does it when it only copies, by what `how`
    says."""

    moved: Moved
    bare_s: float
    how: str


class Setting(NamedTuple):
    """The layouts before and after, the model's layers, the changes of the spec, and the peak of
    all memory."""

    before: Axes
    after: Axes
    num_layers: int
    train: Mapping[str, Any]
    peak_bytes: int


def setting(phase: str, gb: float) -> Setting:
    """For a state of so many GB (1e9 bytes) a rank."""
    state_bytes = gb * 1e9
    if phase in TWO_RANKS:
        layers = _layers(state_bytes / PARAM_BYTES)
        rank_bytes = layers * LAYER_PARAMS * (PARAM_BYTES + GRADIENT_BYTES) + BASE_BYTES
        store_bytes = layers * LAYER_PARAMS * PARAM_BYTES
        return Setting(Axes(dp=2), Axes(dp=2), layers, {}, 2 * rank_bytes + store_bytes)
    if phase == "reshard_tp":
        layers = _layers(2 * state_bytes / PARAM_BYTES)
        whole_bytes = layers * LAYER_PARAMS * PARAM_BYTES
        # Beside its half, a rank has the whole, and no gradients.
        rank_bytes = whole_bytes // 2 + whole_bytes + BASE_BYTES
        return Setting(Axes(tp=2), Axes(dp=2), layers, {}, 2 * rank_bytes)
    before, after = Axes(dp=4), Axes(dp=3)
    # Each rank has all parameters, and its share of the moments.
    layers = _layers(state_bytes / (4 + 8 / before.dp))
    rank_bytes = layers * LAYER_PARAMS * (2 * 4 + 8 // 4 + 3 + GRADIENT_BYTES) + BASE_BYTES
    return Setting(
        before, after, layers, {"parallel": {"optimizer": "sharded"}}, before.dp * rank_bytes
    )


def _layers(num_params: float) -> int:
    return max(1, round(num_params / LAYER_PARAMS))


@contextmanager
def trained(folder: Path, made: Setting) -> Iterator[Trial]:
    """Ranks that have trained for an iteration. Without sums that are kept: they are no state."""
    model = {
        "num_layers": made.num_layers,
        "hidden": HIDDEN,
        "num_heads": 16,
        "sequence": 32,
    }
    batch = {"global": 4, "micro": 1}
    with running(
        folder, made.before, model=model, batch=batch, kept_sum=False, **made.train
    ) as trial:
        trial.launch(trial.ranks, made.before)
        trial.form()
        trial.reach(1)
        yield trial


def two_ranks(folder: Path, gb: float, phases: Collection[str]) -> dict[str, Measured]:
    """Copy and save, then restore from each."""
    found: dict[str, Moved] = {}
    with trained(folder, setting("copy", gb)) as trial:
        driver = trial.driver
        keeper = LocalKeeper("n2", bytes_max=STORE_BYTES_MAX)
        driver.keepers = [keeper]  # from the next generation on
        driver.quiesce(trial.ranks, "boundary")
        trial.reach(trial.form() + 1)
        found["copy"], found["save"], path = _saved(trial)
        copies = [named(driver.keepers, told) for told in driver.told(r.MemoryCheckpointStored)]
        if "restore" in phases:
            found["restore"] = _restored(trial, 2, "copy", copies=tuple(copies))
        keeper.close()
        driver.keepers.clear()
        del keeper
        gc.collect()
        files = bare.files_in(Path(driver.work.output) / path)
        if "folder" in phases:
            found["folder"] = _restored(trial, 3, "checkpoint", files, checkpoint=path)
    plain = {
        "copy": partial(_by_sockets, found["copy"], is_new=True),
        "save": partial(bare.dd_write_s, folder / "dd", [found["save"].num_bytes // 2] * 2),
        "restore": partial(_by_sockets, found.get("restore")),
        "folder": partial(bare.dd_read_s, files, 2),
    }
    return {phase: Measured(found[phase], plain[phase](), HOW[phase]) for phase in phases}


def reshard(folder: Path, gb: float, phase: str) -> Measured:
    """The ranks change their layout between two iterations."""
    made = setting(phase, gb)
    with trained(folder, made) as trial:
        driver, ranks = trial.driver, trial.ranks
        driver.quiesce(ranks, "boundary")
        moved = _moved(trial, driver.reconfigure(ranks, axes=made.after))
    return Measured(moved, _by_sockets(moved), HOW[phase])


def _by_sockets(moved: Moved | None, *, is_new: bool = False) -> float:
    assert moved is not None
    return bare.socket_copy_s(moved.flows, is_new=is_new)


def _saved(trial: Trial) -> tuple[Moved, Moved, str]:
    """The ranks stop at the end of an iteration; each copies its share to the store, then writes it
    to the folder. Returns both, and the checkpoint's path."""
    driver, ranks = trial.driver, tuple(trial.ranks)
    driver.order(
        o.Quiesce(
            nodes=("n1",),
            task=TASK,
            generation=driver.generation,
            mode="boundary",
            ranks=ranks,
            save=True,
            saving=ranks,
        ),
        trial.ranks,
    )
    driver.quiesced(trial.ranks)
    lines = [line for rank in ranks for line in driver.trace(rank)]

    def seconds(first: str, last: str) -> float:
        began_s = min(line["t"] for line in lines if line["event"] == first)
        return float(max(line["t"] for line in lines if line["event"] == last) - began_s)

    told = driver.told(r.MemoryCheckpointStored)
    saved = driver.told(r.CheckpointSaved)[-1]
    flows = [Flow(one.rank, STORE, one.copy_bytes) for one in told]
    return (
        Moved(sum(flow.num_bytes for flow in flows), seconds("copy", "copied"), flows),
        Moved(saved.ckpt_bytes, seconds("save", "saved"), ()),
        saved.path,
    )


def _restored(
    trial: Trial, attempt: int, origin: str, files: Sequence[Path] = (), **given: Any
) -> Moved:
    """The ranks are killed; new processes restore the state."""
    for rank in trial.ranks:
        trial.driver.kill(rank)
    trial.launch(trial.ranks, trial.axes, attempt=attempt)
    bare.leave_page_cache(files)
    return _moved(trial, trial.driver.reconfigure(trial.ranks, axes=trial.axes, **given), origin)


def _moved(trial: Trial, generation: int, origin: str = "") -> Moved:
    """What the ranks have received until they have formed this generation, and how long that
    took."""
    told: dict[int, r.Reconfigured] = {}
    for rank in trial.ranks:
        told[rank] = one = trial.driver.wait(
            r.Reconfigured,
            rank,
            limit_s=WAIT_S,
            where=lambda body: body.generation == generation,
        )
        assert origin in ("", one.origin), f"rank {rank} has its state from {one.origin}"
    flows = [
        Flow(sender.rank, rank, sender.taken_bytes)
        for rank, one in told.items()
        for sender in one.received_from
    ]
    if origin:
        flows = [Flow(STORE, rank, one.received_bytes) for rank, one in told.items()]
    lines = [
        [line for line in trial.driver.trace(rank) if line["generation"] == generation]
        for rank in trial.ranks
    ]
    began_s = min(line["t"] for each in lines for line in each if line["event"] in BEGINS)
    ended_s = max(line["t"] for each in lines for line in each if line["event"] == "moved")
    took_s = ended_s - began_s
    built_s = max(map(_built_s, lines))
    return Moved(
        sum(flow.num_bytes for flow in flows),
        took_s,
        flows,
        max(one.settle_s for one in told.values()) - took_s,
        f"{built_s:.2f} s of it to build the new part" if built_s else "",
    )


def _built_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """How long a rank has built a new part of the model."""
    times = [line["t"] for line in lines if line["event"] == "build"]
    later = [line["t"] for line in lines if times and line["t"] > times[0]]
    return min(later) - times[0] if later else 0.0

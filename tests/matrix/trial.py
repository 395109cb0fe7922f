"""One cell's trial: a folder, a reference run for the comparison, and the verdict."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint_stores import LocalKeeper
from loop_driver import OTHER_RESULT, drive_loop, flagged_example
from matrix.cells import ITERATIONS, MICRO_BATCHES, Cell, Variant
from matrix.judge import complaints, final
from matrix.scenes import Play
from nursery import Nursery
from rank_driver import Driver, small_spec
from rank_twin import Reference, Twin
from unicron.events.records.reports import CheckpointSaved
from unicron.events.spec.job import JobSpec
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions

NUM_ORDERS, NUM_ORDERS_FP16 = 5, 9
"""The summation orders of each reference run. In fp16 few may miss what another order does: a
weight rounds up or down, and 7 of 9 shuffled orders of this training differ from the ascending one
by the same 1.3e-6, but the descending one by 3e-10."""


class Verdict(NamedTuple):
    """The result of a cell. `gaps`: the largest relative gaps of losses and parameters."""

    cell: Cell
    outcome: str
    why: str = ""
    gaps: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()
    lasted_s: float = 0.0


class Trials:
    """Runs cells, one after another, each in its own folder."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.nursery = folder, nursery
        self._twins: dict[str, Reference] = {}

    def run(self, cell: Cell) -> Verdict:
        """Run and judge a cell. Failures are returned, not raised."""
        if cell.absent:
            return Verdict(cell, "not run", cell.absent)
        folder = self.folder / "".join(c if c.isalnum() else "-" for c in cell.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        driver = self._driver(cell.variant, cell.train(), folder)
        if "copy_every" in cell.train():
            driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
        twin = self.twin(cell)
        began_s = time.monotonic()
        try:
            play = Play(driver, cell)
            play.run()
            wrong = "; ".join(complaints(play, twin))
            found = twin.difference(final(play))
        except (AssertionError, OSError):
            wrong = traceback.format_exc()
            (folder / "why").write_text(f"{wrong}\n{driver.story()}")
            return Verdict(
                cell,
                "not equal",
                wrong.strip().splitlines()[-1],
                (),
                (),
                time.monotonic() - began_s,
            )
        finally:
            driver.close()
        return Verdict(
            cell,
            "not equal" if wrong else "equal",
            wrong,
            tuple(getattr(found, name) for name in Twin.names),
            tuple(twin.noise),
            time.monotonic() - began_s,
        )

    def twin(self, cell: Cell) -> Reference:
        """The reference run of the cell. Cells with the same training share one run."""
        what, rounds = cell.train(), cell.variant.rounds
        for apart in ("checkpoint_every", "copy_every", "parallel"):
            what.pop(apart, None)
        if cell.variant.is_loop:
            what["flags"] = [flag for flag in cell.variant.flags if flag in OTHER_RESULT]
            # The initial weights of a loop depend on its largest layout.
            what["parallel"] = {
                name: sizes
                for name, sizes in cell.train().get("parallel", {}).items()
                if name != "optimizer"
            }
        size = cell.variant.axes.tp if cell.variant.is_exact else 1
        key = json.dumps([what, cell.variant.name if rounds else "", size], sort_keys=True)
        if key not in self._twins:
            folder = self.folder / f"twin-{len(self._twins)}"
            shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
            if size > 1:  # another tensor-parallel size computes other bits
                self._twins[key] = Reference(
                    self._undisturbed(cell.variant, what, Axes(tp=size), folder), is_exact=True
                )
                return self._twins[key]
            fp16 = "fp16" in (what.get("precision"), *cell.variant.flags)
            twin = Twin(
                self._reference(cell.variant, what, folder),
                folder,
                self.nursery,
                num_orders=NUM_ORDERS_FP16 if fp16 else NUM_ORDERS,
            )
            if rounds:
                found = twin.difference(
                    self._undisturbed(cell.variant, what, cell.variant.axes, folder / "undisturbed")
                )
                twin.noise = [
                    max(noise, getattr(found, name))
                    for name, noise in zip(twin.names, twin.noise, strict=True)
                ]
            self._twins[key] = twin
        return self._twins[key]

    def _driver(self, variant: Variant, train: dict[str, Any], folder: Path) -> Driver:
        """A driver of the variant's task in a new folder."""
        if not variant.is_loop:
            return Driver(small_spec(folder / "out", **train), folder, self.nursery)
        options = {**train, **train.get("parallel", {})}
        for apart in ("parallel", "flags"):
            options.pop(apart, None)
        return drive_loop(
            folder,
            self.nursery,
            [],
            iterations=ITERATIONS,
            micro_batches=MICRO_BATCHES,
            slots_max=8,
            script=flagged_example(folder, variant.flags),
            **options,
        )

    def _reference(self, variant: Variant, what: dict[str, Any], folder: Path) -> JobSpec:
        """The spec of the reference run. That of a loop has only the flags with which another
        result is right, and the layouts for their initial weights."""
        if not variant.is_loop:
            return small_spec(folder / "out", **what)
        folder.mkdir(parents=True)
        plain = Variant("reference", {}, flags=tuple(what["flags"]), points=variant.points)
        return self._driver(plain, {"parallel": what["parallel"]}, folder).spec

    def _undisturbed(
        self, variant: Variant, what: dict[str, Any], axes: Axes, folder: Path
    ) -> Path:
        """The final checkpoint of the task in this layout, without faults."""
        folder.mkdir()
        driver = self._driver(variant, what | {"parallel": variant.train["parallel"]}, folder)
        ranks = list(range(num_positions(axes)))
        try:
            driver.start(*ranks)
            driver.form(ranks, axes=axes)
            driver.finish(ranks)
            return folder / "out" / driver.told(CheckpointSaved)[-1].path
        finally:
            driver.close()

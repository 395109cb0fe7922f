"""One cell's trial: a folder, a twin to hold it to, and the verdict."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from keepers import LocalKeeper
from nursery import Nursery
from rank_driver import Driver, small_spec
from rank_twin import Twin

from .cells import Cell
from .judge import complaints, final
from .scenes import Play


class Verdict(NamedTuple):
    """What became of a cell. `gaps` are the largest relative ones of losses and of parameters."""

    cell: Cell
    outcome: str
    why: str = ""
    gaps: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()
    lasted_s: float = 0.0


class Trials:
    """Runs cells, one after another, each in a folder of its own."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.nursery = folder, nursery
        self._twins: dict[str, Twin] = {}

    def run(self, cell: Cell) -> Verdict:
        """Play a cell and judge it; what went wrong is told, not raised."""
        if cell.absent:
            return Verdict(cell, "not run", cell.absent)
        folder = self.folder / "".join(c if c.isalnum() else "-" for c in cell.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        driver = Driver(small_spec(folder / "out", **cell.train()), folder, self.nursery)
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
            return Verdict(cell, "not equal", wrong.strip().splitlines()[-1], (), (),
                           time.monotonic() - began_s)
        finally:
            driver.close()
        return Verdict(cell, "not equal" if wrong else "equal", wrong,
                       tuple(getattr(found, name) for name in Twin.names), tuple(twin.noise),
                       time.monotonic() - began_s)

    def twin(self, cell: Cell) -> Twin:
        """Of what is trained alike, trained once."""
        what = cell.train()
        for apart in ("checkpoint_every", "copy_every", "parallel"):
            what.pop(apart, None)
        key = json.dumps(what, sort_keys=True)
        if key not in self._twins:
            folder = self.folder / f"twin-{len(self._twins)}"
            self._twins[key] = Twin(small_spec(folder / "out", **what), folder, self.nursery)
        return self._twins[key]

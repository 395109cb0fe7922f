"""A world (worlds.py) in which one member sleeps while the others wait for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import world_work
from unicron.events.spec.job import Train
from unicron.events.spec.model import Axes
from unicron.workers.ipc.group_rows import Progress
from unicron.workers.ipc.progress_page import ProgressPage, ProgressWriter
from unicron.workers.training.communicators import counting, process_groups

NUM_ITERATIONS = 3
HUNG_IN = 1
STANDS_S = 1.0
"""A member that has entered nothing for this long waits."""
LIMIT_S = 100.0


class Where(NamedTuple):
    """Member `place` sleeps as the event begins for the `nth` time in iteration HUNG_IN."""

    place: int
    event: str
    nth: int


class _Watched:
    """One member: its page, and what its rows told while the world stood."""

    def __init__(self, place: int, where: Where, folder: Path) -> None:
        self._place, self._where, self._folder = place, where, folder
        self.page = ProgressPage()
        self.writer = ProgressWriter(os.dup(self.page.fd))
        self.told: Progress | None = None
        self._iteration, self._num = -1, 0
        threading.Thread(target=self._look, daemon=True).start()

    def on_groups(self, groups: Any) -> None:
        counting.count_in(self.writer.rows)
        counting.begin({"world": dist.group.WORLD, **process_groups.by_role(groups)})

    def on_iteration(self, iteration: int) -> None:
        self._iteration, self._num = iteration, 0
        self.writer.begin(1, iteration, "usual")

    def on_note(self, event: str) -> None:
        self._num += event == self._where.event
        here = Where(self._place, event, self._num)
        if (here, self._iteration) != (self._where, HUNG_IN):
            return
        (self._folder / "hung").touch()
        deadline_s = time.monotonic() + LIMIT_S
        while len(list(self._folder.iterdir())) <= dist.get_world_size():
            assert time.monotonic() < deadline_s, sorted(self._folder.iterdir())
            time.sleep(0.05)

    def _look(self) -> None:
        while not (self._folder / "hung").exists():
            time.sleep(0.05)
        last, since_s = -1, 0.0
        while True:
            entered = self.page.num_entered()
            if entered != last:
                last, since_s = entered, time.monotonic()
            if time.monotonic() > since_s + STANDS_S:
                break
            time.sleep(0.05)
        self.told = self.page.groups()
        (self._folder / f"told-{self._place}").touch()


def hung(
    place: int, train: Train, axes: Axes, where: Where, folder: str
) -> tuple[Progress | None, Progress | None]:
    """What the rows of this member told while the world stood, and at the end of all."""
    watched = _Watched(place, where, Path(folder))
    world_work.trained(
        place,
        train,
        axes,
        NUM_ITERATIONS,
        on_groups=watched.on_groups,
        on_iteration=watched.on_iteration,
        on_note=watched.on_note,
    )
    return watched.told, watched.page.groups()

"""One of four ranks is lost, and the others continue in another layout."""

from __future__ import annotations

from typing import NamedTuple

from rank_driver import Driver
from unicron.events.records.reports import Reconfigured
from unicron.events.spec.model import Axes

TP2DP2, PP2DP2 = Axes(tp=2, dp=2), Axes(pp=2, dp=2)


class Case(NamedTuple):
    """Four ranks in `before`; `victim` dies at `event`; `members` go on in `after`."""

    before: Axes
    victim: int
    event: str
    members: tuple[int, ...]
    after: Axes
    iteration: int = 2


def strike(driver: Driver, case: Case) -> dict[int, Reconfigured]:
    """Run the case up to the survivors' new generation; return their reports of it."""
    driver.start(0, 1, 2, 3)
    driver.hold(case.victim, case.event, case.iteration)
    driver.form([0, 1, 2, 3], axes=case.before)
    driver.held(case.victim, case.iteration)
    driver.kill(case.victim)
    driver.quiesce([rank for rank in range(4) if rank != case.victim], "now")
    return driver.form(list(case.members), axes=case.after)

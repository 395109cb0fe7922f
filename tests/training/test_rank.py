"""Real ranks: a generation up and down in the same process, and nothing lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Drive = Callable[..., Any]
ALL = [0, 1, 2, 3]


def test_a_killed_rank_costs_no_micro_batch(drive: Drive) -> None:
    driver = drive()
    driver.start(*ALL)
    told = driver.form(ALL)
    print(told)
    driver.strike(2, iteration=4, event="backward", nth=2)
    driver.kill(2)
    left = [0, 1, 3]
    driver.quiesce(left, "now")
    told = driver.form(left, 4)
    print(told)
    driver.start(2, attempt=2)
    driver.quiesce(left, "boundary")
    told = driver.form(ALL)
    print(told)
    print(driver.finish(ALL))
    print(driver.losses())
    print(driver.story())

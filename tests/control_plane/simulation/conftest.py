"""Checks the state of every simulated run after each thousandth report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from state_check import check
from unicron.control_plane.simulation.engine import Engine

REPORTS_NUM = 1000


@pytest.fixture(autouse=True)
def checked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, report = itertools.count(1), Engine.report

    def report_and_check(self: Engine, *args: Any, **kwargs: Any) -> None:
        report(self, *args, **kwargs)
        if next(numbers) % REPORTS_NUM == 0:
            assert check(self.state) == []

    monkeypatch.setattr(Engine, "report", report_and_check)

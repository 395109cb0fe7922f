"""A pytest plugin that tells what each test of a lane did, a line of JSON each (tests/suite.py).

`{"collected": 12, "left_out": {"thorough": 3}}` comes first, then for each test that has ended
`{"test": "tests/a.py::test_b", "result": "passed", "s": 0.2, "cpu_s": 0.1, "why": ""}`. Lines are
there as soon as a test has ended, so the counts are known also when the lane is ended.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Generator
from io import RawIOBase
from typing import Any

import pytest

VARIABLE = "UNICRON_LANE_REPORT"
TIERS = ("thorough", "real")
FULL = "the report of this lane cannot be written: "


class LaneReport:
    """Writes the lines of one lane."""

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._left_out: Counter[str] = Counter()
        self._reports: list[pytest.TestReport] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            self._left_out[next((tier for tier in TIERS if tier in marks), "")] += 1

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell(collected=len(session.items), left_out=self._left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._reports = []
        began_s, cpu_s = time.monotonic(), _cpu_s()
        try:
            return (yield)
        finally:
            if self._reports:
                result, why = _result(self._reports)
                took_s = time.monotonic() - began_s
                self._tell(
                    test=item.nodeid,
                    result=result,
                    s=round(took_s, 2),
                    cpu_s=round(_cpu_s() - cpu_s, 2),
                    why=why,
                )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _tell(self, **line: Any) -> None:
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            pytest.exit(f"{FULL}{error}", returncode=pytest.ExitCode.INTERNAL_ERROR)


def _cpu_s() -> float:
    """Of this process and of all its children that have ended."""
    return sum(os.times()[:4])


def _result(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """The test's result over its phases, and the reason if it was skipped."""
    for report in reports:
        if report.failed:
            return "failed", report.when or ""
        if report.skipped:
            text = report.longrepr
            why = text[2] if isinstance(text, tuple) else getattr(report, "wasxfail", str(text))
            return "skipped", str(why).removeprefix("Skipped: ")
    return "passed", ""


def pytest_configure(config: pytest.Config) -> None:
    """Report to the file that the environment names; the tests of a test do not."""
    if name := os.environ.pop(VARIABLE, ""):
        file = open(name, "ab", buffering=0)  # noqa: SIM115
        config.add_cleanup(file.close)
        config.pluginmanager.register(LaneReport(file))

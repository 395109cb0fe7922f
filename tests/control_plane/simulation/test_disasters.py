"""The page of disasters: it has every incident, and its figures equal those of a new run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_scripts import script

ROOT = Path(__file__).resolve().parents[3]
disasters = script("disasters")
PAGE = disasters.PAGE.read_text(encoding="utf-8")
NAMES = [name for name in (*disasters.NAMES, *disasters.MODERN) if name]
# The other incidents take about 30 s; `make disasters` runs them too.
QUICK = [name for name in NAMES if not name.startswith("opt-") or name == "opt-2021-11-05-ecc"]


def test_the_page_has_every_incident_and_scenario() -> None:
    assert len(disasters.NAMES) == len(disasters.INCIDENTS.read_text().splitlines()) == 15
    assert sorted(NAMES) == sorted(path.stem for path in disasters.SCENARIOS.glob("*.yaml"))
    assert [*disasters.rows(PAGE)] == NAMES
    text = PAGE.partition(disasters.END)[2]
    assert all(f"`{name}`" in text for name in NAMES)


def test_every_test_on_the_page_exists() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) >= 8
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    assert all(f"def {name}(" in tests for name in named)


@pytest.mark.parametrize("name", QUICK)
def test_the_figures_equal_a_new_run(name: str) -> None:
    assert disasters.rows(PAGE)[name] == disasters.row(name), "run make disasters"

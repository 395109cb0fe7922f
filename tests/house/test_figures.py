"""`make figures`: blocks with stamped rows are written; blocks without them stay unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from doc_scripts import script

ROOT = Path(__file__).resolve().parents[2]
figures = script("figures")
PAGE = (
    "before\n<!-- figures: {0} -->\nold text\n\nMeasured at commit 0 on 2026-01-01, n=1.\n"
    "<!-- end -->\nafter\n"
)
STAMP = {"commit": "abc1234", "at": "2026-11-23T10:00:00Z", "cores": 2, "versions": {"torch": "2"}}


def measured(folder: Path, name: str, rows: list[dict[str, Any]], *, stamp: bool = True) -> str:
    """The block's page after `make figures` ran over these rows."""
    block = figures.BLOCKS[name]
    page = folder / block.page
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(PAGE.format(name))
    (folder / f"{block.rows}.json").write_text(json.dumps(rows))
    if stamp:
        (folder / f"{block.rows}.stamp").write_text(json.dumps(STAMP))
    said = figures.write(name, block, folder, folder)
    assert said.startswith("written") == ("abc1234" in page.read_text())
    return str(page.read_text())


def row(case: str, system: str, metric: str, value: float | None, n: int) -> dict[str, Any]:
    return {"case": case, "system": system, "metric": metric, "value": value, "unit": "s", "n": n}


DETECTED = [
    row(
        case,
        system,
        "detect_s",
        0.25 if system == "unicron" else None,
        7 if system == "unicron" else 0,
    )
    for case in figures.detection.CASES
    for system in ("unicron", "torchrun")
]


def test_a_block_is_written_from_the_rows_of_a_bench(tmp_path: Path) -> None:
    page = measured(tmp_path, "detection", DETECTED)
    assert page.startswith("before\n<!-- figures: detection -->\n| case |")
    assert "| `rank_killed` | 0.25 | 0.1 | 1.8 | nothing reported |" in page
    assert page.endswith(
        "\n\nMeasured at commit abc1234 on 2026-11-23, n=7.\n<!-- end -->\nafter\n"
    )
    assert "old text" not in page


def test_a_block_written_by_hand_becomes_one_of_the_tool() -> None:
    page = PAGE.format("one").replace("figures:", "figures by hand:")
    fresh = figures.rewritten(page, "one", "text", "abc1234", "2026-11-23", "1")
    assert fresh.startswith("before\n<!-- figures: one -->\ntext\n\nMeasured at commit abc1234 on ")


def test_the_page_says_how_long_the_bench_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STAMP, "took_s", 400)
    assert "n=7, in 7 min.\n" in measured(tmp_path, "detection", DETECTED)


@pytest.mark.parametrize(("load", "said"), [(3.9, ""), (18.3, ", under a load of 18 on 2 cores")])
def test_the_page_says_when_other_work_ran_beside_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, said: str
) -> None:
    monkeypatch.setitem(STAMP, "load_1min", load)
    assert f"on 2026-11-23, n=7{said}.\n<!-- end -->" in measured(tmp_path, "detection", DETECTED)


@pytest.mark.parametrize("commit", ["abc1234-dirty", "unknown"])
def test_rows_of_a_dirty_tree_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    monkeypatch.setitem(STAMP, "commit", commit)
    block = figures.BLOCKS["detection"]
    page = tmp_path / block.page
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format("detection"))
    (tmp_path / "detection.json").write_text(json.dumps(DETECTED))
    (tmp_path / "detection.stamp").write_text(json.dumps(STAMP))
    said = figures.write("detection", block, tmp_path, tmp_path)
    assert said == (
        f"not written: detection.stamp is of commit {commit}; commit the code, then measure again"
    )
    assert page.read_text() == PAGE.format("detection")


@pytest.mark.parametrize(
    ("rows", "stamp"),
    [(DETECTED[:4], True), (DETECTED, False), ([], True)],
    ids=["some cases", "no stamp", "no rows"],
)
def test_a_block_without_all_its_rows_stays_unchanged(
    tmp_path: Path, rows: list[dict[str, Any]], stamp: bool
) -> None:
    assert measured(tmp_path, "detection", rows, stamp=stamp) == PAGE.format("detection")


def test_a_page_without_the_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 blocks other"):
        figures.rewritten(PAGE.format("one"), "other", "text", "abc", "2026-11-23", "1")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in figures.BLOCKS
        if figures.BLOCKS[name].rows
        and name
        not in (
            "attack",
            "chaos-training",
            "throughput",
            "fault-matrix",
            "fault-matrix-loops",
            "fault-matrix-hangs",
            "fuzz",
            "mutants",
        )
    ],
)
def test_every_block_is_rendered_from_its_bench_rows(name: str, tmp_path: Path) -> None:
    """The rows hold every metric of every case and system that a block can use."""
    metrics = (
        "waf_ratio",
        "detect_s",
        "plan_ms",
        "iteration_s",
        "iteration_ratio",
        "iteration_ratio_low",
        "iteration_ratio_high",
        "cpu_s",
        "events",
        "faults",
        "events_per_s",
        "peak_mib",
        "fault_to_step_s",
        "fault_to_resume_s",
        "iterations_lost",
        "grow_pause_s",
        "fault_moved_bytes",
        "fault_least_bytes",
        "grow_moved_bytes",
        "grow_least_bytes",
        *figures.settlement.UNITS,
        figures.memory.METRIC,
        *figures.hosts.UNITS,
        *figures.scale.UNITS,
        *figures.slurm.UNITS,
        *figures.web.GOALS,
        "worst_s",
        "mb_per_s",
        "share_of_copy",
    )
    plain = figures.restore.PLAIN
    systems = (plain, "unicron", "unicron_mirrored", "unicron_sharded", *figures.POLICIES)
    rows = [
        row(case, system, metric, 0.125, 5)
        for case in figures.BLOCKS[name].cases
        for system in systems
        for metric in metrics
    ]
    page = measured(tmp_path, name, rows)
    assert "n=5." in page
    assert re.search(r"0\.1[23]", page)


def test_every_block_is_on_its_page_with_a_stamp() -> None:
    for name, block in figures.BLOCKS.items():
        page = (ROOT / block.page).read_text(encoding="utf-8")
        mark = f"<!-- figures(?: by hand)?: {name} -->\n(.*?)<!-- end -->"
        blocks = re.findall(mark, page, re.DOTALL)
        assert len(blocks) == 1, name
        stamp = r"\n\nMeasured at commit [0-9a-f]{7}\S* on 2\d{3}-\d\d-\d\d, n=\d+.*\n$"
        assert re.search(stamp, blocks[0]), name
    tools = {stamp.name for stamp in script("figure_ages").stamps() if not stamp.by_hand}
    assert tools - set(figures.BLOCKS) == {"demo"}, "docs/reference/screen.py writes that one"


def test_a_case_that_is_newer_than_the_page_is_named(tmp_path: Path) -> None:
    block = figures.BLOCKS["settlement"]
    page = tmp_path / block.page
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format("settlement").replace("old text", "`ranks_64` `ranks_256`"))
    assert figures.unshown("settlement", block, tmp_path) == (
        "; not on the page: ranks_1024, ranks_4096"
    )
    more = "`ranks_256` `ranks_1024` `ranks_4096`"
    page.write_text(page.read_text().replace("`ranks_256`", more))
    assert figures.unshown("settlement", block, tmp_path) == ""


def test_the_fault_matrix_is_written_when_it_is_whole(tmp_path: Path) -> None:
    rows = [
        row(name, "unicron", "outcome", None, 1) | {"value": "equal", "unit": ""}
        for name in figures.MATRIX
    ]
    assert measured(tmp_path, "fault-matrix", rows[1:]) == PAGE.format("fault-matrix")
    rows[-1]["value"] = "not equal"
    page = measured(tmp_path, "fault-matrix", rows)
    num = len(rows)
    assert f"{num} runs, {num - 1} of them equal to their reference run." in page
    assert "| point | SIGKILL | SIGSTOP |" in page
    assert "| point | tp2dp4 | pp2dp4 | pp4dp2 |" in page
    assert page.count(" = ") == sum(line.count(" = ") for line in page.splitlines())
    assert page.count("**not equal**") == 1
    assert "?" not in page


def test_the_loops_of_the_matrix_are_written_when_they_are_whole(tmp_path: Path) -> None:
    rows = [
        row(name, "unicron", "outcome", None, 1) | {"value": "equal", "unit": ""}
        for name in figures.LOOP_MATRIX
    ]
    assert measured(tmp_path, "fault-matrix-loops", rows[1:]) == PAGE.format("fault-matrix-loops")
    page = measured(tmp_path, "fault-matrix-loops", rows)
    assert "| loop | point | SIGKILL | SIGSTOP |" in page
    assert page.count(" = |") == len(rows)


def test_the_hang_rows_are_written_when_they_are_whole(tmp_path: Path) -> None:
    rows = [
        row(name, "unicron", "outcome", None, 1) | {"value": "equal", "unit": ""}
        for name in figures.HANG_MATRIX
    ]
    times = [row(figures.HANG_MATRIX[-1], "unicron", "acted_s", seconds, 1) for seconds in (3, 11)]
    assert measured(tmp_path, "fault-matrix-hangs", rows[1:]) == PAGE.format("fault-matrix-hangs")
    page = measured(tmp_path, "fault-matrix-hangs", rows + times)
    assert page.count(" = ") == len(rows)
    assert "Acted upon after 7.0 s (median), 11.0 s at most." in page
    assert "| first iteration | = enters a collective alone |" in page


def test_the_mutants_are_written_when_all_were_run(tmp_path: Path) -> None:
    counts = {figures.mutants.IN_TEST: 3, figures.mutants.IN_REAL: 1, figures.mutants.TOOK: 9}
    rows = [
        row(name, "unicron", metric, num, 1) | {"note": "it breaks"}
        for name in figures.mutants.PATCHES
        for metric, num in counts.items()
    ]
    assert measured(tmp_path, "mutants", rows[3:]) == PAGE.format("mutants")
    rows[0]["value"] = 0
    rows[3]["value"] = rows[4]["value"] = 0
    page = measured(tmp_path, "mutants", rows)
    num = len(figures.mutants.PATCHES)
    assert f"{num - 1} of {num} mutants are seen, in {9 * num} s." in page
    assert page.count("| it breaks | test | 3 | 1 | 9 |") == num - 2
    assert page.count("| it breaks | real | 0 | 1 | 9 |") == 1
    assert page.count("| it breaks | **not seen** | 0 | 0 | 9 |") == 1

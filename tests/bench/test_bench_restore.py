"""The bench of moving state: its cases, what it refuses, and the plain copies beside it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from bench.restore import bare, main
from bench.restore.bare import Flow
from bench.restore.trial import Measured, Moved, setting


def test_cases_are_phases_and_sizes() -> None:
    assert main.case_of("reshard_dp_0.25gb") == ("reshard_dp_0.25gb", "reshard_dp", 0.25)
    assert len(main.CASES) == 16
    for name in ("copy", "copy_gb", "copy_1.1.1gb", "grow_1gb"):
        with pytest.raises(argparse.ArgumentTypeError, match="a case is a phase and a size"):
            main.case_of(name)


def test_what_needs_too_much_memory_is_refused_in_a_line() -> None:
    assert main.why_not(main.CASES, 18 << 30) == ""
    why = main.why_not([main.case_of("copy_8gb")], 64 << 30)
    assert why == "copy_8gb needs 28.2 GiB of memory: more than 18 are not taken"
    assert "available" in main.why_not(main.CASES, 8 << 30)


def test_a_rank_has_as_much_state_as_the_case_says() -> None:
    layers = {phase: setting(phase, 1.0).num_layers for phase in ("copy", "reshard_tp")}
    assert layers == {"copy": 7, "reshard_tp": 13}
    assert setting("reshard_dp", 1.0).num_layers == 13


def test_the_share_is_the_plain_time_by_ours() -> None:
    moved = Moved(4_000_000, 2.0, ())
    rows = main.rows_of("copy_1gb", [Measured(moved, 1.0, "beside sockets")])
    assert [(row.system, row.metric, row.value) for row in rows] == [
        ("unicron", "mb_per_s", 2.0),
        ("plain copy", "mb_per_s", 4.0),
        ("unicron", "share_of_copy", 0.5),
    ]
    assert main.held_to(rows) == ["holds   copy_1gb share_of_copy: 0.50, goal at least 0.5"]


def test_flows_go_at_once_between_processes() -> None:
    flows = [Flow(0, 1, 9 << 20), Flow(1, 0, 5 << 20), Flow(2, 0, 100)]
    assert 0.0 < bare.socket_copy_s(flows) < bare.WAIT_S
    assert 0.0 < bare.socket_copy_s(flows, is_new=True) < bare.WAIT_S


def test_files_are_read_from_the_disk_after_they_have_left_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "part"
    file.write_bytes(os.urandom(1 << 20))
    assert bare.files_in(tmp_path) == [file]
    bare.leave_page_cache([file])
    assert bare.cached_ratio(file) <= bare.CACHED_RATIO_MAX
    file.read_bytes()
    assert bare.cached_ratio(file) == 1.0
    assert bare.dd_read_s([file], 2) > 0
    assert bare.dd_write_s(tmp_path / "dd", [1 << 20, 1 << 20]) > 0
    assert not [*(tmp_path / "dd").iterdir()]

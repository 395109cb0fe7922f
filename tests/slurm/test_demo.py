"""`make demo-slurm`: all of it, Ctrl-C, and a machine without Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from slurm import site as sites
from slurm.demo import CASES, UNITS
from unicron.workers.host import linux

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0


def started(path: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The demo, as the verb starts it."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            "slurm.demo",
            "--folder",
            str(path / "demo"),
            "--out",
            str(path / "slurm.json"),
        ],
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/drivers", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def leavings(path: Path) -> list[linux.Proc]:
    """The processes of a site that are still there."""
    marker = f"SLURM_CONF={path}/demo/site/slurm.conf".encode()
    return [proc for proc in linux.table() if marker in linux.environ(proc.pid)]


@pytest.mark.thorough
def test_the_demo(tmp_path: Path) -> None:
    if why := sites.why_not():
        pytest.skip(why)
    demo = started(tmp_path)
    try:
        out, err = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.terminate()
    assert demo.returncode == 0, out + err
    rows = {
        (one["case"], one["metric"]): one["value"]
        for one in json.loads((tmp_path / "slurm.json").read_text())
    }
    assert set(rows) == {(case, metric) for case in CASES for metric in UNITS}
    for case in CASES:
        assert (rows[case, "iterations_lost"], rows[case, "loss_equal"]) == (0, 1)
    assert not leavings(tmp_path)


def test_ctrl_c_ends_slurm(tmp_path: Path) -> None:
    if why := sites.why_not():
        pytest.skip(why)
    demo = started(tmp_path)
    try:
        assert demo.stdout is not None
        assert "slurmctld" in demo.stdout.readline()
        assert "cluster.sbatch" in demo.stdout.readline()
        assert len(leavings(tmp_path)) >= len(("munged", "slurmctld", "n1", "n2", "n3"))
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.terminate()
    assert demo.returncode == 130, out + err
    assert "interrupted" in out
    assert not leavings(tmp_path)


def test_a_machine_without_slurm_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("sh", "id"):
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    demo = started(tmp_path, {"PATH": str(tmp_path / "bin")})
    out, err = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, out, len(err.splitlines())) == (2, "", 1), err
    assert "error: no Slurm here" in err

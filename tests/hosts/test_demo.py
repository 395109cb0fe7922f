"""`make demo-hosts`: a case of it, Ctrl-C, and a machine that cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import network_namespaces
import pytest
from hosts.demo import SYSTEM, UNITS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0


def started(path: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The demo, as the verb starts it."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            "hosts.demo",
            "--folder",
            str(path / "demo"),
            "--out",
            str(path / "hosts.json"),
            *words,
        ],
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/drivers", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def leavings(pid: int, path: Path) -> list[str]:
    """The namespaces and processes of a demo that are still there."""
    listed = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    left = [name for name in listed if name.startswith(f"unicron-d{pid}-")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if str(path).encode() in command:
            left.append(command.decode(errors="replace"))
    return left


@pytest.mark.thorough
def test_one_case_of_the_demo(tmp_path: Path) -> None:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    demo = started(tmp_path, "--cases", "agent_cut")
    try:
        out, err = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.terminate()
    assert demo.returncode == 0, out + err
    rows = {one["metric"]: one for one in json.loads((tmp_path / "hosts.json").read_text())}
    assert set(rows) == set(UNITS)
    assert all(
        (one["case"], one["system"], one["n"]) == ("agent_cut", SYSTEM, 1) for one in rows.values()
    )
    assert (rows["healthy_tasks_touched"]["value"], rows["loss_equal"]["value"]) == (0, 1)
    assert not leavings(demo.pid, tmp_path)


def test_ctrl_c_removes_all_hosts(tmp_path: Path) -> None:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    demo = started(tmp_path)
    try:
        assert demo.stdout is not None
        assert "hosts" in demo.stdout.readline()
        assert len(leavings(demo.pid, tmp_path)) > len(("switch", "c", "h1", "h2", "h3"))
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.terminate()
    assert demo.returncode == 130, out + err
    assert "interrupted" in out
    assert not leavings(demo.pid, tmp_path)


def test_a_machine_without_namespaces_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    demo = started(tmp_path, env={"PATH": str(tmp_path / "bin")})
    out, err = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, out, len(err.splitlines())) == (2, "", 1), err
    assert "no `ip`" in err


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    demo = started(tmp_path, "--cases", "agent_cut,flood")
    out, err = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, out) == (2, "")
    assert "no case flood" in err

"""The detection bench: faults strike at the reported time, and the rows are right."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import network_namespaces
import pytest
from bench.detection import faults, hangs, main
from bench.detection.faults import NotStruck, Trial
from bench.detection.layout_peers import NvrxLayout, TorchrunLayout
from rank_trace import InjectedFault, Trace

MS = 0.001


def test_a_rank_raises_when_asked_to(tmp_path: Path) -> None:
    """The rank raises after the time that `inside` returns, and is no longer held."""
    trace, raised_s = Trace(str(tmp_path), 1, 2, 1), list[float]()
    trace.note("start", 0, 0)

    def train() -> None:
        try:
            for iteration in range(10_000):
                trace.note("micro_batch", 1, iteration)
                time.sleep(MS)
        except InjectedFault:
            raised_s.append(time.time())

    rank = threading.Thread(target=train)
    rank.start()
    told_s = faults.inside(tmp_path, 1, 2, "exception")
    rank.join(30)
    assert raised_s
    assert told_s <= raised_s[0]
    assert not (tmp_path / "hold" / "1-2").exists()


def test_a_rank_that_does_not_train_is_not_struck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "HELD_S_MAX", 0.05)
    (tmp_path / "1-2.jsonl").touch()
    with pytest.raises(NotStruck, match="rank 2 did not begin"):
        faults.inside(tmp_path, 1, 2, "exception")
    assert not (tmp_path / "hold" / "1-2").exists(), "a later iteration would be struck"


def test_three_trials_without_a_detection_end_a_case() -> None:
    silent = Trial("rank_stopped", "torchrun", None, "nothing said")
    assert not faults.never([silent] * 2)
    assert faults.never([silent] * 3)
    assert not faults.never([silent] * 5 + [Trial("rank_stopped", "torchrun", 0.2)])


def test_rows_are_medians_of_the_trials() -> None:
    told = {
        "unicron": [Trial("rank_killed", "unicron", value) for value in (0.03, 0.02, 0.2)],
        "torchrun": [Trial("rank_killed", "torchrun", None, "nothing said")],
    }
    ours, theirs = main.rows_of("rank_killed", told)
    assert (ours.value, ours.low, ours.high, ours.n, ours.unit) == (0.03, 0.02, 0.2, 3, "s")
    assert (theirs.value, theirs.n, theirs.note) == (None, 0, "0 of 1 told: nothing said")
    assert main.held_to([ours, theirs]) == [
        "holds   rank_killed detect_s: 0.03, goal at most 0.1; the paper's: 1.8 s"
    ]


def hung(detect_s: float, named: float = 1.0, touched: float = 0.0) -> Trial:
    return Trial("hang_tp2dp2", "unicron", detect_s, "", 0.4, named, 0.0, touched)


def test_a_hang_is_held_to_three_iterations_and_to_naming_its_rank_alone() -> None:
    rows = main.rows_of("hang_tp2dp2", {"unicron": [hung(2.0), hung(2.5), hung(7.0)]})
    assert main.held_to(rows) == [
        "holds   hang_tp2dp2 detect_s: 2.5, goal at most 6.2",
        "holds   hang_tp2dp2 named: 1, goal 1",
        "holds   hang_tp2dp2 iterations_lost: 0, goal 0",
        "holds   hang_tp2dp2 healthy_touched: 0, goal 0",
    ]
    rows = main.rows_of("hang_tp2dp2", {"unicron": [hung(6.3), hung(6.3, 0.0, 1.0), hung(6.3)]})
    lines = main.held_to(rows)
    assert lines[0] == "BROKEN  hang_tp2dp2 detect_s: 6.3, goal at most 6.2"
    assert [line[:6] for line in lines] == ["BROKEN", "BROKEN", "holds ", "BROKEN"]


def test_a_hang_of_the_first_iteration_has_its_own_limit_beside_it() -> None:
    rows = main.rows_of(hangs.FIRST, {"unicron": [Trial(hangs.FIRST, "unicron", 10.4)]})
    assert [(one.metric, one.value) for one in rows] == [("detect_s", 10.4), ("limit_s", 5.0)]
    assert main.held_to(rows) == ["holds   hang_first_iteration detect_s: 10.4, goal at most 11"]


def test_torchrun_names_the_ranks_that_its_launchers_call_failed(tmp_path: Path) -> None:
    peer = TorchrunLayout(tmp_path / "peer", hangs.HANGS["hang_tp2pp2dp2"])
    for number, local in ((0, 2), (1, 1)):
        (peer.folder / f"torchrun-{number}.log").write_text(
            "Sending process 29216 closing signal SIGTERM\n"
            f"E1130 api.py:1002] failed (exitcode: 1) local_rank: {local} (pid: 29217) of binary\n"
        )
    assert peer.named() == {2, 5}
    assert peer.told_s() is not None


def test_nvrx_names_the_rank_whose_function_is_not_called_again(tmp_path: Path) -> None:
    peer = NvrxLayout(tmp_path / "peer", hangs.HANGS["hang_tp2dp2"])
    for rank in (0, 1, 2, 3):
        Trace(str(peer.watch.folder), 1, rank, 1).note("start", 0, 0)
    peer.begin(time.time())
    assert peer.told_s() is None
    assert peer.named() == {0, 1, 2, 3}
    for rank in (0, 2, 3):
        Trace(str(peer.watch.folder), 1, rank, 1).note("start", 1, 0)
    assert peer.named() == {1}
    assert peer.has_settled()


def test_a_cut_link_carries_nothing_until_it_is_mended() -> None:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with network_namespaces.namespaces(f"unicron-test-{os.getpid()}") as (near, far):

        def answers() -> bool:
            return (
                subprocess.run(
                    [
                        "ip",
                        "netns",
                        "exec",
                        near,
                        "python3",
                        "-c",
                        (
                            "import socket; s = socket.socket(); s.settimeout(0.5);\n"
                            "try: s.connect(('10.231.7.2', 9))\n"
                            "except ConnectionRefusedError: pass"
                        ),
                    ],  # a refusal is an answer
                    capture_output=True,
                    timeout=30,
                    check=False,
                ).returncode
                == 0
            )

        assert answers()
        network_namespaces.cut(far)
        assert not answers()
        network_namespaces.mend(far)
        assert any(answers() for _ in range(20))

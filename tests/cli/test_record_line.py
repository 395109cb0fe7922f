"""Lines of `tail` for exits and errors: the cause precedes the last printed line."""

from __future__ import annotations

from typing import Any

import pytest
from unicron.events.records.in_words import essentials, line

EXITED: dict[str, Any] = {
    "task": 1,
    "rank": 2,
    "attempt": 3,
    "pid": 4,
    "exit_code": 1,
    "signal": None,
    "tail": "Traceback\n  frame\nValueError: no batch\n",
}
WHO = "task 1 rank 2.3 pid 4"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"{WHO} exit code 1: ValueError: no batch"),  # a record of an older version
        ({"exit_code": 0}, f"{WHO} exit code 0"),
        (
            {"cause": "Connection refused", "status": "connection refused", "rule": "refused"},
            f"{WHO} exit code 1 (connection refused): Connection refused",
        ),
        (
            {
                "cause": "closed by peer",
                "status": "connection reset",
                "rule": "reset",
                "second_hand": True,
            },
            f"{WHO} exit code 1 (connection reset, second-hand): closed by peer",
        ),
        (
            {"exit_code": None, "signal": 9, "cause": "signal 9 (SIGKILL): killed from outside"},
            f"{WHO}: signal 9 (SIGKILL): killed from outside",
        ),
        ({"exit_code": None, "signal": 9}, f"{WHO} signal 9"),
    ],
)
def test_an_exit_is_described_with_its_cause(changes: dict[str, Any], line: str) -> None:
    assert essentials("RankExited", EXITED | changes) == line


def test_an_error_is_described_with_its_status() -> None:
    body = {
        "task": 1,
        "rank": 2,
        "attempt": 3,
        "iteration": 7,
        "error": "ValueError",
        "text": "a\nValueError: no batch\n",
        "status": "NCCL timeout",
        "rule": "timeout",
    }
    assert essentials("RankErrored", body) == (
        "task 1 rank 2.3 iteration 7: ValueError (collective timeout): ValueError: no batch"
    )
    failed = body | {"error": "closed by peer\nadvice", "status": "", "peer": ""}
    assert essentials("CollectiveFailed", failed) == "task 1 rank 2.3 iteration 7: closed by peer"


GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "error": GLOO + "Connection closed by peer [127.0.0.1]:1234",
                "peer": "127.0.0.1:1234",
            },
            "Connection closed by peer [127.0.0.1]:1234 (connection reset)",
        ),
        (
            {"error": GLOO + "Connection closed by peer [::1]:1234. advice", "peer": "[::1]:1234"},
            "Connection closed by peer [::1]:1234. advice (connection reset)",
        ),
        (
            {"error": GLOO + "Broken pipe\nadvice", "peer": "n2:1234"},
            "Broken pipe (connection reset), peer n2:1234",
        ),
        (
            {"error": "DistBackendError: [rank 3] reset", "peer": ""},
            "DistBackendError: [rank 3] reset (connection reset)",
        ),
    ],
)
def test_a_failed_collective_shows_the_librarys_message(
    changes: dict[str, Any], words: str
) -> None:
    body = {
        "task": 1,
        "rank": 3,
        "attempt": 1,
        "iteration": 12,
        "status": "connection reset",
        "rule": "connection-reset",
    }
    lines = essentials("CollectiveFailed", body | changes)
    assert lines == f"task 1 rank 3.1 iteration 12: {words}"


def test_progress_shows_the_digests_of_a_reproducible_task() -> None:
    body = {
        "task": 1,
        "first_iteration": 29,
        "losses": [2.0, 1.5],
        "step_s": [1.0, 1.0],
        "rate_flops": 2e9,
        "digests": {"30": "00ff"},
    }
    assert essentials("TaskProgressed", body).endswith(
        " loss 1.5000, 1.0 s each, 2 GFLOP/s, digest of 30 00ff"
    )


def test_a_record_of_a_newer_version_is_shown_with_all_its_fields() -> None:
    """Its fields may be others than those of the version that this code knows."""
    assert "first_iteration=3" in line(
        {
            "seq": 7,
            "at_s": 0.0,
            "kind": "TaskProgressed",
            "v": 99,
            "cause": 0,
            "body": {"first_iteration": 3, "losses": [1.5]},
        }
    )

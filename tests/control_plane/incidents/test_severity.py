"""Statuses of faults: the row of the severity table by error text, and the affected ranks."""

from __future__ import annotations

from pathlib import Path

import past_screens
import pytest
from decider import Driver, failed, spec, the
from two_tasks import facts, plain, seen
from unicron.cli.screens import cluster
from unicron.cli.screens.incident import page
from unicron.control_plane.history.history import history
from unicron.control_plane.incidents.lifecycle import open_incidents
from unicron.control_plane.incidents.severity import HANDLING, TABLE, exit_in_words, network_status
from unicron.control_plane.state.incident import Fault
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records.in_words import line
from unicron.events.records.statuses import OTHER_SOFTWARE, WRONG_INPUT

CLOSED = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41022"
)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (CLOSED, "connection reset"),
        ("RuntimeError: readv [::1]:34: Connection reset by peer", "connection reset"),
        ("RuntimeError: writev [::1]:34: Broken pipe", "connection reset"),
        ("DistNetworkError: connect() to [n1]:29: Connection refused", "connection refused"),
        ("RuntimeError: Timed out waiting 30000ms for recv operation", "NCCL timeout"),
        ("DistBackendError: Watchdog caught collective operation timeout", "NCCL timeout"),
        ("RuntimeError: unexpected size of a message", "other network errors"),
    ],
)
def test_a_failed_collective_has_the_status_of_its_text(text: str, status: str) -> None:
    assert network_status(text) == status
    assert TABLE[status] == "SEV3"


def test_a_known_cause_replaces_the_ranks_of_failed_collectives(d: Driver, task: int) -> None:
    for rank in (0, 1):
        failed(d, task, rank, CLOSED)
    opened = the(decisions.IncidentOpened, d.due(f"evidence/{task}/1"))
    assert (opened.status, opened.ranks) == ("connection reset", (0, 1))
    d.join("n2", incarnation=8)
    (known,) = d.state.incidents.values()
    assert (known.severity, known.ranks, known.node) == ("SEV2", [2, 3], "n2")
    for screen in (
        page(facts(d.log))[:1],
        past_screens.every(history(d.log), now_s=d.now_s),
        cluster.status(seen(d), cluster="test", now_s=d.now_s),
    ):
        assert any("ranks 2 3" in x for x in screen), screen
        assert not any("0-3" in x or "NCCL" in x for x in screen), screen


def test_a_cause_in_the_same_decision_replaces_the_ranks() -> None:
    d = Driver()  # the fixture would verify the log
    it = d.state.tasks[d.running()]
    it.faults = [
        Fault(
            ranks=(0, 1),
            node="n1",
            status="connection reset",
            why="a collective failed",
            evidence=(5,),
            at_s=d.now_s,
            hurts=True,
            ended=False,
        ),
        Fault(
            ranks=(3,),
            node="n2",
            status="exited abnormally",
            why="rank 3 on n2: signal 9",
            evidence=(6,),
            at_s=d.now_s,
            hurts=True,
            ended=True,
        ),
    ]
    (opened,) = open_incidents(d.state, it)
    assert isinstance(opened, decisions.IncidentOpened)
    assert (opened.severity, opened.status, opened.node, opened.ranks, opened.evidence) == (
        "SEV2",
        "exited abnormally",
        "n2",
        (3,),
        (5, 6),
    )


def test_a_timeout_is_shown_without_the_word_nccl(d: Driver, task: int) -> None:
    for rank in range(4):
        failed(d, task, rank, "RuntimeError: Timed out waiting 30000ms for recv operation")
    d.due(f"evidence/{task}/1")
    tail = [line(x) for x in plain(d) if x["kind"] == "IncidentOpened"]
    assert "SEV3 collective timeout, task" in tail[0]
    for screen in (
        page(facts(d.log)),
        past_screens.every(history(d.log), now_s=d.now_s),
        tail,
        cluster.status(seen(d), cluster="test", now_s=d.now_s),
    ):
        words = "\n".join(screen)
        assert "collective" in words
        assert "NCCL" not in words


def test_the_guide_has_the_table_of_handling() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/detection.md").read_text(encoding="utf-8")
    for severity, steps in HANDLING.items():
        assert f"| {severity} | {' | '.join(steps)} |" in guide


@pytest.mark.parametrize(
    ("signal", "code", "cause", "words"),
    [
        (None, 1, "KeyError: 'learning_rate'", "exit code 1: KeyError: 'learning_rate'"),
        (None, 1, "", "exit code 1"),
        (None, 0, "", "exit code 0 before it had finished"),
        (11, None, "", "signal 11"),
        (40, None, "no name", "signal 40: no name"),
        (11, None, "a libcuda frame", "signal 11 (SIGSEGV): a libcuda frame"),
        (
            9,
            None,
            "signal 9 (SIGKILL): killed from outside",
            "signal 9 (SIGKILL): killed from outside",
        ),
        (None, 1, "ValueError:\n " + "x" * 500, "exit code 1: ValueError: " + "x" * 105 + "..."),
    ],
)
def test_an_exit_is_described_with_its_cause(
    signal: int | None, code: int | None, cause: str, words: str
) -> None:
    assert (
        exit_in_words(
            r.RankExited(
                task=1, rank=0, attempt=1, pid=2, exit_code=code, signal=signal, cause=cause
            )
        )
        == words
    )


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("begun\nscratch disk of n1 is not mounted\n", ": scratch disk of n1 is not mounted"),
        ("2026-11-29 21:04:10 [info     ] begun", ""),
        ("[INFO] saved", ""),
        ('{"event": "saved"}', ""),
    ],
)
def test_without_a_known_cause_the_last_line_tells_it(tail: str, words: str) -> None:
    """Unless it is a line of a log."""
    for cause in ("", "exit code 4"):
        report = r.RankExited(
            task=1, rank=0, attempt=1, pid=2, exit_code=4, signal=None, cause=cause, tail=tail
        )
        assert exit_in_words(report) == f"exit code 4{words}"


def test_a_task_that_fails_repeatedly_shows_the_cause(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["train"], slots={"min": 1, "max": 1}))
    d.obey(d.log[-20:])
    for _ in range(5):
        rank = d.state.tasks[task].ranks[0]
        d.obey(
            d.tell(
                d.source(rank.slot.node),
                r.RankExited(
                    task=task,
                    rank=0,
                    attempt=rank.attempt,
                    pid=rank.pid,
                    exit_code=1,
                    signal=None,
                    status="other software errors",
                    cause="KeyError: 'learning_rate'",
                ),
            )
        )
    view = seen(d)
    (failed_,) = view["tasks"]
    assert failed_["why"] == (
        "failed 4 times without 10 new iterations in between, and before that on n1/0: "
        "rank 0 on n2: exit code 1: KeyError: 'learning_rate'"
    )
    page_ = " ".join(" ".join(cluster.status(view, cluster="test", now_s=d.now_s)).split())
    assert f"NEEDS YOU alpha failed: {failed_['why']}: unicron logs" in page_


def test_wrong_input_that_a_second_rank_meets_ends_the_task(d: Driver) -> None:
    task = d.running(spec())
    d.progress(task, 3)

    def fails(rank: int, status: str = WRONG_INPUT) -> None:
        process = d.state.tasks[task].ranks[rank]
        d.obey(
            d.tell(
                d.source(process.slot.node),
                r.RankExited(
                    task=task,
                    rank=rank,
                    attempt=process.attempt,
                    pid=process.pid,
                    exit_code=1,
                    signal=None,
                    status=status,
                    cause="UsageError: `sample(4, 1)` raised IndexError: 96",
                ),
            )
        )

    fails(1, OTHER_SOFTWARE)
    fails(1)
    fails(1)
    assert not d.state.tasks[task].outcome, "one rank's alone may be of its node"
    fails(0)
    ended = d.state.tasks[task]
    assert (ended.outcome, ended.suspects) == ("failed", {})
    assert ended.why == (
        "3 times the same (wrong input) at iteration 4, in whichever rank: rank 0 "
        "on n1: exit code 1: UsageError: `sample(4, 1)` raised "
        "IndexError: 96"
    )

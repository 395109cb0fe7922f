"""Output of commands that filter records, name ranks, or change the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from decider import Driver
from two_tasks import gives, plain, seen, train, two_tasks
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import logs, operate, tail
from unicron.cli.commands.request_outcome import Outcome, outcome_of, plan_lines
from unicron.control_plane.api.timeline_answer import past_of
from unicron.control_plane.history.history import history
from unicron.events.errors import UsageError
from unicron.events.records import reports as r

Plain = dict[str, Any]


class Told:
    """A control plane with two tasks, one of which lost a node."""

    def __init__(self) -> None:
        self.driver = gives()[0]
        self.log = plain(self.driver)

    def get(self, path: str, limit_s: float = 10.0, **query: object) -> Plain:
        if path == "/v1/log/beginning":
            return {"after": 0, "state": ""}
        if path.endswith("/curves"):
            task = int(path.split("/")[-2])
            return {**past_of(history(self.driver.log), task, self.driver.now_s), "first_seq": 1}
        return seen(self.driver)

    def records(self, after: int, *, follow: bool) -> Iterator[Plain]:
        return (record for record in self.log if record["seq"] > after)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    one = Told()
    for module in (tail, logs):
        monkeypatch.setattr(module, "connect_to_read", lambda state, url: one)
    return one


# --- tail ---------------------------------------------------------------------------------------
def ask(path: Path, after: int = 0, **wanted: Any) -> None:
    if "incident" in wanted:
        wanted["incident"] = f"inc-{wanted['incident']}"
    tail.tail(StateDir(path), None, after=after, **wanted)


def test_a_filter_without_any_match_names_valid_values(told: Told, tmp_path: Path) -> None:
    (opened,) = (record["seq"] for record in told.log if record["kind"] == "IncidentOpened")
    end = told.log[-1]["seq"]
    wrong: list[tuple[Plain, str, str]] = [
        ({"node": "n9"}, "no node 'n9'", "there is n1, n2, n3"),
        ({"incident": 0}, "no incident 0", f"the newest: inc-{opened}"),
        ({"incident": opened - 1}, f"no incident {opened - 1}", f"the newest: inc-{opened}"),
        ({"incident": 99_999}, "no incident 99999", f"the newest: inc-{opened}"),
        (
            {"after": end + 1},
            f"--after {end + 1} is beyond the log",
            f"its last record is {end}; -f waits for more",
        ),
    ]
    for options, error, hint in wrong:
        with pytest.raises(UsageError) as refused:
            ask(tmp_path, **options)
        assert (str(refused.value), refused.value.hint) == (error, hint)


def test_a_filter_with_matches(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (opened,) = (record["seq"] for record in told.log if record["kind"] == "IncidentOpened")
    ask(tmp_path, node="n2", incident=opened)
    assert "IncidentOpened" in capsys.readouterr().out
    ask(tmp_path, after=told.log[-1]["seq"])
    assert not capsys.readouterr().out, "there are no newer records"


# --- logs ---------------------------------------------------------------------------------------
def test_an_unknown_rank_gets_the_known_ranks_as_hint(told: Told, tmp_path: Path) -> None:
    for task, there in (("alpha", "there are ranks 0-3"), ("beta", "there are ranks 0 1")):
        with pytest.raises(UsageError) as refused:
            logs.logs(StateDir(tmp_path), None, task, 77, follow=False)
        assert str(refused.value) == f"rank 77 of task {task} has not started yet"
        assert refused.value.hint == there


# --- nodes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [operate.drain, operate.undrain, operate.lift])
@pytest.mark.parametrize(
    ("names", "error"),
    [("n1,n9", "no node 'n9'"), ("n1,", "no node ''"), ("x*", "no node has a name like 'x\\*'")],
)
def test_all_names_of_nodes_are_checked_before_the_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any, names: str, error: str
) -> None:
    client = mock.Mock(get=lambda path: seen(gives()[0]))
    monkeypatch.setattr(operate, "connect", lambda state, url: client)
    with pytest.raises(UsageError, match=error) as refused:
        command(StateDir(tmp_path), None, [names], "fans", as_json=False)
    assert refused.value.hint
    client.post.assert_not_called()


def test_several_nodes_are_drained_by_one_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    d, _, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    client = mock.Mock(
        get=lambda path: seen(d),
        records=lambda after, follow: iter(()),
        post=mock.Mock(return_value={"seq": 9}),
    )
    monkeypatch.setattr(operate, "connect", lambda state, url: client)
    operate.drain(StateDir(tmp_path), None, ["n1,n2"], "fans", as_json=False)
    client.post.assert_called_once_with("/v1/nodes/n1,n2/drain", {"reason": "fans"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "n1,n2  drained; alpha shall leave them (seq 9)"
    assert lines[-1].startswith("undo     unicron undrain n1,n2")


# --- plans --------------------------------------------------------------------------------------
def lines_after(d: Driver, ask: Callable[[], object]) -> list[str]:
    """The lines that a command prints about the plan after its request."""
    seq, before = len(d.log), seen(d)
    ask()
    log = plain(d)
    client = mock.Mock(
        records=lambda after, follow: [x for x in log if x["seq"] > after],
        get=lambda path, **query: seen(d),
    )
    return plan_lines(outcome_of(client, seq + 1), {**before, "tasks": seen(d)["tasks"]})


def test_a_waiting_task_shows_what_it_needs() -> None:
    d, _, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    told = lines_after(
        d, lambda: d.submit(train("gamma", 0.1, {2: 1e12}, slots={"min": 2, "max": 2}))
    )
    assert told[-2] == "         no task moves"
    assert told[-1].startswith("waits    gamma: ")
    assert "; needs more slots, or weight " in told[-1]
    assert not any(
        line.startswith("waits")
        for line in lines_after(
            d, lambda: d.tell("operator/x", r.TaskWeightSet(task=1, weight=2.0))
        )
    ), "gamma still waits"


def test_the_waf_of_a_new_plan_says_where_its_throughput_comes_from(d: Driver) -> None:
    one = {"min": 1, "max": 1}
    told = lines_after(d, lambda: d.submit(train("beta", 1.0, {}, slots=one)))
    assert told[0].endswith("FLOP/s, modelled")
    told = lines_after(d, lambda: d.submit(train("gamma", 1.0, {1: 1e12}, slots=one)))
    assert told[0].endswith("FLOP/s, declared and modelled")


def test_an_ending_task_does_not_count_as_earning_before(d: Driver) -> None:
    task = d.running(train("alpha", 1.0, {4: 1e12}))
    d.tell("operator/x", r.TaskCancelRequested(task=task, reason="a test"))
    told = lines_after(d, lambda: d.submit(train("beta", 1.0, {2: 3e11, 4: 5e11})))
    assert told[0].startswith("plan     "), told
    assert "WAF 0 FLOP/s -> " in told[0]


@pytest.mark.parametrize(
    ("waf", "told"),
    [
        (3e9, "3 GFLOP/s"),
        (4e9, "4 GFLOP/s"),
        (3.988e9, "3.99 GFLOP/s"),
        (3.996e9, "4 GFLOP/s, 0.1 % less"),
        (4.0008e9, "4 GFLOP/s, 0.02 % more"),
        (4e9 + 1, "4 GFLOP/s"),
    ],
)
def test_an_alternative_of_the_same_figure_shows_its_distance(waf: float, told: str) -> None:
    plan = {
        "waf": 4e9,
        "num_slots": 4,
        "allocations": [],
        "alternatives": [{"what": "keep as it is", "waf": waf}],
    }
    found = Outcome(seq=1, plan=plan, placed=[], waiting=[], withheld=[], orders=[])
    lines = plan_lines(found, {"plan": None, "tasks": []})
    assert lines[1] == f"rejected keep as it is: {told}"


def test_tasks_that_still_wait_are_listed_after_new_ones() -> None:
    d, _, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    d.submit(train("gamma", 0.1, {2: 1e12}, slots={"min": 2, "max": 2}))
    told = lines_after(
        d, lambda: d.submit(train("delta", 0.1, {2: 1e12}, slots={"min": 2, "max": 2}))
    )
    assert told[-2].startswith("waits    delta: ") or told[-3].startswith("waits    delta: ")
    assert told[-1] == "waits    as before: gamma"

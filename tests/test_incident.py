"""The page of an incident, and the screens around it, from logs of faults that the heart healed.

`UNICRON_SNAPSHOTS=write pytest tests/test_incident.py` writes the pages anew; read the difference.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from heart_driver import Driver, failed, spec
from test_screens import DATA, PLAIN, check
from unicron.cli import incident, screens
from unicron.cli import replay as command
from unicron.cli.history import History, history
from unicron.cli.screen_incident import bar, every, page
from unicron.cli.state_dir import StateDir
from unicron.cli.story import story
from unicron.control_plane.replay import replay
from unicron.control_plane.view import view
from unicron.events import archive
from unicron.events import orders as o
from unicron.events import reports as r
from unicron.events.codec import from_plain, to_plain
from unicron.events.errors import UsageError
from unicron.events.records import Record

Plain = dict[str, Any]


def carry_out(d: Driver, records: list[Record]) -> list[Record]:
    """Orders and what follows, as far as the processes that they name still live."""
    todo, done = list(records), list[Record]()
    while todo:
        record = todo.pop(0)
        try:
            new = d.do(record.body)
        except KeyError:
            new = []
        if isinstance(record.body, o.Resume):
            new = d.progress(record.body.task)
        done += new
        todo += new
    return done


def train(name: str, weight: float, throughput: dict[int, float], **changes: Any) -> Any:
    return spec(name=name, weight=weight, throughput=throughput, train={
        "iterations": 50, "output": f"/srv/{name}", "batch": {"global": 24, "micro": 2}}, **changes)


def two_tasks(beta: dict[int, float]) -> tuple[Driver, int, int]:
    """alpha on n1 and n2, beta on n3, both training."""
    d = Driver(nodes=3)
    first = d.submit(train("alpha", 2.0, {1: 1e12, 2: 1.9e12, 3: 2.6e12, 4: 2.7e12}))
    carry_out(d, d.log[-20:])
    second = d.submit(train("beta", 1.0, beta))
    carry_out(d, d.log[-20:])
    for task in (first, second):
        d.progress(task, 4)
    assert [len(task.target) for task in d.state.tasks.values()] == [4, 2]
    return d, first, second


def lose(d: Driver, node: str, task: int, *, silent_last: bool = False) -> None:
    """The node falls silent, and the task's collectives fail; either may be the second source."""
    survivors = [m.rank for m in d.state.tasks[task].members if m.node != node]
    told: list[Record] = []
    for silent in (False, True) if silent_last else (True, False):
        if silent:
            d.now_s += 6
            told += d.tell("leader/abc", r.NodeSilenced(
                node=node, incarnation=d.state.nodes[node].incarnation, silence_s=6.0))
        else:
            told += [record for rank in survivors for record in failed(d, task, rank)]
    carry_out(d, told)


@pytest.fixture(scope="module")
def gives() -> tuple[Driver, int, int]:
    """n2 is lost under alpha; beta, unhurt, gives one of its two slots and trains on."""
    d, alpha, beta = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha)
    assert [len(task.target) for task in d.state.tasks.values()] == [3, 1]
    return d, alpha, beta


@pytest.fixture(scope="module")
def waits() -> tuple[Driver, int, int]:
    """n2 is lost under alpha; beta, unhurt, gives all its slots and waits."""
    d, alpha, beta = two_tasks({2: 0.6e12})
    lose(d, "n2", alpha)
    return d, alpha, beta


def plain(d: Driver) -> list[Plain]:
    return [to_plain(record) for record in d.log]


def facts(records: list[Plain], which: str = "") -> Plain:
    told = history(records)
    one = incident.pick(told, which)
    assert one is not None
    state = replay(map(from_plain, records))
    return {**incident.facts_of(told, story(one, records), view(state)),
            "verify": f"unicron replay log.jsonl --until {one.closed_seq or told.seq} --verify"}


def seen(d: Driver) -> Plain:
    told = view(d.state)
    told["cluster"]["hash"] = "unicron-state-2:0123456789abcdef"
    return told


# --- the page -----------------------------------------------------------------------------------
def test_a_killed_rank() -> None:
    told = facts(PLAIN)
    check("incident-rank", page(told), columns_max=100)
    assert told["left"] == []
    assert [x["name"] for x in told["phases"]] == ["detect", "decide", "rebuild", "step", "full"]


def test_a_lost_node_and_the_task_that_gave_a_slot(gives: tuple[Driver, int, int]) -> None:
    d, _, _ = gives
    told = facts(plain(d))
    check("incident-node", page(told), columns_max=100)
    hurt, other = told["effects"]
    assert (hurt["task"], hurt["slots_before"], hurt["slots"]) == ("alpha", 4, 3)
    assert (other["task"], other["slots_before"], other["slots"]) == ("beta", 2, 1)
    assert other["iterations_lost"] == 0
    assert 0 < other["pause_s"] < 1
    assert told["left"] == ["n2 is lost: repair it and start its agent"]
    (plan,) = told["plans"]
    assert max(x["waf"] for x in plan["beaten"]) <= plan["waf"]


def test_a_silence_that_is_the_second_sign_is_counted_once() -> None:
    """A peer's collective fails at once, and the node is silent long enough while that is waited
    for: all of it is the decision's."""
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha, silent_last=True)
    told = facts(plain(d))
    assert "NodeSilenced" in [x["kind"] for x in told["evidence"]]
    assert [x["name"] for x in told["phases"]][:2] == ["detect", "decide"]
    spans = [(x["from_s"], x["from_s"] + x["length_s"]) for x in told["phases"]]
    assert all(after[0] == pytest.approx(before[1]) for before, after in pairwise(spans))


def test_the_story_ends_when_the_unhurt_task_steps_again(gives: tuple[Driver, int, int]) -> None:
    d, _, beta = gives
    records = plain(d)
    before = [x["seq"] for x in facts(records)["timeline"]]
    later = [{**records[-1], "seq": records[-1]["seq"] + n, "incident": 0,
              "kind": "TaskProgressed", "body": {**records[-1]["body"], "task": beta}}
             for n in range(1, 4)]
    told = history(records)
    one = incident.pick(told, "")
    assert one is not None
    assert [x["seq"] for x in story(one, [*records, *later]).records] == before


def test_what_the_unhurt_task_lost_is_told_from_its_own_records(
        gives: tuple[Driver, int, int]) -> None:
    """Its pause is from the first member that left to the order to train."""
    d, _, beta = gives
    plan = max(x.seq for x in d.log if isinstance(x.body, o.PlanChosen))
    own = [x for x in d.log if x.seq > plan and getattr(x.body, "task", 0) == beta]
    left = next(x.at_s for x in own if isinstance(x.body, r.Quiesced))
    again = next(x.at_s for x in own if isinstance(x.body, o.Resume))
    assert facts(plain(d))["effects"][1]["pause_s"] == pytest.approx(again - left)


def test_a_task_that_gave_all_its_slots_waits(waits: tuple[Driver, int, int]) -> None:
    d, _, _ = waits
    told = facts(plain(d))
    check("incident-waits", page(told), columns_max=100)
    assert told["effects"][1]["pause_s"] is None


def test_slots_that_did_not_step_are_counted_until_it_was_closed() -> None:
    d = Driver()
    task = d.running()
    told = d.exit(task, 2)  # 4 slots stop here
    struck_s = d.now_s
    d.obey(told, start=False)
    d.progress(task)  # 3 step
    stepped_s = d.now_s
    d.now_s += 10
    carry_out(d, [x for x in told if isinstance(x.body, o.StartRank)])
    (one,) = history(plain(d)).incidents.values()
    assert one.outcome == "healed"
    assert one.pause_s == pytest.approx(stepped_s - struck_s)
    at_one_less_s = next(x.at_s for x in d.log if isinstance(x.body, r.Quiesced)
                         and x.at_s > stepped_s) - stepped_s
    again_s = (one.closed_s or 0.0) - stepped_s - at_one_less_s
    assert one.slot_s == pytest.approx(
        4 * (stepped_s - struck_s) + at_one_less_s + 4 * again_s)


def test_a_collective_that_failed_before_the_evidence_is_part_of_it() -> None:
    """A survivor may tell of the broken connection before the agent has reaped the process."""
    d = Driver()
    task = d.running()
    told = failed(d, task, 0)
    sign = told[0]
    d.now_s += 0.5
    carry_out(d, d.exit(task, 2))
    page_ = facts(plain(d))
    assert page_["timeline"][0]["seq"] == sign.seq
    assert page_["timeline"][0]["after_s"] == pytest.approx(-0.52)
    (one,) = history(plain(d)).incidents.values()
    assert one.slot_s >= 4 * 0.52
    assert one.detected_s - one.fault_s == pytest.approx(0.52)


def test_one_that_got_worse_is_named_by_why() -> None:
    """A peer's collective failed first; then an agent that started again tells the cause."""
    d = Driver()
    task = d.running()
    failed(d, task, 0)
    d.now_s += 2.0
    d.tell("leader/abc", r.DeadlineReached(deadline=f"evidence/{task}/1"))
    node = d.state.nodes["n2"]
    d.tell("n2/8", r.NodeJoined(node="n2", incarnation=node.incarnation + 1, host=node.host,
                                num_slots=node.num_slots, pid=9, accelerator="cpu"))
    told = page(facts(plain(d)))[0]
    assert "SEV2 the agent of n2 started again  alpha" in told


def test_one_that_is_open_says_so() -> None:
    d = Driver()
    task = d.running()
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    d.exit(task, 2)
    told = facts(plain(d))
    check("incident-frozen", page(told), columns_max=100)
    assert told["left"] == ["healing is frozen: a change of switches: unicron unfreeze"]
    d.now_s += 8.0
    carry_out(d, d.tell("operator/unfreeze", r.HealingResumed(reason="done")))
    lengths = {x["name"]: x["length_s"] for x in facts(plain(d))["phases"]}
    assert lengths["held"] >= 8.0 > lengths["rebuild"]


def test_a_slot_that_was_taken_out_is_for_a_person() -> None:
    d = Driver()
    task = d.running()
    for _ in range(5):
        if 2 in d.state.tasks[task].ranks:
            carry_out(d, d.exit(task, 2))
    out = [node.slots_out for node in d.state.nodes.values()]
    assert out == [[], [0]]
    assert facts(plain(d))["left"] == [
        "slot 0 of n2 is out: repair it and start the node's agent again"]


def test_the_bar_is_in_proportion() -> None:
    (line,) = bar([{"name": "detect", "length_s": 0.1}, {"name": "step", "length_s": 0.2}])
    assert line == f"detect 100 ms {'█' * 10}▏step 200 ms {'█' * 20}"
    assert bar([]) == []


# --- the commands -------------------------------------------------------------------------------
@pytest.fixture
def exported(gives: tuple[Driver, int, int], tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    archive.write(path, gives[0].log, cluster="test", code="1")
    return path


def ask(path: Path, which: str, *, as_json: bool = False, verify: bool = False) -> None:
    command.replay(StateDir(path.parent), None, path, live=False, until=None, verify=verify,
                   step=False, as_json=as_json, incident=which)


def test_the_page_from_an_exported_log(exported: Path, capsys: Any) -> None:
    (number,) = [x["seq"] for x in plain_of(exported) if x["kind"] == "IncidentOpened"]
    ask(exported, f"inc-{number}")
    told = capsys.readouterr().out
    assert told.startswith(f"inc-{number}  HEALED  SEV1 lost connection  n2  alpha ranks 2 3")
    assert f"unicron replay {exported} --until " in told
    ask(exported, str(number), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["id"] == number
    assert data["phases"][0]["name"] == "silent"


def plain_of(path: Path) -> list[Plain]:
    return [to_plain(record) for record in archive.read(path)]


def test_one_that_is_not_there_names_the_newest(exported: Path) -> None:
    (number,) = history(plain_of(exported)).incidents
    with pytest.raises(UsageError, match="no incident '7'") as error:
        ask(exported, "7")
    assert error.value.hint == f"the newest: inc-{number}"
    with pytest.raises(UsageError, match="is not an incident"):
        ask(exported, "big")
    with pytest.raises(UsageError, match="neither"):
        ask(exported, "7", verify=True)


def test_a_log_without_incidents() -> None:
    assert incident.pick(History(), "") is None
    assert every(History()) == ["no incidents: nothing has failed so far"]
    with pytest.raises(UsageError, match="no incident '3'"):
        incident.pick(History(), "3")


def test_the_list(gives: tuple[Driver, int, int]) -> None:
    check("incident-all", every(history(plain(gives[0]))), columns_max=100)


# --- the screens after such faults --------------------------------------------------------------
def test_status_after_a_lost_node(gives: tuple[Driver, int, int]) -> None:
    d, alpha, _ = gives
    lines = screens.status(seen(d), cluster="test", now_s=d.now_s + 0.5)
    check("status-lost", lines, columns_max=100)
    assert lines[1].startswith("NEEDS YOU  n2 lost for")
    task = next(x for x in view(d.state)["tasks"] if x["id"] == alpha)
    check("task-shrunk", screens.task_status(view(d.state), task, history(plain(d)),
                                             now_s=d.now_s + 0.5))
    check("nodes-lost", screens.nodes(view(d.state), now_s=d.now_s + 0.5), columns_max=100)


def test_status_while_a_task_waits(waits: tuple[Driver, int, int]) -> None:
    d, _, beta = waits
    check("status-waits", screens.status(seen(d), cluster="test", now_s=d.now_s + 0.5),
          columns_max=100)
    task = next(x for x in view(d.state)["tasks"] if x["id"] == beta)
    check("task-waits", screens.task_status(view(d.state), task, history(plain(d)),
                                            now_s=d.now_s + 0.5))


def test_status_while_healing_is_held() -> None:
    d, alpha, _ = two_tasks({2: 2e12})
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    d.exit(alpha, 2)
    d.tell("operator/drain", r.NodeDrained(node="n3", reason="fans"))
    lines = screens.status(seen(d), cluster="test", now_s=d.now_s + 0.5)
    check("status-frozen", lines, columns_max=100)
    assert "unicron unfreeze" in " ".join(lines[1:3])
    d.tell("leader/abc", r.PolicySet(policy=r.Policy(observe=True)))
    lines = screens.status(seen(d), cluster="test", now_s=d.now_s)
    assert lines[1].startswith("NEEDS YOU  observing")


def test_drained_nodes_are_told_where_they_are_waited_for() -> None:
    d, _, _ = two_tasks({2: 2e12})
    carry_out(d, d.tell("operator/drain", r.NodeDrained(node="n3", reason="fans")))
    told = screens.status(seen(d), cluster="test", now_s=d.now_s)
    check("nodes-drained", screens.nodes(view(d.state), now_s=d.now_s), columns_max=100)
    waiting = any(task.phase == "idle" for task in d.state.tasks.values())
    assert any("n3 is drained (fans)" in line for line in told) == waiting
    d.submit(train("gamma", 0.01, {4: 1e9}, slots={"min": 4, "max": 4}))
    told = screens.status(seen(d), cluster="test", now_s=d.now_s)
    assert any("n3 is drained (fans), and a task waits: unicron undrain n3" in line
               for line in told)


# --- what is no news, and what is ---------------------------------------------------------------
def test_a_silent_task_is_told() -> None:
    d = Driver()
    task = d.running()
    one = view(d.state)["tasks"][0]
    assert screens.task_status(view(d.state), one, History(), now_s=d.now_s + 9.9)[1][:4] == "next"
    told = screens.task_status(view(d.state), one, History(), now_s=d.now_s + 75)
    assert told[1] == "silent     last progress 75 s ago, it trains no more or very slowly"
    (line,) = [x for x in screens.status(seen(d), cluster="test", now_s=d.now_s + 75)
               if x.startswith("NEEDS YOU")]
    assert line == ("NEEDS YOU  alpha: last progress 75 s ago, an iteration took 200 ms: "
                    "unicron logs alpha -f")
    d.tell(d.source("n1"), r.TaskProgressed(
        task=task, generation=1, first_iteration=1, losses=(2.0,), step_s=(60.0,), rate_flops=1e9,
        micro_batches=12))
    assert not [x for x in screens.status(seen(d), cluster="test", now_s=d.now_s + 150)
                if x.startswith("NEEDS YOU")], "it is slow, not silent"


def test_a_failure_is_news_for_a_day_or_until_a_later_task_of_the_name() -> None:
    d = Driver()
    task = d.submit(spec(train=None, command=["false"]))
    for _ in range(9):
        for rank in list(d.state.tasks[task].ranks):
            if rank in d.state.tasks[task].ranks:
                carry_out(d, d.exit(task, rank, code=1))
    assert d.state.tasks[task].outcome == "failed"

    def news(after_s: float) -> list[str]:
        lines = screens.status(seen(d), cluster="test", now_s=d.now_s + after_s)
        return [x for x in lines if x.startswith("NEEDS YOU  alpha failed")]

    assert news(3600)
    assert not news(25 * 3600)
    d.submit(spec())
    assert not news(1)


def test_the_running_span_counts_only_so_far() -> None:
    d = Driver()
    task = d.running()
    for _ in range(40):  # one iteration of 1 GFLOP every 100 s: 10 MFLOP/s
        d.now_s += 99.99
        d.progress(task)
    means = screens.earned(view(d.state), d.now_s)
    assert len(means) == 3
    assert means == pytest.approx([1e7] * 3, rel=0.15)


def test_origins_are_told_so_that_units_do_not_mix(gives: tuple[Driver, int, int]) -> None:
    (line,) = [x for x in screens.status(seen(gives[0]), cluster="test", now_s=gives[0].now_s)
               if x.startswith("plan")]
    assert line.endswith("declared: compares with plans only")
    assert DATA.is_dir()

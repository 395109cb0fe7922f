"""A person gives disabled slots back: they are used again, and what took them out is forgotten."""

from __future__ import annotations

import pytest
from decider import Driver, at_rest, kinds, only, spec, task_of
from device_errors import erred
from failing import out
from two_tasks import seen
from unicron.control_plane.api import requests
from unicron.control_plane.api.requests import Refusal
from unicron.events.records import reports, statuses
from unicron.events.records.codec import to_plain
from unicron.events.records.decisions import IncidentOpened
from unicron.events.records.envelope import Record
from unicron.events.records.in_words import line
from unicron.events.records.orders import StopRank

pytestmark = pytest.mark.nodes(3)
WIDE = {"min": 1, "max": 6}


def lift(d: Driver, name: str) -> list[Record]:
    return d.tell(
        f"operator/{len(d.log)}", requests.lift(d.state, requests.Reason("a new riser"), name)
    )


def refused(d: Driver, name: str) -> tuple[int, str, str]:
    with pytest.raises(Refusal) as found:
        requests.lift(d.state, requests.Reason(), name)
    return found.value.status, str(found.value), found.value.hint


def judged(d: Driver, node: str, *slots: int) -> list[Record]:
    """A device error that no rank has failed of, at its deadline."""
    return d.due(f"device/{node}/{erred(d, node, devices=slots)[0].seq}")


def fail(d: Driver, task: int, rank: int) -> None:
    """A rank fails on its slot until it is tried elsewhere, where it makes progress."""
    before = out(d)
    while not task_of(d, task).suspects:
        d.obey(d.exit(task, rank))
        d.progress(task)
    while out(d) == before:
        d.obey(d.progress(task))


def test_a_slot_of_a_rank_that_failed_repeatedly_is_used_again(d: Driver) -> None:
    beta = d.running(spec(name="beta", slots={"min": 1, "max": 1}))
    task = d.running(
        spec(
            slots={"min": 1, "max": 4},
            train={"iterations": 500, "output": "/tmp/o", "batch": {"global": 24, "micro": 2}},
        )
    )
    slot = max(task_of(d, task).ranks)
    place = task_of(d, task).ranks[slot].slot
    name = f"{place.node}/{place.index}"
    fail(d, task, slot)
    assert out(d) == [name]
    (told,) = [one for one in seen(d)["needs"] if one["what"] == "disabled"]
    assert f"`unicron lift {name}`" in told["do"]
    attempts = dict(task_of(d, beta).attempts)
    d.obey(lift(d, name))
    d.progress(task, 30)
    assert not out(d)
    assert not [one for one in seen(d)["needs"] if one["what"] == "disabled"]
    gamma = d.running(spec(name="gamma", slots={"min": 1, "max": 1}))
    assert task_of(d, gamma).seats_at == {0: place}
    assert task_of(d, beta).attempts == attempts, "another task on that node runs on"
    assert not d.state.nodes[place.node].node_faults
    for _ in range(d.state.policy.restarts_max):
        d.obey(d.exit(gamma, 0))
        d.progress(gamma)
    assert not out(d), "the failures before do not count"
    at_rest(d)


def test_a_device_error_that_was_judged_does_not_count_again(d: Driver) -> None:
    task = d.running(spec(slots=WIDE))
    d.obey(judged(d, "n3", 1))
    assert out(d) == ["n3/1"]
    d.obey(lift(d, "n3/1"))
    node = d.state.nodes["n3"]
    assert not out(d)
    assert not node.erred
    assert not node.node_faults
    d.progress(task)
    there = next(
        rank.rank
        for rank in task_of(d, task).ranks.values()
        if (rank.slot.node, rank.slot.index) == ("n3", 1)
    )
    d.obey(d.exit(task, there))
    assert not out(d), "it is within evidence_s_max of the old error, and is a new fault"
    d.progress(task)
    d.now_s += 600
    d.obey(judged(d, "n3", 1))
    assert out(d) == ["n3/1"], "a new error takes it out again"
    at_rest(d)


def test_an_error_while_it_was_out_does_not_take_it_out_at_once(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}))
    place = task_of(d, task).ranks[3].slot
    fail(d, task, 3)
    judged(d, place.node, place.index)
    d.obey(lift(d, f"{place.node}/{place.index}"))
    assert not out(d)
    before = len(only(IncidentOpened, d.log))
    d.obey(erred(d, place.node, devices=()))  # it has decisions about the node made
    assert not out(d)
    assert len(only(IncidentOpened, d.log)) == before
    at_rest(d)


def test_only_the_named_slot_returns(d: Driver) -> None:
    d.obey(judged(d, "n2", 0, 1))
    assert out(d) == ["n2/0", "n2/1"]
    d.obey(lift(d, "n2:1"))
    assert out(d) == ["n2/0"]
    (left,) = d.state.nodes["n2"].erred
    assert left.devices == (0,)
    d.obey(lift(d, "n2"))
    assert not out(d)
    assert not d.state.nodes["n2"].erred


def test_an_error_of_the_whole_node_is_forgotten_with_its_last_slot(d: Driver) -> None:
    d.running(spec(slots=WIDE))
    erred(d, "n3", devices=())
    other = erred(d, "n3", devices=(), origin="nvml", rule="nvml-lost", text="lost", code=0)
    d.obey(d.due(f"device/n3/{other[0].seq}"))
    assert out(d) == ["n3/0", "n3/1"]
    d.obey(lift(d, "n3/0"))
    assert d.state.nodes["n3"].erred
    d.obey(lift(d, "n3/1"))
    assert not d.state.nodes["n3"].erred
    assert not out(d)
    at_rest(d)


def test_a_failed_task_does_not_give_back_a_slot_that_failed_again(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}))
    place = task_of(d, task).ranks[3].slot
    name = f"{place.node}/{place.index}"
    fail(d, task, 3)
    d.obey(lift(d, name))
    d.obey(judged(d, place.node, place.index))
    assert out(d) == [name]
    d.obey(d.tell("operator/c", reports.TaskCancelRequested(task=task)))
    assert out(d) == [name], "its device has failed, whatever became of the task"


def test_a_quarantined_node_returns_whole_and_a_slot_of_it_alone_stays_unused(d: Driver) -> None:
    d.obey(judged(d, "n3", 0))
    d.now_s += 3600
    d.obey(judged(d, "n3", 1))
    assert d.state.nodes["n3"].quarantine
    task = d.running(spec(slots=WIDE))
    d.obey(lift(d, "n3/0"))
    assert d.state.nodes["n3"].quarantine, "one slot is no node"
    assert {rank.slot.node for rank in task_of(d, task).ranks.values()} == {"n1", "n2"}
    (record,) = only(reports.QuarantineLifted, lift(d, "n3"))
    d.obey(d.log[-8:])
    assert (record.body.slots, record.body.quarantine) == ((1,), True)
    assert line(to_plain(record)).endswith(
        "n3 is no longer quarantined, slot 1 of n3 given back: a new riser"
    )
    assert not out(d)
    d.progress(task)
    assert len(task_of(d, task).ranks) == 6
    assert "NodeQuarantined" not in kinds(judged(d, "n3", 0)), "the count starts again"


def test_what_cannot_be_given_back_is_refused_with_a_reason_and_a_hint(d: Driver) -> None:
    before = d.state.seq
    assert refused(d, "n1/9") == (404, "there is no slot n1/9", "there are n1/0, n1/1")
    assert refused(d, "n1/x")[:2] == (404, "there is no slot n1/x")
    assert refused(d, "n1/")[:2] == (404, "there is no slot n1/")
    assert refused(d, "n1/-1")[:2] == (404, "there is no slot n1/-1")
    assert refused(d, "n9/0") == (404, "there is no node 'n9'", "there are n1, n2, n3")
    assert refused(d, "n1/0") == (409, "n1/0 is not out", "unicron status nodes")
    assert refused(d, "n1")[:2] == (
        409,
        "node n1 is not quarantined, and no slot of it was taken out",
    )
    assert d.state.seq == before


def test_a_slot_that_a_check_reports_is_still_sick(d: Driver) -> None:
    d.obey(judged(d, "n2", 1))
    for health in ("unhealthy", "healthy"):
        d.obey(
            d.tell(
                "n2/1",
                reports.HealthChanged(
                    node="n2",
                    incarnation=1,
                    check="gpu/1",
                    health=health,
                    why="GPU is lost",
                    devices=(1,),
                    status=statuses.GPU_DRIVER_ERRORS,
                    rule="nvml-lost",
                ),
            )
        )
        for name in ("n2/1", "n2"):
            assert refused(d, name) == (
                409,
                "n2/1 is still sick: gpu/1: GPU is lost",
                "repair it; it is used again 60 s "
                "after its check says healthy, then unicron lift n2/1",
            )
    d.obey(d.due("recovered/n2"))
    d.obey(lift(d, "n2/1"))
    assert not out(d)


def test_a_slot_of_a_silent_node_waits_for_its_agent(d: Driver) -> None:
    d.obey(judged(d, "n2", 1))
    d.tell("leader/abc", reports.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    for name in ("n2/1", "n2"):
        assert refused(d, name)[:2] == (
            409,
            "node n2 is unreachable: n2/1 cannot be given back now",
        )


def test_a_slot_with_a_process_that_cannot_be_ended_stays_out(d: Driver) -> None:
    task = d.running(spec(slots=WIDE))
    rank = task_of(d, task).ranks[5]
    name = f"{rank.slot.node}/{rank.slot.index}"
    records = d.tell(
        d.source(rank.slot.node),
        reports.RankErrored(
            task=task, rank=5, attempt=1, generation=1, iteration=2, error="E", text="hangs"
        ),
    )
    while not out(d):
        d.obey([one for one in records if not isinstance(one.body, StopRank)])
        records = d.due(
            next(
                x
                for x in d.state.deadlines
                if x.startswith((f"error/{task}/5/", f"stop/{task}/5/"))
            )
        )
    d.obey([one for one in records if not isinstance(one.body, StopRank)])
    assert out(d) == [name]
    for words in (name, rank.slot.node):
        assert refused(d, words) == (
            409,
            f"{name} is still held by pid {rank.pid} of a rank that could not be ended",
            f"end it on {rank.slot.node} (kill -9 {rank.pid}), then unicron lift {name}",
        )
    d.obey(
        d.tell(
            d.source(rank.slot.node),
            reports.RankExited(
                task=task, rank=5, attempt=1, pid=rank.pid, exit_code=None, signal=9
            ),
        )
    )
    d.obey(lift(d, name))
    assert not out(d)


def test_a_record_of_before_means_the_quarantine(d: Driver) -> None:
    d.obey(judged(d, "n3", 0))
    d.obey(d.tell("operator/old", reports.QuarantineLifted(node="n3", reason="old")))
    assert out(d) == ["n3/0"]
    assert line(to_plain(d.log[-1])).endswith("n3 is no longer quarantined: old")

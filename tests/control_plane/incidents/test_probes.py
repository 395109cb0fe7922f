"""Probes: a silent node that no other host reaches is lost; nothing else follows from a probe."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, at_rest, kinds, only, spec, task_of, the
from hypothesis import given
from hypothesis import strategies as st
from unicron.control_plane.api.view import node_view
from unicron.control_plane.decide.speakers import foreign
from unicron.control_plane.incidents.probes import RECENTLY_S
from unicron.events.node_probe import PROBED_S_MAX
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record, Report
from unicron.events.records.types import Labels

TOUCHES = {"IncidentOpened", "StopRank", "Quiesce", "StartRank", "TaskPlaced", "PlanChosen"}


class Hosts(Driver):
    """Nodes on hosts of their own, each with a probe port that was reached when it joined."""

    def __init__(self, num: int = 4, racks: dict[str, str] | None = None) -> None:
        super().__init__(nodes=0)
        for number in range(1, num + 1):
            self.host(f"n{number}", (racks or {}).get(f"n{number}", ""))
        for name in list(self.state.nodes):
            if (probe := self.state.nodes[name].probe) is not None:
                self.answer(name, probe.probers[0], reached=True)

    def host(self, name: str, rack: str = "", **changes: Any) -> list[Record]:
        labels = Labels(rack=rack)
        return self.join(
            name, slots=1, host=f"{name}.host", probe_port=8430, labels=labels, **changes
        )

    def silent(self, name: str, silence_s: float = 5.2) -> list[Record]:
        node = self.state.nodes[name]
        return self.tell(
            f"leader/{self.state.nonce}",
            r.NodeUnreachable(node=name, incarnation=node.incarnation, silence_s=silence_s),
        )

    def heard(self, name: str) -> list[Record]:
        node = self.state.nodes[name]
        body = r.NodeReachable(node=name, incarnation=node.incarnation)
        return self.tell(f"leader/{self.state.nonce}", body)

    def answer(
        self, target: str, prober: str, *, reached: bool, order: int = 0, error: str = ""
    ) -> list[Record]:
        node = self.state.nodes[target]
        probe = node.probe
        body = r.NodeProbed(
            node=prober,
            incarnation=1,
            target=target,
            target_incarnation=node.incarnation,
            order=order or (probe.order if probe is not None else 1),
            epoch=probe.epoch if probe is not None else self.epoch,
            reached=reached,
            error=error,
        )
        return self.tell(self.source(prober), body)

    def answers(self, target: str, *, reached: tuple[bool, ...]) -> list[Record]:
        probe = self.state.nodes[target].probe
        assert probe is not None
        assert len(probe.probers) == len(reached), probe
        pairs = zip(probe.probers, reached, strict=True)
        return [one for name, is_ in pairs for one in self.answer(target, name, reached=is_)]


def trains(h: Hosts) -> int:
    task = h.running(spec(slots={"min": 1, "max": 4}))
    h.progress(task, 3)
    return task


def test_a_node_that_nobody_reaches_is_lost_in_the_middle_of_an_iteration() -> None:
    h = Hosts()
    task = trains(h)
    asked = the(o.ProbeNode, h.silent("n4"))
    assert (asked.node, asked.host, asked.port) == ("n4", "n4.host", 8430)
    assert set(asked.nodes) == {"n1", "n2", "n3"}
    begun_s = h.now_s
    told = h.answers("n4", reached=(False, False, False))
    lost = the(d.IncidentOpened, told)
    assert (lost.severity, lost.status, lost.node) == ("SEV1", "lost connection", "n4")
    assert lost.why == "node n4 is silent; neither n1, n2 nor n3 reaches it"
    assert [h.log[seq - 1].kind for seq in lost.evidence] == ["NodeUnreachable", "NodeProbed"]
    assert h.now_s - begun_s < PROBED_S_MAX
    assert h.state.nodes["n4"].health == "lost"
    h.obey(told)
    h.progress(task)
    assert len(task_of(h, task).members) == 3
    assert task_of(h, task).iterations_lost == 0
    at_rest(h)


@pytest.mark.parametrize("phase", ["quiescing", "reconfiguring"])
def test_a_node_is_lost_in_the_middle_of_a_transition(phase: str) -> None:
    """A power cut one iteration after a reconfiguration paused 62 s: no collective of that
    generation had told the time of an iteration yet."""
    h = Hosts()
    task = trains(h)
    h.tell("operator/drain", r.NodeDrained(node="n1"))
    if phase == "reconfiguring":
        for rank in task_of(h, task).living_members():
            h.quiesced(task, rank.rank)
    assert task_of(h, task).phase == phase
    h.silent("n4")
    told = h.answers("n4", reached=(False, False, False))
    assert the(d.IncidentOpened, told).node == "n4"
    assert h.state.nodes["n4"].health == "lost"


def test_one_who_reaches_it_is_enough_to_touch_nothing() -> None:
    h = Hosts()
    task = trains(h)
    h.silent("n4")
    told = [*h.answer("n4", "n1", reached=False), *h.answer("n4", "n2", reached=True)]
    assert not TOUCHES & set(kinds(told))
    assert h.state.nodes["n4"].reached_by == ("n2",)
    assert node_view(h.state, h.state.nodes["n4"])["reached_by"] == ["n2"]
    assert node_view(h.state, h.state.nodes["n3"])["reached_by"] == []
    assert not TOUCHES & set(kinds(h.answer("n4", "n3", reached=False))), "the probe is over"
    assert len(task_of(h, task).members) == 4
    again = the(o.ProbeNode, h.due("probe/n4"))
    assert again.node == "n4", "it may die later"
    assert h.state.nodes["n4"].health == "unreachable"
    told = h.answers("n4", reached=(False, False, False))
    assert the(d.IncidentOpened, told).node == "n4"


def test_the_pauses_between_probes_grow() -> None:
    h = Hosts()
    h.silent("n4")
    pauses: list[float] = []
    for _ in range(5):
        h.answers("n4", reached=(False, False, True)[: len(h.state.nodes["n4"].probe.probers)])  # type: ignore[union-attr]
        pauses.append(h.state.deadlines["probe/n4"].length_s)
        h.due("probe/n4")
    assert pauses == [1.0, 4.0, 16.0, 60.0, 60.0]


def test_a_node_that_is_heard_again_is_probed_no_more() -> None:
    h = Hosts()
    trains(h)
    h.silent("n4")
    probe = h.state.nodes["n4"].probe
    assert probe is not None
    assert not TOUCHES & set(kinds(h.heard("n4"))) - {"PlanChosen"}
    assert "probe/n4" not in h.state.deadlines
    for name in probe.probers:
        told = h.answer("n4", name, reached=False, order=probe.order)
        assert kinds(told) == []
    assert h.state.nodes["n4"].health == "healthy"


def test_answers_that_come_late_or_twice_do_not_count() -> None:
    h = Hosts()
    trains(h)
    h.silent("n4")
    for _ in range(2):
        assert kinds(h.answer("n4", "n1", reached=False)) == []
    h.now_s = h.state.deadlines["probe/n4"].due_s + 0.1  # the leader was stopped
    for name in ("n2", "n3"):
        assert kinds(h.answer("n4", name, reached=False)) == []
    assert kinds(h.due("probe/n4")) == []
    assert h.state.nodes["n4"].health == "unreachable"
    assert h.state.nodes["n4"].unreached_seq == 0
    assert "ProbeNode" in kinds(h.due("probe/n4"))


def test_two_who_do_not_reach_it_suffice_if_the_third_does_not_answer() -> None:
    h = Hosts()
    trains(h)
    h.silent("n4")
    for name in ("n1", "n3"):
        assert kinds(h.answer("n4", name, reached=False)) == []
    assert the(d.IncidentOpened, h.due("probe/n4")).why.endswith("neither n1 nor n3 reaches it")


def test_a_prober_that_cannot_probe_says_nothing_about_the_node() -> None:
    h = Hosts()
    trains(h)
    h.silent("n4")
    h.answer("n4", "n1", reached=False)
    for name in ("n2", "n3"):
        h.answer("n4", name, reached=False, error="more than 10 probes a second")
    assert "IncidentOpened" not in kinds(h.due("probe/n4"))


def test_only_who_was_asked_may_answer() -> None:
    h = Hosts(5)
    h.silent("n5")
    probe = h.state.nodes["n5"].probe
    assert probe is not None
    (other,) = {"n1", "n2", "n3", "n4"} - set(probe.probers)

    def body(node: str) -> Report:
        said = r.NodeProbed(
            node=node,
            incarnation=1,
            target="n5",
            target_incarnation=1,
            order=probe.order,
            epoch=probe.epoch,
        )
        return Report(source=f"{node}/1", source_seq=99, occurred_s=0.0, body=said)

    assert foreign(h.state, body(other)) == f"order {probe.order} is not to {other}"
    assert not foreign(h.state, body(probe.probers[0]))


def test_no_node_is_lost_by_probes_if_more_than_a_third_are_silent() -> None:
    """The control plane may be cut off. Who reaches a node is known nevertheless."""
    h = Hosts(5)
    trains(h)
    h.silent("n4")
    h.silent("n5")
    for name in ("n4", "n5"):
        told = h.answers(name, reached=(False, False, False))
        assert not TOUCHES & set(kinds(told))
        assert h.state.nodes[name].health == "unreachable"
    h.heard("n5")
    h.due("probe/n4")
    told = h.answers("n4", reached=(False, False, False))
    assert the(d.IncidentOpened, told).node == "n4"


def test_a_command_that_loses_a_node_recovers_when_its_processes_run_again() -> None:
    h = Hosts()
    task = h.submit(spec(slots={"min": 1, "max": 4}, train=None, command=["python", "x.py"]))
    h.obey(h.log[-20:])
    h.silent("n4")
    told = h.answers("n4", reached=(False, False, False))
    assert the(d.IncidentOpened, told).node == "n4"
    assert not only(d.IncidentRecovering, told), "the others end first, and start again"
    h.now_s += 3.0
    recovering = the(d.IncidentRecovering, h.obey(told))
    assert recovering.pause_s >= 3.0
    assert [rank.attempt for rank in task_of(h, task).ranks.values()] == [2, 2, 2]


def test_nodes_that_are_gone_are_not_silent_at_once() -> None:
    """Idle machines of a cloud go without a word, one by one, and do not come back."""
    h = Hosts(9)
    h.running(spec(slots={"min": 4, "max": 4}))
    idle = [name for name, node in h.state.nodes.items() if not node.occupants]
    for name in idle[:4]:
        h.silent(name)
        assert kinds(h.answers(name, reached=(False, False, False))) == []
        h.now_s += RECENTLY_S
    assert [name for name in idle if h.state.nodes[name].health == "unreachable"] == idle[:4]
    (victim, *_) = (name for name, node in h.state.nodes.items() if node.occupants)
    h.silent(victim)
    told = h.answers(victim, reached=(False, False, False))
    assert the(d.IncidentOpened, told).node == victim


def test_with_fewer_than_two_other_hosts_nobody_is_asked() -> None:
    h = Hosts(2)
    task = trains(h)
    assert kinds(h.silent("n2")) == []
    assert h.state.nodes["n2"].health == "unreachable"
    assert len(task_of(h, task).members) == 2
    one_host = Driver(nodes=0)
    for number in range(4):
        one_host.join(f"n{number}", probe_port=8430 + number)
    assert not only(o.ProbeNode, one_host.log)


def test_a_port_that_nobody_has_reached_tells_nothing() -> None:
    """A firewall drops what is sent there: so it would say of each silent node that it is lost."""
    h = Hosts(3)
    h.host("n4")
    probe = h.state.nodes["n4"].probe
    for _ in range(9):
        if probe is not None:
            h.answer("n4", probe.probers[0], reached=False)
        if "probe/n4" not in h.state.deadlines:
            break
        h.due("probe/n4")
        probe = h.state.nodes["n4"].probe
    assert h.state.nodes["n4"].num_probes == 5, "it is tried five times"
    trains(h)
    assert "ProbeNode" not in kinds(h.silent("n4"))


def test_a_suspect_is_probed_when_its_lease_has_ended() -> None:
    """Its peers suspect it after 1.2 s: a short cut must not take it out."""
    h = Hosts()
    assert kinds(h.silent("n4", silence_s=1.4)) == []
    assert h.state.deadlines["probe/n4"].length_s == pytest.approx(5.0 - 1.4)
    assert "ProbeNode" in kinds(h.due("probe/n4"))


def test_probers_are_of_other_hosts_and_of_other_racks_first() -> None:
    racks = {"n1": "a", "n2": "a", "n3": "b", "n4": "b", "n5": "c", "n6": "c", "n7": "d"}
    h = Hosts(7, racks)
    h.host("n8", rack="d", order_format=0)
    for name in ("n1", "n3", "n7"):
        asked = the(o.ProbeNode, h.silent(name))
        there = [h.state.nodes[one].labels.rack for one in asked.nodes]
        assert len(set(there)) == 3
        assert racks[name] not in there
        assert "n8" not in asked.nodes, "its agent does not know the order"
        h.heard(name)


def test_a_new_leader_asks_anew() -> None:
    """What was said while nobody led is old: the node may have come back."""
    h = Hosts()
    trains(h)
    h.silent("n4")
    probe = h.state.nodes["n4"].probe
    assert probe is not None
    h.epoch = 2
    h.tell("leader/def", r.EpochStarted(nonce="def", code="1", heart=26))
    for name in probe.probers:
        assert kinds(h.answer("n4", name, reached=False, order=probe.order)) == []
    assert h.state.nodes["n4"].health == "unreachable"
    assert h.state.deadlines["probe/n4"].length_s == h.state.policy.silence_s_max
    assert "ProbeNode" in kinds(h.due("probe/n4"))


def test_while_healing_is_paused_nobody_is_asked() -> None:
    h = Hosts()
    h.tell("operator/f", r.HealingFrozen(reason="maintenance"))
    assert kinds(h.silent("n4")) == []
    assert "ProbeNode" in kinds(h.tell("operator/g", r.HealingResumed()))


def test_a_restarted_agent_of_another_incarnation_is_not_vouched_for() -> None:
    h = Hosts()
    h.silent("n4")
    h.host("n4", incarnation=2)
    probe = h.state.nodes["n4"].probe
    assert probe is not None
    assert len(probe.probers) == 1, "it has joined anew, so it is tried whether it can be reached"


Answers = st.lists(
    st.tuples(
        st.sampled_from(["n1", "n2", "n3", "n4"]), st.booleans(), st.floats(0, 0.5), st.booleans()
    ),
    max_size=8,
)


@given(Answers)
def test_a_node_is_lost_only_if_two_of_the_asked_do_not_reach_it_and_nobody_does(
    said: list[tuple[str, bool, float, bool]],
) -> None:
    """Whatever is answered, by whom, when and how often. The reporters' clocks do not matter."""
    h = Hosts(5)
    trains(h)
    h.silent("n5")
    probe, due_s = h.state.nodes["n5"].probe, h.state.deadlines["probe/n5"].due_s
    assert probe is not None
    first: dict[str, bool] = {}
    is_over = False
    for name, reached, pause_s, is_old in said:
        h.now_s += pause_s
        counts = name in probe.probers and not is_old and h.now_s + 0.01 <= due_s
        if counts and not is_over:
            first.setdefault(name, reached)
        order = 1 if is_old else probe.order
        h.answer("n5", name, reached=reached, order=order)
        is_over = is_over or any(first.values()) or len(first) == 3
    if "probe/n5" in h.state.deadlines and h.state.nodes["n5"].probe is not None:
        h.due("probe/n5")
    is_lost = h.state.nodes["n5"].health == "lost"
    assert is_lost == (len(first) >= 2 and not any(first.values()))

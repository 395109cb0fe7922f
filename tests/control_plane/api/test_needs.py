"""What needs a person, and incidents that a person has acknowledged."""

from __future__ import annotations

import pytest
from decider import Driver, spec
from two_tasks import lose, two_tasks
from unicron.cli.screens import cluster
from unicron.control_plane.api import needs, requests
from unicron.control_plane.api.needs import AWAY_S_MIN, INCIDENT_S_MIN
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.api.view import view
from unicron.events.records import reports as r
from unicron.events.words import rfc3339


def found(d: Driver, after_s: float = 0.0) -> list[needs.Need]:
    """Without tasks that are silent: the driver's clock moves, and nobody reports progress."""
    return [one for one in needs.needs(view(d.state), d.now_s + after_s) if one.what != "silent"]


def acknowledge(d: Driver, incident: int, reason: str = "a fan") -> None:
    body = requests.acknowledge(d.state, requests.Reason(reason), str(incident))
    assert isinstance(body, r.IncidentAcknowledged)
    d.tell(
        f"operator/ack{incident}",
        r.IncidentAcknowledged(of=body.of, reason=body.reason, who="ana", role="operate"),
    )


def test_a_lost_node_needs_nobody_while_its_agent_may_be_started_again() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha)
    node = d.state.nodes["n2"]
    assert found(d, node.since_s - d.now_s + AWAY_S_MIN - 0.1) == []
    (one,) = found(d, node.since_s - d.now_s + AWAY_S_MIN)
    (incident,) = d.state.incidents
    assert (one.what, one.node, one.incident, one.since_s) == ("lost", "n2", incident, node.since_s)
    d.join("n2", incarnation=2)
    assert found(d, 60) == []


def test_a_task_that_is_only_on_a_silent_node_says_when_it_moves() -> None:
    d, _, beta = two_tasks({1: 1.5e12, 2: 2.4e12})
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node="n3", incarnation=1, silence_s=5.0))
    (one,) = found(d, AWAY_S_MIN)
    moved = rfc3339(d.state.deadlines["replace/n3"].due_s)[11:19]
    assert f"beta: moved at {moved}Z, or now if its machine is off: `unicron drain n3 --down`" in (
        one.do
    )
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    assert "alpha" not in "".join(one.do for one in found(d, AWAY_S_MIN)), "it has peers elsewhere"
    assert d.state.tasks[beta].phase == "training"


def test_slurm_ends_a_drain_of_slurm() -> None:
    assert needs.undrain({"id": "n3", "drain_reason": "a fan"}) == "`unicron undrain n3`"
    assert needs.undrain({"id": "n3", "drain_reason": "slurm: drained, a fan"}) == (
        "scontrol update NodeName=n3 State=RESUME"
    )


def test_an_acknowledged_incident_needs_nobody_and_its_page_says_who_knows() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha)
    (incident,) = d.state.incidents
    assert [one.what for one in found(d, 60)] == ["lost"]
    acknowledge(d, incident)
    assert found(d, 60) == []
    lines = cluster.status(view(d.state), cluster="c", now_s=d.now_s)
    assert "acknowledged by ana: a fan" in " ".join(" ".join(lines).split())
    with pytest.raises(Refusal, match="is acknowledged by ana: a fan") as refused:
        acknowledge(d, incident)
    assert refused.value.status == 409


@pytest.mark.parametrize("name", ["7", "x", "-1", "9" * 40, "inc-3"])
def test_an_unknown_incident_cannot_be_acknowledged(d: Driver, name: str) -> None:
    with pytest.raises(Refusal, match="there is no incident") as refused:
        requests.acknowledge(d.state, requests.Reason(), name)
    assert refused.value.status == 404


def test_an_incident_that_stays_open_needs_a_person(d: Driver) -> None:
    task = d.running(spec(slots={"min": 4, "max": 4}))
    d.exit(task, 2)
    (incident,) = d.state.incidents
    assert "incident" not in [one.what for one in found(d, INCIDENT_S_MIN)]
    (one,) = [one for one in found(d, INCIDENT_S_MIN + 1) if one.what == "incident"]
    assert one.incident == incident
    assert one.do == f"`unicron incident {incident}`"
    assert one.why.startswith(f"inc-{incident} SEV2 alpha is open for 5 min")
    acknowledge(d, incident)
    assert "incident" not in [one.what for one in found(d, INCIDENT_S_MIN + 1)]

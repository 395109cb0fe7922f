"""The facts of an incident over HTTP are those that `unicron incident` prints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_site import JOB, Site, real
from unicron.control_plane.api import incident_facts, messages, what_if
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.replay import replay
from unicron.control_plane.history.history import history
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.events.log import archive
from unicron.events.records.reports import NodeJoined

DEMO = Path(__file__).parents[2] / "data" / "demo.jsonl"
RECORDS = list(archive.read(DEMO))
INCIDENT = 33


def facts(until: int = len(RECORDS)) -> Any:
    records = RECORDS[:until]
    shown = replay(records)
    return incident_facts.facts_at(INCIDENT, records, encode_state(ClusterState()), shown,
                                   shown.at_s)


def test_they_are_those_of_the_terminal() -> None:
    past, shown = history(RECORDS), replay(RECORDS)
    wanted = incident_facts.facts_of(
        past, incident_records(past.incidents[INCIDENT], RECORDS),
        view(shown, now_s=shown.at_s), now_s=shown.at_s)
    found = facts()
    assert {**wanted, "verify": found["verify"]} == found
    assert found["verify"] == "unicron replay --live --until 67 --verify"


def test_the_openapi_document_names_each_of_them() -> None:
    found = msgspec.to_builtins(facts())
    for kind, data in ((messages.IncidentFacts, found), (messages.Cost, found["cost"]),
                       (messages.Event, found["timeline"][0]), (messages.Phase, found["phases"][0]),
                       (messages.Effect, found["effects"][0]),
                       (messages.Decided, found["decisions"][0])):
        assert set(data) == set(kind.__annotations__) - (
            {"later"} if kind is messages.Event else set()), kind
        msgspec.convert(data, kind)


def test_at_a_past_moment_it_is_as_it_was_then() -> None:
    then = facts(until=40)
    assert (then["outcome"], then["closed_s"], then["seq"]) == ("open", None, 40)
    assert [one["seq"] for one in then["timeline"]] == list(range(32, 41))
    with pytest.raises(Refusal, match="no incident 33"):
        facts(until=32)


@real
async def test_what_is_no_incident_is_refused(site: Site) -> None:
    assert "no incident 9" in await site.refused(404, "GET", "/v1/incidents/9/facts")
    await site.refused(400, "GET", "/v1/incidents/x/facts")


# --- what if -------------------------------------------------------------------------------------
async def answered(site: Site) -> Any:
    async with asyncio.timeout(what_if.LIMIT_S):
        while (answer := (await site.ask("GET", "/v1/what-if"))[1])["state"] in (
                "reading", "simulating"):
            await asyncio.sleep(0.05)
    return answer


@real
async def test_a_log_without_training_has_no_answer(site: Site) -> None:
    assert (await site.ask("GET", "/v1/what-if"))[1]["state"] == "none"
    await site.tell(NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=2))
    await site.ask("POST", "/v1/tasks", JOB)
    status, begun = await site.ask("POST", "/v1/what-if", {"policies": ["megatron"]})
    assert (status, begun["state"]) == (200, "reading")
    await site.refused(409, "POST", "/v1/what-if", {})
    answer = await answered(site)
    assert answer["state"] == "failed"
    assert "no task ever trained" in answer["why"]
    assert answer["read_seq"] == answer["last_seq"] > 1
    await site.refused(400, "POST", "/v1/what-if", {"policies": ["megatron"] * 9})
    assert (await site.ask("POST", "/v1/what-if", {"policies": ["nobody"]}))[0] == 200
    assert "nobody is no policy" in (await answered(site))["why"]

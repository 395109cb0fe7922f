"""The facts of an incident over HTTP are those that `unicron incident` prints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_site import JOB, Site, real
from msgspec.structs import replace
from unicron.control_plane.api import incident_facts, messages, what_if
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.replay import replay
from unicron.control_plane.history.history import history
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.events.log import archive
from unicron.events.records.decisions import IncidentClosed
from unicron.events.records.reports import NodeJoined

DEMO = Path(__file__).parents[2] / "data" / "demo.jsonl"
RECORDS = list(archive.read(DEMO))
INCIDENT = 33


def facts(until: int = len(RECORDS)) -> Any:
    records = RECORDS[:until]
    shown = replay(records)
    return read(records, shown).facts("", shown.at_s)


def read(rest: list[Any], shown: ClusterState, num_page: int = 25) -> incident_facts.Reading:
    """Read the records as the control plane does: only what may be missing."""
    reading = incident_facts.Reading(INCIDENT, encode_state(ClusterState()), shown)
    while num := min(reading.num_missing, num_page):
        reading.add(rest[:num])
        rest = rest[num:]
    return reading


def test_they_are_those_of_the_terminal() -> None:
    past, shown = history(RECORDS), replay(RECORDS)
    wanted = incident_facts.facts_of(
        past,
        incident_records(past.incidents[INCIDENT], RECORDS),
        view(shown, now_s=shown.at_s),
        now_s=shown.at_s,
    )
    found = facts()
    assert {**wanted, "verify": found["verify"]} == found
    assert found["verify"] == "unicron replay --live --until 67 --verify"


def test_the_openapi_document_names_each_of_them() -> None:
    found = msgspec.to_builtins(facts())
    for kind, data in (
        (messages.IncidentFacts, found),
        (messages.Cost, found["cost"]),
        (messages.Event, found["timeline"][0]),
        (messages.Phase, found["phases"][0]),
        (messages.Effect, found["effects"][0]),
        (messages.Decided, found["decisions"][0]),
    ):
        assert set(data) == set(kind.__annotations__) - (
            {"later"} if kind is messages.Event else set()
        ), kind
        msgspec.convert(data, kind)


def test_at_a_past_moment_it_is_as_it_was_then() -> None:
    then = facts(until=40)
    assert (then["outcome"], then["closed_s"], then["seq"]) == ("open", None, 40)
    assert [one["seq"] for one in then["timeline"]] == list(range(32, 41))
    with pytest.raises(Refusal, match="no incident 33"):
        facts(until=32)


def test_a_longer_log_is_not_read_for_it() -> None:
    """What is behind its end is read until late evidence is unlikely, however much there is."""
    (closed,) = (one for one in RECORDS if isinstance(one.body, IncidentClosed))
    long = [
        *RECORDS,
        *(replace(RECORDS[-1], seq=RECORDS[-1].seq + number) for number in range(1, 4_000)),
    ]
    state = replay(RECORDS)
    state.seq = long[-1].seq
    reading = read(long, state)
    assert closed.seq + incident_facts.LATE_RECORDS_NUM <= reading.last
    assert reading.last < closed.seq + incident_facts.LATE_RECORDS_NUM + 25
    told = reading.facts(" --state /s", state.at_s)
    assert told["seq"] == long[-1].seq
    assert {key: told[key] for key in ("timeline", "evidence", "plans", "effects", "phases")} == {
        key: facts()[key] for key in ("timeline", "evidence", "plans", "effects", "phases")
    }
    assert told["verify"] == f"unicron replay --live --state /s --until {closed.seq} --verify"


def test_nothing_behind_a_record_that_is_no_incident_is_read() -> None:
    reading = incident_facts.Reading(3, encode_state(ClusterState()), replay(RECORDS))
    reading.add(RECORDS[:4])
    assert reading.num_missing == 0
    with pytest.raises(Refusal, match="no incident 3") as refused:
        reading.facts("", 0.0)
    assert refused.value.hint == f"the newest: inc-{INCIDENT}"
    with pytest.raises(Refusal, match="began before the log, which was pruned"):
        incident_facts.begin(3, first_seq=9)


@real
async def test_what_is_no_incident_is_refused(site: Site) -> None:
    assert "no incident 9" in await site.refused(404, "GET", "/v1/incidents/9/facts")
    await site.refused(400, "GET", "/v1/incidents/x/facts")


# --- what if -------------------------------------------------------------------------------------
async def answered(site: Site) -> Any:
    async with asyncio.timeout(what_if.LIMIT_S):
        while (answer := (await site.ask("GET", "/v1/what-if"))[1])["state"] in (
            "reading",
            "simulating",
        ):
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

"""The OpenAPI document against what the API answers, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from http_site import JOB, Site, real
from unicron.cli.cluster.client import Client, Refused
from unicron.control_plane.api import openapi
from unicron.control_plane.api.dry_run import explain_present_plan
from unicron.control_plane.api.routes import ROUTES
from unicron.control_plane.api.view import view
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.events.log import archive
from unicron.events.records import codec
from unicron.events.records.reports import NodeJoined

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT: dict[str, Any] = json.loads(openapi.document(ROUTES))
LOGS = [ROOT / "tests/data/demo.jsonl", *sorted((ROOT / "tests/golden").glob("heart-2*.jsonl"))]


def strict(name: str) -> jsonschema.Draft202012Validator:
    """A validator of one schema of the document that refuses fields that are not in it."""
    schemas = {
        key: one | ({"additionalProperties": False} if "properties" in one else {})
        for key, one in DOCUMENT["components"]["schemas"].items()
    }
    schemas["PlanChosen"] = schemas["PlanChosen"] | {"additionalProperties": True}
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    )


def of_api(shown: dict[str, Any]) -> Any:
    """The view as GET /v1/state answers it."""
    shown["cluster"] |= {
        "id": "",
        "name": "",
        "follows": "",
        "followers": [],
        "insecure": False,
        "dead_letters": 0,
        "old_agents": [],
        "ca": "",
    }
    return json.loads(msgspec.json.encode(shown))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_views_records_and_plans_have_the_fields_of_the_document(path: Path) -> None:
    state, of_view, of_record = ClusterState(), strict("View"), strict("LogRecord")
    of_plan = strict("DryRunResult")
    for number, record in enumerate(archive.read(path)):
        of_record.validate(json.loads(msgspec.json.encode(codec.to_plain(record))))
        fold(state, record)
        if number % 25 == 0:
            of_view.validate(of_api(view(state)))
            of_plan.validate(
                json.loads(msgspec.json.encode(explain_present_plan(encode_state(state))))
            )
    assert state.tasks
    with pytest.raises(jsonschema.ValidationError, match="news"):
        of_view.validate(of_api(view(state)) | {"news": 1})


def test_every_schema_is_one() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(DOCUMENT)
    for name in ("TaskView", "Incident", "JobSpec", "IncidentOpened", "Problem"):
        assert f'"#/components/schemas/{name}"' in text
    ids = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(set(ids)) == len(ids) == len(ROUTES)


@real
async def test_the_document_is_answered(site: Site) -> None:
    assert (await site.ask("GET", "/v1/openapi.json"))[1] == DOCUMENT
    await site.refused(401, "GET", "/v1/openapi.json", Authorization="")


# --- refusals ------------------------------------------------------------------------------------
@real
async def test_what_is_wrong_with_a_request_is_a_problem(site: Site) -> None:
    for status, method, path in (
        (404, "GET", "/v1/none"),
        (404, "GET", "/assets/none.js"),
        (405, "DELETE", "/v1/tasks"),
        (405, "POST", "/v1/state"),
        (400, "GET", "/v1/state?att=1"),
        (400, "GET", "/v1/state?explain=2"),
        (400, "GET", "/v1/state?at=yesterday"),
        (404, "GET", "/v1/state?at=99"),
        (404, "GET", "/v1/plan?at=2999-01-01T00:00:00Z"),
        (404, "GET", "/v1/tasks?at=1999-01-01"),
        (404, "GET", "/v1/nodes/none"),
        (400, "GET", "/v1/tasks/x"),
        (404, "GET", "/v1/tasks/7"),
        (400, "GET", "/v1/tasks?limit=0"),
        (400, "GET", "/v1/tasks?cursor=x"),
        (400, "GET", "/v1/incidents?cursor=1.5"),
        (400, "GET", "/v1/nodes?cursor=" + "x" * 99),
        (400, "GET", "/v1/log?after=1e30"),
        (400, "POST", "/v1/handover?epoch=x"),
    ):
        await site.refused(status, method, path)
    async with site.client.delete(
        site.url + "/v1/tasks", headers={"Authorization": "Bearer secret"}
    ) as reply:
        assert reply.headers["Allow"] == "GET,HEAD,POST"
        assert json.loads(await reply.read())["title"] == "Method Not Allowed"
    await site.refused(413, "POST", "/v1/plan/dry-run", b" " * (2 << 20))
    assert site.coordinator.seq == 2


# --- pages and moments ---------------------------------------------------------------------------
@real
async def test_lists_are_paged(site: Site) -> None:
    for number in range(5):
        await site.tell(NodeJoined(node=f"n{number}", incarnation=9, host="h", pid=1, num_slots=1))
        await site.ask(
            "POST",
            "/v1/tasks",
            {**JOB, "name": f"j{number}", "train": {"iterations": 3, "output": f"/o{number}"}},
        )
    _, state = await site.ask("GET", "/v1/state")
    for part in ("nodes", "tasks"):
        found, cursor, sizes = [], "", []
        while True:
            _, page = await site.ask("GET", f"/v1/{part}?limit=2&cursor={cursor}")
            found += page["items"]
            sizes.append(len(page["items"]))
            if not (cursor := page["next"]):
                break
        assert (found, sizes) == (state[part], [2, 2, 1])
        one = state[part][1]
        assert await site.ask("GET", f"/v1/{part}/{one['id']}") == (200, one)
        items = Client(site.url, "secret").items(part)
        assert await asyncio.to_thread(list, items) == state[part]
    assert await site.ask("GET", "/v1/incidents") == (200, {"items": [], "next": ""})
    assert (await site.ask("GET", "/v1/tasks?cursor=999999"))[1]["items"] == []
    first = state["tasks"][0]["id"]
    for at, num in ((first - 1, 0), (first, 1)):
        assert len((await site.ask("GET", f"/v1/tasks?at={at}"))[1]["items"]) == num
    assert (await site.ask("GET", f"/v1/tasks/{first}?at={first}"))[1]["state"] == "waiting"
    await site.refused(404, "GET", f"/v1/tasks/{first}?at={first - 1}")
    for number in range(3):
        site.tokens.create(f"t{number}", "view", 0.0)
    _, page = await site.ask("GET", "/v1/tokens?limit=2&cursor=owner")
    assert ([one["name"] for one in page["items"]], page["next"]) == (["t0", "t1"], "t1")


@real
async def test_older_ended_tasks_are_left_out_and_found(site: Site) -> None:
    await site.tell(NodeJoined(node="n0", incarnation=9, host="h", pid=1, num_slots=1))
    ids = [
        (
            await site.ask(
                "POST",
                "/v1/tasks",
                {**JOB, "name": f"j{number}", "train": {"iterations": 3, "output": f"/o{number}"}},
            )
        )[1]["task"]
        for number in range(4)
    ]
    for task in ids[1:3]:
        await site.ask("POST", f"/v1/tasks/{task}/cancel", {"reason": "not needed"})
    for ended, names in (
        ("", "0123"),
        ("?ended=2", "0123"),
        ("?ended=1", "023"),
        ("?ended=0", "03"),
    ):
        _, state = await site.ask("GET", f"/v1/state{ended}")
        assert [one["name"] for one in state["tasks"]] == [f"j{number}" for number in names]
        assert state["cluster"]["num_tasks"] == 4
    for words, names in (("J1", "1"), ("cancelled j", "12"), (str(ids[3]), "3"), ("j1+j2", "")):
        _, page = await site.ask("GET", f"/v1/tasks?find={words}")
        assert [one["name"] for one in page["items"]] == [f"j{number}" for number in names], words
    headers = {"Authorization": "Bearer secret"}
    async with site.client.get(site.url + "/v1/log?requests=1&newest=2", headers=headers) as reply:
        last = [json.loads(line) async for line in reply.content]
    assert [one["body"]["task"] for one in last] == ids[1:3]


# --- streams -------------------------------------------------------------------------------------
async def event(reply: Any) -> dict[str, str]:
    """The next server-sent event; a comment has the field ""."""
    found: dict[str, str] = {}
    while line := (await reply.content.readline()).decode().rstrip("\n"):
        name, _, value = line.partition(":")
        found[name] = value.strip()
    return found


@real
async def test_the_log_is_a_stream_of_events(site: Site) -> None:
    site.coordinator._limits = msgspec.structs.replace(site.coordinator._limits, idle_s=0.1)
    headers = {"Authorization": "Bearer secret", "Accept": "text/event-stream"}
    url = site.url + "/v1/log"
    async with asyncio.timeout(60), site.client.get(url, headers=headers) as reply:
        assert reply.content_type == "text/event-stream"
        for seq in (1, 2):
            found = await event(reply)
            assert found["id"] == str(seq) == str(json.loads(found["data"])["seq"])
        assert await event(reply) == {"": ""}, "an idle stream is seen to live"
        await site.ask("POST", "/v1/freeze", {"reason": "seen"})
        while not (found := await event(reply)).get("id"):
            pass
        assert "seen" in found["data"]
    headers["Last-Event-ID"] = "2"
    async with asyncio.timeout(60), site.client.get(url + "?after=0", headers=headers) as reply:
        assert (await event(reply))["id"] == "3"
    for wrong in ("x", "-1", ""):
        await site.refused(400, "GET", "/v1/log", Last_Event_ID=wrong, Accept="text/event-stream")


@real
async def test_a_token_that_expires_ends_its_streams(site: Site) -> None:
    """Also while nothing is written, with a problem that names it."""
    site.coordinator._limits = msgspec.structs.replace(site.coordinator._limits, idle_s=0.1)
    _, secret = site.tokens.create("ana", "view", 1.0)
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
    read = asyncio.create_task(
        asyncio.to_thread(lambda: list(Client(site.url, secret).records(0, follow=True)))
    )
    async with asyncio.timeout(60), site.client.get(site.url + "/v1/log", headers=headers) as reply:
        while (found := await event(reply)).get("event") != "problem":
            assert found, "the stream ended without a word"
        told = json.loads(found["data"])
        assert (told["status"], told["detail"]) == (401, "the token ana has expired")
        assert await reply.content.read() == b""
        with pytest.raises(Refused, match="the token ana has expired"):
            await read
    await site.refused(401, "GET", "/v1/log", **{"Authorization": headers["Authorization"]})

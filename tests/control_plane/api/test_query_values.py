"""Whatever stands in a query, a path or a header: no answer is an error of the server."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import quote

import msgspec
import pytest
from http_site import JOB, Site, real
from unicron.cli.commands.tasks import incident_id
from unicron.control_plane.api.moments import seq_at
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.api.routes import ROUTES
from unicron.events.errors import UsageError
from unicron.events.whole_numbers import whole_number

DIGITS = "1" * 4_301
"""One more than int() takes (sys.get_int_max_str_digits)."""
HOSTILE = (
    DIGITS,
    "9" * 18,
    "9" * 19,
    "٤١",
    "４１",
    "²",
    "1_0",
    " 1",
    "+1",
    "-1",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "0x1",
    "\0",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "2026-11-27T02:10:00.٤Z",
    "",
)


@real
async def test_no_query_value_is_an_error_of_the_server(site: Site) -> None:
    await site.ask("POST", "/v1/tasks", JOB)
    tried = 0
    for route in ROUTES:
        if route.method != "GET" or "{" in route.path:
            continue
        fields = msgspec.structs.fields(route.query)
        for name in (field.encode_name for field in fields if field.encode_name != "follow"):
            for value in HOSTILE:
                async with site.client.get(
                    f"{site.url}{route.path}?{name}={quote(value)}",
                    headers={"Authorization": "Bearer secret"},
                ) as reply:
                    text = await reply.text()
                    assert reply.status < 500, (route.path, name, value[:30], text)
                    assert len(text) < 100_000
                    tried += 1
    assert tried > 400


@real
async def test_no_name_in_a_path_is_an_error_of_the_server(site: Site) -> None:
    for route in ROUTES:
        if route.role not in ("view", "operate") or "{" not in route.path:
            continue
        for value in filter(None, HOSTILE):
            path = re.sub(r"\{\w+\}", quote(value, safe=""), route.path)
            async with site.client.request(
                route.method,
                site.url + path,
                json={} if route.method == "POST" else None,
                headers={"Authorization": "Bearer secret"},
            ) as reply:
                assert reply.status < 500, (path[:60], await reply.text())


@real
async def test_the_digits_of_other_scripts_are_no_seq(site: Site) -> None:
    await site.ask("POST", "/v1/tasks", JOB)
    for value in ("٢", "２", DIGITS):
        for path in ("/v1/state", "/v1/plan", "/v1/nodes", "/v1/tasks", "/v1/incidents/1/facts"):
            refused = await site.refused(400, "GET", f"{path}?at={quote(value)}")
            assert "neither a seq nor a time" in refused
            assert len(refused) < 200
    assert "is not a number" in await site.refused(
        400, "GET", "/v1/log?follow=1", None, Accept="text/event-stream", Last_Event_ID=DIGITS
    )


@pytest.mark.parametrize("text", [*HOSTILE[:1], *HOSTILE[2:]])
def test_what_is_no_whole_number(text: str) -> None:
    assert whole_number(text) is None
    assert whole_number(text.encode()) is None
    for prefix in ("", "inc-"):
        with pytest.raises(UsageError, match="is not an incident"):
            incident_id(prefix + text)


def test_whole_numbers() -> None:
    assert [whole_number(text) for text in ("0", "41", "007", "9" * 18)] == [0, 41, 7, 10**18 - 1]
    assert whole_number(b"41") == incident_id("inc-41") == 41


def test_a_moment_beyond_the_log_is_told_by_its_seq() -> None:
    async def read(_: int) -> None:
        raise AssertionError

    for text, status in (("1", 410), ("9", 404)):
        with pytest.raises(Refusal, match=f"at: {text} is not in the log") as refused:
            asyncio.run(seq_at(text, 2, 8, read))  # type: ignore[arg-type]
        assert refused.value.status == status

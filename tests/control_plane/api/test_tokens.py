"""Roles and tokens of the HTTP API: every call, for every role and for tokens that do not hold."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from http_site import JOB, Site, real
from structlog.testing import capture_logs
from unicron.control_plane.api.http import ROUTES
from unicron.control_plane.api.tokens import ROLES, Role, Tokens
from unicron.events.errors import UsageError
from unicron.events.records.types import OWNER

DAY_S = 86_400.0


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def issue(site: Site, role: Role, life_s: float = 0.0) -> dict[str, str]:
    """The header of a new token that is named as its role."""
    return bearer(site.tokens.create(role, role, life_s)[1])


# --- the calls -----------------------------------------------------------------------------------
@real
async def test_every_call_needs_its_role(site: Site) -> None:
    """A role that is too low gets 403 with the role that is needed, a higher one gets further."""
    headers = {role: issue(site, role) for role in ROLES}
    for route in ROUTES:
        path = route.path.replace("{of}", "none")
        if route.role is None:
            continue
        assert "token" in await site.refused(401, route.method, path, Authorization="Bearer no")
        for role in ROLES:
            status, answer = await site.ask(route.method, path, {}, **headers[role]) if (
                path != "/v1/log") else (200, {})
            if ROLES.index(role) < ROLES.index(route.role):
                assert status == 403, (route.path, role, answer)
                assert answer["error"] == (f"this needs the role {route.role}; the token {role} "
                                           f"has the role {role}")
            else:
                assert status not in (401, 500), (route.path, role, answer)
                assert status != 403 or "does not allow faults" in answer["error"]


@real
async def test_no_call_is_missing_from_the_table(site: Site) -> None:
    """What the table does not have does not exist; without a token nobody learns that."""
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert [route.path for route in ROUTES if route.role is None] == ["/v1/health"]
    assert [route.path for route in ROUTES if route.method == "POST" and route.role == "view"] == [
        "/v1/plan/dry-run"], "what else writes nothing?"
    await site.refused(404, "GET", "/v1/nowhere")
    await site.refused(405, "POST", "/v1/state")
    await site.refused(401, "GET", "/v1/nowhere", Authorization="")
    await site.refused(401, "POST", "/v1/health", Authorization="no")


@real
async def test_a_viewer_reads_the_log_and_writes_nothing(site: Site) -> None:
    viewer, seq = issue(site, "view"), site.coordinator.seq
    async with site.client.get(f"{site.url}/v1/log", headers=viewer) as reply:
        lines = (await reply.text()).splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 2]
    await site.refused(403, "POST", "/v1/tasks", JOB, **viewer)
    await site.refused(403, "POST", "/v1/freeze", {"reason": "x"}, **viewer)
    assert site.coordinator.seq == seq


@real
async def test_requests_carry_who_and_role(site: Site) -> None:
    operator = issue(site, "operate")
    await site.ask("POST", "/v1/tasks", JOB, **operator)
    await site.ask("POST", "/v1/freeze", {"reason": "why"}, **operator)
    await site.ask("POST", "/v1/unfreeze", {})
    change = {"weights": {"3": 2.0}}
    _, tried = await site.ask("POST", "/v1/plan/dry-run", change, **operator)
    await site.ask("POST", "/v1/plan/apply", {"change": change, "check": tried["input"]},
                   **operator)
    found = {record.kind: record.body for record in await site.log.read(after=0, num_max=99)}
    for kind, who, role in (("TaskSubmitted", "operate", "operate"),
                            ("HealingFrozen", "operate", "operate"),
                            ("HealingResumed", OWNER, "admin"),
                            ("TaskWeightSet", "operate", "operate")):
        body: Any = found[kind]
        assert (body.who, body.role) == (who, role)


# --- create, list, rotate, revoke ----------------------------------------------------------------
@real
async def test_the_life_of_a_token(site: Site) -> None:
    body = {"name": "ana", "role": "view", "life_s": DAY_S}
    with capture_logs() as lines:
        _, made = await site.ask("POST", "/v1/tokens", body)
    assert re.fullmatch(r"unicron_[A-Za-z0-9_-]{43}", made["token"])
    assert [line["name"] for line in lines] == ["ana"]
    assert made["token"] not in str(lines)
    assert "named ana" in await site.refused(400, "POST", "/v1/tokens", body)
    ana = bearer(made["token"])
    assert (await site.ask("GET", "/v1/state", **ana))[0] == 200
    _, listed = await site.ask("GET", "/v1/tokens")
    assert [(one["name"], one["role"], one["expired"]) for one in listed["tokens"]] == [
        (OWNER, "admin", False), ("ana", "view", False)]
    assert made["token"] not in str(listed)

    _, again = await site.ask("POST", "/v1/tokens/ana/rotate", {})
    assert again["token"] != made["token"]
    assert again["expires_s"] >= made["expires_s"]
    await site.refused(401, "GET", "/v1/state", **ana)
    ana = bearer(again["token"])
    assert (await site.ask("GET", "/v1/state", **ana))[0] == 200

    assert (await site.ask("POST", "/v1/tokens/ana/revoke", {}))[1] == {"name": "ana"}
    assert "revoked" in await site.refused(401, "GET", "/v1/state", **ana)
    assert "no token 'ana'" in await site.refused(400, "POST", "/v1/tokens/ana/revoke", {})
    for of in ("rotate", "revoke"):
        assert "stays" in await site.refused(400, "POST", f"/v1/tokens/{OWNER}/{of}", {})


@real
async def test_what_is_no_token_is_refused(site: Site) -> None:
    good: dict[str, Any] = {"name": "x", "role": "view"}
    for wrong in ({"name": ""}, {"name": "a b"}, {"name": OWNER}, {"name": "x" * 64},
                  {"name": "x\n"}, {"role": "root"}, {"life_s": -1}, {"life_s": 1e12}, {"more": 1}):
        await site.refused(400, "POST", "/v1/tokens", good | wrong)
    assert len(site.tokens.all()) == 1


@real
async def test_an_open_stream_ends_with_its_token(site: Site) -> None:
    viewer = issue(site, "view")
    async with site.client.get(f"{site.url}/v1/log?follow=1&after=2", headers=viewer) as reply:
        await site.ask("POST", "/v1/freeze", {"reason": "seen"})
        assert b"seen" in await reply.content.readline()
        site.tokens.revoke("view")
        await site.ask("POST", "/v1/unfreeze", {"reason": "unseen"})
        async with asyncio.timeout(60):
            assert b"unseen" not in await reply.content.read()


# --- the file ------------------------------------------------------------------------------------
def test_expiry_is_checked_with_the_clock(tmp_path: Path) -> None:
    now_s = 1_000.0
    tokens = Tokens(tmp_path / "tokens.json", owner="o", clock=lambda: now_s)
    token, secret = tokens.create("a", "operate", 60.0)
    assert tokens.find(secret) == token
    assert tokens.is_valid(token)
    now_s = 1_060.0
    assert tokens.has_expired(token)
    assert not tokens.is_valid(token)
    renewed, _ = tokens.rotate("a")
    assert renewed.expires_s == 1_120.0
    assert not tokens.is_valid(token)


@real
async def test_an_expired_token_is_told_so(site: Site) -> None:
    expired = issue(site, "admin", 0.001)
    await asyncio.sleep(0.05)
    assert "has expired" in await site.refused(401, "GET", "/v1/state", **expired)


def test_the_file_holds_hashes_and_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    first = Tokens(path, owner="owner's secret")
    kept, secret = first.create("kept", "view", 0.0)
    _, gone = first.create("gone", "admin", 0.0)
    first.revoke("gone")
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept.sha256 in text
    for hidden in (secret, gone, "owner"):
        assert hidden not in text
    second = Tokens(path, owner="another secret")
    assert second.find(secret) == kept
    assert second.find(gone) is None
    assert second.find("owner's secret") is None


def test_a_file_of_no_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for text in ("", "[]", '{"tokens": [{"name": "x"}]}', '{"tokens": 1}'):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(UsageError, match="not a file of tokens"):
            Tokens(path, owner="o")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        Tokens(path, owner="o")

"""Roles and tokens of the HTTP API: every call, for every role and for tokens that do not hold.

Join tokens: what they open, the identities for which agents exchange them, and how those end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import stat
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from http_site import JOB, POLICY, Site, real
from memory_log import MemoryLog
from unicron.control_plane.api.routes import ROUTES
from unicron.control_plane.api.tokens import ROLES, Role, Tokens, may, share
from unicron.control_plane.service.coordinator import Coordinator
from unicron.events.errors import UsageError
from unicron.events.log.identity import new_secret
from unicron.events.records import codec
from unicron.events.records.reports import (
    NodeJoined,
    NodeLeft,
    NodeUnreachable,
    TokenChanged,
)
from unicron.events.records.types import OWNER

DAY_S = 86_400.0
STREAMED = ("/v1/log", "/metrics")
"""Calls whose answers are no JSON document."""


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def issue(site: Site, role: Role, life_s: float = 0.0) -> dict[str, str]:
    """The header of a new token that is named as its role."""
    return bearer(site.tokens.create(role, role, life_s)[1])


# --- the calls -----------------------------------------------------------------------------------
@real
async def test_every_call_needs_its_role(site: Site) -> None:
    """A role that is too low gets 403 with the role that is needed, a higher one gets further."""
    headers = {role: issue(site, role) for role in (*ROLES, "join")}
    status, _ = await enrol(site, headers["join"], "n1", identity := new_secret())
    assert status == 200
    headers["node"] = bearer(identity)
    names: dict[Role, str] = {"node": "n1"}
    allowed = {role for role in headers if may(role, "join")}
    assert allowed == {"admin", "join", "node"}
    for route in ROUTES:
        path = re.sub(r"{\w+}", "none", route.path)
        if route.role is None:
            continue
        assert "token" in await site.refused(401, route.method, path, Authorization="Bearer no")
        for role in headers:
            status, answer = (
                await site.ask(route.method, path, {}, **headers[role])
                if (path not in STREAMED)
                else (200, {})
            )
            if role not in (allowed if route.role == "join" else ROLES[ROLES.index(route.role) :]):
                assert route.path in STREAMED or status == 403, (route.path, role, answer)
                if answer:
                    assert answer["detail"] == (
                        f"this needs the role {route.role}; the token {names.get(role, role)} "
                        f"has the role {role}"
                    )
            else:
                assert status not in (401, 500), (route.path, role, answer)
                assert status != 403 or "does not allow faults" in answer["detail"]


@real
async def test_no_call_is_missing_from_the_table(site: Site) -> None:
    """What the table does not have does not exist; without a token nobody learns that."""
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert [route.path for route in ROUTES if route.role is None] == [
        "/v1/health",
        "/livez",
        "/readyz",
        "/v1/sessions",
    ]
    assert [route.path for route in ROUTES if route.method == "POST" and route.role == "view"] == [
        "/v1/plan/dry-run",
        "/v1/sessions/codes",
        "/v1/sessions/end",
    ], "what else writes nothing?"
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
    await site.ask(
        "POST", "/v1/plan/apply", {"change": change}, **operator, If_Match=f'"{tried["input"]}"'
    )
    found = {record.kind: record.body for record in await site.log.read(after=0, num_max=99)}
    for kind, who, role in (
        ("TaskSubmitted", "operate", "operate"),
        ("HealingFrozen", "operate", "operate"),
        ("HealingResumed", OWNER, "admin"),
        ("TaskWeightSet", "operate", "operate"),
    ):
        body: Any = found[kind]
        assert (body.who, body.role) == (who, role)


# --- join tokens and identities ------------------------------------------------------------------
async def enrol(
    site: Site, token: dict[str, str], node: str, identity: str = "", incarnation: int = 10
) -> tuple[int, Any]:
    """A join as an agent sends it: again while the log cannot be reached."""
    body = {"node": node, "host": "h", "incarnation": incarnation}
    while (
        answer := await site.ask(
            "POST", "/v1/join", body | ({"identity": identity} if identity else {}), **token
        )
    )[0] == 503:
        await asyncio.sleep(0.1)
    return answer


async def refused(
    site: Site, token: dict[str, str], node: str, identity: str = "", incarnation: int = 10
) -> tuple[int, str, str]:
    status, answer = await enrol(site, token, node, identity, incarnation)
    return status, answer["detail"], answer["hint"]


async def join_token(site: Site, **more: object) -> dict[str, str]:
    body = {"name": f"join-{len(site.tokens.all())}", "role": "join", **more}
    status, answer = await site.ask("POST", "/v1/tokens", body)
    assert status == 200, answer
    return bearer(answer["token"])


@real
async def test_a_join_token_is_exchanged_once(site: Site) -> None:
    token, mine = await join_token(site), new_secret()
    status, answer = await enrol(site, token, "h1", mine)
    assert status == 200
    assert {"redis_url", "key"} <= set(answer)
    assert await enrol(site, token, "h1", mine) == (200, answer), "the answer may have been lost"
    assert await refused(site, token, "h2", new_secret()) == (
        400,
        "the token join-1 is used up",
        "an admin: unicron token rotate join-1",
    )
    assert await refused(site, token, "h1", new_secret()) == (
        400,
        "the token join-1 is used up",
        "an admin: unicron token rotate join-1",
    )
    assert (await enrol(site, bearer(mine), "h1", incarnation=11))[1]["key"] == answer["key"]
    for path in ("/v1/state", "/v1/tokens", "/v1/log"):
        await site.refused(403, "GET", path, **bearer(mine))
        await site.refused(403, "GET", path, **token)
    for held in (token, bearer(mine)):
        assert await site.ask("GET", "/v1/health", **held) == (200, {"ok": True})
    stored = (site.tokens_file).read_text()
    assert mine not in stored
    _, listed = await site.ask("GET", "/v1/tokens")
    assert [(one["name"], one["role"], one["used"], one["uses"]) for one in listed["items"]] == [
        ("h1", "node", 0, 0),
        ("join-1", "join", 1, 1),
        (OWNER, "admin", 0, 0),
    ]


@real
async def test_a_join_token_is_for_its_node_or_for_its_number_of_nodes(site: Site) -> None:
    one, two = await join_token(site, node="h1"), await join_token(site, uses=2)
    assert await refused(site, one, "h2", new_secret()) == (
        400,
        "the token join-1 enrols h1 only",
        "--node h1, or another token",
    )
    made = await asyncio.gather(
        *(enrol(site, two, f"h{number}", new_secret()) for number in range(3, 8))
    )
    assert sorted(status for status, _ in made) == [200, 200, 400, 400, 400]
    assert (await enrol(site, one, "h1", new_secret()))[0] == 200
    wrong: dict[str, Any]
    for wrong in (
        {"node": "h1", "uses": 2},
        {"node": "No"},
        {"uses": -1},
        {"uses": 1 << 40},
        {"role": "view", "node": "h1"},
        {"role": "view", "uses": 1},
        {"role": "node"},
    ):
        await site.refused(400, "POST", "/v1/tokens", {"name": "x", "role": "join"} | wrong)


@real
async def test_wrong_join_tokens_are_refused(site: Site) -> None:
    expired = issue(site, "join", 0.001)
    await asyncio.sleep(0.05)
    assert (await refused(site, expired, "h1", new_secret()))[:2] == (
        401,
        "the token join has expired",
    )
    revoked = await join_token(site)
    site.tokens.revoke("join-2")
    foreign = Tokens(site.tokens_file.with_name("other.json"), owner="another").create(
        "join-1", "join", 0.0
    )[1]
    for token in (revoked, bearer(foreign), bearer("")):
        assert (await refused(site, token, "h1", new_secret()))[0] == 401
    assert (await refused(site, issue(site, "operate"), "h1", new_secret()))[0] == 403
    token = await join_token(site)
    status, why, _ = await refused(site, token, "h1")
    assert (status, "no identity" in why) == (400, True)
    for identity in ("x", "unicron_short", "unicron_" + "ü" * 43, token["Authorization"][7:]):
        assert (await refused(site, token, "h1", identity))[0] == 400
    assert (await enrol(site, token, "h1", new_secret()))[0] == 200, "none of these used it"


@real
async def test_the_name_of_a_node_is_taken_once(site: Site) -> None:
    await site.tell(NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=1))
    token = await join_token(site, uses=9)
    taken = (
        "give this node another --node; if the other one is gone: unicron token revoke n1, "
        "then unicron token create --join --node n1"
    )
    assert await refused(site, token, "n1", new_secret()) == (400, "the name n1 is taken", taken)
    mine = new_secret()
    assert (await enrol(site, token, "h1", mine))[0] == 200
    assert (await refused(site, token, "h1", new_secret()))[1] == "the name h1 is taken"
    assert (await refused(site, token, "h2", mine))[1] == "identity: it was in use before"
    status, why, hint = await refused(site, bearer(mine), "n1")
    assert (status, why) == (400, "this is the identity of h1, not of n1")
    assert hint.startswith("--node h1")
    assert (await refused(site, bearer("secret"), "h1"))[0] == 409, "nor may an admin"
    assert (await enrol(site, bearer("secret"), "n1"))[0] == 200, "as agents of this machine join"
    of_n1 = await join_token(site, node="n1")
    assert (await refused(site, of_n1, "n1", new_secret()))[1] == "the name n1 is taken"
    await site.tell(NodeUnreachable(node="n1", incarnation=9, silence_s=9.0))
    assert (await refused(site, token, "n1", new_secret()))[1] == "the name n1 is taken"
    assert (await enrol(site, of_n1, "n1", new_secret()))[0] == 200
    await site.tell(
        NodeJoined(node="n2", incarnation=9, host="h", pid=1, num_slots=1),
        NodeLeft(node="n2", incarnation=9, reason="stopped"),
    )
    assert (await enrol(site, token, "n2", new_secret()))[0] == 200


@real
async def test_a_clock_that_is_behind_does_not_replace_a_newer_agent(site: Site) -> None:
    """An agent's incarnation is the time of its start; only a lost folder makes it older."""
    await site.tell(NodeJoined(node="n1", incarnation=3_600_009, host="h", pid=1, num_slots=1))
    status, why, hint = await refused(site, bearer("secret"), "n1", incarnation=9)
    assert (status, why) == (409, "a newer agent of n1 has joined")
    assert "clock" in hint


@real
async def test_a_revoked_node_is_told_so_and_may_be_enrolled_again(site: Site) -> None:
    token, mine = await join_token(site, uses=2), new_secret()
    assert (await enrol(site, token, "h1", mine))[0] == 200
    assert "h1" in site.log.users
    assert "its agent alone" in await site.refused(400, "POST", "/v1/tokens/h1/rotate", {})
    assert await site.ask("POST", "/v1/tokens/h1/revoke", {"reason": "stolen"}) == (
        200,
        {"name": "h1"},
    )
    assert "h1" not in site.log.users
    for incarnation in (11, 12):
        assert await refused(site, bearer(mine), "h1", incarnation=incarnation) == (
            410,
            "the identity of h1 was revoked",
            "an admin: unicron token create --join --node h1",
        )
    assert (await refused(site, token, "h1", mine))[1] == "identity: it was in use before"
    again = Tokens(site.tokens_file, owner="secret")
    assert (again.revoked_node(mine), again.revoked_nodes()) == ("h1", {"h1"})
    assert (await enrol(site, token, "h1", new_secret(), 13))[0] == 200
    assert site.log.users["h1"] == 13
    assert not site.tokens.revoked_nodes()
    assert (await refused(site, bearer(mine), "h1"))[0] == 410


@real
async def test_every_act_is_a_record_without_a_secret(site: Site) -> None:
    token = await join_token(site, reason=" for\nh1 ")
    mine = new_secret()
    await enrol(site, token, "h1", mine)
    key = {"Idempotency_Key": "one"}
    await site.ask("POST", "/v1/freeze", {"reason": "x"}, **key)
    _, renewed = await site.ask("POST", "/v1/tokens/join-1/rotate", {"reason": "more"}, **key)
    await site.ask("POST", "/v1/tokens/h1/revoke", {"reason": "gone"}, **key)
    await site.refused(422, "POST", "/v1/tokens/join-1/revoke", {"reason": "x" * 300})
    found = [
        record
        for record in await site.log.read(after=0, num_max=99)
        if isinstance(record.body, TokenChanged)
    ]
    assert [
        (
            one.body.act,
            one.body.name,
            one.body.token_role,
            one.body.who,
            one.body.role,
            one.body.reason,
        )
        for one in found
        if isinstance(one.body, TokenChanged)
    ] == [
        ("created", "join-1", "join", OWNER, "admin", "for h1"),
        ("enrolled", "h1", "node", "join-1", "join", ""),
        ("rotated", "join-1", "join", OWNER, "admin", "more"),
        ("revoked", "h1", "node", OWNER, "admin", "gone"),
    ]
    text = str([codec.to_plain(one) for one in found])
    for secret in (mine, token["Authorization"][7:], renewed["token"]):
        assert secret not in text
        assert hashlib.sha256(secret.encode()).hexdigest() not in text


@real
async def test_a_revoked_node_stays_out_when_the_server_loses_its_users(site: Site) -> None:
    await site.tell(NodeJoined(node="n1", incarnation=9, host="h", pid=1, num_slots=1))
    log, token = site.log, await join_token(site)
    assert (await enrol(site, token, "h1", new_secret()))[0] == 200
    coordinator = Coordinator(
        log,
        clock=time.time,
        nonce="b",
        code="test",
        policy=POLICY,
        access=partial(share, Tokens(site.tokens_file, owner="x"), log),
    )
    site.coordinator.stop()
    log.users.clear()
    leading = asyncio.create_task(coordinator.run())
    async with asyncio.timeout(60):
        while "n1" not in log.users:
            await asyncio.sleep(0.01)
    assert set(log.users) == {"n1"}
    await coordinator.admit("h1", 11)
    assert log.users["h1"] == 11
    coordinator.stop()
    await asyncio.wait_for(leading, 60)


def test_the_next_leader_has_the_tokens_of_the_former_one(tmp_path: Path) -> None:
    """On the same folder and on one of its own; the newer of file and server counts."""

    async def main() -> None:
        folder, log = tmp_path, MemoryLog(time.time)
        epoch = await log.start_epoch("x", url="http://x")
        first = Tokens(folder / "a.json", owner="o")
        of_the_file = first.create("early", "view", 0.0)[1]
        assert await share(first, log, epoch) == set(), "a file of before comes first"
        second = Tokens(folder / "a.json", owner="o")
        elsewhere = Tokens(folder / "b.json", owner="o")
        made = first.create("late", "operate", 0.0)[1]
        token = first.find(first.create("join", "join", 0.0)[1])
        assert token is not None
        node = new_secret()
        first.enrol(token, "h1", node, is_live=False)
        first.revoke("h1")
        await log.keep_tokens(first.encoded(), epoch=epoch)

        for one, writes in ((second, 0), (elsewhere, 0), (elsewhere, epoch)):
            assert await share(one, log, writes) == {"h1"}
            for secret, role in ((of_the_file, "view"), (made, "operate"), ("o", "admin")):
                found = one.find(secret)
                assert found is not None
                assert found.role == role
            assert one.find(node) is None
            assert one.revoked_node(node) == "h1"
            assert (folder / "b.json").exists() == (writes > 0), "a follower writes no file"
        assert Tokens(folder / "b.json", owner="o").find(made)

        elsewhere.revoke("late")
        assert await share(second, log, 0) == {"h1"}
        assert second.find(made), "it is not shared yet"
        await share(elsewhere, log, epoch)
        await share(second, log, 0)
        assert second.find(made) is None

    asyncio.run(main())


# --- create, list, rotate, revoke ----------------------------------------------------------------
@real
async def test_the_life_of_a_token(site: Site) -> None:
    body = {"name": "ana", "role": "view", "life_s": DAY_S}
    _, made = await site.ask("POST", "/v1/tokens", body)
    assert re.fullmatch(r"unicron_[A-Za-z0-9_-]{43}", made["token"])
    assert "named ana" in await site.refused(400, "POST", "/v1/tokens", body)
    ana = bearer(made["token"])
    assert (await site.ask("GET", "/v1/state", **ana))[0] == 200
    _, listed = await site.ask("GET", "/v1/tokens")
    assert [(one["name"], one["role"], one["expired"]) for one in listed["items"]] == [
        ("ana", "view", False),
        (OWNER, "admin", False),
    ]
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
    for wrong in (
        {"name": ""},
        {"name": "a b"},
        {"name": OWNER},
        {"name": "x" * 64},
        {"name": "x\n"},
        {"role": "root"},
        {"life_s": -1},
        {"life_s": 1e12},
        {"more": 1},
    ):
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
    assert not tokens.has_expired(token)
    now_s = 1_060.0
    assert tokens.has_expired(token)
    renewed, _ = tokens.rotate("a")
    assert renewed.expires_s == 1_120.0
    assert tokens.find(secret) is None, "the new one is another"


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
    assert kept.sha256 == hashlib.sha256(secret.encode()).hexdigest()
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

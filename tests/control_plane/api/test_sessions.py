"""Sessions of browsers, and the pages: what a browser gets, and what it must not get."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from http_site import JOB, Site, real
from unicron.control_plane.api import pages, sessions
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.api.tokens import Token

OWNER = Token(name="owner", role="admin", sha256="x", created_s=0.0)


async def session(site: Site, **asked: object) -> dict[str, str]:
    """The headers of a new session."""
    _, made = await site.ask("POST", "/v1/sessions/codes", asked)
    status, found = await site.ask("POST", "/v1/sessions", {"code": made["code"]}, Authorization="")
    assert status == 401, "an Authorization that is no token is refused"
    async with site.client.post(site.url + "/v1/sessions", json={"code": made["code"]}) as reply:
        found = await reply.json()
        assert reply.status == 200, found
    assert found["name"] == "owner"
    return {"Authorization": f"Bearer {found['secret']}"}


@real
async def test_a_code_becomes_one_session(site: Site) -> None:
    _, made = await site.ask("POST", "/v1/sessions/codes", {})
    for status in (200, 401):
        async with site.client.post(
            site.url + "/v1/sessions", json={"code": made["code"]}
        ) as reply:
            assert reply.status == status
    assert site.coordinator.seq == 2, "nothing of it is in the log"


@real
async def test_a_session_may_do_what_an_operator_may(site: Site) -> None:
    mine = await session(site)
    assert (await site.ask("POST", "/v1/tasks", JOB, **mine))[0] == 200
    assert "role admin" in await site.refused(403, "GET", "/v1/tokens", **mine)
    watching = await session(site, role="view")
    assert (await site.ask("GET", "/v1/state", **watching))[0] == 200
    assert "role operate" in await site.refused(403, "POST", "/v1/freeze", {}, **watching)
    assert (await site.ask("POST", "/v1/sessions/end", {}, **watching))[1] == {}
    await site.refused(401, "GET", "/v1/state", **watching)


@real
async def test_a_session_has_no_more_than_its_token_and_ends_with_it(site: Site) -> None:
    _, made = await site.ask("POST", "/v1/tokens", {"name": "grafana", "role": "view"})
    token = {"Authorization": f"Bearer {made['token']}"}
    _, code = await site.ask("POST", "/v1/sessions/codes", {"role": "operate"}, **token)
    async with site.client.post(site.url + "/v1/sessions", json={"code": code["code"]}) as reply:
        found = await reply.json()
    assert found["role"] == "view"
    mine = {"Authorization": f"Bearer {found['secret']}"}
    assert (await site.ask("GET", "/v1/state", **mine))[0] == 200
    await site.ask("POST", "/v1/tokens/grafana/revoke", {})
    assert "session has ended" in await site.refused(401, "GET", "/v1/state", **mine)


@real
async def test_a_session_makes_no_codes(site: Site) -> None:
    """Else it would be renewed for ever, and what it made would live on after its end."""
    mine = await session(site)
    assert "makes no codes" in await site.refused(403, "POST", "/v1/sessions/codes", {}, **mine)
    assert (await site.ask("GET", "/v1/state", **mine))[0] == 200


@real
async def test_no_token_ends_the_sessions_of_another_one(site: Site) -> None:
    operator = await session(site)
    _, made = await site.ask("POST", "/v1/tokens", {"name": "grafana", "role": "view"})
    token = {"Authorization": f"Bearer {made['token']}"}
    own: list[dict[str, str]] = []
    for _ in range(sessions.OF_TOKEN_NUM_MAX + 1):
        _, code = await site.ask("POST", "/v1/sessions/codes", {}, **token)
        async with site.client.post(
            site.url + "/v1/sessions", json={"code": code["code"]}
        ) as reply:
            own.append({"Authorization": f"Bearer {(await reply.json())['secret']}"})
    assert (await site.ask("GET", "/v1/state", **operator))[0] == 200
    await site.refused(401, "GET", "/v1/state", **own[0])
    assert (await site.ask("GET", "/v1/state", **own[1]))[0] == 200
    waiting = await site.ask("POST", "/v1/sessions/codes", {})
    for _ in range(sessions.KEPT_NUM_MAX + 1):
        await site.ask("POST", "/v1/sessions/codes", {}, **token)
    async with site.client.post(
        site.url + "/v1/sessions", json={"code": waiting[1]["code"]}
    ) as reply:
        assert reply.status == 200, "the operator's code is still there"


def test_codes_and_sessions_end() -> None:
    now_s = [0.0]
    kept = sessions.Sessions(lambda: now_s[0])
    late, _ = kept.code(OWNER, "view")
    now_s[0] = sessions.CODE_S_MAX
    with pytest.raises(Refusal, match="older than 60 s"):
        kept.exchange(late)
    secret, one = kept.exchange(kept.code(OWNER, "view")[0])
    assert one.expires_s == now_s[0] + sessions.SESSION_S_MAX
    for _ in range(sessions.OF_TOKEN_NUM_MAX):
        kept.exchange(kept.code(OWNER, "view")[0])
    assert kept.find(secret) is None, "the oldest has made room"


def test_at_the_limit_of_all_the_token_with_most_makes_room() -> None:
    kept = sessions.Sessions(lambda: 0.0)

    def session_of(number: int) -> str:
        token = Token(name=f"t{number}", role="view", sha256=f"{number}", created_s=0.0)
        return kept.exchange(kept.code(token, "view")[0])[0]

    alone = session_of(0)
    hoarded = [session_of(1) for _ in range(sessions.OF_TOKEN_NUM_MAX)]
    for number in range(2, 3 + sessions.KEPT_NUM_MAX - len(hoarded) - 1):
        session_of(number)
    assert kept.find(alone)
    assert [bool(kept.find(one)) for one in hoarded[:2]] == [False, True]


@real
async def test_requests_of_other_sites_are_refused(site: Site) -> None:
    assert (await site.ask("GET", "/v1/state", Origin=site.url))[0] == 200
    for origin in (
        "http://evil.example",
        "http://127.0.0.1:1",
        "null",
        "",
        site.url.replace("http:", "https:"),
        site.url.replace("http:", "file:"),
        site.url.replace("http://", ""),
        f"{site.url}@evil.example",
        f"{site.url}/",
    ):
        assert "Origin" in await site.refused(403, "GET", "/v1/state", Origin=origin)
    assert "Host" in await site.refused(421, "GET", "/v1/state", Host="evil.example")


@real
async def test_the_page_is_served_to_everyone_and_to_no_frame(site: Site) -> None:
    for built in (True, False):
        folder = site.tokens_file.parent / f"built-{built}"
        (folder / "assets").mkdir(parents=True)
        (folder.parent / "secret.js").write_text("hidden")
        if built:
            (folder / "index.html").write_text("<p>built")
            (folder / "assets" / "a-1.js").write_text("1")
        with mock.patch.object(pages, "BUILT", folder):
            async with site.client.get(site.url + "/") as reply:
                text = await reply.text()
                assert ("<p>built" if built else "make web") in text
                policy = reply.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'self'")
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
            async with site.client.get(site.url + "/assets/a-1.js") as reply:
                assert reply.status == (200 if built else 404)
            for path in (
                "/assets/..%2f..%2fsecret.js",
                "/assets/%2e%2e/secret.js",
                "/assets/.hidden",
                "/secret.js",
            ):
                async with site.client.get(site.url + path) as reply:
                    assert reply.status in (401, 404)
                    assert "hidden" not in await reply.text()


def test_the_built_page_is_looked_for_beside_its_source() -> None:
    assert Path(pages.__file__).parents[1] / "web" / "dist" == pages.BUILT

"""`unicron token`, and what each role may do on the command line, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path

import pytest
from cli_process import in_process
from http_site import Site, serving
from unicron.cli.cluster.client import Client
from unicron.cli.commands.token import join_command, life
from unicron.events.errors import UsageError
from unicron.events.records import codec
from unicron.events.records.in_words import line

LIMIT_S = 90


class User:
    """Runs commands with one token."""

    def __init__(self, site: Site, folder: Path, token: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
        self.environment = {
            **clean,
            "UNICRON_STATE": str(folder),
            "UNICRON_URL": site.url,
            "UNICRON_TOKEN": token,
            "LOGNAME": "ana",
            "NO_COLOR": "1",
        }

    async def __call__(self, words: str) -> tuple[int, str, list[str]]:
        """(exit code, stdout, the lines of stderr)."""
        done = await asyncio.wait_for(
            asyncio.to_thread(in_process, tuple(words.split()), None, self.environment), LIMIT_S
        )
        return done.returncode, done.stdout, done.stderr.splitlines()


def test_a_team_with_roles(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving() as site:
            await _team(site, tmp_path)

    asyncio.run(main())


async def _team(site: Site, folder: Path) -> None:
    admin = User(site, folder, "secret")
    code, secret, told = await admin("token create --role view --expires 30d")
    assert (code, secret[:8]) == (0, "unicron_")
    assert told[0].startswith("ana, role view, until 20")
    viewer = User(site, folder, secret.strip())
    assert (await viewer("status"))[0] == 0
    assert await viewer("freeze") == (
        2,
        "",
        [
            "error: this needs the role operate; the token ana has the role view",
            "hint: an admin: unicron token create --role operate",
        ],
    )
    assert (await viewer("token list"))[2][0].startswith("error: this needs the role admin")

    code, out, _ = await admin("token create --role operate --name ben -o json")
    operator = User(site, folder, json.loads(out)["token"])
    assert (await operator("freeze --reason switches"))[0] == 0
    record = next(r for r in await site.log.read(after=0, num_max=99) if r.kind == "HealingFrozen")
    assert "switches; by ben, operate" in line(codec.to_plain(record))

    code, out, _ = await admin("token list")
    rows = [words.split() for words in out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [
        ["owner", "admin"],
        ["ana", "view"],
        ["ben", "operate"],
    ]
    assert [row[3] for row in (rows[1], rows[3])] == ["never", "never"]

    code, renewed, _ = await admin("token rotate ben")
    assert await operator("status") == (
        2,
        "",
        [
            "error: the token is missing, wrong or revoked",
            "hint: set UNICRON_TOKEN, or name the cluster's folder with --state",
        ],
    )
    assert (await User(site, folder, renewed.strip())("status"))[0] == 0
    assert await admin("token revoke ana") == (0, "ana  is refused from now on\n", [])
    assert (await viewer("status"))[0] == 2
    code, out, told = await admin("token revoke ana")
    assert (code, out, told[0]) == (2, "", "error: there is no token 'ana'")


def test_a_join_token_is_a_command_to_paste(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving() as site:
            await _join_tokens(site, tmp_path)

    asyncio.run(main())


async def _join_tokens(site: Site, folder: Path) -> None:
    admin = User(site, folder, "secret")
    code, out, told = await admin("token create --join --uses 2")
    found = re.fullmatch(rf"UNICRON_TOKEN=(unicron_\S{{43}}) unicron agent --url {site.url}\n", out)
    assert (code, bool(found)) == (0, True), out
    assert re.match(
        r"join-[0-9a-f]{8}, role join, until 20.*; for 2 hosts; it is not shown again", told[0]
    )
    code, out, _ = await admin("token create --join --node h1 --expires 5m -o json")
    made = json.loads(out)
    assert made["command"] == (
        f"UNICRON_TOKEN={made['token']} unicron agent --url {site.url} --node h1"
    )
    assert 290 < made["expires_s"] - time.time() < 310
    _, out, _ = await admin("token rotate join-h1")
    assert out.startswith("UNICRON_TOKEN=unicron_")
    rows = [words.split() for words in (await admin("token list"))[1].splitlines()[1:]]
    assert [(row[1], row[4:]) for row in rows] == [
        ("admin", ["-"]),
        ("join", ["0", "of", "2"]),
        ("join", ["0", "of", "1"]),
    ]
    for words, error in (
        ("token create", "give either --role or --join"),
        ("token create --join --role view", "give either --role or --join"),
        ("token create --role view --uses 2", "--node and --uses are for --join"),
        ("token create --join --node h1 --uses 2", "node: 'h1' with 2 uses"),
        ("token create --join --node H1", "node: 'H1'"),
        ("token create --join --uses 999999", "uses: 999999 is not from 1"),
        ("token create --join --expires 5", "--expires '5' is not"),
    ):
        code, out, told = await admin(words)
        assert (code, out, told[0].startswith(f"error: {error}")) == (2, "", True), (words, told)
        assert told[1].startswith("hint: "), told


def test_the_command_says_what_the_way_to_the_control_plane_needs() -> None:
    alone = {"ca": "", "follows": "", "followers": []}
    for url, words in (
        ("http://10.0.0.1:8420", "--url http://10.0.0.1:8420 --insecure --node h1"),
        ("http://[::2]:8420", "--url 'http://[::2]:8420' --insecure --node h1"),
        ("https://c.example:8420", "--url https://c.example:8420 --node h1"),
        ("http://127.0.0.1:1", "--url http://127.0.0.1:1 --node h1"),
    ):
        assert join_command(Client(url, "t", insecure=True), "S", "h1", alone) == (
            f"UNICRON_TOKEN=S unicron agent {words}"
        )
    two = alone | {"ca": "sha256:ab", "follows": "https://b:1"}
    assert join_command(Client("https://c:1", "t"), "S", "h1", two) == (
        "UNICRON_TOKEN=S unicron agent --url https://c:1 --url https://b:1 --ca sha256:ab --node h1"
    )


def test_a_life_is_a_number_with_a_unit() -> None:
    assert [life(text) for text in ("", "90m", "12h", "30d")] == [0, 5_400, 43_200, 2_592_000]
    for wrong in ("30", "d", "0d", "-1d", "1w", "1.5d", "9999999d", "30 d"):
        with pytest.raises(UsageError, match="not a length of time"):
            life(wrong)

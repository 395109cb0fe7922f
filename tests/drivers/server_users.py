"""Writes the users of the log's server into docs/guides/threat-model.md, as the server has them."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis
from unicron.events.log import embedded_server
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/threat-model.md"
CLUSTER, NODES = "default", ("n1", "n2")
BLOCK = re.compile(r"^As `ACL LIST` .*\n\n```\n(?:user .*\n)+```\n", re.MULTILINE)
REFRESH = "PYTHONPATH=tests:tests/drivers .venv/bin/python -P -m server_users"
Redis: Any = redis.Redis


async def block_of(server: Server) -> str:
    """What the page shows, as this server has it after a leader has given the nodes their users."""
    identities = Identities(bytes(SECRET_BYTES), CLUSTER)
    log = RedisLog(server.url, CLUSTER, identities.key, identities)
    try:
        await log.check_users()
        await log.admit(dict.fromkeys(NODES, 1))
        await log.mark_admitted()
        with Redis.from_url(server.url) as master:
            users, told = sorted(master.acl_list()), master.info("server")
    finally:
        await log.close()
    shown = "".join(re.sub(r"#[0-9a-f]{64}", "#...", f"{line}\n") for line in users)
    name = f"Valkey {told['valkey_version']}" if "valkey_version" in told else "another server"
    return (
        f"As `ACL LIST` prints them in a cluster of two nodes ({name} of `unicron up`; hashes of "
        f"passwords left out):\n\n```\n{shown}```\n"
    )


def plain(block: str) -> set[frozenset[str]]:
    """The rights of each user in any order, without what only some versions of the server say."""
    return {
        frozenset(
            part.strip("() ").replace("resetchannels ", "").replace("sanitize-payload ", "")
            for part in line.split(" (")
        )
        for line in block.splitlines()
        if line.startswith("user ")
    }


def main() -> None:
    """Write the block anew."""
    with TemporaryDirectory() as folder:
        server = embedded_server.start(Path(folder))
        try:
            block = asyncio.run(block_of(server))
        finally:
            server.stop(grace_s=1.0)
    text, num = BLOCK.subn(lambda _: block, PAGE.read_text(encoding="utf-8"))
    if num != 1:
        sys.exit(f"{PAGE} has no such block")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

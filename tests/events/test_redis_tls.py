"""A server of one's own with TLS, Debian's redis-server: its certificate is checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import certificates
import pytest
import redis_with_tls
from certificates import Pair
from unicron.events.errors import Unavailable
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if why := certificates.why_not():
        pytest.skip(why)
    return Pair(tmp_path_factory.mktemp("certs"), "127.0.0.1")


@pytest.fixture(scope="module")
def url(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if why := redis_with_tls.why_not():
        pytest.skip(why)
    with redis_with_tls.serving(pair, tmp_path_factory.mktemp("redis")) as found:
        yield found


def log_at(url: str, ca: str) -> RedisLog:
    name = f"tls-{os.getpid()}"
    identities = Identities(bytes(SECRET_BYTES), name)
    return RedisLog(url, name, identities.key, identities, ca)


async def test_the_log_is_used_over_tls(url: str, pair: Pair) -> None:
    log = log_at(url, pair.ca.read_text())
    try:
        await log.check()
        await log.check_users()
        await log.beat("n1", 7)
        assert [beat.incarnation for beat in await log.beats(["n1"])] == [7]
    finally:
        await log.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [("system", "self-signed|issuer"), ("foreign", "issuer|refused"), ("name", "not valid for")],
)
async def test_another_server_is_refused(
    url: str, pair: Pair, tmp_path: Path, what: str, words: str
) -> None:
    ca = {"system": "", "name": pair.ca.read_text()}.get(what)
    log = log_at(
        url.replace("127.0.0.1", "localhost") if what == "name" else url,
        Pair(tmp_path / "foreign").ca.read_text() if ca is None else ca,
    )
    try:
        with pytest.raises(Unavailable, match=words):
            await log.check()
    finally:
        await log.close()


async def test_plain_to_its_port_does_not_hang(url: str) -> None:
    log = log_at(url.replace("rediss:", "redis:"), "")
    try:
        with pytest.raises(Unavailable):
            await log.check()
    finally:
        await log.close()

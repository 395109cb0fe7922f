"""A server of one's own with TLS, Debian's redis-server: who it is is checked, and agents use it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import certificates
import pytest
from certificates import Pair
from unicron.cli.cluster.local_cluster import free_port
from unicron.events import tls
from unicron.events.errors import Unavailable
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog

PROGRAM = shutil.which("redis-server")
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if why := certificates.why_not():
        pytest.skip(why)
    return Pair(tmp_path_factory.mktemp("certs"), "127.0.0.1")


@pytest.fixture(scope="module")
def url(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if PROGRAM is None:
        pytest.skip("there is no `redis-server`")
    port, folder = free_port(), tmp_path_factory.mktemp("redis")
    process = subprocess.Popen(
        [PROGRAM, "--port", "0", "--tls-port", str(port), "--tls-cert-file", str(pair.certificate),
         "--tls-key-file", str(pair.key), "--tls-ca-cert-file", str(pair.ca), "--tls-auth-clients",
         "no", "--requirepass", "hush", "--bind", "127.0.0.1", "--appendonly", "yes", "--dir",
         str(folder), "--logfile", str(folder / "log")])
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            tls.sent_chain("127.0.0.1", port)
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline_s, "it does not listen"
            time.sleep(0.05)
    yield f"rediss://:hush@127.0.0.1:{port}/0"
    process.terminate()
    process.wait(LIMIT_S)


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


@pytest.mark.parametrize(("what", "words"), [
    ("system", "self-signed|issuer"), ("foreign", "issuer|refused"), ("name", "not valid for")])
async def test_another_server_is_refused(
        url: str, pair: Pair, tmp_path: Path, what: str, words: str) -> None:
    ca = {"system": "", "name": pair.ca.read_text()}.get(what)
    log = log_at(url.replace("127.0.0.1", "localhost") if what == "name" else url,
                 Pair(tmp_path / "foreign").ca.read_text() if ca is None else ca)
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

"""A stream of records that breaks off is an error: what was read is not the whole log."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from cli_process import in_process
from http_site import JOB, serving
from unicron.cli.cluster.answers import Interrupted
from unicron.cli.cluster.client import Client
from unicron.control_plane.api import http
from unicron.events.errors import CorruptLog
from unicron.events.records.envelope import Record

CHUNK = b'{"seq": 1}\n'
BROKEN = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + f"{len(CHUNK):x}\r\n".encode()
    + CHUNK
    + b"\r\n"
)


@pytest.mark.parametrize("words", ["tail", "incident --all", "export x.log", "tail -o json"])
def test_damage_behind_the_first_page_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http, "PAGE_RECORDS_MAX", 1)

    async def main() -> None:
        async with serving() as site:
            # The leader, which now and then reads the last record again, must not find the damage.
            await site.ask("POST", "/v1/tasks", JOB)
            read = site.log.read

            async def damaged(*, after: int, num_max: int) -> Sequence[Record]:
                if after == 1:
                    raise CorruptLog(2, "a segment is damaged")
                return await read(after=after, num_max=num_max)

            monkeypatch.setattr(site.log, "read", damaged)
            environment = {
                **os.environ,
                "UNICRON_STATE": str(tmp_path / "none"),
                "UNICRON_URL": site.url,
                "UNICRON_TOKEN": "secret",
                "NO_COLOR": "1",
            }
            done = await asyncio.to_thread(in_process, tuple(words.split()), None, environment)
            assert done.returncode == 1
            assert done.stderr.splitlines()[-2:] == [
                "error: seq 2: a segment is damaged",
                "hint: unicron log verify",
            ]

    asyncio.run(main())


def test_a_stream_that_is_cut_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):  # until the server is shut down
                while True:
                    link, _ = server.accept()
                    with link:
                        link.recv(4096)
                        link.sendall(BROKEN)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", "secret")
            records = client.records(0, follow=False)
            assert next(records) == {"seq": 1}
            with pytest.raises(Interrupted, match="was interrupted"):
                next(records)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()

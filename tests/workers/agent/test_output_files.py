"""What an agent reads for the control plane: files in its folder of logs, and nothing else."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path
from typing import Any, cast

import pytest
from unicron.events.log.port import FilePart, FileRequest
from unicron.workers.agent import output_files
from unicron.workers.agent.output_files import PART_BYTES_MAX, read_part


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "logs"
    (made / "5-job").mkdir(parents=True)
    (made / "5-job" / "rank-0.attempt-1.log").write_bytes(b"ab" * PART_BYTES_MAX)
    return made


def read(folder: Path, path: Path | str, offset: int = 0) -> FilePart:
    return read_part(folder, FileRequest(number="n", path=str(path), offset=offset))


def test_a_file_is_read_in_parts_up_to_its_end(folder: Path) -> None:
    log, found = folder / "5-job" / "rank-0.attempt-1.log", b""
    while data := read(folder, log, len(found)).data:
        assert len(data) <= PART_BYTES_MAX
        found += data
    assert found == log.read_bytes()


def test_nothing_else_is_read(folder: Path) -> None:
    secret = folder.parent / "token"
    secret.write_text("secret")
    (folder / "link.log").symlink_to(secret)
    (folder / "up").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.log")
    for path in (
        secret,
        folder / "link.log",
        folder / ".." / "token",
        folder / "up" / "token",
        folder / "pipe.log",
        folder,
        "token",
        "",
        folder / "absent.log",
    ):
        part = read(folder, path)
        assert (part.data, bool(part.error)) == (b"", True), path


class Requests:
    """The requests that an agent gets, and its answers."""

    def __init__(self, *requests: FileRequest) -> None:
        self.requests, self.answers = list(requests), list[FilePart]()

    async def file_request(self, node: str, wait_s: float) -> FileRequest | None:
        await asyncio.sleep(0.01)
        return self.requests.pop(0) if self.requests else None

    async def send_file(self, node: str, part: FilePart) -> None:
        self.answers.append(part)


async def test_a_shortage_of_descriptors_does_not_end_the_answers(folder: Path) -> None:
    log = folder / "5-job" / "rank-0.attempt-1.log"
    trial = FileRequest(number="1", path="", offset=0, slots=(0,))
    requests = Requests(trial, FileRequest(number="2", path=str(log), offset=0))
    serving = asyncio.create_task(output_files.serve(cast(Any, requests), "n1", folder, ["0"]))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        while len(requests.requests) == 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    async with asyncio.timeout(20):
        while not requests.answers and not serving.done():
            await asyncio.sleep(0.01)
    assert [part.number for part in requests.answers] == ["2"]
    serving.cancel()

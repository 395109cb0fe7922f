"""Answers the control plane: parts of ranks' output, trials of devices; removes old outputs."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog
from msgspec import msgpack

from ...events import bounded_file
from ...events.errors import LogError, UsageError
from ...events.log.port import FilePart, FileRequest
from ...events.log.redis_streams import RedisLog
from ...events.object_storage import reason
from ...events.regular_files import open_regular
from ...events.shortage import outlast
from .delivery.log_link import backoff_s
from .health.device_trial import try_devices
from .processes import former_outputs

WAIT_S = 5.0
PART_BYTES_MAX = 1 << 16
REMOVE_S = 600.0
"""Time between two looks at the outputs of ended tasks."""

_log = structlog.get_logger("agent")


async def serve(log: RedisLog, node: str, folder: Path, devices: Sequence[str] = ()) -> None:
    """Answer requests for files in `folder`, and for trials of the slots' devices, until cancelled.
    A lost answer is not repeated. Now and then, remove the oldest outputs of ended tasks there."""
    answer = partial(_answer_requests, log, node, folder, devices)
    await asyncio.gather(outlast(answer, _warn), outlast(partial(_remove_oldest, folder), _warn))


def _warn(why: str) -> None:
    _log.warning("cannot serve the output of ranks for now", why=why)


async def _remove_oldest(folder: Path) -> None:
    while True:
        await asyncio.to_thread(former_outputs.remove_oldest, folder)
        await asyncio.sleep(REMOVE_S)


async def _answer_requests(log: RedisLog, node: str, folder: Path, devices: Sequence[str]) -> None:
    num_failed = 0
    while True:
        try:
            request = await log.file_request(node, WAIT_S)
            if request is not None:
                await log.send_file(node, await _answer(folder, devices, request))
            num_failed = 0
        except (LogError, UsageError) as error:
            if not num_failed:
                _warn(str(error))
            await asyncio.sleep(backoff_s(num_failed))
            num_failed += 1


async def _answer(folder: Path, devices: Sequence[str], request: FileRequest) -> FilePart:
    if not request.slots:
        return await asyncio.to_thread(read_part, folder, request)
    found = await try_devices(devices, request.slots)
    return FilePart(number=request.number, data=msgpack.encode(found))


def read_part(folder: Path, request: FileRequest) -> FilePart:
    """The requested part of a regular file that is in `folder`, not by a link."""
    path = Path(request.path)
    if not path.is_relative_to(folder) or path.resolve() != path:
        return FilePart(number=request.number, error="it is not in the agent's folder of logs")
    try:
        # A rank that runs as this user may have put a pipe there.
        with open_regular(path, follow=False) as file:
            begin, data = bounded_file.read_part(file.fileno(), request.offset, PART_BYTES_MAX)
            return FilePart(number=request.number, data=data, begin=begin)
    except OSError as error:
        return FilePart(number=request.number, error=reason(error))

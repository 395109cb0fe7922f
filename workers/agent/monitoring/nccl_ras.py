"""Asks NCCL's RAS service (NCCL 2.24 and later) what is wrong with the jobs of this node.

Each process that uses NCCL has a thread for it; one of them listens at NCCL_RAS_ADDR of its host
and answers for all its job: processes that are gone, ranks whose numbers of collectives differ. The
protocol is that of NCCL's own client, `ncclras`: lines of text.
"""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress

from ....events.network_address import split_endpoint

ADDRESS = "localhost:28028"
"""NCCL's default of NCCL_RAS_ADDR."""
PROTOCOL_NUM = 2
ANSWER_S_MAX = 1.0
BYTES_MAX = 64 << 10
TROUBLE_CHARS_MAX = 1000
_HEADING = re.compile(r"^(Errors|Warnings)\s*$")
_RULE = re.compile(r"^[=-]{3,}\s*$")


def address(environment: Mapping[str, str]) -> str:
    """Where the service of ranks with this environment listens; "": they have none."""
    if environment.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return ""
    return environment.get("NCCL_RAS_ADDR", "").strip() or ADDRESS


async def status(endpoint: str) -> str:
    """The report of the service, in its words; "": nobody answers, or not as NCCL does. Takes
    ANSWER_S_MAX at most."""
    with suppress(OSError, TimeoutError, ValueError):
        host, port = split_endpoint(endpoint)
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_connection(host, port, limit=BYTES_MAX)
            try:
                return await _ask(reader, writer)
            finally:
                writer.close()
    return ""


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    writer.write(f"CLIENT PROTOCOL {PROTOCOL_NUM}\n".encode())
    if not (await reader.readline()).upper().startswith(b"SERVER PROTOCOL "):
        return ""
    writer.write(f"TIMEOUT {ANSWER_S_MAX:.0f}\n".encode())
    if (await reader.readline()).strip().upper() != b"OK":
        return ""
    writer.write(b"VERBOSE STATUS\n")
    data = bytearray()
    while len(data) < BYTES_MAX and (part := await reader.read(BYTES_MAX - len(data))):
        data += part
    return data.decode("utf-8", "replace")


def trouble(report: str) -> str:
    """The errors and warnings of a report; "": it has none."""
    lines: list[str] = []
    inside = False
    for line in report.splitlines():
        if heading := _HEADING.match(line):
            inside = True
            lines.append(f"{heading[1]}:")
        elif inside and line.strip() and not _RULE.match(line):
            lines.append(line.strip())
    return "\n".join(lines)[:TROUBLE_CHARS_MAX]

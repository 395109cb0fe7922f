"""Two nodes in two network namespaces, and a link between them that can be cut.

The log server and the control plane listen on unix sockets. In the near namespace, a relay forwards
connections from the link to them. The machine's own network has no access. Needs the rights to
create namespaces, and `ip`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unicron.cli.cluster.client import Client
from unicron.cli.cluster.local_cluster import free_port
from unicron.events import unix_socket
from unicron.events.log.embedded_server import Server

HERE, THERE = "10.231.7.1", "10.231.7.2"
NODES = ("n1", "n2")
"""The first runs beside the control plane, the second in the far namespace."""
RELAY_BYTES = 1 << 16
IP_S_MAX = 30.0
CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """The reason why namespaces cannot be created here, or ""."""
    if shutil.which("ip") is None:
        return "there is no `ip`"
    tried = subprocess.run(
        ["unshare", "-n", "true"], capture_output=True, text=True, timeout=IP_S_MAX, check=False
    )
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    tried = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=IP_S_MAX, check=False
    )
    return "" if tried.returncode == 0 else f"`ip netns` fails: {tried.stderr.strip()}"


@contextmanager
def namespaces(mark: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them; removed at the end."""
    near, far = f"{mark}-a", f"{mark}-b"
    try:
        for name in (near, far):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far)
        for name, link, address in ((near, "near", HERE), (far, "far", THERE)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
        yield near, far
    finally:
        for name in (near, far):
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True, timeout=IP_S_MAX
            )


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=IP_S_MAX)


def cut(far: str) -> float:
    """Take the link down; return the time."""
    at_s = time.time()
    ip("-n", far, "link", "set", "far", "down")
    return at_s


def mend(far: str) -> None:
    ip("-n", far, "link", "set", "far", "up")


@contextmanager
def within(name: str) -> Iterator[None]:
    """Run this thread, and all threads and processes that it starts, in a namespace."""
    with open("/proc/thread-self/ns/net") as before:
        _enter(Path("/run/netns") / name)
        try:
            yield
        finally:
            _enter_fd(before.fileno())


def _enter(path: Path) -> None:
    with path.open() as namespace:
        _enter_fd(namespace.fileno())


def _enter_fd(fd: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


# --- in the near namespace -----------------------------------------------------------------------
class Relay:
    """Forwards connections at HERE, in this thread's namespace, to a unix socket."""

    def __init__(self, to: str) -> None:
        self.port = free_port()
        self._to = unix_socket.address(to)
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="relay", daemon=True
        )
        self._thread.start()
        assert self._ready.wait(10.0), "the relay did not start"

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._come, HERE, self.port)
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._passing)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10.0)

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.get_running_loop().create_task(self._pass(reader, writer))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_unix_connection(self._to)
        except OSError:
            writer.close()
            return
        ends = {writer, to_writer}
        self._writers |= ends
        await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))
        self._writers -= ends


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(RELAY_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


class Agents:
    """The agents of both nodes. They reach the control plane and the log server by relays only."""

    def __init__(
        self, folder: Path, far: str, server: Server, client: Client, *, num_slots: int, trace: Path
    ) -> None:
        self._relays = [Relay(client.socket), Relay(server.socket)]
        http, redis = (relay.port for relay in self._relays)
        self._running: list[subprocess.Popen[bytes]] = []
        for node, host, inside in (
            (NODES[0], HERE, []),
            (NODES[1], THERE, ["ip", "netns", "exec", far]),
        ):
            with (folder / f"{node}.log").open("wb") as log:
                self._running.append(
                    subprocess.Popen(
                        [
                            *inside,
                            sys.executable,
                            "-P",
                            "-m",
                            "unicron.cli.main",
                            "agent",
                            "--node",
                            node,
                            "--advertise",
                            host,
                            "--insecure",
                            "--slots",
                            str(num_slots),
                            "--url",
                            f"http://{HERE}:{http}",
                            "--redis",
                            f"redis://:{server.password}@{HERE}:{redis}/0",
                            "--state",
                            str(folder / node),
                        ],
                        env={
                            **os.environ,
                            "UNICRON_TOKEN": client.token,
                            "UNICRON_TRACE_DIR": str(trace),
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def stop(self) -> None:
        """Kill the agents; their ranks die with them."""
        for agent in self._running:
            agent.kill()
            agent.wait()
        for relay in self._relays:
            relay.stop()

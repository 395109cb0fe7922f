"""The case network_cut: two nodes in network namespaces of their own, and the link between them.

The cluster's server and its control plane listen on loopback, as ever; in their namespace a relay
takes what comes over the link. Nothing of it is reached from the machine's own network. Needs the
rights to make namespaces, and `ip`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from unicron.cli import local_cluster
from unicron.cli.local_cluster import CONTROL_PLANE
from unicron.events.embedded import free_port

from . import detection_faults as faults
from .detection_faults import NotStruck, Trial
from .detection_torchrun import Torchrun
from .detection_unicron import Watched
from .recovery_job import NUM_RANKS
from .recovery_trial import NotStarted
from .recovery_unicron import Unicron

CASE = "network_cut"
HERE, THERE = "10.231.7.1", "10.231.7.2"
STEP_S_MAX = 900.0
RELAY_BYTES = 1 << 16


def trials(folder: Path, name: str, num: int, say: Callable[[str], None]) -> list[Trial]:
    """`num` cuts under this system, in a process of their own that lives in one namespace."""
    mark = f"unicron-{os.getpid()}"
    try:
        with namespaces(mark) as (near, far):
            done = subprocess.run(
                ["ip", "netns", "exec", near, sys.executable, "-P", "-m", "bench.detection_network",
                 str(folder / f"{name}-{CASE}"), name, str(num), far],
                stdout=subprocess.PIPE, text=True, timeout=STEP_S_MAX, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{CASE} {name}: {error}")
        return [Trial(CASE, name, None, f"no network namespaces: {error}")]
    found = [Trial(**json.loads(line)) for line in done.stdout.splitlines()]
    for number, trial in enumerate(found, 1):
        say(f"{CASE} {name} {number} of {num}: {trial.why or f'{trial.detect_s:.3f} s'}")
    return found


@contextmanager
def namespaces(mark: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them; gone afterwards."""
    near, far = f"{mark}-a", f"{mark}-b"
    try:
        for name in (near, far):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far)
        for name, link, address in ((near, "near", HERE), (far, "far", THERE)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
        yield near, far
    finally:
        for name in (near, far):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True,
                           timeout=30)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def cut(far: str) -> float:
    """Take the link down; when."""
    at_s = time.time()
    _ip("-n", far, "link", "set", "far", "down")
    return at_s


def mend(far: str) -> None:
    _ip("-n", far, "link", "set", "far", "up")


# --- in the near namespace -----------------------------------------------------------------------
class Parted(Unicron):
    """Its second node is in the far namespace."""

    def __init__(self, folder: Path, far: str) -> None:
        super().__init__(folder)
        self._far = far
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._local.choose_port()
        server = self._local.ensure_server()
        assert server is not None
        self._local.ensure(CONTROL_PLANE)
        client = self._client = self._local.wait_control_plane()
        http, redis = relay(self._local.wanted.port), relay(server.port)
        url, token = f"http://{HERE}:{http}", client.token
        common = [sys.executable, "-P", "-m", "unicron.cli.main", "agent", "--slots",
                  str(NUM_RANKS // 2), "--url", url,
                  "--redis", f"redis://:{server.password}@{HERE}:{redis}/0"]
        for node, host, within in (("n1", HERE, []), ("n2", THERE,
                                                      ["ip", "netns", "exec", self._far])):
            log = (self.folder / f"{node}.log").open("wb")
            self._agents.append(subprocess.Popen(
                [*within, *common, "--node", node, "--host", host,
                 "--state", str(self.folder / node)],
                env={**os.environ, "UNICRON_TOKEN": token,
                     "UNICRON_TRACE_DIR": str(self.watch.folder)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True))
        local_cluster.wait_for(lambda: self.are_healthy() or None, 60.0,
                               "an agent does not join", f"see {self.folder}")
        self.task = int(client.post("/v1/tasks", self._spec)["task"])

    def stop(self) -> None:
        for agent in self._agents:  # its ranks die with it
            agent.kill()
            agent.wait()
        super().stop()


class WatchedCut(Watched):
    """Struck by taking its link down; mended as soon as that was told."""

    def __init__(self, folder: Path, far: str) -> None:
        super().__init__(Parted(folder, far))
        self._far = far

    def _struck(self, case: str, node: str) -> float:
        return cut(self._far)

    def _undo(self, case: str, node: str) -> None:
        mend(self._far)


class TorchrunCut(Torchrun):
    """Its second launcher is in the far namespace."""

    def __init__(self, folder: Path, far: str) -> None:
        super().__init__(folder)
        self.address, self._far = HERE, far
        self._env["GLOO_SOCKET_IFNAME"] = "near"

    def launch_node(self, number: int) -> None:
        if number:
            self.within = ["ip", "netns", "exec", self._far]
            self._env["GLOO_SOCKET_IFNAME"] = "far"
        super().launch_node(number)

    def _struck(self, case: str) -> float:
        return cut(self._far)

    def stop(self) -> None:
        super().stop()
        mend(self._far)


def relay(port: int) -> int:
    """Whatever comes to HERE goes on to this port of loopback; the port to come to."""
    ours = free_port()

    async def serve() -> None:
        server = await asyncio.start_server(_passes(port), HERE, ours)
        ready.set()
        await server.serve_forever()

    ready = threading.Event()
    threading.Thread(target=lambda: asyncio.run(serve()), name="relay", daemon=True).start()
    if not ready.wait(10.0):
        raise NotStarted("the relay does not start")
    return ours


def _passes(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter],
                                   asyncio.Future[None] | object]:
    async def passes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    return passes


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(RELAY_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def main() -> None:
    """Strike; a line of JSON for each trial."""
    folder, name, num, far = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    found: list[Trial] = []
    while len(found) < num and not faults.never(found):
        place = folder / str(len(found))
        system = WatchedCut(place, far) if name == "unicron" else TorchrunCut(place, far)
        try:
            system.start()
            while len(found) < num and not faults.never(found):
                found.append(system.strike(CASE))
                print(json.dumps(found[-1]._asdict()), flush=True)
                if name != "unicron":
                    break
        except (NotStarted, NotStruck) as error:
            found.append(Trial(CASE, name, None, str(error)))
            print(json.dumps(found[-1]._asdict()), flush=True)
        finally:
            system.stop()


if __name__ == "__main__":
    main()

"""The case network_cut: two nodes in separate network namespaces, and the link between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.detection import faults
from bench.detection.faults import NotStruck, Trial
from bench.detection.torchrun import Torchrun
from bench.detection.unicron import Watched
from bench.recovery.job import NUM_RANKS
from bench.recovery.trial import NotStarted
from bench.recovery.unicron import Unicron
from network_namespaces import HERE, Agents, cut, mend, namespaces
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.local_cluster import CONTROL_PLANE

CASE = "network_cut"
STEP_S_MAX = 900.0


def trials(folder: Path, name: str, num: int, say: Callable[[str], None]) -> list[Trial]:
    """Run `num` cuts for this system in a child process that lives in one of the namespaces."""
    mark = f"unicron-{os.getpid()}"
    try:
        with namespaces(mark) as (near, far):
            done = subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    near,
                    sys.executable,
                    "-P",
                    "-m",
                    "bench.detection.network",
                    str(folder / f"{name}-{CASE}"),
                    name,
                    str(num),
                    far,
                ],
                stdout=subprocess.PIPE,
                text=True,
                timeout=STEP_S_MAX,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{CASE} {name}: {error}")
        return [Trial(CASE, name, None, f"no network namespaces: {error}")]
    found = [Trial(**json.loads(line)) for line in done.stdout.splitlines()]
    for number, trial in enumerate(found, 1):
        say(f"{CASE} {name} {number} of {num}: {trial.why or f'{trial.detect_s:.3f} s'}")
    return found


# --- in the near namespace -----------------------------------------------------------------------
class Parted(Unicron):
    """Unicron with its second node in the far namespace."""

    def __init__(self, folder: Path, far: str) -> None:
        super().__init__(folder, policy={"shared_folders": [str(folder)]})
        self._far = far
        self._agents: Agents | None = None

    def start(self) -> None:
        self._local.choose_port()
        server = self._local.ensure_server()
        assert server is not None
        self._local.ensure(CONTROL_PLANE)
        client = self._client = self._local.wait_control_plane()
        self._agents = Agents(
            self.folder,
            self._far,
            server,
            client,
            num_slots=NUM_RANKS // 2,
            trace=self.watch.folder,
        )
        local_cluster.wait_for(
            lambda: self.are_healthy() or None, 60.0, "an agent does not join", f"see {self.folder}"
        )
        self.task = int(client.post("/v1/tasks", self.spec)["task"])

    def stop(self) -> None:
        if self._agents is not None:
            self._agents.stop()
        super().stop()


class WatchedCut(Watched):
    """Unicron whose fault takes the link down. The link is restored after each trial."""

    def __init__(self, folder: Path, far: str) -> None:
        super().__init__(Parted(folder, far))
        self._far = far

    def _struck(self, case: str, node: str) -> float:
        return cut(self._far)

    def _undo(self, case: str, node: str) -> None:
        mend(self._far)


class TorchrunCut(Torchrun):
    """torchrun with its second launcher in the far namespace."""

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


def main() -> None:
    """Run the trials; print a line of JSON for each."""
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

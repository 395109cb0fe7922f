"""Unicron in the detection bench: a full cluster, and a reader that follows its log."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.detection import faults
from bench.detection.faults import Trial
from bench.recovery.job import NUM_RANKS, VICTIM_NUM
from bench.recovery.trial import NotStarted
from bench.recovery.unicron import Unicron
from demo.stage import kill_node
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.answers import Interrupted
from unicron.cli.cluster.client import Client, Refused, Unable, Unreachable, connect
from unicron.cli.cluster.state_dir import StateDir

WHOLE_S_MAX = 120.0
WARM_NUM = 12
"""Iterations in a generation before a fault. More than the policy's restart_iterations (10):
otherwise one more fault of the same rank would disable its slot."""
KNOWN_NUM = 30
"""The same for faults whose detection needs statistics of the normal behaviour."""
STATISTICAL = ("gil_held", "rank_looping", "rank_slow", "network_cut")
"""For a cut: waiting members make a short silence of the far node suspicious."""
HEALED = ("rank_killed", "exception", "agent_killed", "rank_stopped", "gil_held", "rank_looping")
"""Faults that end in a new generation. The next fault waits for that generation."""
TOLD_S_MAX = 60.0
Record = dict[str, Any]


class Reader(threading.Thread):
    """Follows the log as `unicron tail -f` does. `seen` has each record and its time of arrival."""

    def __init__(self, client: Client) -> None:
        super().__init__(name="reader", daemon=True)
        self._client = client
        self.seen: list[tuple[float, Record]] = []

    def run(self) -> None:
        while True:
            last = self.seen[-1][1]["seq"] if self.seen else 0
            try:
                for record in self._client.records(last, follow=True):
                    self.seen.append((time.time(), record))
            except (Interrupted, Refused, Unable, Unreachable):
                time.sleep(0.1)

    def first(self, begin: int, is_it: Callable[[Record], bool]) -> float | None:
        """When the first matching record at or after index `begin` arrived."""
        return next((at_s for at_s, record in self.seen[begin:] if is_it(record)), None)


class Watched:
    """A task of four ranks on two nodes, into which faults are injected one after another."""

    name = "unicron"

    def __init__(self, made: Unicron) -> None:
        self._made = made
        self._beyond = 0
        """The next fault waits for a generation after this one; 0 if any generation will do."""
        self.folder = self._made.watch.folder

    def start(self) -> None:
        """Raises NotStarted."""
        self._made.start()
        self._reader = Reader(connect(StateDir(self._made.folder / "state")))
        self._reader.start()

    def stop(self) -> None:
        self._made.stop()

    def strike(self, case: str) -> Trial:
        """Wait until the task is complete and warm; inject; wait. Raises NotStarted."""
        self._whole(KNOWN_NUM if case in STATISTICAL else WARM_NUM)
        begin = len(self._reader.seen)
        told = TOLD[case]
        node = self._victim()["node"]
        self._beyond = self._made.view()["generation"] if case in HEALED else 0
        at_s = self._struck(case, node)
        came_s = faults.wait(
            lambda: self._reader.first(
                begin, lambda record: told(record["kind"], record["body"], node)
            ),
            TOLD_S_MAX,
        )
        self._undo(case, node)
        if came_s is None:
            return Trial(case, self.name, None, f"not told within {TOLD_S_MAX:g} s")
        return Trial(case, self.name, came_s - at_s)

    def _struck(self, case: str, node: str) -> float:
        if case in faults.HELD:
            return faults.inside(self.folder, self._made.task, VICTIM_NUM, case)
        if case == "agent_killed":
            at_s = time.time()
            kill_node(StateDir(self._made.folder / "state"), node)
            return at_s
        return faults.by_signal(self._victim()["pid"], case)

    def _undo(self, case: str, node: str) -> None:
        """Undo what does not recover without help."""
        faults.undo(self.folder, self._made.task, VICTIM_NUM)
        if case == "agent_killed":
            self._made.start_agent(local_cluster.agent_name(node))
        if case == "rank_slow":  # a later slowdown of this process is reported later
            self._beyond = self._made.view()["generation"]
            os.kill(self._victim()["pid"], signal.SIGKILL)

    def _victim(self) -> dict[str, Any]:
        return next(rank for rank in self._made.view()["ranks"] if rank["rank"] == VICTIM_NUM)

    def _whole(self, num_warm: int) -> None:
        last_s = time.monotonic() + WHOLE_S_MAX
        while not self._is_whole(num_warm):
            if time.monotonic() > last_s:
                raise NotStarted(f"not whole within {WHOLE_S_MAX:g} s")
            time.sleep(0.1)

    def _is_whole(self, num_warm: int) -> bool:
        if not self._made.are_healthy():
            return False
        view = self._made.view()
        members = [rank for rank in view["ranks"] if rank["state"] == "member"]
        if (
            view["state"] != "running"
            or view["phase"] != "training"
            or not (len(members) == len(view["ranks"]) == NUM_RANKS)
        ):
            return False
        progress = [
            record["body"] for _, record in self._reader.seen if record["kind"] == "TaskProgressed"
        ]
        newest = progress[-1]["generation"] if progress else 0
        if view["generation"] <= self._beyond or self._is_slow():
            return False
        num = sum(
            len(body["losses"])
            for body in progress
            if body["generation"] == newest == view["generation"]
        )
        return num >= num_warm

    def _is_slow(self) -> bool:
        """True if the last report of the victim's step time calls it slow."""
        paced = [
            record["body"]
            for _, record in self._reader.seen
            if record["kind"] == "StepTimeChanged" and _of_victim(record["body"])
        ]
        return bool(paced) and _slowed(paced[-1])


def _of_victim(body: Record) -> bool:
    return bool(body["rank"] == VICTIM_NUM)


def _slowed(body: Record) -> bool:
    return bool(body["own_s"] >= 1.1 * body["normal_s"])


TOLD: dict[str, Callable[[str, Record, str], bool]] = {
    "rank_killed": lambda kind, body, node: kind == "RankExited" and _of_victim(body),
    "exception": lambda kind, body, node: kind == "RankErrored" and _of_victim(body),
    "agent_killed": lambda kind, body, node: kind == "NodeUnreachable" and body["node"] == node,
    "network_cut": lambda kind, body, node: kind == "NodeUnreachable" and body["node"] == node,
    "rank_stopped": lambda kind, body, node: kind == "RankSuspended" and _of_victim(body),
    "gil_held": lambda kind, body, node: (
        kind == "RankStalled" and _of_victim(body) and body["where"] == "own"
    ),
    "rank_looping": lambda kind, body, node: (
        kind == "RankStalled" and _of_victim(body) and body["where"] == "own"
    ),
    "rank_slow": lambda kind, body, node: (
        kind == "StepTimeChanged" and _of_victim(body) and _slowed(body)
    ),
}
"""By case, the report that counts as detection: the first finding, not its consequences."""

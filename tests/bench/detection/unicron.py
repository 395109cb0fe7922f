"""Unicron in the detection bench: a whole cluster, and a reader who follows its log."""

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
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.client import Client, Interrupted, Refused, Unable, Unreachable, connect
from unicron.cli.cluster.state_dir import StateDir

WHOLE_S_MAX = 120.0
WARM_NUM = 12
"""Iterations in a generation before it is struck: above the 10 without which one fault more of the
same rank would take its slot out (the policy's restart_iterations)."""
KNOWN_NUM = 30
"""Where what is usual has to be known before."""
STATISTICAL = ("gil_held", "rank_looping", "rank_slow", "network_cut")
"""Of a cut, the members that wait over here are what makes a short silence suspicious."""
HEALED = ("rank_killed", "exception", "agent_killed", "rank_stopped", "gil_held", "rank_looping")
"""What ends in another generation, with another process: not struck again before."""
TOLD_S_MAX = 60.0
Record = dict[str, Any]


class Reader(threading.Thread):
    """Follows the log as `unicron tail -f` does; `seen` has each record and when it came."""

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
        """When the first such record behind place `begin` came."""
        return next((at_s for at_s, record in self.seen[begin:] if is_it(record)), None)


class Watched:
    """A training of four ranks on two nodes, struck again and again."""

    name = "unicron"

    def __init__(self, made: Unicron) -> None:
        self._made = made
        self._beyond = 0
        """The generation that was struck last."""
        self.folder = self._made.watch.folder

    def start(self) -> None:
        """Raises NotStarted."""
        self._made.start()
        self._reader = Reader(connect(StateDir(self._made.folder / "state")))
        self._reader.start()

    def stop(self) -> None:
        self._made.stop()

    def strike(self, case: str) -> Trial:
        """Wait until it is whole and warm, strike, wait for the word. Raises NotStarted."""
        self._whole(KNOWN_NUM if case in STATISTICAL else WARM_NUM)
        begin = len(self._reader.seen)
        told = TOLD[case]
        node = self._victim()["node"]
        self._beyond = self._made.view()["generation"] if case in HEALED else 0
        at_s = self._struck(case, node)
        came_s = faults.wait(lambda: self._reader.first(
            begin, lambda record: told(record["kind"], record["body"], node)), TOLD_S_MAX)
        self._undo(case, node)
        if came_s is None:
            return Trial(case, self.name, None, f"not told within {TOLD_S_MAX:g} s")
        return Trial(case, self.name, came_s - at_s)

    def _struck(self, case: str, node: str) -> float:
        if case in faults.HELD:
            return faults.inside(self.folder, self._made.task, VICTIM_NUM, case)
        if case == "agent_killed":
            at_s = time.time()
            os.kill(self._made.process(local_cluster.agent_name(node)).pid, signal.SIGKILL)
            return at_s
        return faults.by_signal(self._victim()["pid"], case)

    def _undo(self, case: str, node: str) -> None:
        """What does not heal by itself."""
        faults.undo(self.folder, self._made.task, VICTIM_NUM)
        if case == "agent_killed":
            self._made.start_agent(local_cluster.agent_name(node))
        if case == "rank_slow":  # of one process each further time is told later (monitor.py)
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
        if view["state"] != "running" or view["phase"] != "training" or not (
                len(members) == len(view["ranks"]) == NUM_RANKS):
            return False
        progress = [record["body"] for _, record in self._reader.seen
                    if record["kind"] == "TaskProgressed"]
        newest = progress[-1]["generation"] if progress else 0
        if view["generation"] <= self._beyond or self._is_slow():
            return False
        num = sum(len(body["losses"]) for body in progress
                  if body["generation"] == newest == view["generation"])
        return num >= num_warm

    def _is_slow(self) -> bool:
        """As last told of the victim: after it was made slow, it has to be seen well again."""
        paced = [record["body"] for _, record in self._reader.seen
                 if record["kind"] == "StepTimeChanged" and _of_victim(record["body"])]
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
    "gil_held": lambda kind, body, node: (kind == "RankStalled" and _of_victim(body)
                                          and body["where"] == "own"),
    "rank_looping": lambda kind, body, node: (kind == "RankStalled" and _of_victim(body)
                                              and body["where"] == "own"),
    "rank_slow": lambda kind, body, node: (kind == "StepTimeChanged" and _of_victim(body)
                                           and _slowed(body)),
}
"""The report that says it; the finding's name, not that of what came of it elsewhere."""

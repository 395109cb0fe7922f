"""Attacks of a node, by its key and its rights on the log's server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from bench.attack.stage import (
    HEAL_S_MAX,
    Outcome,
    Victim,
    cluster_for,
    control_plane_pid,
    healing_pair,
    judged,
)
from hostile_node import HostileNode
from rank_bodies import body_of
from real_cluster import RealCluster
from twins import small
from unicron.events.records.orders import PublishCheckpoint
from unicron.events.records.reports import (
    CheckpointSaved,
    LossNotFinite,
    NodeLeft,
    ReportsLost,
    TaskProgressed,
)

RATIO_MAX = 3.0
FLOOD_NUM, LARGE_BYTES, WARM_S = 250_000, 8 << 20, 5.0
EVERY_S = 0.02
JUMPED_NUM = 10**9


def malformed(num_pairs: int) -> Outcome:
    """S1: reports that end who reads them, again and again; then a new control plane."""
    broken, pairs_s = list[str](), list[tuple[float, float]]()
    with cluster_for() as cluster, _nodes(cluster) as (evil, healthy):
        victim, pid = Victim(cluster), control_plane_pid(cluster)
        entries = list(evil.malformed())
        for _ in range(num_pairs):
            with _again(lambda: _to_all(evil, entries)) as stop:
                pairs_s.append(healing_pair(victim, stop.clear, stop.set, 1.0))
        broken += ["the control plane ended"] * (control_plane_pid(cluster) != pid)
        broken += _heard(healthy, "another node is not heard")
        _to_all(evil, entries)
        if control_plane_pid(cluster):
            cluster.kill_control_plane()
        try:
            cluster.start_control_plane()
            broken += _heard(healthy, "another node is not heard after a restart")
        except Exception as error:  # noqa: BLE001 (whatever it is, it does not lead)
            broken.append(f"a new control plane does not lead: {error}"[:160])
    return with_ratio(broken, "5 kinds of reports, many times; then a restart", pairs_s)


def _to_all(evil: HostileNode, entries: Sequence[bytes]) -> None:
    """Into each list to which the node may append."""
    for number in range(len(evil.lists)):
        evil.push(entries, to=number)


def with_ratio(
    broken: list[str], how: str, pairs_s: list[tuple[float, float]], ratio_max: float = RATIO_MAX
) -> Outcome:
    """The outcome: a ratio above the goal is a break, too."""
    outcome = judged(broken, how, pairs_s)
    late = [f"not healed within {HEAL_S_MAX:g} s"] * any(s >= HEAL_S_MAX for _, s in pairs_s)
    if (ratio := outcome.ratio) is not None and ratio > ratio_max:
        late = late or [f"healing takes {ratio:.1f} times as long, goal {ratio_max:g}"]
    return judged([*broken, *late], how, pairs_s)


@contextmanager
def _nodes(cluster: RealCluster) -> Iterator[tuple[HostileNode, HostileNode]]:
    """A hostile node and a healthy one, in the state, without slots."""
    client = cluster.client()
    with HostileNode(client, "evil") as evil, HostileNode(client, "healthy") as healthy:
        for one in (evil, healthy):
            one.join()
        yield evil, healthy


def _heard(node: HostileNode, otherwise: str) -> list[str]:
    try:
        node.check_leader()
    except Exception as error:  # noqa: BLE001 (whatever it is, it was not heard)
        return [f"{otherwise}: {error}"[:160]]
    return []


@contextmanager
def _again(do: Callable[[], object]) -> Iterator[threading.Event]:
    """Do it again and again, while the event is not set. It is set at first."""
    paused, ended = threading.Event(), threading.Event()
    paused.set()

    def work() -> None:
        while not ended.wait(EVERY_S):
            if not paused.is_set():
                with suppress(Exception):  # the server may be away
                    do()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield paused
    finally:
        ended.set()
        thread.join(20)


def false_reports(num_pairs: int) -> Outcome:
    """S6: reports about a task by a node that runs none of it, and by one that never started."""
    with cluster_for() as cluster, _nodes(cluster) as (evil, _):
        task = cluster.submit(small("small", cluster.path / "out", slots=(1, 1), copy_every=0))
        cluster.wait_whole(task, 1)
        after = cluster.seq()
        generation = cluster.task(task)["generation"]
        with HostileNode(cluster.client(), "stranger") as stranger:
            _lie(stranger, task, generation)
        _lie(evil, task, generation)
        time.sleep(2.0)
        view: Any = cluster.task(task)
        broken = [f"iteration {view['iteration']}"] * (view["iteration"] >= JUMPED_NUM)
        broken += ["LossNotFinite is taken"] * bool(cluster.told(after, "LossNotFinite", task=task))
        kind = PublishCheckpoint.__name__
        moved = [one for one in cluster.told(after, kind) if "iter-999" in str(one.body)]
        broken += ["`latest` is moved"] * bool(moved)
    return judged(
        broken, "3 kinds of reports, by a node without ranks and by one that has not started"
    )


def _lie(evil: HostileNode, task: int, generation: int) -> None:
    of: dict[str, Any] = {"task": task, "generation": generation}
    evil.report(
        TaskProgressed(
            **of,
            first_iteration=JUMPED_NUM,
            losses=(1.0,),
            step_s=(1.0,),
            rate_flops=1e24,
            micro_batches=4,
        ),
        body_of(LossNotFinite, **of, iteration=JUMPED_NUM, text="nan"),
        body_of(CheckpointSaved, **of, path="gen-1/iter-999", final=True),
    )


def flood(num_pairs: int) -> Outcome:
    """S7: as many valid reports as one node can send, then junk; entries of 8 MiB."""
    broken, pairs_s, sent = list[str](), list[tuple[float, float]](), 0
    for _ in range(num_pairs):
        with cluster_for() as cluster, _nodes(cluster) as (evil, healthy):
            victim, flooding = Victim(cluster), _Flood(evil)
            pairs_s.append(healing_pair(victim, flooding.start, flooding.stop, WARM_S))
            sent = max(sent, flooding.num)
            after_s = victim.heal()
            broken += ["not healed after the flood"] * (after_s >= HEAL_S_MAX)
            if not broken:
                broken += _large(cluster, evil, healthy)
    how = f"{sent:,} reports of one node in {WARM_S:g} s and more; 8 MiB in one"
    return with_ratio(list(dict.fromkeys(broken)), how, pairs_s)


class _Flood(threading.Thread):
    """Valid reports and junk, until `stop`, at most FLOOD_NUM."""

    def __init__(self, node: HostileNode) -> None:
        super().__init__(daemon=True)
        self._node, self._ended, self.num = node, threading.Event(), 0

    def run(self) -> None:
        body = ReportsLost(node=self._node.name, num_lost=1)
        while self.num < FLOOD_NUM and not self._ended.is_set():
            entries = [self._node.signed(self._node.next(body)) for _ in range(400)]
            self._node.push([*entries, *[b"junk" * 10] * 100], to=self.num // 500)
            self.num += 500

    def stop(self) -> None:
        self._ended.set()
        self.join(20)


def _large(cluster: RealCluster, evil: HostileNode, healthy: HostileNode) -> list[str]:
    """Whether one report of 8 MiB is in the log as it is."""
    after = cluster.seq()
    left = NodeLeft(node=evil.name, incarnation=evil.incarnation, reason="x" * LARGE_BYTES)
    evil.push([evil.signed(evil.next(left))])
    broken = _heard(healthy, "another node is not heard")
    whole = [
        one
        for one in cluster.told(after, "NodeLeft", node=evil.name)
        if len(str(one.body)) >= LARGE_BYTES
    ]
    return broken + ["a report of 8 MiB is in the log"] * bool(whole)

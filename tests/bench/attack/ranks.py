"""Attacks of ranks: their page, their pipe, their output, processes that they leave behind."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.attack.nodes import with_ratio
from bench.attack.stage import (
    HEAL_S_MAX,
    NOBODY,
    POLICY,
    Outcome,
    Victim,
    cannot,
    cluster_for,
    hostile,
    judged,
    running_words,
)
from fuzz.bounds import peak_bytes
from real_cluster import RealCluster, can_run_as
from unicron.cli.cluster.client import Interrupted, Refused, Unable, Unreachable

WATCHED_S = 10.0
MEMORY_BYTES_MAX, LOG_BYTES_MAX = 64 << 20, 1 << 20
DISK_BYTES = 120 << 20
FULL_S_MAX, GONE_S_MAX, ASKS_S_MAX = 20.0, 15.0, 20.0
AWAY = (Interrupted, Refused, Unable, Unreachable, AssertionError, OSError)


@functools.cache
def _users() -> tuple[str, ...]:
    """As whom ranks run: as this user, and as nobody where that can be tried."""
    return ("", NOBODY) if can_run_as(NOBODY) else ("",)


def _how(what: str) -> str:
    """What was tried, and as whom."""
    return what + ("; also as nobody" if NOBODY in _users() else "; not tried as nobody")


def _shown(user: str) -> str:
    return f"--run-as {user}" if user else "without --run-as"


def page(num_pairs: int) -> Outcome:
    """S3: three pages of a rank that would end its agent, and with it the ranks of other tasks."""
    broken, told = list[str](), list[str]()
    for user in _users():
        for how in ("cut_page", "wrong_kind", "not_a_number"):
            with cluster_for(user) as cluster:
                victim = Victim(cluster)
                agent, num = cluster.agent("n1").pid, victim.num_starts
                task = cluster.submit(hostile(cluster, how, loop=True))
                time.sleep(WATCHED_S)
                broken += _harm(cluster, victim, agent, num, f"{how}, {_shown(user)}")
                told += [str(one.body.cause)[:60] for one in _exits(cluster, task)[:1]]
    ends = ", ".join(dict.fromkeys(told)) or "nothing"
    return judged(broken, _how(f"a cut page, a wrong kind, NaN; they ended by: {ends}"))


def _exits(cluster: RealCluster, task: int) -> list[Any]:
    with suppress(*AWAY):
        return cluster.told(0, "RankExited", task=task)
    return []


def _harm(
    cluster: RealCluster, victim: Victim, agent: int, num_starts: int, what: str
) -> list[str]:
    """What the agent and the victim suffered."""
    now = cluster.local.find("agent-n1")
    ended = now is None or now.pid != agent
    return [f"{what}: the agent ended"] * ended + [f"{what}: the victim was restarted"] * (
        victim.num_starts != num_starts
    )


def pipe(num_pairs: int) -> Outcome:
    """S4: a deep frame; then its task is cancelled."""
    broken, grown = list[str](), 0
    for user in _users():
        with cluster_for(user) as cluster:
            victim = Victim(cluster)
            agent, num = cluster.agent("n1").pid, victim.num_starts
            log = cluster.state.logs / "agent-n1.log"
            memory, size = peak_bytes(agent), log.stat().st_size
            task = cluster.submit(hostile(cluster, "deep_frame", loop=True))
            time.sleep(WATCHED_S)
            broken += _harm(cluster, victim, agent, num, f"a deep frame, {_shown(user)}")
            with suppress(OSError):
                grown = max(grown, peak_bytes(agent) - memory)
            written = log.stat().st_size - size
            broken += ["the agent's memory grows"] * (grown > MEMORY_BYTES_MAX)
            broken += [f"the agent's log has {written} bytes more"] * (written > LOG_BYTES_MAX)
            with suppress(*AWAY):  # it may have failed by now
                cluster.client().cancel(task)
            time.sleep(WATCHED_S / 2)
            broken += _harm(cluster, victim, agent, num, f"cancelling it, {_shown(user)}")
    return judged(broken, _how(f"memory +{grown >> 20} MB"))


@contextmanager
def _disk() -> Iterator[Path | None]:
    """A disk of DISK_BYTES; None if none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="unicron-attack-") as name:
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", name]
        if os.geteuid() or subprocess.run(words, check=False, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=False, timeout=20)


def output(num_pairs: int) -> Outcome:
    """S5: a task that prints without end, on a state folder of 120 MB under `unicron up`."""
    pairs_s, broken = list[tuple[float, float]](), list[str]()
    for _ in range(num_pairs):
        with _disk() as disk:
            if disk is None:
                return cannot("no file system can be mounted here")
            with _by_up(disk) as (cluster, up):
                victim = Victim(cluster)
                time.sleep(2.0)
                calm_s = victim.heal()
                task = cluster.submit(hostile(cluster, "chatty"))
                _wait_full(disk)
                under_s = victim.heal()
                if under_s < HEAL_S_MAX:  # the log's server may fail only now
                    under_s = max(under_s, victim.heal())
                pairs_s.append((calm_s, under_s))
                broken += ["up has ended"] * (up.poll() is not None)
                for words in (("cancel", str(task)), ("status",)):
                    broken += [f"{words[0]}: {why}" for why in _refusals(cluster, *words)]
    return with_ratio(list(dict.fromkeys(broken)), "120 MB; cancel and status answer", pairs_s)


@contextmanager
def _by_up(folder: Path) -> Iterator[tuple[RealCluster, subprocess.Popen[bytes]]]:
    """A cluster that `unicron up` has started, and watches."""
    (folder / "out").mkdir()
    cluster = RealCluster(folder, 1, POLICY, num_slots=3)
    options = ["--agents", "1", "--slots", "3", "--policy", str(folder / "policy.yaml")]
    up = subprocess.Popen(
        [*cluster.program("up"), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        cluster.wait(lambda: cluster.state.control_planes() or None, "up has a control plane")
        cluster.local.wait_agents(cluster.client())
        yield cluster, up
    finally:
        up.kill()
        up.wait(20)
        cluster.stop()


def _wait_full(disk: Path) -> None:
    """Wait until the disk is full, or FULL_S_MAX: then its output is bounded."""
    deadline_s = time.monotonic() + FULL_S_MAX
    while time.monotonic() < deadline_s and os.statvfs(disk).f_bavail * 4096 > 1 << 20:
        time.sleep(0.1)


def _refusals(cluster: RealCluster, *words: str) -> list[str]:
    """Why a command failed."""
    try:
        done = subprocess.run(
            cluster.program(*words), capture_output=True, text=True, check=False, timeout=ASKS_S_MAX
        )
    except subprocess.TimeoutExpired:
        return [f"no answer in {ASKS_S_MAX:g} s"]
    if not done.returncode:
        return []
    return [done.stderr.strip().partition("\n")[0].partition(" since ")[0][:100]]


def orphan(num_pairs: int) -> Outcome:
    """S10: a process that has left its rank, of a task that is cancelled."""
    broken = list[str]()
    for user in _users():
        with cluster_for(user) as cluster:
            left = _left_behind(cluster)
            broken += [f"it outlives its cancelled task, {_shown(user)}"] * bool(left)
    return judged(broken, _how("forked twice, setsid, no environment"))


def _left_behind(cluster: RealCluster) -> list[int]:
    """The processes that are left of a task that was cancelled. They are ended here."""
    word = f"{random.SystemRandom().randrange(10**5, 10**6)}.5"
    task = cluster.submit(hostile(cluster, "orphan", word))
    cluster.wait(lambda: running_words(f"sleep {word}") or None, "the orphan runs")
    cluster.cancel(task)
    deadline_s = time.monotonic() + GONE_S_MAX
    while running_words(f"sleep {word}") and time.monotonic() < deadline_s:
        time.sleep(0.1)
    left = running_words(f"sleep {word}")
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left

"""`make chaos-log`: the log's server, its leader or both are killed under load, again and again.

Clients set the weights of tasks, and submit commands that end at once; two real agents run these
and report. In the end the log is compared with what was acknowledged: no record may be lost, and
none may be there twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import redis
from bench.log.takeover import CLUSTER, LocalPair, Server, wait
from bench.recovery.rows import Row, finish, row
from unicron.cli.cluster.client import connect
from unicron.events.errors import UnicronError
from unicron.events.log import embedded_server
from unicron.events.records import codec
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "build" / "bench" / "chaos-log.json"
SYSTEM = "unicron"
TARGETS = ("server", "leader", "both")
NUM_KILLS = 200
NUM_CLIENTS, SUBMIT_EVERY = 3, 20
NUM_MORE = 3
"""Answers after each kill, before the next."""
PAUSE_S_MAX = 0.5
POLICY = "seal_records: 500\nquarantine_faults: 1000\n"
"""Seals often, so that kills meet that too."""


class Told(NamedTuple):
    """What the log has acknowledged, and what readers have seen of it."""

    answers: dict[float, int]
    """By the weight that a client has set: the seq of the answer."""
    seen: dict[int, bytes]
    """By seq: the encoded record."""


class Load:
    """Clients that set weights, each one a number of its own, and a reader of the stream."""

    def __init__(self, pair: LocalPair, tasks: list[int]) -> None:
        self.told = Told({}, {})
        self.num_failed = 0
        self._pair, self._stopping = pair, threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number, task), daemon=True)
            for number, task in enumerate(tasks, 1)
        ]
        self._threads.append(threading.Thread(target=self._read, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60.0)

    def _ask(self, number: int, task: int) -> None:
        count = 0
        while not self._stopping.is_set():
            count += 1
            weight = number + count * 1e-6
            try:
                client = connect(self._pair.state)
                self.told.answers[weight] = client.post(
                    f"/v1/tasks/{task}/weight", {"weight": weight}
                )["seq"]
                if count % SUBMIT_EVERY == 0:
                    client.post("/v1/tasks", command(f"c{number}-{count}", "true"))
            except UnicronError:
                self.num_failed += 1

    def _read(self) -> None:
        """Follow the stream, as any reader may; a server that is away is tried again."""
        last, key = b"0-0", f"{{unicron:{CLUSTER}}}:log"
        while not self._stopping.is_set():
            server = Server.from_url(self._url(), socket_timeout=5.0)
            with suppress(redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
                while not self._stopping.is_set():
                    found = server.xread({key: last}, 500, 500)
                    for entry, fields in found[0][1] if found else ():
                        last = entry
                        self.told.seen[int(entry.partition(b"-")[2])] = fields[b"r"]
            server.close()
            time.sleep(0.05)

    def _url(self) -> str:
        return self._pair.local.redis_url


class Kills:
    """Kills a target, and starts again what was killed."""

    def __init__(self, pair: LocalPair, load: Load) -> None:
        self._pair, self._load = pair, load

    def kill(self, target: str) -> None:
        """Wait until all is there, kill, start again, wait until requests are answered again."""
        pair, load = self._pair, self._load
        wait(self._is_complete, "one leads, and one follows")
        time.sleep(random.uniform(0.0, PAUSE_S_MAX))
        if target != "server":
            pair.strike(target)
        if target != "leader":
            server = embedded_server.adopt(pair.state.server)
            assert server is not None
            os.kill(server.pid, signal.SIGKILL)
            wait(lambda: not server.is_alive, "the server is dead")
            pair.local.ensure_server()
        if target != "server":
            pair.mend()
        num = len(load.told.answers)
        wait(
            lambda: self._revived() and len(load.told.answers) >= num + NUM_MORE,
            f"answers after {target} was killed",
        )

    def _is_complete(self) -> bool:
        return self._revived() and bool(self._pair.lease.url()) and self._pair.lease.is_followed()

    def _revived(self) -> bool:
        self._pair.revive()
        return True


def command(name: str, *words: str) -> dict[str, object]:
    """The spec of a command on one slot."""
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "command": list(words),
        "slots": {"min": 1, "max": 1},
    }


@contextmanager
def chaotic(folder: Path) -> Iterator[LocalPair]:
    """Two control planes and two agents."""
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    pair = LocalPair(folder, str(policy), num_agents=2)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


def chaos(folder: Path, num: int, seed: int) -> tuple[int, int, str]:
    """The records lost and doubled in `num` kills, and a summary."""
    rng = random.Random(seed)
    with chaotic(folder) as pair:
        client = connect(pair.state)
        tasks = [
            client.post("/v1/tasks", command(f"client-{number}", "sleep", "100000"))["task"]
            for number in range(1, NUM_CLIENTS + 1)
        ]
        load = Load(pair, tasks)
        targets = Counter[str]()
        try:
            for number in range(num):
                target = rng.choice(TARGETS)
                Kills(pair, load).kill(target)
                targets[target] += 1
                if (number + 1) % 10 == 0:
                    print(
                        f"chaos  {number + 1} kills, {len(load.told.answers)} answers", flush=True
                    )
        finally:
            load.stop()
        wait(
            lambda: (
                not any(
                    task["state"] in ("running", "starting", "waiting")
                    for task in connect(pair.state).get("/v1/state")["tasks"]
                    if task["id"] not in tasks
                )
            ),
            "the commands have ended",
        )
        records = [codec.from_plain(one) for one in connect(pair.state).records(0, follow=False)]
    lost, doubled = lost_of(records, load.told), doubled_of(records)
    return (
        lost,
        doubled,
        (
            f"{len(records)} records, {len(load.told.answers)} answers, {load.num_failed} requests "
            f"without one; killed: {', '.join(f'{name} {num}' for name, num in targets.items())}"
        ),
    )


# --- the verdict ----------------------------------------------------------------------------------
def lost_of(records: list[Record], told: Told) -> int:
    """Acknowledged records that are not in the log: answered requests, records that were read,
    reports of agents before later ones of the same agent."""
    weights = {one.seq: one.body.weight for one in records if isinstance(one.body, r.TaskWeightSet)}
    num = sum(weights.get(seq) != weight for weight, seq in told.answers.items())
    encoded = {one.seq: codec.encode_record(one) for one in records}
    num += sum(encoded.get(seq) != wire for seq, wire in told.seen.items())
    num += sum(one.body.num_lost for one in records if isinstance(one.body, r.ReportsLost))
    return num + _gaps(one for one in records if one.source_seq)


def _gaps(reports: Iterable[Record]) -> int:
    """Numbers that a source has skipped; those of a ReportsLost are counted by itself."""
    last, num = dict[str, int](), 0
    for one in reports:
        if not isinstance(one.body, r.ReportsLost):
            num += max(one.source_seq - last.get(one.source, 0) - 1, 0)
        last[one.source] = one.source_seq
    return num


def doubled_of(records: list[Record]) -> int:
    """Records that are there again: reports by their number, requests by what they ask for, all by
    their seq."""
    keys = [("report", one.source, one.source_seq) for one in records if one.source_seq]
    keys += [
        ("weight", str(one.body.weight), 0)
        for one in records
        if isinstance(one.body, r.TaskWeightSet)
    ]
    keys += [("seq", "", one.seq) for one in records]
    return len(keys) - len(set(keys))


def rows_of(num: int, lost: int, doubled: int, note: str) -> list[Row]:
    """`n` of each row is the number of kills."""
    return [
        row(case, SYSTEM, "records", [float(value)], "records", note)._replace(n=num)
        for case, value in (("lost", lost), ("doubled", doubled))
    ]


def main() -> None:
    """Kill, count, compare. Exit status: 1 if a record is lost or doubled."""
    parser = argparse.ArgumentParser(prog="make chaos-log")
    parser.add_argument("-n", type=int, default=NUM_KILLS, help="kills")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="unicron-chaos-") as folder:
            lost, doubled, note = chaos(Path(folder), options.n, options.seed)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finish(rows_of(options.n, lost, doubled, note), OUT, began_s, [note], seed=options.seed)
    sys.exit(1 if lost or doubled else 0)


if __name__ == "__main__":
    main()

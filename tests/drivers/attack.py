"""What a hostile rank can reach: `attack.py REPORT STATE STORE VICTIM`, run as a rank of a cluster.

It tries to leave its task: its environment and that of all processes, the files and sockets of the
state folder STATE, the memory of the agents, the HTTP port, the log's server, a forged order, the
copies of the task VICTIM in the checkpoint store at STORE. It writes what it got to REPORT. At the
end it reports for VICTIM over its own pipe, for which its agent ends it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from unicron.events.log.identity import (
    Identities,
    StoreKey,
    sign_order,
    store_key,
    store_secret,
)
from unicron.events.records import codec, orders, reports
from unicron.events.records.envelope import Record
from unicron.workers.checkpoint_store import protocol
from unicron.workers.ipc.pipe_protocol import FD, Frame, Unpacker, pack

REDIS: Any = redis.Redis
FORGED_SEQ = 1 << 40


class Attack:
    """Each method returns what it got; an exception means nothing."""

    def __init__(self, state: Path, store: str, victim: int) -> None:
        self.state, self.store, self.victim = state, store, victim
        self.keys: dict[str, StoreKey] = {}
        """Those that this rank was given."""

    def environments(self) -> str:
        """All that processes show of themselves, this one included."""
        found = ""
        for process in Path("/proc").glob("[0-9]*"):
            for name in ("environ", "cmdline"):
                try:
                    found += (process / name).read_bytes().decode("latin-1")
                except OSError:
                    continue
        return found

    def files(self) -> list[str]:
        """The files of the state folder that it can read."""
        found: list[str] = []
        for folder, _, names in os.walk(self.state):
            found += [
                str((Path(folder) / name).relative_to(self.state))
                for name in names
                if os.access(Path(folder) / name, os.R_OK)
            ]
        return sorted(found)

    def memory(self) -> list[str]:
        """The agents and control planes whose memory it can read, or which it can signal."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"unicron.cli.main" not in words:
                    continue
                os.kill(int(process.name), 0)
                found.append(words[words.index(b"unicron.cli.main") + 1].decode())
                (process / "mem").open("rb").close()
            except (OSError, IndexError):
                continue
        return sorted(set(found))

    def descriptors(self) -> list[str]:
        """Open files of this process that are of the state folder, other than its own output."""
        found = [
            os.readlink(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}")
        ]
        return [
            one
            for one in found
            if one.startswith(str(self.state)) and not Path(one).name.startswith("rank-")
        ]

    def http(self) -> list[str]:
        """The nodes, by the operator's token."""
        plane = json.loads((self.state / "control_plane.json").read_text())
        asked = urllib.request.Request(
            plane["url"] + "/v1/state", headers={"Authorization": f"Bearer {plane['token']}"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return [node["id"] for node in json.load(answer)["nodes"]]

    def local_socket(self) -> str:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.state / "control_plane.sock"))
        return "connected"

    def server(self) -> Any:
        """The log's server as its master."""
        (path,) = (self.state / "server").glob("*.sock")
        link = REDIS(
            unix_socket_path=str(path),
            password=(self.state / "server" / "password").read_text().strip(),
        )
        link.ping()
        return link

    def server_user(self) -> str:
        return str(self.server().acl_whoami())

    def identities(self) -> Identities:
        return Identities((self.state / "secret").read_bytes(), "default")

    def order(self) -> str:
        """An order to n2 that this rank has signed; its agent answers it."""
        server = self.server()
        stream = "{unicron:default}:orders:n2"
        entry = f"9999999-{FORGED_SEQ}"
        wire = codec.encode_record(
            Record(
                seq=FORGED_SEQ,
                epoch=9999999,
                at_s=1.0,
                occurred_s=1.0,
                source="heart",
                source_seq=0,
                cause=0,
                incident=0,
                body=orders.StopRank(
                    nodes=("n2",), task=self.victim, rank=99, attempt=1, grace_s=0.0, why="forged"
                ),
            )
        )
        keys = b"\x80"
        server.xadd(
            stream,
            {"r": wire, "s": sign_order(self.identities().key("n2"), entry, wire, keys), "k": keys},
            id=entry,
        )
        return entry

    def copies_by_own_keys(self) -> int:
        """Shares of the victim, with keys that it was given, as they are and renamed."""
        num = 0
        for key in [*self.keys.values(), StoreKey(self.victim, 1, bytes(32))]:
            for claim in (key, StoreKey(self.victim, key.generation, key.key)):
                try:
                    with protocol.connect(self.store, claim) as connection:
                        num += len(protocol.list_shares(connection, self.victim))
                except (OSError, protocol.TransferError):
                    continue
        return num

    def copies(self) -> int:
        """Shares of the victim, by the secret of the cluster."""
        node = self.store.partition("@")[0]
        key = store_key(store_secret(self.identities().key(node)), self.victim, 1)
        with protocol.connect(self.store.partition("@")[2], key) as connection:
            return len(protocol.list_shares(connection, self.victim))


def main() -> None:
    report, state, store, victim = sys.argv[1:]
    pipe = socket.socket(fileno=int(os.environ[FD]))
    (start, *_) = Unpacker().feed(pipe.recv(1 << 20))
    attack = Attack(Path(state), store, int(victim))
    attack.keys = dict(start.store_keys)
    found: dict[str, object] = {"uid": os.getuid(), "groups": os.getgroups()}
    tries: tuple[Callable[[], object], ...] = (
        attack.environments,
        attack.files,
        attack.memory,
        attack.descriptors,
        attack.http,
        attack.local_socket,
        attack.server_user,
        attack.order,
        attack.copies,
    )
    for one in tries:
        try:
            found[one.__name__] = one()
        except (OSError, ValueError, redis.RedisError, protocol.TransferError) as error:
            found[one.__name__] = None
            found[f"{one.__name__}: why"] = repr(error)
    attack.store = store.partition("@")[2]
    found["copies_by_own_keys"] = attack.copies_by_own_keys()
    Path(report + ".new").write_text(json.dumps(found))
    os.rename(report + ".new", report)
    pipe.sendall(
        pack(
            Frame(
                at_s=time.time(),
                body=reports.RankErrored(
                    task=int(victim),
                    rank=0,
                    attempt=1,
                    generation=1,
                    iteration=1,
                    error="RuntimeError",
                    text="forged: I am not that task",
                    second_hand=False,
                ),
            )
        )
    )
    time.sleep(60)


if __name__ == "__main__":
    main()

"""Attacks by files: state folders, segments and checkpoints of a sender. And what is shipped."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from bench.attack.readers import ASKS_S_MAX, unicron
from bench.attack.stage import Outcome, cannot, cluster_for, command, judged
from real_cluster import RealCluster
from twins import small
from unicron.events.log.segments import NO_DIGEST, Segment
from unicron.workers.checkpoint_store import protocol

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guides" / "threat-model.md"
MEMORY_BYTES_MAX, BOMB_BYTES = 3 << 30, 3_300_000_000
LINES_NUM_MAX = 4
"""A refusal is one line and a hint; a damaged log has one more each."""
REDIS: Any = redis.Redis
LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {
  FILE *file = fopen("MARK", "w"); if (file) { fputs("it ran", file); fclose(file); } }
int ValkeyModule_OnLoad(void) { return 0; }
int RedisModule_OnLoad(void) { return 0; }
"""


def limited(*words: str) -> str:
    """What is wrong with how a command ends on hostile files; "": one line, soon, in bounds."""
    try:
        done = subprocess.run(
            [*RealCluster.PROGRAM, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=ASKS_S_MAX,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX)
            ),
        )
    except subprocess.TimeoutExpired:
        return f"does not end in {ASKS_S_MAX:g} s"
    if "Traceback" in done.stderr:
        return f"a traceback, {done.stderr.strip().splitlines()[-1][:80]}"
    if done.returncode not in (1, 2, 3):
        return f"exit code {done.returncode}"
    lines = done.stderr.strip().splitlines()
    return f"{len(lines)} lines" if len(lines) > LINES_NUM_MAX else ""


# --- state folders --------------------------------------------------------------------------------
@contextmanager
def _killed_folder() -> Iterator[Path]:
    """The state folder of a cluster whose processes have ended."""
    with tempfile.TemporaryDirectory(prefix="unicron-attack-") as name:
        with cluster_for(folder=Path(name)) as cluster:
            cluster.submit(command("task", ["true"]))
            shutil.copytree(
                cluster.state.path,
                Path(name) / "copy",
                ignore=shutil.ignore_patterns("*.sock", "*.shim"),
            )
        yield Path(name) / "copy"


def state_folder(num_pairs: int) -> Outcome:
    """S2: files of the server that load a library, and a `log.json` that names a URL."""
    if not shutil.which("cc"):
        return cannot("this machine has no C compiler")
    broken = list[str]()
    with _killed_folder() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        files, mark = folder / "server" / "appendonlydir", folder.parent / "mark"
        (folder.parent / "evil.c").write_text(LIBRARY.replace("MARK", str(mark)))
        words = ["cc", "-shared", "-fPIC", "-o", str(files / "evil.so")]
        subprocess.run([*words, str(folder.parent / "evil.c")], check=True, timeout=60)
        (files / "evil.so").chmod(0o755)
        looks = (
            ("view", str(folder), "--print"),
            ("status", "--state", str(folder)),
            ("history", "--state", str(folder)),
        )
        for evil in (("MODULE", "LOAD", "appendonlydir/evil.so"), ("EVAL", "return 1", "0")):
            file = next(files.glob("*.incr.aof"))
            good = file.read_bytes()
            file.write_bytes(good + resp("SELECT", "0") + resp(*evil))
            for look in looks:
                done = unicron(*look)
                broken += [f"{look[0]} runs the sender's code"] * mark.exists()
                broken += [f"{look[0]} takes {evil[0]}"] * (done.returncode == 0)
            file.write_bytes(good)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/log"
        (folder / "log.json").write_text(json.dumps({"cluster": "default", "segments": url}))
        unicron("status", "--state", str(folder))
        with suppress(TimeoutError):
            listener.accept()[0].close()
            broken.append("the URL of log.json is asked")
    return judged(list(dict.fromkeys(broken)), "MODULE LOAD, EVAL, a URL; view, status, history")


def resp(*words: str) -> bytes:
    """A command in the server's protocol."""
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words
    )


# --- segments -------------------------------------------------------------------------------------
def segments(num_pairs: int) -> Outcome:
    """S15: a cycle, a bomb, depth, a length beyond the end."""
    broken = list[str]()
    deep = b"\x81\xa1a" * 5_000 + b"\xc0"
    bodies = {
        "a cycle": b"",
        "depth": struct.pack(">I", len(deep)) + deep,
        "a length beyond the end": struct.pack(">I", 1 << 20) + b"\x80",
    }
    with _killed_folder() as folder:
        for what, body in bodies.items():
            _only_segment(folder, zlib.compress(body, 1), is_cycle=what == "a cycle")
            broken += _looked(folder, what)
        packer = zlib.compressobj(1)
        parts = [packer.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)]
        _only_segment(folder, b"".join([*parts, packer.flush()]))
        broken += _looked(folder, "a bomb")
    return judged(broken, "a cycle, depth, a wrong length, 3.3 GB in 15 MB: one line each")


def _only_segment(folder: Path, packed: bytes, *, is_cycle: bool = False) -> None:
    shutil.rmtree(folder / "log", ignore_errors=True)
    (folder / "log").mkdir()
    head = {"kind": "unicron-segment", "version": 1, "cluster": "default"}
    data = json.dumps(head).encode() + b"\n" + packed
    digest = hashlib.sha256(data).hexdigest()[:16]
    name = Segment(1, 1, 1, digest, digest if is_cycle else NO_DIGEST).name
    (folder / "log" / name).write_bytes(data)


def _looked(folder: Path, what: str) -> list[str]:
    for words in (("log", "verify"), ("status",)):
        if why := limited(*words, "--state", str(folder)):
            return [f"{what}: {' '.join(words)} {why}"]
    return []


# --- checkpoints ----------------------------------------------------------------------------------
class _Renamed(pickle.Pickler):
    pass


def checkpoints(num_pairs: int) -> Outcome:
    """S16: `.metadata` that names a file outside, a device, a fifo."""
    broken = list[str]()
    with tempfile.TemporaryDirectory(prefix="unicron-attack-") as name:
        good = Path(name) / "good"
        shutil.copytree(ROOT / "tests" / "data" / "checkpoint_version_1", good)
        (good / "config.json").write_text(json.dumps(CONFIG))
        os.mkfifo(Path(name) / "fifo")
        data = (good / ".metadata").read_bytes()
        for target in ("../../../../../../etc/passwd", "/dev/zero", "../fifo"):
            folder = Path(name) / "evil"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            (folder / ".metadata").write_bytes(_pointed(data, target))
            if why := limited("model", "export", str(folder), str(Path(name) / "exported")):
                broken.append(f"{target}: {why}")
    return judged(broken, "a file outside, a device, a fifo: one line each")


CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 64, "n_positions": 64}


def _pointed(metadata: bytes, target: str) -> bytes:
    """The metadata with another name for its one file of tensors."""
    found: Any = pickle.loads(metadata)
    changed = {
        index: type(info)(target, info.offset, info.length)
        for index, info in found.storage_data.items()
    }
    found.storage_data = changed
    return pickle.dumps(found)


# --- the checkpoint store's log -------------------------------------------------------------------
STRANGERS_NUM, LOG_BYTES_MAX = 1_000, 100_000


def store(num_pairs: int) -> Outcome:
    """S11: a thousand strangers that say no UTF-8 to the checkpoint store."""
    broken = list[str]()
    with cluster_for(num_agents=2, num_slots=2) as cluster:
        task = cluster.submit(small("small", cluster.path / "out", slots=(2, 2), copy_every=5))
        stored = cluster.wait_told(0, "MemoryCheckpointStored", task=task).body
        order: Any = cluster.told(0, "Reconfigure", task=task)[-1].body
        endpoint = next(one.endpoint for one in order.keepers if one.node == stored.node)
        before = _sizes(cluster)
        host, _, port = endpoint.rpartition(":")
        word = b"\x82\xa4type\xa7Refused\xa3why\xa2\xff\xfe"
        for _ in range(STRANGERS_NUM):
            with suppress(OSError), socket.create_connection((host, int(port)), 5) as link:
                link.sendall(len(word).to_bytes(4, "big") + word)
                while link.recv(1 << 12):
                    pass
        grown = sum(_sizes(cluster).values()) - sum(before.values())
        broken += [f"the logs have {grown:,} bytes more"] * (grown > LOG_BYTES_MAX)
        try:
            protocol.connect(endpoint, None)
        except protocol.TransferError:
            pass
        with socket.create_connection((host, int(port)), 5) as link:
            protocol.receive(link, protocol.Greeting)
    return judged(broken, f"{STRANGERS_NUM:,} connections; the logs have {grown:,} bytes more")


def _sizes(cluster: RealCluster) -> dict[Path, int]:
    return {path: path.stat().st_size for path in cluster.state.logs.rglob("*.log")}


# --- what is shipped, and what the guide says -----------------------------------------------------
def rights(num_pairs: int) -> Outcome:
    """S18: the rights that the guide prints are those that the server has."""
    with cluster_for(num_agents=2) as cluster:
        server = next((cluster.state.path / "server").glob("*.sock"))
        password = (cluster.state.path / "server" / "password").read_text().strip()
        with REDIS(unix_socket_path=str(server), password=password) as link:
            there = {_plain(line) for line in map(str, link.acl_list())}
    guide = GUIDE.read_text(encoding="utf-8")
    said = {_plain(line) for line in re.findall(r"^user .*$", guide, re.MULTILINE)}
    missing = sorted(line.split()[1] for line in there - said)
    return judged(
        [f"other rights than the guide says: {', '.join(missing)}"] * bool(missing),
        f"{len(there)} users, as `ACL LIST` prints them",
    )


def _plain(line: str) -> str:
    """A line of ACL LIST without the hashes and the order of its parts."""
    line = re.sub(r"#\S+", "#...", line.replace("sanitize-payload ", ""))
    head, *parts = re.split(r" (?=\()", line)
    return " ".join([head, *sorted(parts)])


def supply(num_pairs: int) -> Outcome:
    """S19: hashes of what is installed, the image's digest, the units' sandbox."""
    broken = list[str]()
    locks = [path for path in ROOT.glob("*") if path.is_file() and path.suffix in (".txt", ".lock")]
    hashed = [path for path in locks if "--hash=sha256:" in path.read_text(errors="replace")]
    broken += ["no lock with hashes"] * (not hashed)
    image = (ROOT / "deploy" / "Containerfile").read_text()
    bases = re.findall(r"^(?:FROM|ARG BASE=)\s*([^\s$]+)", image, re.MULTILINE)
    unpinned = [base for base in bases if "@sha256:" not in base]
    broken += [f"the image's base has no digest: {', '.join(unpinned)}"] * bool(unpinned)
    unit = (ROOT / "deploy" / "systemd" / "unicron-control-plane.service").read_text()
    for line in ("NoNewPrivileges=", "ProtectSystem="):
        broken += [f"the control plane's unit has no {line}"] * (f"\n{line}" not in unit)
    agent = (ROOT / "deploy" / "systemd" / "unicron-agent.service").read_text()
    broken += ["the agent's unit does not delegate"] * ("\nDelegate=yes" not in agent)
    return judged(broken, "read in the files; systemd does not run here, no image was built")

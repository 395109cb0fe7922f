"""More that is fuzzed: input of nodes, ranks, strangers, senders of folders, and false servers.

After each case the reader lives, and its memory and its logs have grown by a bound (bounds.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import itertools
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import msgspec
from checkpoint_stores import SECRET, put
from fuzz.areas import (
    ANSWER_S_MAX,
    DATA,
    SAYS,
    Area,
    Case,
    control_plane,
    hostile_ranks,
    run_command,
)
from fuzz.bounds import Bounds
from fuzz.mutation import EXTREMES, TOKENS, bytes_of, plain_of, text_of
from hostile_node import HostileNode
from http_site import JOB
from rank_bodies import body_of
from unicron.cli.cluster import local_cluster, processes
from unicron.cli.cluster.client import connect
from unicron.cli.cluster.local_cluster import CONTROL_PLANE
from unicron.cli.cluster.state_dir import StateDir
from unicron.control_plane.api.routes import ROUTES
from unicron.events.errors import UnicronError
from unicron.events.log import archive
from unicron.events.log.identity import AGENT_REPORTS, StoreKey, sign_report, store_key
from unicron.events.log.segments import Folder, SealedLog, Segment
from unicron.events.records import codec
from unicron.events.records.codec import UnknownBody
from unicron.events.records.reports import RankReady
from unicron.events.spec.policy import Policy
from unicron.workers.agent import agent as agent_module
from unicron.workers.agent.checkpoint_store import ARGV
from unicron.workers.checkpoint_store import protocol
from unicron.workers.checkpoint_store.store import BYTES_MAX
from unicron.workers.ipc.pipe_protocol import FRAME_BYTES_MAX, Frame, pack
from unicron.workers.ipc.progress_page import PAGE_BYTES, ProgressWriter

EVERY_NUM = 200
"""Cases between two questions whether the reader still serves others."""
DEPTH_NUM_MAX = 20_000
BOMB_BYTES, UNPACKED_BYTES_MAX = 1 << 30, 1280 << 20
"""What a file unpacks to; the memory that reading one may take."""
WILD_FLOATS = tuple(
    struct.pack("<d", value) for value in (float("nan"), float("inf"), -1e300, 5e-324, -0.0)
)


def nested(rng: random.Random) -> bytes:
    """A msgpack value in a value, and so on."""
    depth = rng.choice((1, 30, 500, 1_100, 5_000, DEPTH_NUM_MAX))
    return rng.choice((b"\x81\xa1a", b"\x91", b"\x81\xc0")) * depth + b"\xc0"


def packed(value: Any) -> bytes:
    """The value as msgpack; as JSON if msgpack has no such value."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, TypeError, RecursionError):
        return json.dumps(value, default=str).encode("utf-8", "replace")


# --- the inbox of a node --------------------------------------------------------------------------
@contextmanager
def inbox(folder: Path) -> Iterator[Case]:
    """A node with its key says anything; another one is still heard."""
    with control_plane(folder) as (_, _):
        state = StateDir(folder / "state")
        client = connect(state)
        process = processes.find(state, CONTROL_PLANE)
        assert process is not None
        with HostileNode(client, "evil") as evil, HostileNode(client, "healthy") as healthy:
            evil.join(num_slots=2)
            healthy.join()
            client.post("/v1/tasks", JOB)  # the leader gives it to the hostile node
            bounds, numbers = Bounds(process.pid, state.logs), itertools.count(1)

            def settle() -> None:
                evil.beat()
                healthy.check_leader()
                bounds.check()

            def case(rng: random.Random) -> None:
                evil.push([_report(rng, evil)], to=rng.choice((0, 0, 0, 0, 1, 2)))
                if not next(numbers) % EVERY_NUM:
                    settle()

            yield case
            settle()


KINDS = tuple(kind for kind in AGENT_REPORTS if kind is not UnknownBody)


def _report(rng: random.Random, node: HostileNode) -> bytes:
    """Bytes; a report that is not signed; one that is, with wild values."""
    which = rng.random()
    if which < 0.1:
        return rng.randbytes(rng.randint(0, 300))
    if which < 0.15:
        return sign_report(node.key, node.nested(rng.choice((1, 40, 500, 5_000))))
    kind, own = rng.choice(KINDS), {"node": node.name, "incarnation": node.incarnation}
    own |= {"task": 2, "rank": rng.randrange(2), "attempt": 1, "generation": 1}
    body = {
        name: own.get(name, value) for name, value in msgspec.to_builtins(body_of(kind)).items()
    }
    wild = {
        "kind": kind.__name__,
        "v": rng.choice((1, 1, 1, 1, 0, -1, 99)),
        "body": plain_of(rng, body) if rng.random() < 0.8 else body,
        "source": node.source
        if rng.random() < 0.9
        else str(rng.choice((node.name + "/1", "/", 9))),
        "source_seq": rng.choice((1, rng.randint(2, 1 << 20), rng.randint(2, 1 << 20), 2**62)),
        "occurred_s": rng.choice((1.0, 1.8e9, -1e300, 1e300)),
    }
    wire = packed(wild)
    if which < 0.25:
        wire = bytes_of(rng, wire)
    return bytes(32) + wire if which < 0.2 else sign_report(node.key, wire)


# --- a rank's progress page, and depth in its pipe ------------------------------------------------
SCRIBBLES = """
import json, os, sys, time
fd = int(sys.argv[sys.argv.index("--pulse") + 1])
with open(sys.argv[1]) as file:
    for length, data in json.load(file):
        try:
            os.pwrite(fd, bytes.fromhex(data), 0)
            if length >= 0:
                os.ftruncate(fd, length)
        except OSError:
            pass
        time.sleep(0.01)
"""
"""A rank that writes what a file says into its page, and cuts it where it may."""
LOOK_S = 0.003
"""The agent looks at its pages this often here."""


@contextmanager
def page(folder: Path) -> Iterator[Case]:
    """A rank writes what it likes into its progress page."""
    with (
        mock.patch.object(agent_module, "WATCH_S", LOOK_S),
        hostile_ranks(folder, SCRIBBLES) as run,
        _page_of_a_rank() as whole,
    ):
        bounds = Bounds(os.getpid())

        def case(rng: random.Random) -> None:
            rounds = [_scribbled(rng, whole) for _ in range(rng.randint(1, 4))]
            run(lambda attempt, pid: json.dumps(rounds).encode())
            bounds.check()

        yield case


@contextmanager
def _page_of_a_rank() -> Iterator[bytes]:
    """The page of a rank that has trained for a few iterations."""
    fd = os.memfd_create("page")
    os.ftruncate(fd, PAGE_BYTES)
    writer = ProgressWriter(os.dup(fd))
    for iteration in range(12):
        writer.begin(1, iteration, "usual")
        writer.enter("reduce")
        writer.finish()
    yield os.pread(fd, PAGE_BYTES, 0)
    os.close(fd)


def _scribbled(rng: random.Random, whole: bytes) -> tuple[int, str]:
    """A length (-1: as it is), and the bytes of a page with values at random."""
    data = bytearray(whole)
    for _ in range(rng.choice((0, 1, 1, 4, 40))):
        value = rng.choice((*WILD_FLOATS, rng.randbytes(8), rng.randbytes(1), b"\xff" * 16))
        at = rng.choice((rng.randrange(256), rng.randrange(PAGE_BYTES - 16)))
        data[at : at + len(value)] = value
    length = rng.choice((0, 1, PAGE_BYTES - 1, 1 << 20)) if rng.random() < 0.05 else -1
    return length, data.hex()


@contextmanager
def depth(folder: Path) -> Iterator[Case]:
    """Values in values, in frames of a rank."""
    with hostile_ranks(folder, SAYS) as run:
        bounds = Bounds(os.getpid())

        def case(rng: random.Random) -> None:
            run(lambda attempt, pid: _deep_frames(rng, attempt))
            bounds.check()

        yield case


def _deep_frames(rng: random.Random, attempt: int) -> bytes:
    good = pack(Frame(body=body_of(RankReady, task=1, rank=0, attempt=attempt)))
    wire = msgspec.msgpack.decode(good[4:])
    parts = [packed(value) for value in wire.values()]
    parts[rng.randrange(len(parts))] = nested(rng)
    data = bytes([0x80 + len(parts)]) + b"".join(
        packed(name) + part for name, part in zip(wire, parts, strict=True)
    )
    if rng.random() < 0.2:
        data = bytes_of(rng, data)
    data = data[: FRAME_BYTES_MAX - 1]
    return good * rng.randrange(3) + struct.pack(">I", len(data)) + data


# --- segments and state folders -------------------------------------------------------------------
@contextmanager
def segment_folders(folder: Path) -> Iterator[Case]:
    """Segments with matching digests: cycles, bombs, depth, other lengths, other names."""
    plain = list(archive.read(DATA / "demo.jsonl"))[:400]
    where, bounds = folder / "log", Bounds(os.getpid(), memory_bytes=UNPACKED_BYTES_MAX)

    def case(rng: random.Random) -> None:
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        _write_segments(rng, where, plain)
        try:
            sealed = SealedLog(Folder(where, "c"))
            for _ in sealed.records(after=sealed.first - 1):
                pass
            for snapshot in sealed.folder.snapshots():
                sealed.folder.read_snapshot(snapshot)
        except (UnicronError, OSError):
            pass
        if rng.random() < 0.02:
            run_command("log", "verify", "--segments", str(where), "--state", str(folder))
        bounds.check()

    yield case


def _write_segments(rng: random.Random, where: Path, plain: list[Any]) -> None:
    prev, first = "0" * 16, 1
    for _ in range(rng.randint(1, 4)):
        wires = [codec.encode_record(one) for one in plain[first - 1 : first + rng.randrange(20)]]
        body = b"".join(struct.pack(">I", len(wire)) + wire for wire in wires)
        match rng.randrange(8):
            case 0:
                body = bytes_of(rng, body)
            case 1:
                deep = nested(rng)
                body += struct.pack(">I", len(deep)) + deep
            case 2:
                body += bytes(1 << 16)
            case 3:
                body += struct.pack(">I", rng.choice((2**32 - 1, 1 << 16, 0)))
        head = {"kind": "unicron-segment", "version": 1, "cluster": "c"}
        line = (
            text_of(rng, plain_of(rng, head)) if rng.random() < 0.2 else json.dumps(head).encode()
        )
        is_bomb = rng.random() < 0.01
        data = line + b"\n" + (_bomb() if is_bomb else zlib.compress(body, 1))
        if rng.random() < 0.1:
            data = bytes_of(rng, data)
        digest = hashlib.sha256(data).hexdigest()[:16]
        if rng.random() < 0.1:
            prev = rng.choice((digest, "f" * 16))
        last = first + max(len(wires), 1) - 1 + (rng.random() < 0.05)
        name = Segment(first, last, 1, digest, prev).name
        if rng.random() < 0.1:
            name = f"{last:016}-00000001-{digest}.{rng.choice(('state', 'usage'))}"
        (where / name).write_bytes(data)
        prev, first = digest, last + 1


@functools.cache
def _bomb() -> bytes:
    """A few MB that unpack to BOMB_BYTES."""
    packer = zlib.compressobj(1)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)]
    return b"".join([*parts, packer.flush()])


@contextmanager
def state_folders(folder: Path) -> Iterator[Case]:
    """A state folder whose cluster was killed, with changed files, looked at by commands."""
    with control_plane(folder / "made", num_agents=1):
        connect(StateDir(folder / "made" / "state")).post("/v1/tasks", JOB)
        shutil.copytree(
            folder / "made" / "state",
            folder / "plain",
            ignore=shutil.ignore_patterns("*.sock", "*.shim"),
        )
    where, bounds = folder / "state", Bounds(os.getpid())
    names = sorted(
        str(path.relative_to(folder / "plain"))
        for path in (folder / "plain").rglob("*")
        if path.suffix in (".json", ".aof", ".manifest", ".segment", ".state")
    )
    looks = (("status",), ("history",), ("tail",), ("log", "status"), ("log", "verify"))

    def case(rng: random.Random) -> None:
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(folder / "plain", where)
        for name in rng.choices((*names, *names, "log.json", "pids/up.pid"), k=rng.randint(1, 2)):
            path = where / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_hostile(rng, path))
        run_command(*rng.choice(looks), "--state", str(where))
        bounds.check()

    yield case


def _hostile(rng: random.Random, path: Path) -> bytes:
    """The file's data, changed: as JSON, as a list of a server's commands, as bytes."""
    data = path.read_bytes() if path.exists() else b"{}"
    if path.suffix == ".json" and rng.random() < 0.8:
        with contextlib.suppress(ValueError):
            return text_of(rng, plain_of(rng, json.loads(data)))
    if path.suffix == ".aof" and rng.random() < 0.5:
        words = [rng.choice((b"XADD", b"SELECT", b"MULTI", b"EVAL", b"MODULE", *TOKENS[:9]))]
        words += [rng.choice(TOKENS) for _ in range(rng.randrange(4))]
        command = b"*%d\r\n" % rng.choice((len(words), len(words), 10**8)) + b"".join(
            b"$%d\r\n%b\r\n" % (rng.choice((len(word), len(word), 10**8)), word) for word in words
        )
        at = rng.choice((0, len(data)))
        return data[:at] + command + data[at:]
    return bytes_of(rng, data)


# --- the socket of a checkpoint store -------------------------------------------------------------
TASK, STORE_BYTES = 7, 16 << 20
MESSAGES = tuple(
    kind
    for kind in vars(protocol).values()
    if isinstance(kind, type)
    and issubclass(kind, protocol.Message)
    and kind is not protocol.Message
)


@contextmanager
def store_socket(folder: Path) -> Iterator[Case]:
    """The store's process, before and after a client has proved that it has a key."""
    log = folder / "logs" / "store.log"
    log.parent.mkdir()
    agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, agent:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        fds = {"--fd": theirs.fileno(), "--listen": listener.fileno()}
        with log.open("wb") as output, theirs:
            process = subprocess.Popen(
                [*ARGV, "--start", "1", *(str(word) for pair in fds.items() for word in pair)],
                pass_fds=[*fds.values()],
                stdout=output,
                stderr=output,
                env={**os.environ, BYTES_MAX: str(STORE_BYTES)},
            )
        agent.send(SECRET)
        agent.setblocking(False)
        try:
            put(endpoint, 1, [b"share"])
            bounds = Bounds(process.pid, log.parent, memory_bytes=2 * STORE_BYTES)
            numbers = itertools.count(1)

            def settle() -> None:
                with contextlib.suppress(BlockingIOError):
                    while agent.recv(8):
                        pass
                agent.send((TASK + 1).to_bytes(8, "big"))  # the hostile rank's task has ended
                put(endpoint, next(numbers), [b"share"])
                bounds.check()

            def case(rng: random.Random) -> None:
                with contextlib.suppress(protocol.TransferError, ConnectionError):
                    _speak(rng, endpoint)
                if not next(numbers) % EVERY_NUM:
                    settle()

            yield case
            settle()
        finally:
            process.kill()
            process.wait(ANSWER_S_MAX)


def _speak(rng: random.Random, endpoint: str) -> None:
    """One connection to the store, with the key of a task of its own or without."""
    if rng.random() < 0.5:
        key: StoreKey = store_key(SECRET, TASK + 1, 1)
        link = protocol.connect(endpoint, key)
    else:
        host, _, port = endpoint.rpartition(":")
        link = socket.create_connection((host, int(port)), timeout=ANSWER_S_MAX)
    with link:
        link.settimeout(ANSWER_S_MAX)
        link.sendall(b"".join(_message(rng) for _ in range(rng.randint(1, 3))))
        with contextlib.suppress(OSError):  # the store has closed already
            link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 16):
            pass


def _message(rng: random.Random) -> bytes:
    kind = rng.choice(MESSAGES)
    values = {name: _value(rng, name) for name in kind.__struct_fields__}
    data = packed({"type": kind.__struct_config__.tag, **values})
    match rng.randrange(6):
        case 0:
            data = rng.randbytes(rng.randint(0, 60))
        case 1:
            data = nested(rng)
        case 2:
            data = bytes_of(rng, data)
        case 3:
            data = packed(plain_of(rng, {"type": kind.__struct_config__.tag, **values}))
    length = len(data) if rng.random() < 0.9 else rng.choice((0, 1, len(data) + 9, 2**32 - 1))
    return length.to_bytes(4, "big") + data


def _value(rng: random.Random, name: str) -> Any:
    known = {
        "task": TASK + 1,
        "copy_bytes": rng.choice((1, 9, 1 << 10, STORE_BYTES + 1, -1)),
        "manifest_bytes": rng.choice((0, 1, 9, -1)),
        "why": b"\xff",
        "indices": [rng.choice((0, -1, 2**40))],
        "nonce": bytes(32),
        "answer": bytes(32),
    }
    return known.get(name, rng.choice((0, 1, 1, 1, 2**53, -1)))


# --- query values ---------------------------------------------------------------------------------
VALUES = (
    *(value for value in EXTREMES if not isinstance(value, list | dict)),
    "9" * 4_301,
    "9" * 5_000,
    "\u0663",
    "²",
    "1_0",
    " 1",
    "1970-01-01",
    "2026-13-45T99:99:99Z",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.999999999Z",
    "x" * 2_000,
)


@contextmanager
def query_values(folder: Path) -> Iterator[Case]:
    """Each GET of the API with values of its own names, by a token."""
    routes = [one for one in ROUTES if one.method == "GET" and "what-if" not in one.path]
    with control_plane(folder) as (port, token):
        state = StateDir(folder / "state")
        process = processes.find(state, CONTROL_PLANE)
        assert process is not None
        connect(state).post("/v1/tasks", JOB)
        bounds = Bounds(process.pid, state.logs)
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)

        def case(rng: random.Random) -> int:
            route = rng.choice(routes)
            names = [name for name in route.query.__struct_encode_fields__ if name != "follow"]
            some = rng.sample(names, rng.randint(0, min(2, len(names))))
            query = {name: _text(rng.choice(VALUES)) for name in some}
            path = route.path
            while "{" in path:
                head, _, rest = path.partition("{")
                value = rng.choice(("2", "n1", "1", _text(rng.choice(VALUES))[:1_000]))
                path = head + urlencode({"": value})[1:] + rest.partition("}")[2]
            link.request(
                "GET", f"{path}?{urlencode(query)}", headers={"Authorization": f"Bearer {token}"}
            )
            answer = link.getresponse()
            answer.read()
            if not answer.isclosed() or answer.will_close:
                link.close()
            bounds.check()
            return answer.status

        try:
            yield case
        finally:
            link.close()


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()


# --- answers of a server --------------------------------------------------------------------------
ASKS = (
    ("status",),
    ("status", "job"),
    ("status", "-o", "json"),
    ("status", "nodes"),
    ("plan",),
    ("history",),
    ("tail",),
    ("incident",),
    ("logs", "job"),
    ("token", "list"),
    ("cancel", "job"),
    ("export", "FILE"),
)


@contextmanager
def server_answers(folder: Path) -> Iterator[Case]:
    """A false control plane that answers the commands; what a true one has said, changed."""
    answers = _true_answers(folder / "made")
    now, file = [random.Random(0)], str(folder / "out.jsonl")

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            rng = now[0]
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            known = answers.get(self.path.partition("?")[0], b"{}")
            data = known if rng.random() < 0.4 else _changed(rng, known)
            self.send_response(rng.choice((200,) * 9 + (204, 301, 307, 404, 429, 500, 503)))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if rng.random() < 0.05:
                self.send_header("Unicron-Follows", rng.choice(("", "x", "http://localhost:1")))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, bounds = f"http://127.0.0.1:{server.server_address[1]}", Bounds(os.getpid())

    def case(rng: random.Random) -> None:
        now[0] = rng
        words = [file if word == "FILE" else word for word in rng.choice(ASKS)]
        run_command(*words, "--url", url, "--state", str(folder / "none"))
        Path(file).unlink(missing_ok=True)
        bounds.check()

    try:
        yield case
    finally:
        server.shutdown()
        server.server_close()


def _changed(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.7:
        with contextlib.suppress(ValueError):
            return text_of(rng, plain_of(rng, json.loads(data)))
    return rng.choice((b"", b"null", b"[]", b"[" * 100_000, bytes_of(rng, data)))


def _true_answers(folder: Path) -> dict[str, bytes]:
    """What a control plane with a task answers to the commands, by path."""
    with control_plane(folder, num_agents=1) as (port, token):
        connect(StateDir(folder / "state")).post("/v1/tasks", JOB)
        found: dict[str, bytes] = {}
        for route in ROUTES:
            if route.method != "GET":
                continue
            path = route.path.replace("{task}", "2").replace("{node}", "n1")
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
            link.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = link.getresponse()
            if answer.status == 200:
                found[path] = answer.read()
            link.close()
        return found


# --- a false server of the log --------------------------------------------------------------------
REPLIES = (b"+OK\r\n", b"$-1\r\n", b":1\r\n", b"*0\r\n", b"-ERR no\r\n", b"*1\r\n$1\r\na\r\n")


@contextmanager
def log_server_answers(folder: Path) -> Iterator[Case]:
    """A false server at `--redis`, as `up` and `doctor` ask one."""
    listener, now = socket.create_server(("127.0.0.1", 0)), [random.Random(0)]

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                link.recv(1 << 16)  # it closes then: a client need not wait for the rest
                link.sendall(b"".join(_reply(now[0]) for _ in range(3)))

    threading.Thread(target=serve, daemon=True).start()
    url, bounds = f"redis://127.0.0.1:{listener.getsockname()[1]}", Bounds(os.getpid())

    state = StateDir(folder / "state")

    def case(rng: random.Random) -> None:
        now[0] = rng
        with contextlib.suppress(UnicronError):
            local_cluster.check_redis(url, "c", state, Policy())
        bounds.check()

    try:
        yield case
    finally:
        listener.close()


def _reply(rng: random.Random, depth: int = 0) -> bytes:
    """A reply of the server's protocol, often not quite."""
    match rng.randrange(8 if depth < 4 else 5):
        case 0:
            data = rng.choice((*TOKENS, nested(rng)))
            return b"$%d\r\n%b\r\n" % (rng.choice((len(data), len(data), 10**9, -2)), data)
        case 1:
            return b":%d\r\n" % rng.choice((0, 1, 2**63, -1))
        case 2:
            return rng.randbytes(rng.randint(1, 60)) + b"\r\n"
        case 3 | 4:
            return rng.choice(REPLIES)
        case _:
            num = rng.randrange(4)
            return b"*%d\r\n" % num + b"".join(_reply(rng, depth + 1) for _ in range(num))


AREAS = (
    Area("inbox", inbox, 8.0),
    Area("page", page, 0.1),
    Area("pipe-depth", depth, 0.1),
    Area("segments", segment_folders, 0.5),
    Area("state-folders", state_folders, 0.1),
    Area("store-socket", store_socket, 4.0),
    Area("queries", query_values, 2.0),
    Area("answers", server_answers, 0.3),
    Area("log-server", log_server_answers, 2.0),
)

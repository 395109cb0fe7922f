"""What is fuzzed: for each area how it is set up, and one case of it.

A case raises where the product shows a traceback, and returns the HTTP status if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import math
import pickle
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import quote

import msgspec
import typer.main
from agent_driver import LocalNode, local_node, train
from fuzz.mutation import EXTREMES, bytes_of, lines_of, plain_of, text_of
from memory_log import MemoryLog
from rank_bodies import body_of
from unicron.cli import app
from unicron.cli.cluster import local_cluster, processes
from unicron.cli.cluster.client import connect
from unicron.cli.cluster.local_cluster import CONTROL_PLANE, ClusterOptions, LocalCluster
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.files import job_file
from unicron.events.errors import SpecError, UsageError
from unicron.events.log import archive
from unicron.events.records import codec
from unicron.events.records.reports import RankExited, TaskSubmitted
from unicron.events.spec import job
from unicron.events.spec.policy import Policy
from unicron.workers.agent.processes.report_limits import KINDS
from unicron.workers.ipc.pipe_protocol import FRAME_BYTES_MAX, Adopted, Frame, pack

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
JOBS = [path.read_bytes() for path in sorted((ROOT / "deploy" / "examples").glob("*.yaml"))]
ANSWER_S_MAX = 15.0
REST_S = 0.2
"""How long a server may wait for the rest of a flawed request before the client closes."""
HEAD_BYTES_MAX = 1 << 16
Case = Callable[[random.Random], int | None]
Says = Callable[[int, int], bytes]


class Area(NamedTuple):
    """`share`: its cases per case of the others; those of a slow area are fewer."""

    name: str
    opened: Callable[[Path], AbstractContextManager[Case]]
    share: float = 1.0


# --- specs and files ------------------------------------------------------------------------------
def _specs() -> list[Any]:
    return [job_file.read_yaml(text.decode()) for text in JOBS]


@contextmanager
def specs(folder: Path) -> Iterator[Case]:
    plain = _specs()

    def case(rng: random.Random) -> None:
        try:
            spec = job.parse(plain_of(rng, rng.choice(plain)))
        except SpecError:
            return
        body = TaskSubmitted(spec=spec)
        assert codec.decode_body(*codec.encode_body(body)) == body

    yield case


@contextmanager
def job_files(folder: Path) -> Iterator[Case]:
    path = folder / "job.yaml"

    def case(rng: random.Random) -> None:
        change = rng.choice((bytes_of, lines_of))
        path.write_bytes(change(rng, rng.choice(JOBS)))
        with contextlib.suppress(UsageError):
            job_file.load(path)

    yield case


@contextmanager
def policies(folder: Path) -> Iterator[Case]:
    path = folder / "policy.yaml"
    plain = msgspec.to_builtins(Policy())

    def case(rng: random.Random) -> None:
        few = dict(rng.sample(sorted(plain.items()), rng.randint(0, 6)))
        path.write_bytes(text_of(rng, plain_of(rng, few)))
        with contextlib.suppress(UsageError):
            job_file.load_policy(path)

    yield case


# --- commands that read files ---------------------------------------------------------------------
@functools.cache
def _command() -> Callable[..., object]:
    """Typer builds all commands again at each call, for longer than most cases take."""
    return typer.main.get_command(app.app)


def run_command(*arguments: str) -> None:
    """Run a command in this process. It has to end with a result, or with one line of an error."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(app, "app", _command()),
    ):
        code = app.run_command(arguments)
    text = err.getvalue()
    assert code in (0, 1, 2, 3), f"exit {code}: {text}"
    assert "Traceback" not in text, text
    assert code == 0 or text or out.getvalue(), f"exit {code} without a word"


@contextmanager
def replays(folder: Path) -> Iterator[Case]:
    """Half of the logs have a valid hash chain over changed records, for the fold to meet them."""
    path = folder / "log.jsonl"
    data = (DATA / "demo.jsonl").read_bytes()
    plain = [codec.to_plain(record) for record in archive.read(DATA / "demo.jsonl")]

    def case(rng: random.Random) -> None:
        if rng.random() < 0.5:
            path.write_bytes(rng.choice((bytes_of, lines_of))(rng, data))
        else:
            records = plain[: rng.randint(1, len(plain))]
            at = rng.randrange(len(records))
            _write_chained(path, [*records[:at], plain_of(rng, records[at]), *records[at + 1 :]])
        how = rng.choice(((), ("--verify",), ("-o", "json")))
        run_command("replay", str(path), *how)

    yield case


def _write_chained(path: Path, records: list[Any]) -> None:
    """A log file with a valid chain, whatever the records are."""
    with path.open("wb") as file:
        writer = archive.Writer(
            path,
            file,
            archive.Header(
                format=archive.FORMAT,
                version=archive.FORMAT_VERSION,
                cluster="c",
                code="fuzz",
                first_seq=1,
            ),
        )
        for record in records:
            try:
                writer._line(record if isinstance(record, dict) and record else {"seq": record})
                writer.num_records += 1
            except (TypeError, ValueError, UnicodeEncodeError, OverflowError):
                continue  # not JSON
        writer.finish()


@contextmanager
def classified(folder: Path) -> Iterator[Case]:
    path = folder / "LOG"
    texts = [
        json.loads(line)["text"].encode()
        for name in ("error_lines", "error_lines_more")
        for line in (DATA / f"{name}.jsonl").read_bytes().splitlines()
    ]
    texts += (DATA / "error_lines.jsonl").read_bytes().splitlines()

    def case(rng: random.Random) -> None:
        path.write_bytes(bytes_of(rng, b"\n".join(rng.choices(texts, k=rng.randint(1, 8)))))
        run_command("classify", str(path), *rng.choice(((), ("-o", "json"))))

    yield case


@contextmanager
def located(folder: Path) -> Iterator[Case]:
    whole = [
        json.loads(path.read_bytes()) for path in sorted((DATA / "flight_recorder").glob("*.json"))
    ]
    dumps = [one for document in whole for one in document["ranks"].values()]
    path = folder / "dump_0"

    def case(rng: random.Random) -> None:
        source = rng.choice(dumps)
        dump = {**source, "entries": rng.sample(source["entries"], min(6, len(source["entries"])))}
        changed = plain_of(rng, dump)
        if rng.random() < 0.3:
            changed = {"ranks": {"0": changed, "1": plain_of(rng, dump)}}
        data = (
            pickle.dumps(changed, protocol=2)
            if rng.random() < 0.5
            else json.dumps(changed).encode()
        )
        path.write_bytes(bytes_of(rng, data) if rng.random() < 0.3 else data)
        run_command("locate", str(path), *rng.choice(((), ("-o", "json"))))

    yield case


# --- the HTTP API ---------------------------------------------------------------------------------
PATHS = (
    "/v1/health",
    "/v1/state",
    "/v1/log",
    "/v1/plan",
    "/v1/tasks",
    "/v1/join",
    "/v1/freeze",
    "/v1/unfreeze",
    "/v1/inject",
    "/v1/plan/dry-run",
    "/v1/plan/apply",
    "/v1/tasks/2/cancel",
    "/v1/tasks/1e9/cancel",
    "/v1/tasks/2/weight",
    "/v1/nodes/n1/drain",
    "/v1/nodes/n1,n1/lift",
    "/v1/nodes/n1/undrain",
    "/metrics",
    "/",
    "/v1/../v1/state",
    "//v1/state",
    "*",
    "/v1/%00",
    "/v1/tasks/%F0%9F/cancel",
    "http://other/v1/state",
)
QUERIES = (
    "",
    "?after=0",
    "?after=-1",
    "?after=1e9&follow=2",
    "?seq=1",
    "?seq=99999999999999999",
    "?explain=1",
    "?after=%00",
    "?" + "a" * 9000,
    "?seq=%D9%A3",
)
BODIES: tuple[Any, ...] = (
    {},
    {"reason": "x"},
    {"weight": 2.0, "reason": ""},
    {"slots": 4},
    {"without": ["n1"]},
    {"weights": {"2": 3.0}},
    {"node": "n1", "host": "127.0.0.1", "incarnation": 1, "labels": {"rack": "r"}},
    {"what": "rank", "task": 2, "rank": 0},
    {"change": {"slots": 1}},
)
HEADERS = (
    b"Content-Encoding: deflate",
    b"Content-Encoding: gzip",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999",
    b"Expect: 100-continue",
    b"Upgrade: websocket",
    b"Idempotency-Key: a",
    b"Idempotency-Key: " + b"k" * 200,
    b"Idempotency-Key: \xff",
    b"Host:",
    b"Host: a, b",
    b"X: " + b"y" * 9000,
    b" folded",
    b"Content-Type: text/xml",
    b"Connection: upgrade",
    b"Authorization: Basic eDp5",
    b"Range: bytes=0-",
)
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"PATCH",
    b"CONNECT",
    b"get",
    b"\xff",
    b"GET /v1/health HTTP/1.1\r\n\r\nGET",
)


@contextmanager
def control_plane(folder: Path, num_agents: int = 0) -> Iterator[tuple[int, str]]:
    """A real control plane over a real server. Yields its port and its token. The agents have left
    by then, so that nothing runs what is submitted."""
    state = StateDir(folder / "state")
    state.create()
    cluster = LocalCluster(state, ClusterOptions(num_agents=num_agents))
    try:
        cluster.ensure_server()
        cluster.choose_port()
        process, _ = cluster.ensure(CONTROL_PLANE)
        client = cluster.wait_control_plane()
        for name in cluster.names()[1:]:
            cluster.start(name)
        cluster.wait_agents(client)
        processes.stop_together(
            state,
            [agent for name in cluster.names()[1:] if (agent := cluster.find(name)) is not None],
            10.0,
        )
        yield cluster.port, client.token
        assert cluster.find(CONTROL_PLANE) == process, "the control plane has ended"
        assert connect(state).get("/v1/health")["leader"]
        log = (state.logs / f"{CONTROL_PLANE}.log").read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
    finally:
        local_cluster.stop_all(state, grace=False)


class Request(NamedTuple):
    """`is_whole`: HTTP without a flaw, so that an answer must come. `leaves`: the client closes its
    end at once."""

    data: bytes
    is_whole: bool
    leaves: bool = False


@contextmanager
def api(folder: Path) -> Iterator[Case]:
    plain = _specs()
    with control_plane(folder) as (port, token):

        def case(rng: random.Random) -> int:
            return _status(_ask(port, _request(rng, token, plain)))

        yield case


@contextmanager
def api_without_token(folder: Path) -> Iterator[Case]:
    plain = _specs()
    with control_plane(folder) as (port, token):

        def case(rng: random.Random) -> int:
            wrong = rng.choice(("", token[:-1], token + "x", token.swapcase(), "Bearer", "\xff"))
            answer = _ask(port, _request(rng, wrong, plain))
            status = _status(answer)
            assert (
                not 200 <= status < 400 or b'"ok"' in answer or b"Content-Security-Policy" in answer
            ), f"no token, but {answer!r}"
            return status

        yield case


def _request(rng: random.Random, token: str, plain: list[Any]) -> Request:
    """One request, often not quite HTTP."""
    method = rng.choice(METHODS) if rng.random() < 0.1 else rng.choice((b"GET", b"POST"))
    path = rng.choice(PATHS) + rng.choice(QUERIES) * (rng.random() < 0.4)
    if rng.random() < 0.1:
        path = f"/v1/tasks/{quote(repr(rng.choice(EXTREMES)))}/cancel"
    body, is_whole = b"", method in (b"GET", b"POST") and path[0] == "/"
    if method != b"GET":
        value = rng.choice((*BODIES, *plain))
        if "apiVersion" in value:
            value = {**value, "name": f"job-{rng.randrange(4)}"}  # at most a few live tasks
            path = rng.choice(("/v1/tasks", "/v1/plan/dry-run"))
            value = {"submit": value} if path.endswith("dry-run") else value
        body = text_of(rng, plain_of(rng, value) if rng.random() < 0.8 else value)
        if rng.random() < 0.02:
            body += b" " * (2 << 20)
    lines = [method + b" " + path.encode() + b" HTTP/1.1", b"Host: 127.0.0.1"]
    lines += [b"Authorization: Bearer " + token.encode("latin-1")] * bool(token)
    if body and rng.random() < 0.95:
        lines.append(b"Content-Length: %d" % len(body))
    if rng.random() < 0.3:
        lines.append(rng.choice(HEADERS))
        is_whole = False
    data = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if rng.random() < 0.1:
        return Request(bytes_of(rng, data), False)
    leaves = rng.random() < 0.05
    return Request(data, is_whole and not leaves, leaves)


def _ask(port: int, request: Request) -> bytes:
    """The beginning of the answer; b"" if the server closes, or if it may wait for more of the
    request. Raises TimeoutError if the request is whole."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S_MAX) as link:
        with contextlib.suppress(ConnectionError):  # it may be refused before it is read
            link.sendall(request.data)
        with contextlib.suppress(OSError):
            if request.leaves:
                link.shutdown(socket.SHUT_WR)
        link.settimeout(ANSWER_S_MAX if request.is_whole else REST_S)
        try:
            while b"\r\n\r\n" not in answer and len(answer) < HEAD_BYTES_MAX:
                if not (more := link.recv(4096)):
                    break
                answer += more
        except ConnectionError:
            pass
        except TimeoutError:
            if request.is_whole:
                raise
    return answer


def _status(answer: bytes) -> int:
    words = answer[:12].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


# --- the pipe of a rank ---------------------------------------------------------------------------
SAYS = """
import socket, sys
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
with open(sys.argv[1], "rb") as file:
    link.sendall(file.read())
"""
"""A rank that sends the bytes of a file, and exits."""


@contextmanager
def rank_pipe(folder: Path) -> Iterator[Case]:
    """A rank says something over its pipe."""
    with hostile_ranks(folder, SAYS) as run:
        yield lambda rng: run(lambda attempt, pid: _said(rng, attempt, pid))


@contextmanager
def hostile_ranks(folder: Path, program: str) -> Iterator[Callable[[Says], None]]:
    """Yields a function that starts a rank, a process of its own under a real agent, and waits for
    its exit. What it says is made from its attempt and the pid of a stranger."""
    says = folder / "says"
    bystander = subprocess.Popen(["sleep", "3600"])
    with asyncio.Runner() as runner:
        opened = local_node(
            MemoryLog(runner.get_loop().time),
            folder,
            rank_argv=(sys.executable, "-I", "-S", "-c", program, str(says)),
        )
        node = runner.run(opened.__aenter__())
        attempts = iter(range(1, 1 << 30))

        async def start(attempt: int) -> None:
            await node.start(train(0), attempt=attempt)
            async with asyncio.timeout(ANSWER_S_MAX):
                await _exit_of(node, attempt)

        def run(said: Says) -> None:
            attempt = next(attempts)
            says.write_bytes(said(attempt, bystander.pid))
            runner.run(start(attempt))

        try:
            yield run
            assert bystander.poll() is None, "a rank made the agent end another process"
        finally:
            bystander.kill()
            bystander.wait()
            runner.run(opened.__aexit__(None, None, None))


async def _exit_of(node: LocalNode, attempt: int) -> None:
    seen = 0
    while True:
        assert node.serving is not None
        if node.serving.done():
            node.serving.result()
            raise AssertionError("the agent has ended")
        records = node.leader.records
        for record in records[seen:]:
            if isinstance(record.body, RankExited) and record.body.attempt == attempt:
                return
        seen = len(records)
        await asyncio.sleep(0.005)


def _said(rng: random.Random, attempt: int, pid: int) -> bytes:
    """What the rank says: true reports, then one of several kinds of nonsense."""
    own = {"task": 1, "rank": 0, "attempt": attempt}
    frames = b"".join(pack(_report(rng, own)) for _ in range(rng.randint(0, 4)))
    match rng.randrange(9):
        case 0:
            return frames + rng.randbytes(rng.randint(1, 4000))
        case 1:  # a head without its frame
            return frames + struct.pack(">I", rng.choice((0, 1, FRAME_BYTES_MAX, 2**32 - 1)))
        case 2:
            return frames + pack(
                _report(
                    rng,
                    {**own, rng.choice(list(own)): rng.choice((0, 2, 5, -1, 2**53, attempt + 1))},
                )
            )
        case 3:
            return frames + pack(Frame(body=Adopted(pid=rng.choice((pid, 0, -1, 2**22 + 1)))))
        case 4:
            at_s = rng.choice((1e300, -1e300, math.nan, math.inf, 1e18, 0.0))
            return frames + pack(Frame(body=_report(rng, own).body, at_s=at_s))
        case 5:
            return frames * 200
        case 6:
            return frames + pack(
                Frame(
                    body=RankExited(
                        task=1, rank=0, attempt=attempt, pid=1, exit_code=0, signal=None
                    )
                )
            )
        case 7:
            return frames
        case _:
            return bytes_of(rng, frames + pack(_report(rng, own)))


def _report(rng: random.Random, own: dict[str, int]) -> Frame:
    kind = rng.choice(KINDS)
    names = kind.__struct_fields__
    changes: dict[str, Any] = {name: value for name, value in own.items() if name in names}
    for name, value in (("iteration", rng.randrange(9)), ("detail", "d" * rng.choice((1, 9999)))):
        if name in names and rng.random() < 0.5:
            changes[name] = value
    return Frame(body=body_of(kind, **changes))


AREAS = (
    Area("api", api),
    Area("api-no-token", api_without_token),
    Area("specs", specs),
    Area("job-files", job_files),
    Area("policies", policies),
    Area("replay", replays),
    Area("classify", classified),
    Area("locate", located),
    Area("rank-pipe", rank_pipe, 0.1),
)

"""A cluster on this machine: server, control plane, agents, each in its own session.

The processes outlive the command that started them; a later command finds them by their pid files.
events/log/embedded_server.py writes the pid file of the server.
"""

import asyncio
import errno
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from ...events import network_address, unix_socket
from ...events.errors import Unavailable, UnicronError, UsageError
from ...events.log import embedded_server
from ...events.log.durability import Settings
from ...events.records import types
from ...events.secret_environment import REDIS_URL
from ...events.spec.policy import Policy
from ...events.timing import AGENT_STOP_S_MAX
from . import processes
from .answers import Interrupted
from .client import Client, Refused, Unable, Unreachable, authority, connect
from .processes import Process
from .state_dir import StateDir, read_json, write_json

CONTROL_PLANE = "control-plane"
UP = "up"
START_S_MAX = 30.0
CONTROL_PLANE_GRACE_S = 10.0
POLL_S = 0.05
HOST = "127.0.0.1"
PORT_MIN, PORT_MAX = 20000, 32000
"""Below the ephemeral ports of Linux (from 32768) and macOS (from 49152)."""
PORT_TRIES_MAX = 5
PORT_WAIT_S_MAX = 2.0
T = TypeVar("T")


class LateError(UnicronError):
    """A process ended, or was not ready in time; the hint names its log."""


class ClusterOptions(Struct, frozen=True, kw_only=True):
    """Options of `up`. `redis_url` empty: a private server. `port` 0: a free one."""

    num_agents: int = 2
    num_slots: int = 2
    redis_url: str = ""
    port: int = 0
    num_control_planes: int = 1
    cluster: str = "default"
    trace_dir: str = ""
    policy: str = ""
    """A policy file for the control plane; empty: its defaults."""
    observe: bool = False
    allow_inject: bool = False
    shared_password: bool = False
    insecure: bool = False
    watch: bool = True
    """Whether agents monitor the progress marks of their ranks."""
    labels: tuple[str, ...] = ()
    """Labels of nodes: KEY=VALUE for all, NODE:KEY=VALUE for one."""
    checks: str = ""
    """Folder of custom checks; empty: none."""
    checks_every_s: float = 60.0
    run_as: str = ""
    """The user of the ranks; empty: that of the agents."""
    notify: str = ""
    """The file with the URL of the webhook; empty: none."""


def saved_options(state: StateDir) -> ClusterOptions | None:
    """The options of the last `up` on this folder."""
    data = read_json(state.cluster)
    try:
        return None if data is None else msgspec.convert(data, ClusterOptions)
    except msgspec.ValidationError:
        return None


class LocalCluster:
    """The processes of one state folder. Use it under the folder's lock."""

    def __init__(self, state: StateDir, wanted: ClusterOptions) -> None:
        self.state, self.wanted = state, wanted
        self.redis_url = wanted.redis_url
        self.port = wanted.port
        """The HTTP port of the last start: another than wanted while a stranger has that."""

    def save(self) -> None:
        """Save the options, so that a later `up` starts the same cluster."""
        write_json(self.state.cluster, msgspec.to_builtins(self.wanted))

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.wanted.num_agents + 1)]

    def names(self) -> list[str]:
        """The processes that this class starts: the control planes, then agents."""
        return [*self.control_planes, *(agent_name(node) for node in self.nodes)]

    @property
    def control_planes(self) -> list[str]:
        """Of these one leads; it need not be the first."""
        return [
            CONTROL_PLANE,
            *(
                f"{CONTROL_PLANE}-{number}"
                for number in range(2, self.wanted.num_control_planes + 1)
            ),
        ]

    def find(self, name: str) -> Process | None:
        return processes.find(self.state, name)

    # --- start ----------------------------------------------------------------------------------
    def ensure_server(self, password: str = "") -> embedded_server.Server | None:
        """Adopt or start the private server; None if a Redis URL was given. `password`: as in
        embedded_server.start."""
        if self.wanted.redis_url:
            return None
        server = embedded_server.ensure(self.state.server, password)
        self.redis_url = server.url
        return server

    def ensure(self, name: str) -> tuple[Process, bool]:
        """Start the process if it does not run. Returns the process, and whether it already ran."""
        if found := self.find(name):
            return found, True
        return self.start(name), False

    def start(self, name: str) -> Process:
        """Start one of `names()`. Raises UnicronError if there is no free port."""
        environment: dict[str, str] = {}
        common = ["--state", str(self.state.path), *["--insecure"] * self.wanted.insecure]
        if name in self.control_planes:
            # Local clients use the socket, so the control plane does not wait for its port.
            fixed = self.wanted.port if name == CONTROL_PLANE else 0
            port = fixed if fixed and wait_until_free(fixed) else free_port()
            self.port = port if fixed else self.port
            environment[REDIS_URL] = self.redis_url  # not in argv, which all users can read
            if self.wanted.policy:
                common += ["--policy", self.wanted.policy]
            common += ["--notify", self.wanted.notify] if self.wanted.notify else []
            common += ["--observe"] * self.wanted.observe
            common += ["--allow-inject"] * self.wanted.allow_inject
            common += ["--shared-password"] * self.wanted.shared_password
            return processes.start(
                self.state,
                name,
                program(
                    CONTROL_PLANE,
                    *common,
                    "--port",
                    str(port),
                    "--cluster",
                    self.wanted.cluster,
                    "--name",
                    name,
                ),
                environment,
            )
        if self.wanted.trace_dir:
            environment["UNICRON_TRACE_DIR"] = self.wanted.trace_dir
        common += ["--no-watch"] * (not self.wanted.watch)
        common += ["--run-as", self.wanted.run_as] if self.wanted.run_as else []
        node = name.removeprefix("agent-")
        for label in labels_of(node, self.wanted.labels):
            common += ["--label", label]
        if self.wanted.checks:
            common += [
                "--checks",
                self.wanted.checks,
                "--checks-every",
                f"{self.wanted.checks_every_s:g}",
            ]
        return processes.start(
            self.state,
            name,
            program("agent", *common, "--node", node, "--slots", str(self.wanted.num_slots)),
            environment,
        )

    def choose_port(self) -> None:
        """Choose a fixed port, so that clients find a restarted control plane."""
        if self.wanted.port == 0:
            self.wanted = msgspec.structs.replace(self.wanted, port=free_port())

    def extra(self) -> list[Process]:
        """Running agents and control planes that the options no longer include."""
        wanted = set(self.names())
        found = (
            self.find(name)
            for name in processes.names(self.state)
            if name.startswith(("agent-", CONTROL_PLANE)) and name not in wanted
        )
        return [process for process in found if process is not None]

    # --- wait -----------------------------------------------------------------------------------
    def wait_control_plane(self) -> Client:
        """Wait until a control plane leads and answers. Raises LateError."""
        see_log = f"see {self.state.logs / (CONTROL_PLANE + '.log')}"

        def answers() -> Client | None:
            running = [process.pid for name in self.control_planes if (process := self.find(name))]
            if not running:
                words = processes.last_output(self.state, CONTROL_PLANE)
                raise LateError(f"the control plane ended: {words}", see_log)
            try:
                client = connect(self.state)
                health = client.get("/v1/health")
            except (Refused, Unreachable, Unable):
                return None
            return client if health.get("leader") and health.get("pid") in running else None

        return wait_for(answers, START_S_MAX, "the control plane does not answer", see_log)

    def wait_agents(self, client: Client) -> None:
        """Wait until every agent has joined. Raises LateError."""
        wait_for(
            lambda: self._joined(client) or None,
            START_S_MAX,
            "an agent does not join",
            f"see {self.state.logs}",
        )

    def _joined(self, client: Client) -> bool:
        pids: dict[str, int] = {}
        for node in self.nodes:
            process = self.find(agent_name(node))
            if process is None:
                words = processes.last_output(self.state, agent_name(node))
                raise LateError(
                    f"agent {node} ended: {words}",
                    f"see {self.state.logs / (agent_name(node) + '.log')}",
                )
            pids[node] = process.pid
        try:
            nodes = list(client.nodes())
        except (Interrupted, Unable, Unreachable):
            return False
        joined = {node["id"]: node["pid"] for node in nodes if node["contact"] == "heard"}
        return all(joined.get(node) == pid for node, pid in pids.items())


def stop_all(state: StateDir, *, grace: bool = True) -> list[str]:
    """Stop the agents, the control plane and the server, in this order, but not `up`.

    Returns the names of the stopped processes. The data is kept."""
    stopped: list[str] = []
    for prefix, grace_s in (("agent-", AGENT_STOP_S_MAX), (CONTROL_PLANE, CONTROL_PLANE_GRACE_S)):
        found = [
            process
            for name in processes.names(state)
            if name.startswith(prefix)
            if (process := processes.find(state, name)) is not None
        ]
        processes.stop_together(state, found, grace_s if grace else 0.0)
        stopped += [process.name for process in found]
    kill_marked(state)  # ranks whose agent had been killed
    for file in state.control_planes():
        processes.discard(file)
    server = embedded_server.adopt(state.server)
    if server is not None:
        server.stop()
        stopped.append("server")
    return stopped


def kill_marked(state: StateDir, prefix: str = "") -> None:
    """Kill what the folder's agents have started; with `NODE/`, what that node's agent has."""
    from ...workers.agent.processes.launcher import MARKER
    from ...workers.host import linux

    linux.kill_marked(f"{MARKER}={state.path.absolute()}:{prefix}".encode())


def labels_of(node: str, labels: Sequence[str]) -> list[str]:
    """KEY=VALUE labels of one node. A label of the node overrides a label of all nodes."""
    found: dict[str, str] = {}
    for text in sorted(labels, key=lambda text: ":" in text):
        of, _, label = text.rpartition(":")
        if of in ("", node):
            found[label.partition("=")[0]] = label
    return list(found.values())


def check_labels(labels: Sequence[str], nodes: Sequence[str]) -> None:
    """Raises UsageError for an invalid label, or for a label of an unknown node."""
    by_node: dict[str, list[str]] = {}
    for text in labels:
        node_name, colon, label = text.rpartition(":")
        if colon and node_name not in nodes:
            raise UsageError(
                f"--label {text!r}: there is no node {node_name!r} here",
                f"there is {' '.join(nodes)}" if nodes else "--agents is 0",
            )
        by_node.setdefault(node_name, []).append(label)
    for node_name in sorted(by_node):
        types.parse_labels(by_node[node_name])


def agent_name(node: str) -> str:
    """The process name of a node's agent."""
    return f"agent-{node}"


def wait_for(attempt: Callable[[], T | None], limit_s: float, late: str, hint: str = "") -> T:
    """Call `attempt` until it returns a value. Raises LateError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (answer := attempt()) is None:
        if time.monotonic() > deadline_s:
            raise LateError(f"{late} within {limit_s:.0f} s", hint)
        time.sleep(POLL_S)
    return answer


def program(*arguments: str) -> list[str]:
    """The command line of `unicron` with these arguments."""
    # -P: do not import from the current folder
    return [sys.executable, "-P", "-m", "unicron.cli.main", *arguments]


def check_port(port: int) -> None:
    """Raises UsageError if the port is not available."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "is in use" if taken else "cannot be used"
            raise UsageError(f"port {port} {why}", "give another --port, or none") from None


def free_port() -> int:
    """A free port outside the ephemeral range. Raises UnicronError if there is none.

    On an ephemeral port, a client that retries to reach a dead server can get the same port as its
    own source port. It then connects to itself.
    """
    for _ in range(PORT_TRIES_MAX):
        port = PORT_MIN + secrets.randbelow(PORT_MAX - PORT_MIN)
        if _is_free(port):
            return port
    raise UnicronError(f"no free port of {HOST} found from {PORT_MIN} to {PORT_MAX}", "")


def wait_until_free(port: int) -> bool:
    """Wait at most PORT_WAIT_S_MAX: a process that was just killed may still hold the port."""
    deadline_s = time.monotonic() + PORT_WAIT_S_MAX
    while not _is_free(port):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _is_free(port: int) -> bool:
    try:
        check_port(port)
    except UsageError:
        return False
    return True


def check_redis(url: str, cluster: str, state: StateDir, policy: Policy) -> Settings:
    """The settings of the server. Raises UsageError if the URL does not reach a Redis that can hold
    the log as the policy asks."""
    hint = "for example --redis redis://:password@host:6379/0, or none for a private server"
    name, server_url, _ = network_address.split_sentinels(url)
    parts = network_address.url_parts(server_url)
    host, port = parts.hostname or "localhost", parts.port or 6379
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise UsageError("--redis is not a redis:// URL", hint)
    where = parts.path if parts.scheme == "unix" else f"{host}:{port}"
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(3.0)
                link.connect(unix_socket.address(unquote(parts.path)))
        elif not name:  # another Sentinel may answer
            socket.create_connection((host, port), timeout=3.0).close()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"no Redis answers at {where} ({why})", hint) from None
    try:
        return asyncio.run(
            _check_log(
                url,
                cluster,
                authority(host, port, state) if parts.scheme == "rediss" else "",
                policy,
            )
        )
    except Unavailable as error:
        raise UsageError(f"no Redis answers: {error}", hint) from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"what answers at {where} is no Redis: {error}", hint) from None


async def _check_log(url: str, cluster: str, ca: str, policy: Policy) -> Settings:
    import structlog

    from ...events.log.redis_streams import RedisLog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    log = RedisLog(url, cluster, ca=ca, policy=policy)
    try:
        await log.check()
        return await log.settings()
    finally:
        await log.close()

"""`up` and `down`: start, supervise and stop a cluster on this machine.

Life of `up`: lock the folder; adopt or start the server, the control plane and the agents, in this
order; wait until the log shows that the agents have joined; then restart each process that exits,
with a backoff. SIGINT or SIGTERM: stop the agents, the control plane and the server, then exit.
After a SIGKILL of `up` all other processes go on.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from msgspec import Struct, json, structs

from ...control_plane.api.needs import ENDED
from ...events import file_space
from ...events.bounded_file import LOG_BYTES_MAX, BoundedFiles
from ...events.decoding import from_json
from ...events.errors import UnicronError, UsageError
from ...events.log import embedded_server, reserve
from ...events.log.embedded_server import Server
from ...events.log.reserve import Reserve
from ...events.regular_files import open_to_write
from ...events.secret_environment import REDIS_URL
from ...events.shortage import is_full
from ...events.spec.job import NAME
from ...events.spec.policy import Policy
from ...events.timing import AGENT_STOP_S_MAX
from ...workers.host import rank_user
from ..cluster import local_cluster, processes
from ..cluster.client import connect
from ..cluster.local_cluster import CONTROL_PLANE, UP, ClusterOptions, LocalCluster, agent_name
from ..cluster.processes import Process
from ..cluster.state_dir import StateDir, shown
from ..files import job_file
from ..terminal import console
from ..terminal.format import Plain, way_to_act
from . import serve
from .tasks import option_for

WATCH_S = 0.1
BACKOFF_S, BACKOFF_S_MAX = 0.5, 10.0
STABLE_S = 30.0
"""After this uptime the backoff of a process is reset."""
RESERVE_S = 1.0
"""Interval at which the reserve is looked at."""
SERVER = "server"
START_MIN = file_space.Room(1 << 20, 64)
"""A start writes 0.1 MB in 30 files (measured); what fails then is to be told in its logs."""
DETACH_S_MAX = 90.0
OPTIONS = "UNICRON_UP_OPTIONS"
"""The variable with the options of an `up` in the background."""
OF_CONTROL_PLANE = {
    "observe": "--observe or --act",
    "policy": "--policy",
    "allow_inject": "--allow-inject, which is never remembered,",
}
FIXED = {
    "labels": "--label",
    "checks": "--checks",
    "notify": "--notify",
    "redis_url": "--redis",
    "watch": "--no-watch",
    "shared_password": "--shared-password",
}
TOLD = {
    "num_slots": "--slots",
    "port": "--port",
    "run_as": "--run-as",
    "checks_every_s": "--checks-every",
    "cluster": "--cluster",
}
"""The options that cannot change while the cluster runs; of TOLD the values are told."""


class UpOptions(Struct, frozen=True, kw_only=True):
    """The options as given, by their names in ClusterOptions. None: the value of the last `up` on
    this folder, else the default; "" and () clear it. Those that are no None are not remembered."""

    num_agents: int | None = None
    num_slots: int | None = None
    redis_url: str | None = None
    port: int | None = None
    num_control_planes: int | None = None
    cluster: str | None = None
    policy: Path | None = None
    """A file; the state folder stores a copy."""
    labels: tuple[str, ...] | None = None
    observe: bool | None = None
    checks: str | None = None
    checks_every_s: float | None = None
    run_as: str | None = None
    notify: str | None = None
    allow_inject: bool = False
    watch: bool = True
    shared_password: bool = False
    insecure: bool = False

    def wanted(self, before: ClusterOptions | None, state: StateDir) -> ClusterOptions:
        """The options of the last `up`, with those given now."""
        last = before or ClusterOptions()
        given = {name: value for name, value in structs.asdict(self).items() if value is not None}
        return structs.replace(
            last, **given | {"policy": str(state.policy) if self.policy or last.policy else ""}
        )

    def refuse_other(self, before: ClusterOptions, state: StateDir, *, leads: bool = False) -> None:
        """Raises UsageError for options that cannot change while the cluster of `before` runs;
        `leads`: with its control plane."""
        wanted = self.wanted(before, state)
        for name, option in ((OF_CONTROL_PLANE if leads else {}) | FIXED | TOLD).items():
            asked, runs = getattr(wanted, name), getattr(before, name)
            if name == "policy":
                asked, runs = (
                    (_policy(self.policy), _policy(before.policy)) if self.policy else (None, None)
                )
            # Port 0 is any port; without --no-watch, ranks are watched as before.
            if asked == runs or (name, asked) in (("port", 0), ("watch", True)):
                continue
            values = f" {asked}, but it was {runs}:" if name in TOLD else ""
            raise UsageError(
                f"{option}{values} differs from the cluster on {shown(state.path)}",
                f"unicron down {state.option}, then up again",
            )


def up(state: StateDir, asked: UpOptions, *, detach: bool) -> None:
    """Start or adopt the folder's cluster. Raises UsageError, UnicronError."""
    if given := os.environ.pop(OPTIONS, ""):
        asked = structs.replace(
            from_json(given, UpOptions, lambda _, path: Path(path)),
            redis_url=asked.redis_url,
        )
    if asked.cluster is not None and not NAME.match(asked.cluster):
        raise UsageError(
            f"--cluster {asked.cluster!r} is not a cluster's name",
            "lower-case letters, digits, '-' and '.', at most 63",
        )
    if asked.policy is not None:
        if asked.policy.is_fifo():  # it is read twice
            raise UsageError(f"--policy {asked.policy} is a pipe", "name a file")
        _policy(asked.policy)
    room = _room(state)
    state.create()
    if detach:
        _detach(state, asked)
        return
    lock = state.lock()
    stop = _Stop()
    last = local_cluster.saved_options(state)
    before = {name for name in processes.names(state) if processes.find(state, name)}
    leads = any(name.startswith(CONTROL_PLANE) for name in before)
    if leads and last is None:
        raise UsageError(
            f"a control plane that `up` did not start runs on {shown(state.path)}: "
            "`up` would start it again without its address and certificate",
            "stop it, or give another --state",
        )
    if before and last is not None:
        asked.refuse_other(last, state, leads=leads)
    wanted = asked.wanted(last, state)
    if wanted.checks:
        serve.own_checks(Path(wanted.checks))
    if wanted.notify:
        serve.webhook(Path(wanted.notify))
    if not leads and asked.policy is None and wanted.policy:
        _policy_kept(wanted.policy, state)
    rank_user.find(wanted.run_as)
    cluster = LocalCluster(state, wanted)
    local_cluster.check_labels(asked.labels or (), cluster.nodes)
    processes.record(state, UP, os.getpid())
    try:
        _start(cluster, asked.policy)
        stop.begin()
        option = option_for(state)
        if room.is_below(reserve.ROOM_MIN):
            console.out(
                f"room     {room.in_words(reserve.ROOM_MIN)}: no process is started until there "
                f"are {_least(reserve.ROOM_BACK)}, but `unicron cancel` works; to heal nothing "
                f"then either: unicron down{option}; {_observed(state)}"
            )
        console.out(f"next     unicron submit deploy/examples/demo.yaml{option}")
        console.out(f"look     unicron status -w{option}        unicron tail -f{option}")
        console.out(f"stop     Ctrl-C, or unicron down{option}")
        _Watch(cluster).run(stop)
    except (UnicronError, KeyboardInterrupt):
        if not before:  # no process ran before: leave none
            local_cluster.stop_all(state, grace=False)
        raise
    finally:
        processes.discard(state.pids / f"{UP}.json")
        lock.release()


def _room(state: StateDir) -> file_space.Room:
    """Free room on the folder's disk. Raises UsageError if it is too little for a start, also
    without the reserve."""
    place = next(path for path in (state.path, *state.path.parents) if path.exists())
    if (room := file_space.room(place)).is_below(START_MIN):
        Reserve(state.path, state.server).give_up()
        room = file_space.room(place)
    if room.is_below(START_MIN):
        has = f"{room.num_bytes >> 10} KiB free"
        if room.num_bytes >= START_MIN.num_bytes:
            has = room.in_words(START_MIN)
        raise UsageError(
            f"the disk of {shown(state.path)} is full: {has}",
            f"make room there, then {_observed(state)}: nothing heals, so `unicron cancel` can end "
            "what fills it; then down, and up --act",
        )
    return room


def _least(room: file_space.Room) -> str:
    return f"{room.num_bytes >> 20} MiB and {room.num_files} files"


def _observed(state: StateDir) -> str:
    return f"unicron up --observe{option_for(state)}"


def kept(path: Path | None) -> str | None:
    """The absolute path, for processes restarted in another directory; "" for the word none."""
    return None if path is None else "" if path == Path("none") else str(path.absolute())


def _policy(path: Path | str) -> Policy:
    """The content of a policy file; an empty path means the defaults. Raises UsageError."""
    from ..files import job_file

    return job_file.load_policy(Path(path or os.devnull))


def _policy_kept(path: str, state: StateDir) -> None:
    """Raises UsageError if the policy kept from an earlier `up` is invalid now."""
    try:
        _policy(path)
    except UsageError as error:
        raise UsageError(
            str(error),
            f"give another: unicron up --policy FILE {state.option}; an empty file: the defaults",
        ) from None


def _start(cluster: LocalCluster, policy: Path | None) -> None:
    state = cluster.state
    if cluster.wanted.redis_url:
        local_cluster.check_redis(
            cluster.wanted.redis_url,
            cluster.wanted.cluster,
            cluster.state,
            _policy(policy or cluster.wanted.policy),
        )
    if not cluster.find(CONTROL_PLANE):
        local_cluster.check_port(cluster.wanted.port)
        cluster.choose_port()
    console.out(f"cluster  {cluster.wanted.cluster} on {shown(state.path)}")
    for process in cluster.extra():
        processes.stop_together(state, [process], AGENT_STOP_S_MAX)
        console.out(f"stopped  {process.name}: no longer requested")
    adopted = embedded_server.adopt(state.server) is not None
    server = cluster.ensure_server()
    if server is not None:
        console.out(_line("server", shown(Path(server.socket)), server.pid, adopted))
    if policy is not None:
        kept = job_file.read_text(policy, job_file.FILE_BYTES_MAX, "name a policy file", "")
        state.policy.write_text(kept, encoding="utf-8")  # `policy` may name this very file
    cluster.save()
    started = {name: cluster.ensure(name) for name in cluster.names()}
    client = cluster.wait_control_plane()
    leader = client.get("/v1/health")["pid"]
    for name in cluster.control_planes:
        process, adopted = started[name]
        where = (client.leader or client).url if process.pid == leader else "follows"
        console.out(_line("control", where, process.pid, adopted))
    console.lines(_mode(client.get("/v1/state")["cluster"], option_for(state)))
    for node in cluster.nodes:
        process, adopted = started[agent_name(node)]
        console.out(
            _line("agent", f"{node}, {cluster.wanted.num_slots} slots", process.pid, adopted)
        )
    cluster.wait_agents(client)


def _mode(cluster: Plain, option: str) -> list[str]:
    """Whether the cluster heals, and whether faults may be injected."""
    healing: str = cluster["healing"]
    if healing == "on":
        lines = ["healing  on"]
    else:
        what = (
            "OBSERVING: decides and logs, acts on nothing; to act:"
            if healing == "observing"
            else f"{healing.replace('frozen', 'FROZEN', 1)};"
        )
        lines = [f"healing  {what} {way_to_act(healing, option)}"]
    if cluster["allow_inject"]:
        lines.append("faults   allowed on purpose: unicron inject --help")
    return lines


def _line(what: str, where: str, pid: int, adopted: bool) -> str:
    return f"{what:<8} {where:<34} pid {pid}{', adopted' if adopted else ''}"


class _Stop:
    """Set by SIGINT or SIGTERM; a second signal stops without grace."""

    def __init__(self) -> None:
        self.asked = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        self._starting = True

    def begin(self) -> None:
        """From now on a signal requests a stop; before, it raises KeyboardInterrupt."""
        self._starting = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self._starting:
            raise KeyboardInterrupt


class _Watch:
    """Restarts each process that exits, with one backoff per process.

    It ends by a signal alone. What fails for want of room, descriptors or memory is told once and
    tried again: the processes that run need nothing of it.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._running: dict[str, Process | Server] = {}
        self._began_s: dict[str, float] = {}
        self._backoff_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._told: dict[str, str] = {}
        """What failed last, until it succeeds."""
        self._reserve = Reserve(cluster.state.path, cluster.state.server)
        self._password = ""

    def run(self, stop: _Stop) -> None:
        """Supervise until a signal; then stop all."""
        if server := embedded_server.adopt(self._cluster.state.server):
            self._running[SERVER], self._password = server, server.password
        state, logs = self._cluster.state, BoundedFiles()
        for path in (
            *(state.logs / f"{name}.log" for name in (UP, *self._cluster.names())),
            state.server / embedded_server.LOG,
        ):
            logs.add(str(path), path, LOG_BYTES_MAX)
        for name in self._cluster.names():
            if found := self._cluster.find(name):
                self._running[name] = found
        names = [*([SERVER] if server else []), *self._cluster.names()]
        while not stop.asked:
            for name in names:
                self._outlast(name, partial(self._look, name))
            self._outlast("the reserve", self._keep_reserve)
            time.sleep(WATCH_S)
        for line in _unfinished(self._cluster.state):
            console.talk(line)
        console.talk("stopping: agents, control plane, server")
        local_cluster.stop_all(self._cluster.state, grace=stop.asked < 2)
        console.talk("stopped; the log stays")

    def _outlast(self, what: str, call: Callable[[], None]) -> None:
        """Call, unless it is too early to try again; tell an error once."""
        if time.monotonic() < self._due_s.get(what, 0.0):
            return
        try:
            call()
        except (UnicronError, OSError, MemoryError) as error:
            self._wait(what)
            if is_full(error) and self._reserve.give_up():
                self._due_s[what] = 0.0
                console.talk(f"{self._full()}: the reserve is given up")
            if self._told.get(what) != str(error):
                self._told[what] = str(error)
                console.talk(f"{what} fails, and is tried again: {error or 'out of memory'}")
        else:
            if self._told.pop(what, ""):
                console.talk(f"{what}: well again")

    def _wait(self, what: str) -> float:
        """Set when it is tried again, later each time; returns the pause in seconds."""
        now_s = time.monotonic()
        if now_s - self._began_s.get(what, 0.0) > STABLE_S:
            wait_s = 0.0 if what == SERVER else BACKOFF_S
        else:
            wait_s = min(max(self._backoff_s.get(what, 0.0) * 2, BACKOFF_S), BACKOFF_S_MAX)
        self._backoff_s[what], self._due_s[what] = wait_s, now_s + wait_s
        self._began_s[what] = now_s
        return wait_s

    def _keep_reserve(self) -> None:
        self._due_s["the reserve"] = time.monotonic() + RESERVE_S
        self._reserve.keep()

    def _full(self) -> str:
        state = self._cluster.state.path
        return f"{shown(state)} has {file_space.room(state).in_words(reserve.ROOM_MIN)}"

    def _look(self, name: str) -> None:
        running = self._running.get(name)
        if running is not None and running.is_alive:
            return
        if running is not None:
            del self._running[name]
            wait_s = self._wait(name)
            console.talk(f"{name} (pid {running.pid}) ended; again in {wait_s:.1f} s")
            if (
                name == SERVER
                and file_space.free_bytes(self._cluster.state.path) < reserve.FILE_BYTES
            ):
                self._reserve.give_up()
                console.talk(f"{self._full()}: the server ends itself without room")
            if wait_s:
                return
        self._running[name] = started = self._start(name)
        self._began_s[name] = time.monotonic()
        console.talk(f"{name} started again, pid {started.pid}")
        cluster = self._cluster
        if name == CONTROL_PLANE and cluster.port != cluster.wanted.port:
            console.talk(
                f"port {cluster.wanted.port} is in use by another process: HTTP is on "
                f"port {cluster.port} until the control plane starts again"
            )

    def _start(self, name: str) -> Process | Server:
        if name != SERVER:
            return self._cluster.start(name)
        server = self._cluster.ensure_server(self._password)
        assert server is not None, "it has run"
        return server


def _detach(state: StateDir, asked: UpOptions) -> None:
    """Run `up` in its own POSIX session; return when it is ready, print its output."""
    state.lock().release()
    argv = local_cluster.program("up", "--state", str(state.path))
    # A Redis URL holds a password: argv is readable by all users, and the options are kept.
    environment = {
        **os.environ,
        OPTIONS: json.encode(structs.replace(asked, redis_url=None), enc_hook=str).decode(),
    }
    if asked.redis_url is not None:
        environment[REDIS_URL] = asked.redis_url
    path = state.logs / "up.log"
    open_to_write(path).close()
    with open_to_write(path, appends=True) as log:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    deadline_s = time.monotonic() + DETACH_S_MAX
    while child.poll() is None:
        said = path.read_text(encoding="utf-8", errors="replace")
        if "\nstop " in said:
            console.lines(said.replace("Ctrl-C, or ", "").rstrip().splitlines())
            child.returncode = 0  # the child outlives this process
            return
        if time.monotonic() > deadline_s:
            child.terminate()
            raise UnicronError(f"up is not ready within {DETACH_S_MAX:.0f} s, see {path}")
        time.sleep(WATCH_S / 2)
    _raise_as(path.read_text(encoding="utf-8", errors="replace"), child.returncode)


def _raise_as(said: str, code: int) -> None:
    lines = said.splitlines()
    message = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")),
        f"up ended with code {code}: {lines[-1] if lines else 'no output'}",
    )
    hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")), "")
    raise UsageError(message, hint) if code == 2 else local_cluster.LateError(message, hint)


def down(state: StateDir) -> None:
    """Stop `up` and the processes that it started, even if `up` has ended."""
    watching = processes.find(state, UP)
    console.lines(_unfinished(state))
    has_server = embedded_server.adopt(state.server) is not None
    with_it = [
        name
        for name in processes.names(state)
        if name != UP and processes.find(state, name) is not None
    ]
    if watching is not None:
        processes.stop_together(state, [watching], 2 * AGENT_STOP_S_MAX)
    stopped = [UP, *with_it, *(["server"] if has_server else [])] if watching else []
    stopped += [name for name in local_cluster.stop_all(state) if name not in stopped]
    console.out(
        f"stopped {', '.join(stopped)}" if stopped else f"nothing runs on {shown(state.path)}"
    )


def _unfinished(state: StateDir) -> list[str]:
    """What stopping now costs each live task, one line for all commands, then how to avoid it.

    Empty if the control plane does not answer.
    """
    try:
        tasks = connect(state).get("/v1/state")["tasks"]
    except UnicronError:
        return []
    live = [task for task in tasks if task["state"] not in ENDED]
    lines: list[str] = []
    for task in live:
        if task["tier"] == "command":
            continue
        # A checkpoint that is being written may be published before the agents stop.
        again = f"from {task['checkpoint']} or newer" if task["checkpoint"] else "from iteration 0"
        lines.append(
            f"unfinished {task['name']}, {task['iteration']} of {task['iterations']} "
            f"iterations; the next up starts it again {again}"
        )
    if commands := " ".join(task["name"] for task in live if task["tier"] == "command"):
        lines.append(
            f"unfinished {commands}: the next up starts a command again from its "
            "beginning, or from what it has saved itself"
        )
    if any(task["unpublished"] and task["tier"] == "train" for task in live):
        lines.append(
            "to lose nothing: unicron drain '*' first, then down; unicron undrain '*' "
            "after the next up"
        )
    return lines

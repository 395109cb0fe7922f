"""Runs the agent process: lock, join, signals, exit code."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn, cast
from urllib.parse import unquote

import msgspec
import structlog
from msgspec import Struct, msgpack
from unicron import __version__

from ...events import tls
from ...events.decoding import from_msgpack
from ...events.errors import LogError, UsageError
from ...events.file_lock import FileLock, Held
from ...events.log.identity import Keys, only_key, store_secret, with_credentials
from ...events.log.redis_streams import RedisLog
from ...events.network_address import url_parts
from ...events.node_probe import probe_secret
from ...events.process_log import configure_logging
from ...events.records.types import Labels
from ...events.secret_environment import REDIS_URL, TOKEN, URL, remove_secrets
from ..checkpoint_store.store import bytes_max
from ..host import gpus, rank_user
from ..host.rank_cgroups import Limits
from ..host.rank_user import RankUser
from ..ipc import rank_variables
from . import output_files
from .agent import Agent
from .delivery.join import (
    JOIN_S_MAX,
    IdentityFile,
    Joined,
    NodeRevoked,
    Others,
    TokenRefused,
    join,
)
from .delivery.log_link import backoff_s
from .delivery.outbox import LogReplaced
from .delivery.spool import Spool, load_spool
from .health import kubernetes
from .health.custom_checks import CheckOptions
from .health.health_monitor import HealthSources
from .prober import NO_PORT, answer_probes
from .processes.launcher import MARKER, RANK_ARGV, NodeConfig, marker_prefix
from .processes.shim import CHECK, NODE, ZYGOTE, Shim, ShimLost

# --- The lock file `agents/NODE.lock`: one agent per node and state directory. ---


class LockFile:
    """The lock of a node's agent. The file has the last incarnation."""

    def __init__(self, state_dir: Path, node: str) -> None:
        self._folder = state_dir / "agents"
        self._node = node
        self._lock = FileLock(self._folder / f"{node}.lock")

    def take(self) -> None:
        """Lock. Raises UsageError if another agent holds the lock, also a stopped one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Held as held:
            by = f": {held.holder}" if held.holder else ""
            raise UsageError(
                f"an agent for node {self._node} already runs on {self._folder}{by}",
                held.hint or "give another --node or --state",
            ) from None

    def next_incarnation(self, now_s: float, former: int = 0) -> int:
        """The incarnation of this agent: `former` if it continues that one, else `now_s` in ms,
        above all earlier ones also if the clock was set back."""
        last = os.pread(self._lock.fd, 32, 0).strip()
        incarnation = former or max(int(now_s * 1000), int(last) + 1 if last.isdigit() else 0)
        os.pwrite(self._lock.fd, b"%d\n" % incarnation, 0)
        return incarnation

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._lock.release()


CONNECT_S_MAX = 60.0
"""How long the agent retries to reach the log's server at startup. Later there is no limit."""
EXIT_S_MAX = 1.0
"""How long the agent may take for a clean exit after a signal has cancelled it."""
HEALTH = "UNICRON_HEALTH"
"""Environment variable. "off" disables the health checks, a site's custom checks included."""
OLD_SPOOLS_NUM_MAX = 8
"""At most this many spools of earlier incarnations are delivered; older spools are deleted."""

_log = structlog.get_logger("agent")


class AgentOptions(Struct, frozen=True, kw_only=True):
    """The options of `unicron agent`.

    `enrols`: the token is exchanged for an identity of this node's own, unless it has one.
    `host` is the address of this node's ranks. `socket` is the control plane's, if it has one here.
    If `redis_url` is empty, the control plane gives it.
    CUDA_VISIBLE_DEVICES gives one GPU per slot; without any, slots are CPU.
    """

    node: str
    url: str
    token: str
    num_slots: int
    state_dir: Path
    enrols: bool = False
    host: str = "127.0.0.1"
    socket: str = ""
    others: Others = tuple
    """URL and socket of each other control plane; one of all leads."""
    redis_url: str = ""
    labels: Labels = Labels()
    watch: bool = True
    rank_argv: tuple[str, ...] = RANK_ARGV
    checks: CheckOptions | None = None
    kubernetes: str = ""
    """This node's name in Kubernetes; empty: it is not asked."""
    ca: str = ""
    """The authorities (PEM) that it trusts; "": the system's."""
    insecure: bool = False
    """The log may be used unencrypted on another host."""
    run_as: str = ""
    """The user of the ranks; empty: that of the agent."""
    probe_port: int | None = None
    """The UDP port at which probes are answered. None: the first free one from 8430 on; 0: none."""
    drain_s_max: float = 0.0
    """How long a stopping agent waits for its ranks to leave; 0: it ends them at once."""


def run(options: AgentOptions) -> int:
    """Run the node's agent until SIGTERM or SIGINT; return the exit code. Raises UsageError.

    SIGUSR2: the agent executes itself again, and its ranks run on. 0: stopped on request. 1: the
    log was replaced by another one, the shim was killed, or a second signal came.
    """
    configure_logging()
    secrets = {name: os.environ[name] for name in (TOKEN, URL, REDIS_URL) if name in os.environ}
    # The options have them. No process that an agent starts may: rank, check, store, zygote.
    remove_secrets(TOKEN, URL, REDIS_URL)
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "an agent runs on Linux only", "run the control plane here and agents elsewhere"
        )
    run_as = rank_user.find(options.run_as)
    if run_as is None:
        _log.warning(
            "ranks run as this agent's user and are trusted as the operator",
            hint="--run-as USER, see docs/guides/threat-model.md",
        )
    for variable in rank_variables.others(os.environ):
        _log.warning(
            "a variable is not as healing needs it: an NCCL fault may end a rank", variable=variable
        )
    bytes_max(os.environ)  # fail here on a bad value, not at every start of the store
    lock = LockFile(options.state_dir.absolute(), options.node)
    lock.take()
    try:
        if run_as is not None:
            rank_user.check(
                run_as,
                options.state_dir.absolute(),
                *filter(None, [os.environ.get("UNICRON_TRACE_DIR")]),
            )
        return asyncio.run(_run(options, lock, secrets, run_as))
    except LogReplaced as error:
        _log.error(
            "stopped: the log was replaced by another one; start the agent again", why=str(error)
        )
        return 1
    except ShimLost as error:
        _log.error("stopped: its processes are gone; start the agent again", why=str(error))
        return 1
    finally:
        lock.release()


async def _run(
    options: AgentOptions, lock: LockFile, secrets: Mapping[str, str], run_as: RankUser | None
) -> int:
    """Start in this order: signals, shim, kill of orphaned processes, join, log, agent.

    Stop in this order: agent, shim, log. A signal before the agent serves cancels the start. Later
    the first signal stops the agent cleanly; the second cancels it, which kills the ranks.
    """
    stop = asyncio.Event()
    signals = _Signals(stop, drains=options.drain_s_max > 0)
    state_dir = options.state_dir.absolute()
    shim, former = await asyncio.to_thread(_attach, state_dir, options.node)
    try:
        incarnation = lock.next_incarnation(
            time.time(), cast(int, former["incarnation"]) if former else 0
        )
        identity = IdentityFile(state_dir / "agents", options.node) if options.enrols else None
        if options.kubernetes:  # with other labels than the former agent's it would end its ranks
            options = msgspec.structs.replace(
                options,
                labels=(
                    msgspec.convert(former["labels"], Labels)
                    if former
                    else await kubernetes.labels_of(options.kubernetes, options.labels)
                ),
            )
        joined = await _join(options, incarnation, identity)
        if identity is not None:
            identity.enrolled()
        log = await _connect(
            _log_url(options, joined), joined, options.ca, f"{options.node}/{incarnation}"
        )
        try:
            node = _node(options, joined, incarnation, run_as)
            note = _note(node, options)
            if former and former != note:
                _log.warning(
                    "this agent has other options: it ends the ranks of the former one",
                    former=former,
                    now=note,
                )
                shim.end()
                return await _run(options, lock, secrets, run_as)
            shim.hold(NODE, msgpack.encode(note))
            node = _serve_node(shim, node, options, joined, is_new=not former)
            spool, left = open_spools(state_dir / "agents", node.name, node.source)
            sources = (
                None
                if os.environ.get(HEALTH) == "off"
                else HealthSources(checks=options.checks, kubernetes=options.kubernetes)
            )
            signals.is_serving = True
            _log.info("joined", node=node.name, incarnation=incarnation, epoch=joined.epoch)
            if joined.version != __version__:
                _log.warning(
                    "the control plane has another version",
                    version=joined.version,
                    own=__version__,
                    hint="one image for all; control planes first",
                )
            serving = asyncio.create_task(
                output_files.serve(log, node.name, (state_dir / "logs").resolve(), node.devices)
            )
            try:
                await Agent(
                    node,
                    log,
                    time.time,
                    os.getpid(),
                    spool=spool,
                    left=left,
                    shim=shim,
                    sources=sources,
                    rejoin=partial(_rejoin, options, incarnation, identity, joined, log),
                    drain_s_max=options.drain_s_max,
                    restart=lambda: (
                        partial(_execute_again, lock, secrets) if signals.is_restart else None
                    ),
                ).run(stop)
            finally:
                serving.cancel()
            spool.close(forget=not spool.num_unacked)
        finally:
            await log.close()
    except asyncio.CancelledError:
        if not signals.num_received:
            raise
        return 1 if signals.is_serving else 0
    finally:
        if not former:  # else a successor may still serve its ranks
            shim.end()
    return 0


def _attach(state_dir: Path, node: str) -> tuple[Shim, dict[str, object]]:
    """The node's shim, a new one if it has none or if the agent that it served has left; and the
    note of that agent."""
    prefix = marker_prefix(state_dir, node)
    shim = Shim.open(
        state_dir / "agents" / f"{node}.shim",
        os.environ,
        (MARKER, f"{prefix}:shim"),
        state_dir / "logs" / f"shim-{node}.log",
    )
    if NODE in shim.held and not shim.held[NODE].note:
        shim.end()
        return _attach(state_dir, node)
    # The new agent's ranks are forked from new code, and it runs its checks itself.
    for key in [key for key in shim.held if key == ZYGOTE or key.startswith(CHECK)]:
        shim.discard(key, shim.held.pop(key).pid)
    shim.kill_unknown(f"{MARKER}={prefix}".encode())
    if NODE in shim.held:
        return shim, from_msgpack(shim.held[NODE].note, dict[str, object])
    return shim, {}


def _node(
    options: AgentOptions, joined: Joined, incarnation: int, run_as: RankUser | None
) -> NodeConfig:
    return NodeConfig(
        name=options.node,
        incarnation=incarnation,
        cluster=joined.cluster,
        cluster_id=joined.cluster_id,
        host=options.host,
        num_slots=options.num_slots,
        state_dir=options.state_dir.absolute(),
        labels=options.labels,
        devices=_by_uuid(_devices(options.num_slots, os.environ)),
        watch=options.watch,
        rank_argv=options.rank_argv,
        redact=joined.redact,
        run_as=run_as,
        gone_s=joined.agent_gone_s_max,
        output_bytes_max=joined.output_bytes_max,
        limits=Limits(joined.rank_pids_max, joined.rank_memory_bytes_max),
        store_secret=store_secret(bytes.fromhex(joined.key)),
    )


def _serve_node(
    shim: Shim, node: NodeConfig, options: AgentOptions, joined: Joined, *, is_new: bool
) -> NodeConfig:
    """From now on the shim holds the node's ranks, and answers probes at `probe_port`. An agent
    that goes on with an incarnation cannot tell of a new port."""
    shim.serve(node.gone_s)
    port = options.probe_port if is_new else NO_PORT
    secret = probe_secret(bytes.fromhex(joined.key), node.incarnation)
    port = answer_probes(shim, options.host, port, secret)
    return msgspec.structs.replace(node, probe_port=port)


def _note(node: NodeConfig, options: AgentOptions) -> dict[str, object]:
    """What the next agent must have in common with this one to adopt its ranks."""
    return {
        "incarnation": node.incarnation,
        "cluster": node.cluster,
        "host": node.host,
        "slots": node.num_slots,
        "devices": list(_devices(options.num_slots, os.environ)),
        "run_as": options.run_as,
        "labels": msgspec.to_builtins(node.labels),
    }


async def _join(
    options: AgentOptions,
    incarnation: int,
    identity: IdentityFile | None,
    s_max: float = JOIN_S_MAX,
) -> Joined:
    token, new = options.token, ""
    if identity is not None:
        token, new = (identity.secret, "") if identity.is_enrolled else (token, identity.secret)
    try:
        return await join(
            options.url,
            token,
            node=options.node,
            host=options.host,
            incarnation=incarnation,
            labels=options.labels,
            socket=options.socket,
            others=options.others,
            ca=options.ca,
            identity=new,
            insecure=options.insecure,
            s_max=s_max,
        )
    except TokenRefused as error:
        if identity is not None and identity.is_enrolled:
            error.hint = (
                f"an admin: unicron token create --join --node {options.node}; then "
                f"remove {identity.path} and start with that command"
            )
        raise


async def _rejoin(
    options: AgentOptions,
    incarnation: int,
    identity: IdentityFile | None,
    joined: Joined,
    log: RedisLog,
) -> None:
    """Ask the control plane once where the log is now, and with which credentials; use those.

    Raises NodeRevoked. A control plane that does not know it may be a
    wrong one: no rank is ended for that.
    """
    try:
        now = await _join(options, incarnation, identity, s_max=0.0)
        url = _log_url(options, now)
    except NodeRevoked:
        raise
    except UsageError as error:
        _log.warning("cannot ask where the log is", why=str(error))
        return
    if now.cluster == joined.cluster and await log.move(
        url, _keys_of(now), has_lists=now.has_lists
    ):
        _log.info("the log has moved", cluster=now.cluster)


def _execute_again(lock: LockFile, secrets: Mapping[str, str]) -> NoReturn:
    """Replace this process by a new agent, with the same pid, arguments and environment. To the
    shim that is the end of the agent."""
    lock.release()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **secrets})


class _Signals:
    """SIGTERM and SIGINT: the first stops a serving agent cleanly; the second cancels it, but if it
    drains, only a SIGINT does: a pod may be evicted twice. SIGUSR2 restarts a serving agent."""

    def __init__(self, stop: asyncio.Event, *, drains: bool) -> None:
        self._drains = drains
        self.num_received = 0
        self.is_restart = False
        self.is_serving = False
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGUSR2, self._on_restart)

    def _on_restart(self) -> None:
        if self.is_serving and not self.num_received:
            self.is_restart = True
            self._stop.set()

    def _on_signal(self, number: int) -> None:
        if self._drains and self.is_serving and self.num_received and number == signal.SIGTERM:
            return
        self.num_received += 1
        self._stop.set()
        if not self.is_serving or self.num_received > 1:
            self._task.cancel()
            self._loop.call_later(EXIT_S_MAX, os._exit, 1)


def open_spools(folder: Path, node: str, source: str) -> tuple[Spool, list[Spool]]:
    """Open this incarnation's spool, and the undelivered ones of earlier ones, oldest first."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = f"{node}.{source.rpartition('/')[2]}.spool"
    # The file name ends in the incarnation, which is the sort key. A node's name may hold dots.
    found = sorted(
        (int(number), path)
        for path in folder.glob(f"{node}.*.spool")
        if (number := path.name.removeprefix(f"{node}.").removesuffix(".spool")).isdecimal()
        and path.name != mine
    )
    for _, path in found[:-OLD_SPOOLS_NUM_MAX]:
        _log.warning("deleted the undelivered reports of an earlier agent", file=path.name)
        path.unlink()
    left: list[Spool] = []
    for old, path in found[-OLD_SPOOLS_NUM_MAX:]:
        spool = load_spool(path, f"{node}/{old}", node, time.time)
        if spool is None or not spool.num_unacked:
            path.unlink()
        else:
            left.append(spool)
    own = load_spool(folder / mine, source, node, time.time) if (folder / mine).exists() else None
    return own or Spool(source, node, time.time, file=folder / mine), left


def log_url(own: str, given: str) -> str:
    """The server's URL: `own` if it is not empty; if it has no credentials, with `given`'s."""
    user = url_parts(given)
    if not own or url_parts(own).password is not None or user.password is None:
        return own or given
    return with_credentials(own, unquote(user.username or ""), unquote(user.password))


def _log_url(options: AgentOptions, joined: Joined) -> str:
    """Raises UsageError if the log would be used unencrypted on another host."""
    url = log_url(options.redis_url, joined.redis_url)
    if tls.is_plain(url) and not options.insecure:
        raise UsageError(
            "the log's server has no TLS: reports would cross the network unencrypted",
            "--insecure allows it: on a network that you trust",
        )
    return url


def _keys_of(joined: Joined) -> Keys:
    return only_key(joined.node, bytes.fromhex(joined.key))


async def _connect(url: str, joined: Joined, ca: str, source: str) -> RedisLog:
    """Raises UsageError if the server is unreachable, or refuses this agent, for CONNECT_S_MAX."""
    deadline, num_tries = time.monotonic() + CONNECT_S_MAX, 0
    log = RedisLog(url, joined.cluster, _keys_of(joined), ca=ca, has_lists=joined.has_lists)
    while True:
        try:
            await log.acked(source)
            return log
        except (LogError, UsageError) as error:
            # A server that was just restarted refuses: it has no user for this node yet.
            if time.monotonic() > deadline:
                await log.close()
                raise UsageError(
                    f"the log's server cannot be used: {error}",
                    "on another host, give --redis URL as seen from here",
                ) from None
        await asyncio.sleep(backoff_s(num_tries))
        num_tries += 1


def _devices(num_slots: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """One GPU for each slot, or none. Raises UsageError if there are fewer GPUs than slots."""
    given = tuple(
        part.strip()
        for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if part.strip() not in ("", "-1")
    )
    if given and len(given) < num_slots:
        raise UsageError(
            f"{len(given)} GPUs for {num_slots} slots",
            "lower --slots, or widen CUDA_VISIBLE_DEVICES",
        )
    return given[:num_slots]


def _by_uuid(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The same GPUs by UUID. The driver is asked only if one is given by its index."""
    if not any(device.isdecimal() for device in devices):
        return devices
    return gpus.by_uuid(devices, gpus.uuids() or {})

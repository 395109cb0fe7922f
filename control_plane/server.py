"""The control plane process: Redis connection, leadership and HTTP, from start to a clean stop."""

import asyncio
import os
import platform
import secrets
import signal
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec
import structlog
from msgspec import Struct
from unicron import __version__

from ..events import network_address
from ..events.decoding import from_json
from ..events.errors import Fenced, Unavailable, UsageError
from ..events.log.embedded_server import start_time
from ..events.log.identity import SECRET_BYTES, Identities, new_secret
from ..events.log.redis_streams import RedisLog
from ..events.log.segments import Folder
from ..events.private_files import read_private, write_private
from ..events.process_log import configure_logging
from ..events.records.envelope import Record
from ..events.shortage import outlast
from ..events.spec.policy import Policy
from .api.address import Address
from .api.connections import ConnectionLimits, Listener, limits_of_descriptors, seldom_logged
from .api.http import HttpApi
from .api.metrics import Metrics
from .api.notifications import Notifier
from .api.read_messages import Begin
from .api.reads import ReadProcess
from .api.routes import ROUTES
from .api.tokens import Tokens, share
from .service import server_relay
from .service.coordinator import Coordinator
from .service.dead_letters import DeadLetters
from .service.room import Room
from .service.server_certificate import ServerCertificate
from .service.server_places import ServerPlaces
from .state.cluster import ClusterState

CONNECT_S_MAX = 5.0
SHUTDOWN_S_MAX = 2.0
EXIT_DONE, EXIT_FAILED = 0, 1
FULL = "the log's server has no place for a further connection: waiting for one"
FULL_HINT = "restart that server, which ends all connections: unicron down, then unicron up"


class Options(Struct, frozen=True, kw_only=True):
    """Options of `unicron control-plane`. `port` 0 selects a free one.

    `listen` is the address at which it listens, `advertise` the one at which others reach it ("":
    the same). If other hosts reach it and cannot reach the server at `redis_url`, it relays their
    connections to the server, at `port` + 1.
    """

    state: Path
    redis_url: str
    listen: str = "127.0.0.1"
    advertise: str = ""
    port: int = 0
    cluster: str = "default"
    certificate: ServerCertificate | None = None
    """With it HTTP and the relay are over TLS."""
    ca: str = ""
    """The authorities (PEM) of a server at rediss://; "": the system's."""
    insecure: bool = False
    """Something crosses the network unencrypted: `unicron status` says so."""
    policy: Policy = Policy()
    """Replaces the policy of the log."""
    segments: str = ""
    """Where segments and snapshots of the log are: a folder or a URL; "": `log` in `state`."""
    notify: str = ""
    """The webhook for what needs a person; "": none. A secret."""
    name: str = "control-plane"
    """Names its files; another one for each control plane on the state folder."""
    shared_password: bool = False
    """Agents use the server with the control plane's own password, and so with all its rights."""


def run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0 stopped, 1 fenced.

    Raises UsageError for errors that the user can fix (a port in use, a server that cannot be
    reached or refuses the password), CorruptLog for a log that cannot be trusted.

    Start order: secret, server, HTTP port and socket (before any leader is fenced), token and
    `control_plane.json`, leadership, at first as a follower if another control plane leads. Stop
    order: leadership after its turn, HTTP with its open streams, the file, the server's
    connections. A cancel does the same.
    """
    configure_logging()
    return asyncio.run(_serve(options))


async def _serve(options: Options) -> int:
    logger = structlog.get_logger("control_plane")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().set_exception_handler(seldom_logged())
    is_relayed = server_relay.is_local(options.redis_url) and not network_address.is_loopback(
        options.listen
    )
    limits, too_few = limits_of_descriptors(
        ConnectionLimits(relayed_num_max=server_relay.RELAYED_NUM_MAX if is_relayed else 0)
    )
    if too_few:
        logger.warning(too_few)
    identities = Identities(_secret(options.state), options.cluster)
    folder = Folder(options.segments or options.state / "log", options.cluster)
    log = RedisLog(
        options.redis_url,
        options.cluster,
        identities.key,
        None if options.shared_password else identities,
        options.ca,
        folder,
        options.policy,
    )
    try:
        await _wait_for_redis(log, stop)
        if options.shared_password:
            logger.warning("every agent has the server's password and may do all that it allows")
        else:
            await log.check_users()
        token = _token(options.state)
        tokens = Tokens(options.state / "tokens.json", owner=token)
        metrics = Metrics()
        letters = DeadLetters(options.state / "dead-letters.jsonl", metrics.reports_rejected.inc)

        def observe(state: ClusterState, records: Sequence[Record], plan_s: float) -> None:
            metrics.observe(state, records, plan_s)
            reads.folded(state)

        coordinator = Coordinator(
            log,
            clock=steady_clock(),
            nonce=secrets.token_hex(8),
            code=__version__,
            policy=options.policy,
            access=partial(share, tokens, log),
            folder=folder,
            observe=observe,
            dead_letters=letters,
            room=Room(_folder_of_server(options.redis_url)),
            places=ServerPlaces(log, ended=metrics.connections_ended.inc),
        )
        advertised = options.advertise or options.listen
        address = _address(options, advertised, identities, is_relayed=is_relayed)
        ca = partial(_authority, options.certificate)
        file = options.state / f"{options.name.replace('-', '_', 1)}.json"
        reads = ReadProcess(_begin(options, folder, address), coordinator, ca, _reads_at(file))
        http = HttpApi(
            ROUTES,
            coordinator,
            log,
            tokens=tokens,
            address=address,
            identities=identities,
            metrics=metrics,
            ca=ca,
            reads=reads,
            folder=folder,
        )
        listener = Listener(http.app(), stop_s_max=SHUTDOWN_S_MAX, limits=limits)
        url = await _listen(listener, options, advertised)
        socket = await _listen_locally(listener, file.with_suffix(".sock").absolute())
        relay = server_relay.ServerRelay(options.redis_url, limits.relayed_num_max, log.find_server)
        beside = _begin_beside(options, coordinator, metrics)
        try:
            with suppress(Unavailable):  # the first read starts it then
                await reads.start()
            if is_relayed:
                await _relay(relay, options)
            _tell_where(file, options.cluster, url=url, socket=socket, token=token, ca=ca())
            logger.info(
                "listening",
                url=url,
                cluster=options.cluster,
                **{"ca": ca()} if options.certificate else {},
            )
            return await _lead(coordinator, stop, url)
        finally:
            for task in beside:
                task.cancel()
            await relay.close()
            await reads.stop()
            await listener.stop()
            _remove(file, socket)
    finally:
        await log.close()


def _authority(certificate: ServerCertificate | None) -> str:
    return certificate.ca if certificate is not None else ""


def _begin(options: Options, folder: Folder, address: Address) -> Begin:
    return Begin(
        redis_url=options.redis_url,
        ca=options.ca,
        cluster=options.cluster,
        folder=folder.where,
        policy=options.policy,
        address=address,
        token=secrets.token_hex(),
    )


def _reads_at(file: Path) -> Path:
    return file.with_suffix(".reads.sock").absolute()


def _tell_where(file: Path, cluster: str, **where: str) -> None:
    """Write for clients of this folder where the control plane is, and its token."""
    pid = os.getpid()
    write_private(
        file,
        msgspec.json.encode(
            where
            | {
                "pid": pid,
                "start_time": start_time(pid),
                "cluster": cluster,
                "host": platform.node(),
            }
        ),
    )


def _address(
    options: Options, advertised: str, identities: Identities, *, is_relayed: bool
) -> Address:
    return Address(
        cluster=options.cluster,
        cluster_id=_cluster_id(options.state, options.cluster, identities),
        shared_password=options.shared_password,
        insecure=options.insecure,
        names=(options.listen, advertised),
        redis_url=server_relay.url_at(
            options.redis_url,
            advertised,
            options.port + 1,
            with_tls=options.certificate is not None,
        )
        if is_relayed
        else options.redis_url,
    )


def _begin_beside(
    options: Options, coordinator: Coordinator, metrics: Metrics
) -> list[asyncio.Task[None]]:
    """What runs beside leadership: it ends nothing, and outlasts what the machine lacks."""
    loops = [options.certificate.keep_reloading] if options.certificate else []
    if options.notify:
        loops.append(Notifier(coordinator, options.notify, options.cluster, metrics).run)
    return [asyncio.create_task(outlast(run, partial(_told, run))) for run in loops]


def _told(loop: Callable[[], Awaitable[None]], why: str) -> None:
    structlog.get_logger("control_plane").warning(
        "a loop fails for now, and goes on after a pause", loop=loop.__qualname__, why=why
    )


def _folder_of_server(redis_url: str) -> Path | None:
    """The folder of a server on this host, whose socket is beside its files."""
    parts = network_address.url_parts(redis_url)
    return Path(unquote(parts.path)).parent if parts.scheme == "unix" else None


async def _lead(coordinator: Coordinator, stop: asyncio.Event, url: str) -> int:
    """Follow and lead until `stop` is set. Raises the error that ends it; Fenced is logged."""
    leading = asyncio.create_task(coordinator.run(url), name="leadership")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
        coordinator.stop()
        done, _ = await asyncio.wait((leading,), timeout=SHUTDOWN_S_MAX)
        if not done:
            leading.cancel()
            await asyncio.wait((leading,))
        if not leading.cancelled():
            leading.result()
    except Fenced as error:
        structlog.get_logger("control_plane").error("fenced, stopping", why=str(error))
        return EXIT_FAILED
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]  # pyright: ignore
        if isinstance(first, UsageError):
            raise first from None
        raise
    finally:
        stopping.cancel()
        leading.cancel()
    return EXIT_DONE


async def _wait_for_redis(log: RedisLog, stop: asyncio.Event) -> None:
    """Wait for CONNECT_S_MAX, and for a server that is full until it has a place. Raises
    UsageError, also if it is stopped before."""
    deadline_s, is_told, why = time.monotonic() + CONNECT_S_MAX, False, ""
    while not stop.is_set() and time.monotonic() < deadline_s:
        try:
            await log.check()
            return
        except Unavailable as error:
            why = str(error)
        if await log.is_full():
            deadline_s = time.monotonic() + CONNECT_S_MAX
            if not is_told:
                structlog.get_logger("control_plane").warning(FULL, hint=FULL_HINT)
            is_told = True
        await asyncio.sleep(0.05)
    raise UsageError(f"the server cannot be reached: {why}", "is it running? check --redis")


async def _listen(listener: Listener, options: Options, advertised: str) -> str:
    """Listen for HTTP; returns the URL at which others reach it."""
    try:
        bound_port = await listener.start(options.listen, options.port, _tls(options))
    except OSError as error:
        raise _cannot_listen(options.listen, options.port, error) from None
    scheme = "http" if options.certificate is None else "https"
    return f"{scheme}://{network_address.endpoint(advertised, bound_port)}"


async def _relay(relay: server_relay.ServerRelay, options: Options) -> None:
    try:
        await relay.start(options.listen, options.port + 1, _tls(options))
    except OSError as error:
        raise _cannot_listen(options.listen, options.port + 1, error) from None


def _tls(options: Options) -> ssl.SSLContext | None:
    return None if options.certificate is None else options.certificate.context


def _cannot_listen(host: str, port: int, error: OSError) -> UsageError:
    why = os.strerror(error.errno) if error.errno else str(error)
    return UsageError(
        f"cannot listen on {network_address.endpoint(host, port)}: {why}",
        "choose another port, or stop what uses it",
    )


async def _listen_locally(listener: Listener, path: Path) -> str:
    """Listen on a unix socket as well; returns its path."""
    try:
        await listener.start_locally(path)
    except OSError as error:
        await listener.stop()
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(
            f"cannot listen on {path}: {why}", "use --state to name a folder on a local disk"
        ) from None
    return str(path)


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that never jump: wall clock time at the start plus monotonic time."""
    origin_s = time.time() - time.monotonic()
    return lambda: origin_s + time.monotonic()


def _token(state: Path) -> str:
    """The cluster's token: created once, stored in the state folder, readable by its owner only."""
    path = state / "token"
    token = _made_once(path, lambda: new_secret().encode() + b"\n").decode(errors="replace").strip()
    if not token:
        raise UsageError(f"{path} is empty", "remove it, and the control plane makes a new one")
    return token


def _secret(state: Path) -> bytes:
    """The secret that the nodes' identities derive from: created once, in the state folder."""
    path = state / "secret"
    found = _made_once(path, lambda: secrets.token_bytes(SECRET_BYTES))
    if len(found) != SECRET_BYTES:
        raise UsageError(
            f"{path} does not hold {SECRET_BYTES} bytes",
            "remove it, then restart the control plane and the agents",
        )
    return found


def _cluster_id(state: Path, cluster: str, identities: Identities) -> str:
    """The cluster's id, which stays when the secret is changed."""
    path = state / f"{cluster}.cluster-id"
    return _made_once(path, lambda: identities.new_cluster_id.encode()).decode(errors="replace")


def _made_once(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of the file, also if several control planes want to make it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        with suppress(FileExistsError):
            write_private(path, make(), replaces=False)
    return read_private(path)


def _remove(path: Path, socket: str) -> None:
    """Remove the file and the socket, unless a successor has made them."""
    try:
        if from_json(path.read_bytes())["pid"] == os.getpid():
            path.unlink()
            os.unlink(socket)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return

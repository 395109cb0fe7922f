"""The node's object in Kubernetes: labels are its place, conditions and taints are findings.

The only module that uses kubernetes_asyncio, which is loaded on demand.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from typing import Any

import aiohttp
import msgspec
import structlog
from msgspec import Struct

from ....events.errors import UnicronError, UsageError
from ....events.records.reports import CheckHealth
from ....events.records.types import Labels
from ..delivery.log_link import backoff_s
from . import limits
from .finding import Finding

PREFIX = "kubernetes/"
"""Of the names of all its checks."""
RACKS = ("topology.kubernetes.io/rack", "network.topology.nvidia.com/accelerator",
         "cloud.google.com/gce-topology-subblock")
SWITCHES = ("network.topology.nvidia.com/leaf", "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-block")
"""Labels of nodes, the first one that a node has counts: none that sites agree on, NVIDIA's
Topograph, and clouds."""
TOLERATED = ("nvidia.com/gpu",)
"""Taints that only keep other pods away (deploy/kubernetes/agent.yaml)."""
START_S_MAX = 60.0
"""How long the first read is tried; then the agent starts without the labels."""
WATCH_S = 300
"""A watch is begun anew after this time; it then tells the node's present object again."""
ANSWER_S_MAX = 30.0
_log = structlog.get_logger("agent")


class _Condition(Struct):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _Taint(Struct):
    key: str
    effect: str
    value: str = ""


class _Metadata(Struct):
    labels: dict[str, str] = {}


class _Spec(Struct):
    unschedulable: bool = False
    taints: list[_Taint] = []


class _Status(Struct):
    conditions: list[_Condition] = []


class Node(Struct):
    """What is read of a node's object."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _Event(Struct):
    type: str
    object: msgspec.Raw


class _Unreadable(UnicronError):
    """Kubernetes does not answer, or not what is expected; `status` is that of HTTP, or 0."""

    status = 0


def findings(node: Node) -> dict[str, Finding]:
    """What the object says against its node, by check.

    A condition is degraded: reported and priced. A cordon and a taint NoExecute are unhealthy: the
    tasks leave. Conditions named ...Ready are well if True, all others if False.
    """
    found: list[Finding] = []
    for one in node.status.conditions:
        if one.status != ("True" if one.type.endswith("Ready") else "False"):
            found.append(_finding(one.type, "degraded" if one.status in ("True", "False")
                                  else "unknown", f"{one.reason}: {one.message}"))
    if node.spec.unschedulable:
        found.append(_finding("unschedulable", "unhealthy", "the node is cordoned"))
    for taint in node.spec.taints:
        # Kubernetes' own say what its conditions and the cordon say.
        if not taint.key.startswith("node.kubernetes.io/") and taint.key not in TOLERATED:
            found.append(_finding(
                taint.key, "unhealthy" if taint.effect == "NoExecute" else "degraded",
                f"taint {taint.key}={taint.value}:{taint.effect}"))
    return {one.check: one for one in found[:limits.CHECKS_NUM_MAX]}


def _finding(what: str, health: CheckHealth, why: str) -> Finding:
    text = "".join(char if char.isprintable() else " " for char in why)
    return Finding(PREFIX + what, health, text[:limits.REASON_CHARS_MAX], rule="kubernetes")


def place(labels: Mapping[str, str], given: Labels) -> Labels:
    """Rack and switch of a node with these labels; what was given by hand comes first."""
    def first(names: Sequence[str]) -> str:
        return next((labels[name] for name in names if labels.get(name)), "")
    return Labels(rack=given.rack or first(RACKS), switch=given.switch or first(SWITCHES))


async def labels_of(name: str, given: Labels) -> Labels:
    """Rack and switch of the node; those given if Kubernetes cannot be reached. Raises UsageError.
    """
    deadline, num_tries = time.monotonic() + START_S_MAX, 0
    while True:
        try:
            async with aclosing(_read("read_node", ANSWER_S_MAX, name=name)) as lines:
                return place(_decode(await anext(lines), Node).metadata.labels, given)
        except _Unreadable as error:
            if error.status == 404:
                raise UsageError(f"Kubernetes has no node {name!r}", "kubectl get nodes shows the "
                                 "names: --kubernetes NAME") from None
            if error.status in (401, 403) or time.monotonic() > deadline:
                _log.warning("no rack and switch from Kubernetes", why=str(error))
                return given
        await asyncio.sleep(backoff_s(num_tries))
        num_tries += 1


async def follow(name: str) -> AsyncIterator[dict[str, Finding] | str]:
    """The findings whenever the object changes, or why it cannot be read."""
    while True:
        try:
            async with aclosing(_read(
                    "list_node", WATCH_S + ANSWER_S_MAX, field_selector=f"metadata.name={name}",
                    watch=True, timeout_seconds=WATCH_S)) as lines:
                async for line in lines:
                    event = _decode(line, _Event)
                    if event.type == "DELETED":
                        gone = _finding("deleted", "unhealthy", "Kubernetes has this node no more")
                        yield {gone.check: gone}
                    elif event.type == "ERROR":  # most often: the watch is too old
                        break
                    else:
                        yield findings(_decode(event.object, Node))
        except (_Unreadable, UsageError) as error:
            yield str(error)
        await asyncio.sleep(limits.KUBERNETES_RETRY_S)


async def _read(call: str, s_max: float, **given: Any) -> AsyncGenerator[bytes, None]:
    """The lines of the answer. Raises _Unreadable, and UsageError without a configuration."""
    library: Any = _library("client")
    async with library.ApiClient(await _configuration()) as api:
        try:
            answer = await getattr(library.CoreV1Api(api), call)(
                **given, _preload_content=False, _request_timeout=s_max)
            if answer.status != 200:
                error = _Unreadable(f"Kubernetes answers {answer.status} {answer.reason}")
                error.status = answer.status
                raise error
            async for line in answer.content:
                yield line
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise _Unreadable(f"Kubernetes cannot be reached: {why}"[:limits.REASON_CHARS_MAX]
                              ) from None


def _decode(data: bytes | msgspec.Raw, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise _Unreadable(f"Kubernetes sends something else: {error}") from None


async def _configuration() -> Any:
    """The pod's, else that of $KUBECONFIG. Raises UsageError."""
    config, made = _library("config"), _library("client").Configuration()
    try:
        if os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" not in os.environ:
            await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=made)
        else:
            config.load_incluster_config(client_configuration=made)
    except config.ConfigException as error:
        raise UsageError(f"--kubernetes: {error}", "run the agent in a pod with a service account, "
                         "or set KUBECONFIG") from None
    return made


def _library(module: str) -> Any:
    try:
        return import_module(f"kubernetes_asyncio.{module}")
    except ImportError:
        raise UsageError("--kubernetes needs the package kubernetes-asyncio",
                         "pip install 'unicron[kubernetes]'") from None

"""A server that speaks Kubernetes' API of nodes: one object, and the watch of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

CONDITIONS = {
    # as kubelet, node-problem-detector and NVSentinel write them on a node without a problem
    "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
    "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory"),
    "KernelDeadlock": ("False", "KernelHasNoDeadlock", "kernel has no deadlock"),
    "GpuMemWatch": ("False", "GpuMemWatchIsHealthy", "No Health Failures"),
}
LABELS = {
    "kubernetes.io/hostname": "gpu-1",
    "network.topology.nvidia.com/leaf": "leaf-7",
    "network.topology.nvidia.com/accelerator": "nvl-3",
}


class KubernetesApi:
    """The server. A test changes `node`, and calls `changed`."""

    def __init__(self, name: str = "gpu-1") -> None:
        self.name, self.version = name, 100
        self.conditions = dict(CONDITIONS)
        self.taints: list[dict[str, str]] = [
            {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
        ]
        self.is_cordoned = False
        self.status = 200
        self.num_watches = 0
        self.asked: list[str] = []
        self._lines: set[asyncio.Queue[bytes]] = set()

    def node(self) -> dict[str, Any]:
        """The object as the API server sends it."""
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "uid": "u",
                "resourceVersion": str(self.version),
                "labels": LABELS,
            },
            "spec": {"podCIDR": "10.0.1.0/24", "taints": self.taints}
            | ({"unschedulable": True} if self.is_cordoned else {}),
            "status": {
                "capacity": {"nvidia.com/gpu": "8"},
                "conditions": [
                    {
                        "type": kind,
                        "status": status,
                        "reason": reason,
                        "message": message,
                        "lastHeartbeatTime": "2026-11-27T10:00:00Z",
                    }
                    for kind, (status, reason, message) in self.conditions.items()
                ],
                "images": [
                    {"names": [f"registry/image-{at}@sha256:{'0' * 64}"], "sizeBytes": 1}
                    for at in range(1000)
                ],
            },
        }  # real objects are long lines

    def changed(self) -> None:
        """Tell all watches the object as it is now."""
        self.version += 1
        self.send(self._event("MODIFIED"))

    def send(self, line: bytes) -> None:
        """Send a line to all watches; an empty one ends them."""
        for lines in self._lines:
            lines.put_nowait(line)

    def _event(self, what: str) -> bytes:
        return json.dumps({"type": what, "object": self.node()}).encode() + b"\n"

    async def _one(self, request: web.Request) -> web.Response:
        self.asked.append(request.headers.get("Authorization", ""))
        if self.status == 200 and request.match_info["name"] == self.name:
            return web.json_response(self.node())
        return web.json_response(
            {"kind": "Status", "code": self.status},
            status=(404 if self.status == 200 else self.status),
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"kind": "Status"}, status=self.status)
        assert request.query["watch"] in ("true", "True", "1")
        assert request.query["fieldSelector"] == f"metadata.name={self.name}"
        self.num_watches += 1
        response, lines = web.StreamResponse(), asyncio.Queue[bytes]()
        await response.prepare(request)
        await response.write(self._event("ADDED"))
        self._lines.add(lines)
        try:
            while line := await lines.get():
                await response.write(line)
        finally:
            self._lines.discard(lines)
        return response

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Path]:
        """Serve on loopback; yields the path of a configuration for clients."""
        app = web.Application()
        app.add_routes(
            [web.get("/api/v1/nodes/{name}", self._one), web.get("/api/v1/nodes", self._watch)]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        file = folder / "kubeconfig"
        file.write_text(
            json.dumps(
                {  # JSON is YAML
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "u", "user": {"token": "of-the-pod"}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )
        try:
            yield file
        finally:
            self.send(b"")
            await runner.cleanup()

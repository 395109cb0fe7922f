"""The node's object in Kubernetes, from a server that speaks its watch protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import yaml
from kubernetes_api import KubernetesApi
from unicron.events.errors import UsageError
from unicron.events.records.reports import HealthChanged
from unicron.events.records.types import Body, Labels
from unicron.workers.agent.health import kubernetes, limits
from unicron.workers.agent.health.health_monitor import HealthMonitor, HealthSources
from unicron.workers.agent.processes.launcher import NodeConfig

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 30.0


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> KubernetesApi:
    monkeypatch.setattr(kubernetes, "RETRY_S", 0.05)
    return KubernetesApi()


class Watched:
    """A health monitor that follows the object, and its reports."""

    def __init__(self) -> None:
        self.reports: list[HealthChanged] = []

    def take(self, body: Body) -> None:
        assert isinstance(body, HealthChanged)
        self.reports.append(body)

    async def told(self, *wanted: tuple[str, str]) -> None:
        """Wait until these are the next reports, in any order: check, health."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.reports) < len(wanted):
                await asyncio.sleep(0.01)
        found = {(one.check.removeprefix("kubernetes/"), one.health) for one in self.reports}
        assert found == set(wanted), self.reports
        self.reports.clear()


@asynccontextmanager
async def watched(
    api: KubernetesApi, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Watched]:
    node = NodeConfig(
        name="n1", incarnation=1, cluster="c", host="127.0.0.1", num_slots=8, state_dir=folder
    )
    async with api.serve(folder) as file:
        monkeypatch.setenv("KUBECONFIG", str(file))
        made = Watched()
        monitor = HealthMonitor(
            node, HealthSources(kubernetes=api.name, readers=(), kmsg=folder / "none"), made.take
        )
        task = asyncio.create_task(monitor.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                while not api.num_watches:
                    await asyncio.sleep(0.01)
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_conditions_cordon_and_taints_are_reports(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(api, tmp_path, monkeypatch) as seen:
        api.conditions["KernelDeadlock"] = ("True", "DockerHung", "task docker:7 blocked")
        api.changed()
        await seen.told(("KernelDeadlock", "degraded"))
        api.conditions["GpuMemWatch"] = (
            "True",
            "GpuMemWatchIsNotHealthy",
            "[DCGM_FR_FAULTY_MEMORY] GPU memory failure on GPU 0 - RecommendedAction: RESTART_VM",
        )
        api.conditions["Ready"] = ("Unknown", "NodeStatusUnknown", "Kubelet stopped posting")
        api.is_cordoned = True
        api.taints += [
            {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
            {"key": "nvidia.com/gpu-xid-error", "value": "true", "effect": "NoSchedule"},
        ]
        api.changed()
        await seen.told(
            ("GpuMemWatch", "degraded"),
            ("Ready", "unknown"),
            ("unschedulable", "unhealthy"),
            ("nvidia.com/gpu-xid-error", "degraded"),
        )
        api.changed()  # a heartbeat: nothing new
        api.conditions = dict(KubernetesApi().conditions)
        api.is_cordoned, api.taints = False, api.taints[:1]
        api.changed()
        await seen.told(
            *(
                (name, "healthy")
                for name in (
                    "KernelDeadlock",
                    "GpuMemWatch",
                    "Ready",
                    "unschedulable",
                    "nvidia.com/gpu-xid-error",
                )
            )
        )
        api.taints = [{"key": "example.com/leave", "effect": "NoExecute"}]
        api.changed()
        await seen.told(("example.com/leave", "unhealthy"))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}\n',
        b"<html>\n",
        b'{"type": "MODIFIED"}\n',
        b'{"type": "MODIFIED", "object": {"spec": 7}}\n',
    ],
)
async def test_a_watch_that_ends_is_begun_anew(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """What changed in between is reported then."""
    async with watched(api, tmp_path, monkeypatch) as seen:
        api.is_cordoned = True
        api.send(line)
        await seen.told(("unschedulable", "unhealthy"))
        assert api.num_watches >= 2


async def test_an_api_server_that_refuses_is_unknown(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(api, tmp_path, monkeypatch) as seen:
        api.status = 403
        api.send(b"")
        await seen.told(("api", "unknown"))
        api.status, api.is_cordoned = 200, True
        await seen.told(("api", "healthy"), ("unschedulable", "unhealthy"))


async def test_labels_are_rack_and_switch(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api.serve(tmp_path) as file:
        monkeypatch.setenv("KUBECONFIG", str(file))
        assert await kubernetes.labels_of("gpu-1", Labels()) == Labels(
            rack="nvl-3", switch="leaf-7"
        )
        assert await kubernetes.labels_of("gpu-1", Labels(rack="r9")) == Labels(
            rack="r9", switch="leaf-7"
        )
        assert api.asked == ["Bearer of-the-pod"] * 2
        with pytest.raises(UsageError, match="Kubernetes has no node 'GPU-1'") as error:
            await kubernetes.labels_of("GPU-1", Labels())
        assert "kubectl get nodes" in error.value.hint
        api.status = 403
        assert await kubernetes.labels_of("gpu-1", Labels(rack="r9")) == Labels(rack="r9")


async def test_an_api_server_that_is_away_delays_no_agent_for_ever(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api.serve(tmp_path) as file:
        monkeypatch.setenv("KUBECONFIG", str(file))
    assert await kubernetes.labels_of("gpu-1", Labels(rack="r9")) == Labels(rack="r9")


async def test_without_a_configuration_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="--kubernetes: Invalid kube-config"):
        await kubernetes.labels_of("gpu-1", Labels())
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(UsageError, match="--kubernetes: Service"):
        await kubernetes.labels_of("gpu-1", Labels())


def test_a_node_with_many_conditions_is_bounded() -> None:
    node = msgspec.convert(
        {"status": {"conditions": [{"type": f"C{at}", "status": "True"} for at in range(1000)]}},
        kubernetes._Node,
    )
    assert len(kubernetes.findings(node)) == limits.CHECKS_NUM_MAX


def test_the_manifest_tolerates_what_no_finding_is() -> None:
    (agents,) = yaml.safe_load_all((ROOT / "deploy/kubernetes/agent.yaml").read_text())
    tolerated = agents["spec"]["template"]["spec"]["tolerations"]
    assert tuple(one["key"] for one in tolerated) == kubernetes.TOLERATED

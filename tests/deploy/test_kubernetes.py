"""The manifests of deploy/kubernetes: rendered, valid, and in step with the commands they start."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from started_commands import options
from unicron import __version__
from unicron.control_plane.api.routes import ROUTES
from unicron.events.errors import UsageError
from unicron.events.private_files import read_private

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
GUIDE = ROOT / "docs/guides/kubernetes.md"
NUM_OBJECTS = Counter(
    {
        "NetworkPolicy": 4,
        "ServiceAccount": 3,
        "Service": 2,
        "StatefulSet": 2,
        "ClusterRole": 1,
        "ClusterRoleBinding": 1,
        "ConfigMap": 1,
        "DaemonSet": 1,
        "Namespace": 1,
        "PersistentVolumeClaim": 1,
        "PodDisruptionBudget": 1,
    }
)
Object = dict[str, Any]


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    """What `kubectl apply -k` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(FOLDER)], capture_output=True, text=True, check=True, timeout=60
    )
    return list(yaml.safe_load_all(done.stdout))


def pods(objects: list[Object]) -> dict[str, Object]:
    """The pod's spec of each workload."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in objects
        if one["kind"] in ("StatefulSet", "DaemonSet")
    }


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("version", ["1.25", "1.30", "1.37"])
def test_every_object_is_valid(objects: list[Object], version: str) -> None:
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)
    assert Counter(one["kind"] for one in objects) == NUM_OBJECTS
    assert sum(NUM_OBJECTS.values()) == 18


def test_an_invalid_object_is_found(objects: list[Object]) -> None:
    broken = next(one for one in objects if one["kind"] == "DaemonSet")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**broken, "spec": {**broken["spec"], "replicas": 2}}, "1.30", strict=True
        )


def test_the_containers_start_commands_of_this_version(objects: list[Object]) -> None:
    found = pods(objects)
    control_plane = options(found["unicron-control-plane"]["containers"][0]["args"])
    agent = options(found["unicron-agent"]["containers"][0]["args"])
    assert str(control_plane["segments"]).startswith("/shared/")
    assert agent["node"] == agent["kubernetes"] == "$(NODE_NAME)"
    ours = {
        one["image"]
        for name in ("unicron-control-plane", "unicron-agent")
        for one in containers(found[name])
    }
    assert ours == {f"registry.example.com/unicron:{__version__}"}, "one version for both"


def test_an_agent_has_time_to_drain(objects: list[Object]) -> None:
    pod = pods(objects)["unicron-agent"]
    assert (
        pod["terminationGracePeriodSeconds"]
        >= options(pod["containers"][0]["args"])["drain_limit"] + 30
    )


def test_the_probes_ask_what_the_control_plane_answers(objects: list[Object]) -> None:
    (container,) = pods(objects)["unicron-control-plane"]["containers"]
    asked = {
        container[f"{kind}Probe"]["httpGet"]["path"].partition("?")[0]
        for kind in ("liveness", "readiness")
    }
    assert asked == {"/livez", "/readyz"}
    assert asked <= {route.path for route in ROUTES if route.role is None}


def test_rights_are_the_least(objects: list[Object]) -> None:
    (role,) = (one for one in objects if one["kind"] == "ClusterRole")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}
    ]
    for name, pod in pods(objects).items():
        assert pod["automountServiceAccountToken"] is (name == "unicron-agent")
        for one in containers(pod):
            rights = one["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert ("add" in rights["capabilities"]) is (name == "unicron-agent")
    assert not any(one["kind"] == "Secret" for one in objects)


def test_every_pod_has_a_policy_and_what_it_names_exists(objects: list[Object]) -> None:
    """Selectors, accounts, claims and config maps name objects that are there."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    chosen = [
        one["spec"]["podSelector"].get("matchLabels", {})
        for one in objects
        if one["kind"] == "NetworkPolicy"
    ]
    for one in objects:
        if one["kind"] in ("StatefulSet", "DaemonSet"):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"] == labels
            assert labels in chosen
    assert {} in chosen, "what no policy names is refused"
    for pod in pods(objects).values():
        assert ("ServiceAccount", pod["serviceAccountName"]) in names
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "persistentVolumeClaim" in volume:
                assert (
                    "PersistentVolumeClaim",
                    volume["persistentVolumeClaim"]["claimName"],
                ) in names


def test_the_guide_makes_every_secret(objects: list[Object]) -> None:
    text = "\n".join(yaml.safe_dump(pod) for pod in pods(objects).values())
    wanted = {
        *re.findall(r"secretName: (\S+)", text),
        *re.findall(r"secretKeyRef:\n(?: +(?!name)\S.*\n)* +name: (\S+)", text),
    }
    assert wanted == {"unicron", "unicron-tls", "unicron-join"}
    guide = GUIDE.read_text(encoding="utf-8")
    assert wanted == set(re.findall(r"create secret generic (unicron\S*)", guide))


def shell(container: Object, folder: Path, **environment: str) -> str:
    """Run a container's script here, with its folders below `folder`; returns what it prints."""
    sh, option, script = container["command"]
    assert (sh, option) == ("sh", "-c")
    for place in ("/state", "/secrets", "/certs"):
        script = script.replace(f"{place}/", f"{folder}{place}/")
    return subprocess.run(
        ["sh", "-c", script.replace("exec valkey-server -", "cat")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    ).stdout


def test_the_secrets_of_a_control_plane_are_its_own(objects: list[Object], tmp_path: Path) -> None:
    """As in a Secret's volume, the group may read them, and Unicron refuses that."""
    (first,) = pods(objects)["unicron-control-plane"]["initContainers"]
    for name in ("secrets/secret", "secrets/token", "certs/tls.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o440)
        with pytest.raises(UsageError, match="others may read it"):
            read_private(tmp_path / name)
    (tmp_path / "state").mkdir()
    shell(first, tmp_path)
    state = tmp_path / "state/unicron"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {path.name: read_private(path).decode() for path in state.iterdir()} == {
        "secret": "secrets/secret",
        "token": "secrets/token",
        "tls.key": "certs/tls.key",
    }


def test_valkey_reads_its_password_from_standard_input(
    objects: list[Object], tmp_path: Path
) -> None:
    (server,) = pods(objects)["unicron-valkey"]["containers"]
    lines = shell(server, tmp_path, PASSWORD="pass-of-a-test").splitlines()
    assert lines[0] == "requirepass pass-of-a-test"
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction"} <= set(lines)
    assert not any("pass" in word for word in server.get("args", ()))

"""deploy/Containerfile: linted, and in step with the manifests. It is not built here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from locked_packages import EXTRAS, LOCK, PINS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/Containerfile"


def complaints(text: str) -> str:
    beside = str(Path(sys.executable).parent)
    hadolint = shutil.which("hadolint", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, "--no-color", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_the_linter_finds_nothing() -> None:
    assert complaints(FILE.read_text()) == ""


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("FROM ${BASE}", "FROM python:latest", "DL3007"),
        ("RUN pip", "RUN cd /tmp; pip", "DL3003"),
        ("WORKDIR /opt/unicron", "WORKDIR opt/unicron", "DL3000"),
    ],
)
def test_the_linter_finds_a_fault(old: str, new: str, rule: str) -> None:
    assert rule in complaints(FILE.read_text().replace(old, new))


def test_the_base_has_a_digest() -> None:
    assert re.findall(r"^FROM (.*)$", FILE.read_text(), re.MULTILINE) == ["${BASE}"]
    assert re.search(r"^ARG BASE=\S+:\S+@sha256:[0-9a-f]{64}$", FILE.read_text(), re.MULTILINE)


def test_the_image_has_what_its_build_and_its_pods_need() -> None:
    text = FILE.read_text()
    copied = {
        name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        one.split(".")[1] for one in project["tool"]["setuptools"]["packages"] if "." in one
    }
    assert packages <= copied
    files = {project["project"]["readme"], "__init__.py", PINS.name, LOCK.name}
    assert files <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert set(EXTRAS) <= set(project["project"]["optional-dependencies"])
    user = f"{10001}:{10001}"
    assert f"USER {user}" in text
    for name in ("control-plane", "agent"):
        manifest = (ROOT / f"deploy/kubernetes/{name}.yaml").read_text()
        assert "fsGroup: 10001" in manifest
    assert "--uid 10001 --gid 10001 --create-home unicron" in text
    assert "--run-as=unicron" in (ROOT / "deploy/kubernetes/agent.yaml").read_text()


def test_pip_takes_only_what_the_lock_has_and_torch_from_one_index() -> None:
    text = re.sub(r"\s*\\\n\s*", " ", FILE.read_text())
    calls = re.findall(r"pip install ([^;\n]*?)(?= ;;|\n)", text)
    assert calls == [
        f"--require-hashes --no-deps -r {LOCK.name}",
        f'-c {PINS.name} "$pin"',
        f'-c {PINS.name} --no-deps --index-url https://download.pytorch.org/whl/cpu "$pin+cpu"',
        "--no-deps --no-build-isolation .",
    ]
    assert "extra-index-url" not in text

"""The examples of docs/guides/api.md, run against a real control plane."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.areas import control_plane

PAGE = (Path(__file__).resolve().parents[3] / "docs/guides/api.md").read_text(encoding="utf-8")


def blocks(language: str) -> str:
    """All examples in a language, as one program."""
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    with control_plane(tmp_path) as (port, token):
        yield {**os.environ, "UNICRON_URL": f"http://127.0.0.1:{port}", "UNICRON_TOKEN": token}


def run(words: list[str], environment: dict[str, str], folder: Path) -> list[str]:
    done = subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_examples_with_curl(environment: dict[str, str], tmp_path: Path) -> None:
    lines = run(["bash", "-euo", "pipefail", "-c", blocks("bash")], environment, tmp_path)
    problems = [json.loads(line) for line in lines if "about:blank" in line]
    assert problems == [json.loads(blocks("json"))]
    assert json.loads((tmp_path / "openapi.json").read_text())["openapi"] == "3.1.0"
    assert json.loads((tmp_path / "plan.json").read_text())["tried"]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"TaskSubmitted", "TaskWeightSet"} <= set(kinds)
    assert kinds.count("TaskWeightSet") == 2, "set, and applied"
    assert next(line for line in lines if line.startswith("id: ")) == "id: 3"


def test_the_example_with_python(environment: dict[str, str], tmp_path: Path) -> None:
    lines = run([sys.executable, "-c", blocks("python")], environment, tmp_path)
    assert lines[0] == "waiting ['day']"
    assert any(line.endswith(" TaskWeightSet") for line in lines)
    assert lines[-1].startswith("409 task ")

"""The check at start of the versions of torch and megatron-core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import megatron.core
import pytest
import torch
from nursery import Nursery
from rank_driver import EXEC, Driver, small_spec
from structlog.testing import capture_logs
from unicron.events.errors import UsageError
from unicron.events.records import reports as r
from unicron.events.records.statuses import WRONG_INPUT
from unicron.workers.training.dependencies import known_versions, parts
from unicron.workers.training.dependencies.parts import Part
from unicron.workers.training.megatron_lm.versions import INTERFACES

EXAMPLE = Path(__file__).parents[3] / "deploy" / "examples" / "loop.py"
LIMIT_S = 240.0
LOST = "_set_global_memory_buffer"
"""A private name of parallel_state that `other_megatron` may lack."""


def other_megatron(folder: Path, version: str, *, lacks: str = "") -> Path:
    """The installed megatron-core under another version, without this name of parallel_state."""
    core, made = Path(megatron.core.__file__).parent, folder / "megatron" / "core"
    made.mkdir(parents=True)
    for path in core.iterdir():
        if path.name != "__pycache__":
            (made / path.name).symlink_to(path)
    changed = {"package_info.py": ("__version__ = ", f"__version__ = {version!r} or ")}
    if lacks:
        changed["parallel_state.py"] = (lacks, f"another{lacks}")
    for name, (old, new) in changed.items():
        (made / name).unlink()
        (made / name).write_text((core / name).read_text().replace(old, new))
    record = folder / f"megatron_core-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
    )
    return folder


def run(megatron_folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this folder before the installed packages."""
    return subprocess.run(
        [sys.executable, "-P", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=megatron_folder,
        env={**os.environ, "PYTHONPATH": str(megatron_folder)},
    )


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    return other_megatron(tmp_path / "lacking", "0.99.0", lacks=LOST)


def test_the_installed_versions_are_known_and_have_every_part() -> None:
    for found in known_versions.installed():
        assert (found.problem, found.warning) == ("", ""), found
    assert len(parts.PARTS) > 50
    assert {f"{major}.{minor}" for major, minor in INTERFACES} <= set(
        known_versions.DEPENDENCIES[1].known
    ), "all of Megatron-LM's versions"


@pytest.mark.parametrize(
    "name", ["no_such", "_World.no_such", "no_such or _nor_this", "_world.no_such"]
)
def test_a_missing_part_is_wrong_input_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "torch.distributed.distributed_c10d"
    monkeypatch.setattr(
        parts,
        "PARTS",
        [
            *parts.PARTS,
            Part(module, ("_world", "_then_changed")),
            Part(module, tuple(name.split(" or "))),
            *[Part("torch.no_such_module", ("x",))] * 3,
        ],
    )
    with pytest.raises(UsageError) as refused:
        known_versions.require_parts()
    assert str(refused.value) == (
        f"torch {torch.__version__} has no {module}.{name}, torch.no_such_module.x, "
        "torch.no_such_module.x and 1 more; known are 2.11 and 2.13"
    )
    assert "pip install" in refused.value.hint


def test_an_unknown_version_is_a_warning_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.160.0")
    known_versions.require_parts()
    with capture_logs() as lines:
        known_versions.warn_unknown()
    assert [(line["log_level"], line["event"]) for line in lines] == [
        (
            "warning",
            "megatron-core 0.160.0 was never run with Unicron; known are 0.15, 0.16, 0.17, "
            "0.18, 0.19 and 0.20",
        )
    ]


@pytest.mark.thorough
def test_the_check_imports_nothing_that_a_rank_does_not(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "-c",
        """
import sys
from unicron.workers.training.dependencies import known_versions
from unicron.workers.training.model import cpu_device
assert "torch" in sys.modules and "megatron" not in sys.modules
with cpu_device.uncompiled():
    import torch._dynamo
    from unicron.workers.training import member
before = set(sys.modules)
found = known_versions.installed()
assert not any(one.problem for one in found), found
print(sorted(set(sys.modules) - before))
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.fixture
def exec_driver(tmp_path: Path, nursery: Nursery) -> Iterator[Driver]:
    """A driver whose ranks are started by exec, so that they import Megatron themselves."""
    with closing(Driver(small_spec(tmp_path / "out"), tmp_path, nursery)) as driver:
        driver.by = EXEC
        yield driver


def test_a_rank_without_a_part_ends_as_wrong_input(
    exec_driver: Driver, lacking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(lacking))
    exec_driver.launch(0)
    told = exec_driver.wait(r.RankErrored, 0, limit_s=LIMIT_S)
    assert told.status == WRONG_INPUT
    assert told.text.startswith(f"megatron-core 0.99.0 has no megatron.core.parallel_state.{LOST};")
    assert told.text.count("\n") == 0


def test_a_script_without_a_part_ends_with_one_line(lacking: Path) -> None:
    done = run(lacking, str(EXAMPLE), "--iterations", "1")
    assert done.returncode == 2
    assert (
        f"megatron-core 0.99.0 has no megatron.core.parallel_state.{LOST};"
        in (done.stderr.splitlines()[-1])
    )


@pytest.mark.thorough
def test_a_rank_of_an_unknown_version_warns(
    exec_driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(other_megatron(tmp_path / "newer", "0.99.0")))
    exec_driver.start(0)
    text = exec_driver.processes[0].log.read_text()
    assert text.count("megatron-core 0.99.0 was never run with Unicron") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("lacks", [LOST, ""])
def test_doctor_imports_a_version_that_it_does_not_know(tmp_path: Path, lacks: str) -> None:
    folder = other_megatron(tmp_path / "other", "0.99.0", lacks=lacks)
    done = run(folder, "-m", "unicron.cli.main", "doctor")
    line = next(line for line in done.stdout.splitlines() if " megatron " in line)
    if lacks:
        assert line.startswith(
            f"missing  megatron  megatron-core 0.99.0 has no megatron.core"
            f".parallel_state.{LOST}; known are"
        )
        assert done.returncode == 1
    else:
        assert line.startswith("note     megatron  0.99.0; megatron-core 0.99.0 was never run")

"""The wheel holds every package of the project and nothing else, and imports without a checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from unicron.events import words

ROOT = Path(__file__).resolve().parents[2]
BUILD_S_MAX = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that the checkout gets no build/ folder."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    skipped = shutil.ignore_patterns(
        ".*", "build", "dist", "__pycache__", "*.egg-info", "node_modules"
    )
    shutil.copytree(ROOT, source, ignore=skipped, symlinks=True)
    assets = source / "control_plane" / "web" / "dist" / "assets"
    assets.mkdir(parents=True)  # as `make web` builds it
    (assets / "index-1.js").touch()
    (assets.parent / "index.html").touch()
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            str(out),
            str(source),
        ],
        check=True,
        timeout=BUILD_S_MAX,
        capture_output=True,
    )
    (built,) = out.glob("unicron_train-*.whl")
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    wanted: set[str] = set()
    for package in listed:
        folder = ROOT.joinpath(*package.split(".")[1:])
        wanted |= {f"{package.replace('.', '/')}/{path.name}" for path in folder.glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == wanted
    assert {name for name in names if "/web/" in name} == {
        "unicron/control_plane/web/dist/index.html",
        "unicron/control_plane/web/dist/assets/index-1.js",
    }
    assert all(name.startswith("unicron/") for name in names)
    assert not any(name.startswith("unicron/tests") for name in names)


def test_the_wheel_holds_the_licence_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "unicron = unicron.cli.main:main" in archive.read(entry).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_hint_of_an_extra_installs_our_own_package(wheel: Path, tmp_path: Path) -> None:
    """In a checkout it names that; beside an installed wheel it names the wheel."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--target", str(tmp_path), str(wheel)],
        check=True,
        timeout=BUILD_S_MAX,
        capture_output=True,
    )
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-P",
            "-c",
            "from unicron.events.words import install;print(install('gpu'))",
        ],
        check=True,
        timeout=BUILD_S_MAX,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert words.install("gpu") == f"{sys.executable} -m pip install -e '.[gpu]' in {ROOT}"
    assert done.stdout == (f"{sys.executable} -m pip install '/path/to/{wheel.name}[gpu]'\n")
    report = tmp_path / "report.json"
    subprocess.run(
        [*pip, "--dry-run", "--ignore-installed", "--report", str(report), f"{wheel}[gpu]"],
        check=True,
        timeout=BUILD_S_MAX,
        capture_output=True,
    )
    (found,) = json.loads(report.read_text())["install"]
    assert (found["metadata"]["name"], found["requested_extras"]) == ("unicron-train", ["gpu"])


def test_the_version_imports_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """With -S and -P neither the editable install nor the working directory can be imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import unicron;"
        "print(unicron.__version__, unicron.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        cwd=tmp_path,
        check=True,
        timeout=BUILD_S_MAX,
        capture_output=True,
        text=True,
    )
    version, where = done.stdout.split()
    assert where.startswith(str(wheel))
    assert wheel.name.startswith(f"unicron_train-{version}-")

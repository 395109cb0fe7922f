"""What a clone of Megatron-LM (UNICRON_MEGATRON_LM) needs and a machine lacks: one line says it."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_trial import WORDS, clones_or_skip
from nursery import Nursery
from rank_driver import START_S, Driver
from unicron.events.errors import UsageError
from unicron.events.records.reports import RankErrored
from unicron.events.records.statuses import WRONG_INPUT
from unicron.events.spec.job import parse
from unicron.workers.training.megatron_lm import launcher

PACKAGES = ("triton", "pybind11", "six", "regex")
LAUNCH = """
import os, sys
fd = sys.argv.pop()
sys.argv.pop()
os.environ["UNICRON_FD"] = fd
os.environ["UNICRON_LOOP"] = '{"micro_batches": 6, "iterations": 12, "output": ""}'
from unicron.workers.training.megatron_lm.launcher import main
main()
"""
BLOCKER = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name == {name!r} else find_spec(
    name, *more))
"""
"""As sitecustomize.py it hides a package from each Python."""
COMPILED = "helpers_cpp*"


@pytest.fixture(params=clones_or_skip(), ids=lambda folder: folder.name)
def clone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the clone in which the index builder of the datasets is not compiled."""
    found: Path = request.param
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        pytest.skip(f"{', '.join(lacking)} not installed: a clone of Megatron-LM needs them")
    copy = tmp_path / "clone"
    copy.mkdir()
    for script in found.glob("*.py"):
        shutil.copyfile(script, copy / script.name)
    shutil.copytree(
        found / "megatron",
        copy / "megatron",
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns(COMPILED, "__pycache__"),
    )
    for folder, _, _ in os.walk(copy):
        Path(folder).chmod(0o755)
    return copy


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("sentencepiece", "{python} -m pip install sentencepiece"),
        ("wandb.sdk", "{python} -m pip install wandb"),
        # Packages of these names on PyPI are not the ones that bring the modules.
        ("apex", "install it for {python} as its own project says"),
        ("cv2", "install it for {python} as its own project says"),
        ("my_tokenizer.words", "install it for {python} as its own project says"),
    ],
)
def test_a_hint_names_only_packages_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, hint: str
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # as in a new process
    if find_spec(module.partition(".")[0]) is not None:
        pytest.skip(f"{module} is installed")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(f"import {module}\n")
    with (
        pytest.raises(UsageError, match="a requirement of the script") as refused,
        launcher.start_failures_named(script),
    ):
        runpy.run_path(str(script))
    assert refused.value.hint == hint.format(python=sys.executable)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        (
            "triton",
            "pretrain_gpt.py cannot be imported: No module named 'triton'. Megatron-LM imports "
            "triton also without a GPU ({python} -m pip install triton)",
        ),
        (
            "six",
            "pretrain_gpt.py cannot be imported: No module named 'six'. It is a requirement of the "
            "script ({python} -m pip install six)",
        ),
        (
            "regex",
            "pretrain_gpt.py cannot be imported: No module named 'regex'. It is a requirement of "
            "the script ({python} -m pip install regex)",
        ),
        (
            "pybind11",
            "the index builder of the datasets cannot be compiled: pybind11 is not "
            "installed ({python} -m pip install pybind11)",
        ),
        (
            "c++",
            "the index builder of the datasets cannot be compiled: make: {lacks}/c++: No such file "
            "or directory (install a C++ compiler, or type make -C ",
        ),
    ],
)
def test_a_missing_requirement_is_one_line(
    clone: Path,
    tmp_path: Path,
    nursery: Nursery,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    line: str,
) -> None:
    lacks = tmp_path / "lacks"
    lacks.mkdir()
    if package == "c++":
        monkeypatch.setenv("CXX", str(lacks / "c++"))
    else:
        (lacks / "sitecustomize.py").write_text(BLOCKER.format(name=package))
        paths = [str(lacks), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    argv = [str(clone / "pretrain_gpt.py"), *WORDS]
    driver = Driver(
        parse(
            {
                "apiVersion": "unicron/v1",
                "name": "lacks",
                "slots": {"min": 1, "max": 1},
                "command": argv,
                "heal": "in-memory",
                "loop": {"micro_batches": 6, "iterations": 12, "output": str(tmp_path / "out")},
            }
        ),
        tmp_path,
        nursery,
    )
    driver.by = [sys.executable, "-P", "-c", LAUNCH, *argv]
    try:
        driver.launch(0)
        errored = driver.wait(RankErrored, 0, limit_s=START_S)
    finally:
        driver.close()
    assert errored.status == WRONG_INPUT, errored.text
    assert errored.text.startswith(line.format(python=sys.executable, lacks=lacks)), errored.text
    assert len(errored.text.splitlines()) == 1

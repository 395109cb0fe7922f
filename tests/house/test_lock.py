"""The lock has what hosts need, in the versions of constraints.txt, each file with a digest."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from locked_packages import BESIDE_TORCH, EXTRAS, LOCK, PINS, ROOT, TORCH, head, pins, read
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEXT = LOCK.read_text(encoding="utf-8")
LOCKED = read(TEXT)
CUDA = re.compile(r"nvidia-(?!ml-py)|cuda-|triton$")
"""What only torch's build for CUDA brings."""


def wanted() -> list[Requirement]:
    """What pyproject.toml says that a host needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [Requirement(one) for one in project["dependencies"]] + [
        Requirement(one) for extra in EXTRAS for one in extras[extra]
    ]


def needed_by(name: str) -> list[Requirement]:
    """What an installed package needs here."""
    lines = importlib.metadata.requires(name) or ()
    return [
        one
        for one in map(Requirement, lines)
        if one.marker is None or one.marker.evaluate({"extra": ""})
    ]


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    pinned = pins(PINS.read_text(encoding="utf-8"))
    for name, package in LOCKED.items():
        if package.marker and name not in pinned:
            continue  # of another platform or Python
        assert pinned.get(name) == package.version, f"{name}: make lock"


def test_the_lock_has_what_the_project_needs() -> None:
    for one in wanted():
        name = canonicalize_name(one.name)
        if name != TORCH:
            assert name in LOCKED, f"{name}: make lock"
            assert LOCKED[name].version in one.specifier, f"{name}: make lock"
    assert TORCH not in LOCKED


def test_the_lock_has_all_that_its_packages_need() -> None:
    here = {canonicalize_name(one.name) for one in importlib.metadata.distributions()}
    looked_at = 0
    for name in {*LOCKED, TORCH} & here:
        for one in needed_by(name):
            needed = canonicalize_name(one.name)
            if needed != TORCH and not (name == TORCH and CUDA.match(needed)):
                assert needed in LOCKED, f"{needed}, which {name} needs: make lock"
                looked_at += 1
    assert looked_at > 40
    assert set(BESIDE_TORCH) <= set(LOCKED)


def test_the_lock_names_no_index_and_no_address() -> None:
    assert TEXT.startswith(head()), "make lock"
    body = TEXT.removeprefix(head())
    for word in ("://", "index", "find-links", "trusted", "@", "#"):
        assert word not in body


@pytest.mark.parametrize(
    "text",
    [
        "a==1\n",
        "a==1 \\\n    --hash=md5:0123\n",
        f"a==1 \\\n    --hash=sha256:{'0' * 63}\n",
        f"a>=1 \\\n    --hash=sha256:{'0' * 64}\n",
        f"a @ https://h/a.whl \\\n    --hash=sha256:{'0' * 64}\n",
        "--index-url https://h\n",
    ],
)
def test_what_is_no_lock(text: str) -> None:
    with pytest.raises(ValueError, match="no package with digests"):
        read(text)


def test_a_lock_is_read() -> None:
    first, second = "0" * 64, "f" * 64
    text = (
        f"# a word\na-b==1.0.post1 ; sys_platform != 'win32' \\\n    --hash=sha256:{first} \\\n"
        f"    --hash=sha256:{second}\nc==2 \\\n    --hash=sha256:{first}\n"
    )
    found = read(text)
    assert found["a-b"] == ("1.0.post1", "sys_platform != 'win32'", (first, second))
    assert found["c"] == ("2", "", (first,))

"""What is packaged, under which name."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from .tree import Rules, files, library, nodes, trees

# The distribution that PyPI calls unicron, which is another project's, as the target of an install.
STRANGER = re.compile(r"\bunicron\[|\bpip\d? install[^\n`]*[\s'\"]unicron(?![\w./-])")


def the_root_holds_no_modules(root: Path) -> list[str]:
    found = [
        f"{name} lies at the root"
        for name, _ in files(root, ".py")
        if "/" not in name and name != "__init__.py"
    ]
    found += ["tests/__init__.py exists"] if (root / "tests/__init__.py").exists() else []
    return found + (["a folder unicron/ exists"] if (root / "unicron").exists() else [])


def every_package_is_listed(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    there = {".".join(["unicron", *name.split("/")[:-1]]) for name, _ in files(root, "__init__.py")}
    there |= {".".join(["unicron", *name.split("/")[:-1]]) for name, _ in library(root)}
    return [f"pyproject and the tree disagree on {package}" for package in sorted(listed ^ there)]


def the_distribution_is_our_own(root: Path) -> list[str]:
    """Only the history names the one of another project."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = [] if project["name"] == "unicron-train" else [f"pyproject names {project['name']}"]
    return found + [
        f"{name} sends people to another project's unicron"
        for name, path in files(root)
        if name != "CHANGELOG.md" and STRANGER.search(path.read_text("utf-8", errors="replace"))
    ]


PIN = re.compile(r"(?<![\w.-])([A-Za-z][\w.-]*)(?:\[[\w,]+\])?==(\d[\w.+!-]*)")
# Where packages are pinned: files for pip, and what is given to pip on a command line.
PIN_FILES = re.compile(
    r"(^|/)(constraints[\w-]*\.txt|requirements[\w-]*\.txt|pyproject\.toml|Makefile|Dockerfile[\w.-]*)$"
)


def no_package_is_pinned_twice(root: Path) -> list[str]:
    """One version a package over all files: who installs two of them meets no contradiction, and
    whoever raises a version raises it everywhere."""
    pins: dict[str, dict[str, str]] = {}
    for file, text in _with_pins(root):
        for package, version in PIN.findall(text):
            plain = re.sub(r"[-_.]+", "-", package).lower()
            pins.setdefault(plain, {}).setdefault(version, file)
    return [
        f"{package} has two versions: " + ", ".join(f"{v} in {f}" for v, f in sorted(known.items()))
        for package, known in sorted(pins.items())
        if len(known) > 1
    ]


def _with_pins(root: Path) -> Iterator[tuple[str, str]]:
    """(file, text with pins): files for pip without comments, and literal pins of Python files."""
    for file, path in files(root):
        if PIN_FILES.search(file):
            yield file, re.sub(r"(^|\s)#.*", "", path.read_text(encoding="utf-8"))
    for file, tree in trees(root):
        for node in nodes(tree):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and PIN.fullmatch(value):
                yield file, value


PROJECT = '[project]\nname = "unicron-train"\n[tool.setuptools]\npackages = ["unicron"]\n'


RULES: Rules = {
    the_root_holds_no_modules: [
        {"setup.py": "\n"},
        {"tests/__init__.py": "\n"},
        {"unicron/a.txt": "\n"},
    ],
    every_package_is_listed: [{"pyproject.toml": PROJECT, "events/__init__.py": "\n"}],
    the_distribution_is_our_own: [
        {"pyproject.toml": PROJECT.replace("-train", "")},
        *(
            {"pyproject.toml": PROJECT, "docs/a.md": text}
            for text in (
                "It needs `unicro" + "n[gpu]`.",
                "pip install -U unicro" + "n\n",
                "python -m pip install 'unicro" + "n==0.3.0'",
            )
        ),
    ],
    no_package_is_pinned_twice: [
        {"constraints.txt": "a==1\n", "tests/bench/a/constraints-a.txt": "A==2  # newer\n"},
        {"constraints.txt": "a_b==1.0\n", "pyproject.toml": '[project]\nx = ["a-b[c]==1.1"]\n'},
        {"Makefile": "\tpip install a==1\n", "tests/a.py": 'pip("a==2")\n'},
    ],
}

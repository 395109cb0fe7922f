"""What is packaged, under which name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from .tree import Rules, files, library

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
}

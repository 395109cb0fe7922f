"""Programs that no type checker reads exist, with the names that they import."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .tree import Rules, nodes, parsed, trees

PROGRAM_IMPORT = re.compile(r"from unicron((?:\.\w+)*) import (?:\(([^)]*)\)|([\w, ]+))")


@functools.cache
def bound(tree: ast.Module) -> set[str]:
    """All names that a module defines or imports, at any depth."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def programs_in_tests_import_what_exists(root: Path) -> list[str]:
    """Programs in strings run in another process, so no type checker reads their imports."""
    found: list[str] = []
    for name, tree in trees(root):
        for node in nodes(tree) if name.startswith("tests/") else ():
            text = node.value if isinstance(node, ast.Constant) else None
            for module, several, one in PROGRAM_IMPORT.findall(text if type(text) is str else ""):
                path = root.joinpath(*module.split("."))
                file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                known = bound(parsed(file.read_text(encoding="utf-8"))) if file.exists() else set()
                for attribute in (x.split()[0] for x in (several or one).split(",") if x.strip()):
                    if (
                        attribute not in known
                        and not (path / attribute).is_dir()
                        and not (path / f"{attribute}.py").exists()
                    ):
                        found.append(f"{name}:{node.lineno} unicron{module} has no {attribute}")
    return found


MODULE = re.compile(r"PYTHONPATH=(\S+) \S*(?:python|PYTHON\)) (?:-P |-W ignore )*-m ([\w.]+)")
SCRIPT = re.compile(r"(?<![\w./-])(?:tests|docs|control_plane)/[\w/.-]+\.(?:py|sh)\b")


def what_make_runs_exists(root: Path) -> list[str]:
    """Each file and module that the Makefile names, and what these import of this tree: a verb that
    runs once a week must not be the first to notice that a file was renamed."""
    makefile = root / "Makefile"
    text = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
    missing = [
        f"Makefile names {name}" for name in SCRIPT.findall(text) if not (root / name).exists()
    ]
    read: set[Path] = set()
    for path, dotted in sorted(set(MODULE.findall(text))):
        places = [root / place for place in path.split(":")]
        file = _module(dotted, places)
        missing += [] if file else [f"Makefile names {dotted}"]
        pending = [file] if file else []
        while pending:
            file = pending.pop()
            if file.suffix == ".py" and file not in read:
                read.add(file)
                for target, problem in _imported(file, root, places):
                    pending += [target] if target else []
                    missing += [problem] if problem else []
    return sorted(set(missing))


def _module(dotted: str, places: list[Path]) -> Path | None:
    """The module's file, or its folder if that is a package without a file."""
    for place in places:
        path = place.joinpath(*dotted.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py"), path):
            if file.exists():
                return file
    return None


def _imported(file: Path, root: Path, places: list[Path]) -> Iterator[tuple[Path | None, str]]:
    """(file of this tree, "") of each import of a file of tests/, or (None, what is wrong)."""
    name = file.relative_to(root).as_posix()
    for node in nodes(parsed(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.ImportFrom) and node.module and not node.level):
            continue
        top, _, rest = node.module.partition(".")
        if top == "unicron":
            target = _module(rest, [root]) if rest else root / "__init__.py"
        elif _module(top, places):
            target = _module(node.module, places)
        else:
            continue
        if target is None:
            yield None, f"{name} imports {node.module}, which is not there"
            continue
        folder = target.parent if target.name == "__init__.py" else target
        known = _names(target) if target.is_file() else set[str]()
        yield (target if top != "unicron" and target.is_file() else None), ""
        for alias in node.names:
            inner = _module(alias.name, [folder])
            yield (
                (inner if top != "unicron" else None),
                (
                    ""
                    if inner or alias.name in known
                    else f"{name}: {node.module} has no {alias.name}"
                ),
            )


def _names(file: Path) -> set[str]:
    """What a module defines or imports, also by `from ...x import *`."""
    tree = parsed(file.read_text(encoding="utf-8"))
    known = set(bound(tree))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.level:
            source = _module(node.module or "", [file.parents[node.level - 1]])
            known |= _names(source) if source else set()
    return known


def every_mutant_applies(root: Path) -> list[str]:
    """Each patch of tests/mutants fits the code, by the command of tests/mutants/run.py."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed: it applies the patches")
    return [
        f"tests/mutants/{patch.name} does not apply"
        for patch in sorted((root / "tests/mutants").glob("*.patch"))
        if subprocess.run(
            ["git", "apply", "--check", "--recount", "-C1", str(patch)],
            cwd=root,
            # No repository: the patch is tried on the files as they are, also in an archive.
            env={**os.environ, "GIT_DIR": str(root / "none")},
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
    ]


MAKE = "a:\n\t@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.a --more\n"
PATCH = "--- a/cli/a.py\n+++ b/cli/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
RULES: Rules = {
    programs_in_tests_import_what_exists: [
        {"tests/a.py": "P = 'from unicron" + ".cli.a import f, g'\n", "cli/a.py": "def f(): ...\n"},
        {"tests/a.py": "P = 'from unicron" + ".cli import b'\n", "cli/a.py": "\n"},
    ],
    what_make_runs_exists: [
        {"Makefile": MAKE},
        {"Makefile": MAKE, "tests/bench/a.py": "from bench.b import c\n"},
        {"Makefile": MAKE, "tests/bench/a.py": "from b import c\n", "tests/drivers/b.py": "\n"},
        {"Makefile": MAKE, "tests/bench/a.py": "from unicron" + ".events.b import c\n"},
        {"Makefile": "test:\n\t@$(BIN)/python tests/suite.py\n"},
    ],
    every_mutant_applies: [
        {"tests/mutants/01-a.patch": PATCH},
        {"tests/mutants/01-a.patch": PATCH, "cli/a.py": "x = 3\n"},
    ],
}

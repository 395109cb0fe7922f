"""Programs that no type checker reads exist, with the names that they import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .tree import Rules, nodes, parsed, trees

PROGRAM_IMPORT = re.compile(r"from unicron((?:\.\w+)*) import (?:\(([^)]*)\)|([\w, ]+))")


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


RULES: Rules = {
    programs_in_tests_import_what_exists: [
        {"tests/a.py": "P = 'from unicron" + ".cli.a import f, g'\n", "cli/a.py": "def f(): ...\n"},
        {"tests/a.py": "P = 'from unicron" + ".cli import b'\n", "cli/a.py": "\n"},
    ],
}

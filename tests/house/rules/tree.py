"""The files of the tree, parsed once for all rules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


Rule = Callable[[Path], list[str]]
Rules = dict[Rule, list[dict[str, str]]]
"""Rule -> the smallest trees that violate it: path -> text."""


# Top-level package -> the packages that it may import. "" is the root package (`__version__`).
MAY_IMPORT = {
    "events": {"", "events"},
    "control_plane": {"", "events", "control_plane"},
    "workers": {"", "events", "workers"},
    "cli": {"", "events", "control_plane", "workers", "cli"},
}


SKIPPED = {
    ".git",
    ".venv",
    ".typing",
    "build",
    "dist",
    "node_modules",
    "__pycache__",
    "unicron.egg-info",
    "unicron_train.egg-info",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
}


def files(root: Path, suffix: str = "") -> Iterator[tuple[str, Path]]:
    """(path from the root, path) of every file of the tree."""
    for path in sorted(root.iterdir()):
        if path.name in SKIPPED or path.is_symlink():
            continue
        if path.is_dir():
            yield from ((f"{path.name}/{name}", inner) for name, inner in files(path, suffix))
        elif path.name.endswith(suffix):
            yield path.name, path


@functools.cache
def parsed(text: str) -> ast.Module:
    """Parse a file once for all rules, because parsing takes longer than reading."""
    return ast.parse(text)


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Walk a file once for all rules."""
    return tuple(ast.walk(tree))


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for name, path in files(root, ".py"):
        yield name, parsed(path.read_text(encoding="utf-8"))


def library(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """The trees of the packages only: no tests, no scripts of docs."""
    return ((name, tree) for name, tree in trees(root) if name.split("/")[0] in MAY_IMPORT)


def imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import; `from a import b` gives a.b."""
    package = ["unicron", *name.split("/")[:-1]]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, within_name: str = "") -> Iterator[tuple[str, Function]]:
    """(its name after those of the classes and functions around it, the function)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{within_name}.{node.name}" if within_name else node.name
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, name)
        elif not isinstance(node, ast.expr):
            yield from functions(node, within_name)


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """All nodes of a function, without those of the functions and classes inside it."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            pending += ast.iter_child_nodes(node)


def plain_data(root: Path) -> set[str]:
    """Names of the classes that are fields and no more: msgspec's Struct, TypedDict, NamedTuple,
    and all that inherit from them."""
    above: dict[str, set[str]] = {}
    for _, tree in trees(root):
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                above.setdefault(node.name, set()).update(bases(node))
    plain = {"Struct", "TypedDict", "NamedTuple"}
    while more := {name for name, names in above.items() if names & plain} - plain:
        plain |= more
    return plain


def bases(of: ast.ClassDef) -> set[str]:
    """The last parts of the names of the classes from which one inherits."""
    named = (base.value if isinstance(base, ast.Subscript) else base for base in of.bases)
    return {ast.unparse(base).rpartition(".")[2] for base in named}


def within(dotted: str, package: str) -> bool:
    return dotted == package or dotted.startswith(package + ".")

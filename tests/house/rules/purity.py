"""Pure files: without clocks and sockets, exact and repeatable."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .tree import Rules, imports, nodes, trees

# Packages and files without clocks, sockets, random numbers and loggers.
PURE = (
    *(
        f"control_plane/{package}/"
        for package in (
            "state",
            "fold",
            "decide",
            "history",
            "incidents",
            "throughput",
            "planner",
            "placement",
            "simulation",
        )
    ),
    *(f"control_plane/api/{name}.py" for name in ("dry_run", "needs", "view")),
    "events/records/",
    "events/spec/",
    *(
        f"workers/diagnosis/{name}"
        for name in (
            "rules/",
            "classifier.py",
            "flight_recorder.py",
            "step_time.py",
        )
    ),
    "workers/agent/monitoring/megatron_output.py",
    "workers/agent/health/debounce.py",
    "workers/agent/health/finding.py",
    "workers/agent/health/limits.py",
    *(
        f"workers/training/recovery/{name}.py"
        for name in ("resharding", "settlement", "state_sources")
    ),
    "workers/training/step/progress.py",
)


IMPURE = {
    "asyncio",
    "time",
    "datetime",
    "random",
    "uuid",
    "os",
    "socket",
    "threading",
    "logging",
    "structlog",
    "aiohttp",
    "redis",
    "torch",
}


def is_pure(name: str) -> bool:
    return name.startswith(PURE)


def pure_files_import_nothing_impure(root: Path) -> list[str]:
    """Pure files import nothing impure, except `random.Random`, which needs a seed."""
    return [
        f"{name}:{line} imports {dotted}"
        for name, tree in trees(root)
        if is_pure(name)
        for line, dotted in imports(name, tree)
        if dotted.split(".")[0] in IMPURE
        and (dotted != "random.Random" or "Random()" in ast.unparse(tree))
    ]


def _is_set(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("set", "frozenset")
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Attribute) and node.attr in names


def _set_names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.AnnAssign):
            is_set = bool(re.match(r"(frozen)?set\b", ast.unparse(node.annotation)))
            targets: list[ast.expr] = [node.target] if is_set else []
        elif isinstance(node, ast.Assign) and _is_set(node.value, set()):
            targets = node.targets
        else:
            continue
        found |= {t.id if isinstance(t, ast.Name) else getattr(t, "attr", "") for t in targets}
    return found


def pure_files_iterate_no_sets(root: Path) -> list[str]:
    """Pure files have no `for x in s` or `list(s)` of a set: its order differs per process."""
    found: list[str] = []
    for name, tree in trees(root):
        names = _set_names(tree) if is_pure(name) else set()
        for node in nodes(tree) if is_pure(name) else ():
            over: list[ast.expr] = []
            if isinstance(node, ast.For | ast.comprehension):
                over = [node.iter]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                over = node.args[:1] if node.func.id in ("list", "tuple", "enumerate") else []
            found += [f"{name}:{x.lineno} iterates over a set" for x in over if _is_set(x, names)]
    return found


def pure_files_sum_no_floats(root: Path) -> list[str]:
    """Pure files use math.fsum, not `sum`, for expressions whose names have a float's unit."""
    floats = re.compile(r"\b\w*(_s|_flops|waf|loss|losses|rate|weight)\b")
    return [
        f"{name}:{node.lineno} sums floats: {ast.unparse(node)}"
        for name, tree in trees(root)
        if is_pure(name)
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "sum"
        and floats.search(ast.unparse(node))
    ]


RULES: Rules = {
    pure_files_import_nothing_impure: [
        {"control_plane/fold/fold.py": "def f():\n    import time\n"},
        {"control_plane/fold/fold.py": "from random import Random\nhere = Random()\n"},
    ],
    pure_files_iterate_no_sets: [
        {"control_plane/decide/decide.py": "s = {1}\nx = [y for y in s]\n"},
        {"control_plane/decide/decide.py": "x = tuple({1, 2})\n"},
        {
            "control_plane/state/cluster.py": "class S:\n  a: set[int]\n"
            "  def f(self):\n    for x in self.a: ...\n"
        },
    ],
    pure_files_sum_no_floats: [
        {"control_plane/planner/planner.py": "x = sum(t.waf for t in [])\n"}
    ],
}

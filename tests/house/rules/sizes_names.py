"""Sizes, captions and names: what a reader meets first."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .tree import Rules, bases, files, functions, library, nodes, own_nodes, plain_data, trees

FUNCTION_LINES_MAX = 70
ATTRIBUTES_NUM_MAX = 15
NAMES_THAT_SAY_NOTHING = {"found", "one"}


BANNED_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|manager|base)(_|$)")


# Names of module-level numbers contain a unit or the kind of count.
UNITS = re.compile(
    r"(_|^)(S|MS|US|BYTES|FLOPS|LINES|COLUMNS|ITERATIONS|RECORDS|REPORTS|CHARS|VERSION|PORT|"
    r"SEED|SEEDS|SCHEMA|HEART|NUM|EXIT|CODE|RATIO|SHARE|TIMES|TRIES|PERCENT|HZ|BITS|LENGTH|MASK|"
    r"VOCABULARY)"
    r"(_|$)"
)


def functions_stay_short(root: Path) -> list[str]:
    return [
        f"{name} {node.name} has {length} lines"
        for name, tree in trees(root)
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def classes_have_few_attributes(root: Path) -> list[str]:
    """At most ATTRIBUTES_NUM_MAX that the class sets on itself or declares. Plain data may have
    more: records, the state and the policy are what they list."""
    plain = plain_data(root)
    return [
        f"{name} {node.name} has {number} attributes"
        for name, tree in trees(root)
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        and not bases(node) & plain  # not by its name: another class may have it too
        and (number := len(_attributes(node))) > ATTRIBUTES_NUM_MAX
    ]


def _attributes(of: ast.ClassDef) -> set[str]:
    declared = {
        node.target.id
        for node in of.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return declared | {
        node.attr
        for node in ast.walk(of)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def locals_say_what_they_are(root: Path) -> list[str]:
    """No argument or variable of a function is only `found` or `one`: found where, one what?"""
    return [
        f"{name} {qualified} has a local named found or one"
        for name, tree in library(root)
        for qualified, function in functions(tree)
        if any(
            node.arg in NAMES_THAT_SAY_NOTHING
            if isinstance(node, ast.arg)
            else isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in NAMES_THAT_SAY_NOTHING
            for node in own_nodes(function)
        )
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
        for node in nodes(tree):
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


RULES: Rules = {
    functions_stay_short: [{"cli/a.py": "def f():\n" + "    x = 1\n" * 70}],
    classes_have_few_attributes: [
        {
            "cli/a.py": "class A:\n def f(self):\n  "
            + "; ".join(f"self.a{n} = {n}" for n in range(16))
        },
        {"tests/a.py": "class A(Protocol):\n" + "".join(f"  a{n}: int\n" for n in range(16))},
        {
            "events/a.py": "class A(Struct):\n  a: int\n",
            "cli/a.py": "class A:\n" + "".join(f"  a{n}: int\n" for n in range(16)),
        },
    ],
    locals_say_what_they_are: [
        {"cli/a.py": "def f():\n    found = 1\n"},
        {"cli/a.py": "def f(these):\n    return [one for one in these]\n"},
        {"cli/a.py": "class A:\n    def f(self, one): ...\n"},
    ],
    every_file_has_a_caption: [{"cli/a.py": "import os\n"}, {"cli/a.py": '# A\n"""B."""\n'}],
    names_are_specific: [
        {"cli/a.py": "class RankManager: ...\n"},
        {"cli/utils.py": "\n"},
        {"cli/common/a.py": "\n"},
        {"events/a.py": "def parse_helper(): ...\n"},
    ],
    constants_name_their_unit: [{"cli/a.py": "SILENCE = 5.0\n"}, {"cli/a.py": "A: int = 4 << 2\n"}],
}

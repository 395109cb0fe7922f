"""Contracts between files: callbacks, keys and fields that a reader can follow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .tree import Function, Rules, functions, imports, library, nodes, own_nodes, plain_data

# It replaces functions of Megatron, whose modules and objects are no classes of ours.
REPLACES_FOREIGN = ("workers/training/megatron_lm/",)
# Files and functions that read what other programs say in words: no type can be given to it.
READS_FOREIGN_WORDS = (
    "cli/commands/doctor.py _torch",
    "events/log/durability.py refusal",
    "events/spec/validation.py",
    "workers/agent/health/kernel_log.py",
    "workers/agent/processes/torch_files.py",
    "workers/diagnosis/",
    "workers/training/process/exit_report.py is_cuda_error",
)
SENTENCE = re.compile(r"\w\W* +\W*\w|^\w+:? $")
"""Words with a blank between them, or the beginning of a sentence."""
PART_OF_SENTENCE = re.compile(r"[a-z]{3,}")
"""A plain word, which as the beginning of a text is the beginning of a sentence."""
READS_ENDS = ("startswith", "endswith")
# Where plain data is documented field by field: the state, the policy, the records, what the API
# reads and answers, and what of its answers lies in other rooms.
DOCUMENTED = (
    *(
        f"control_plane/api/{name}.py"
        for name in (
            "dry_run",
            "incident_facts",
            "messages",
            "needs",
            "requests",
            "timeline_answer",
            "usage_answer",
        )
    ),
    "control_plane/history/history.py",
    "control_plane/history/timeline.py",
    "control_plane/state/",
    "control_plane/throughput/transition_cost.py",
    *(
        f"events/records/{name}.py"
        for name in ("decisions", "envelope", "orders", "reports", "types")
    ),
    "events/spec/policy.py",
)
GLOSSARY = re.compile(r"^## Glossary$(.*?)^## ", re.MULTILINE | re.DOTALL)


# --- callbacks -----------------------------------------------------------------------------------
def no_callable_is_assigned_from_outside(root: Path) -> list[str]:
    """Nobody but the class itself sets an attribute that is called: who calls it cannot be seen
    there, nor what it does. A constructor takes a callable, or a protocol."""
    called = {name for _, tree in library(root) for name in _called_attributes(tree)}
    ours = called | {
        node.name
        for _, tree in library(root)
        for kind in nodes(tree)
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, Function)
    }
    return [
        f"{name} {qualified} sets {ast.unparse(target)}"
        for name, tree in library(root)
        if not name.startswith(REPLACES_FOREIGN)
        for qualified, function in functions(tree)
        for target, value in _assigned(function)
        if (target.attr in called or (target.attr in ours and _is_function(value, function, tree)))
        and not _is_of_a_foreign_module(target, name, tree)
    ]


CALLABLE = re.compile(r"(^|\| ?)\(?(\w+\.)*Callable\b")


def _called_attributes(tree: ast.Module) -> Iterator[str]:
    """Attributes that a class declares as Callable, or sets to a lambda or a Callable argument."""
    for kind in nodes(tree):
        for node in ast.walk(kind) if isinstance(kind, ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign):
                if CALLABLE.search(ast.unparse(node.annotation)):
                    yield getattr(node.target, "attr", getattr(node.target, "id", ""))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                yield from _own_names(node)
            elif isinstance(node, Function):
                arguments = {
                    one.arg
                    for one in (*node.args.args, *node.args.kwonlyargs)
                    if one.annotation and CALLABLE.search(ast.unparse(one.annotation))
                }
                for inner in own_nodes(node):
                    if (
                        isinstance(inner, ast.Assign)
                        and getattr(inner.value, "id", "") in arguments
                    ):
                        yield from _own_names(inner)


def _own_names(node: ast.Assign) -> Iterator[str]:
    yield from (t.attr for t in node.targets if isinstance(t, ast.Attribute) and _own(t))


def _assigned(function: Function) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    """(attribute of another object, value) of each assignment in a function."""
    for node in own_nodes(function):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                each = zip(target.elts, value.elts, strict=False)
            else:
                each = iter([(target, value)])
            yield from (
                (at, what) for at, what in each if isinstance(at, ast.Attribute) and not _own(at)
            )


def _own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def _is_function(value: ast.expr, function: Function, tree: ast.Module) -> bool:
    """Whether the value is a lambda, or a function of this one or of the file."""
    if isinstance(value, ast.Lambda):
        return True
    if not isinstance(value, ast.Name):
        return False
    own = list(own_nodes(function))
    is_variable = any(
        (isinstance(node, ast.arg) and node.arg == value.id)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == value.id)
        for node in own
    )
    defined = [node.name for node in (*own, *tree.body) if isinstance(node, Function)]
    return value.id in defined and not is_variable


def _is_of_a_foreign_module(target: ast.Attribute, name: str, tree: ast.Module) -> bool:
    first = ast.unparse(target).partition(".")[0]
    return any(
        dotted.rpartition(".")[2] == first and not dotted.startswith("unicron.")
        for _, dotted in imports(name, tree)
    )


# --- prose ---------------------------------------------------------------------------------------
def no_comparison_with_a_sentence(root: Path) -> list[str]:
    """A sentence is for people, and whoever improves it must not change what is done. A constant
    with a name may hold one: it stands once, and both sides use it."""
    return [
        f"{name} {qualified} asks for {text!r}"
        for name, tree in library(root)
        for qualified, function in functions(tree)
        if not f"{name} {qualified}".startswith(READS_FOREIGN_WORDS)
        for node in own_nodes(function)
        for text in _sentences(node)
    ]


def _sentences(node: ast.AST) -> Iterator[str]:
    """The sentences that a comparison, a pattern or a test of a text's ends has in itself."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        if any(isinstance(by, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for by in node.ops):
            sides = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        sides = [node.value]
    is_end = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in READS_ENDS
        and ast.unparse(node.func.value) != "sys.platform"
    )
    for text in (text for side in (node.args if is_end else sides) for text in _texts(side)):
        if SENTENCE.search(text) or (is_end and PART_OF_SENTENCE.fullmatch(text)):
            yield text


def _texts(side: ast.expr) -> Iterator[str]:
    """The literal texts on one side of a comparison; each fixed part of an f-string."""
    if isinstance(side, ast.Constant) and isinstance(side.value, str):
        yield side.value
    elif isinstance(side, ast.Tuple | ast.List | ast.Set):
        for part in side.elts:
            yield from _texts(part)
    elif isinstance(side, ast.JoinedStr):
        for part in side.values:
            yield from _texts(part)


# --- fields --------------------------------------------------------------------------------------
def every_field_is_documented(root: Path) -> list[str]:
    """A docstring after it, or its name between backquotes in the docstring of its class, or a
    description in its type; or it is a word of the glossary of docs/ARCHITECTURE.md."""
    plain, words = plain_data(root), _glossary(root)
    return [
        f"{name} {kind}.{field}"
        for name, tree in library(root)
        if name.startswith(DOCUMENTED)
        for node in nodes(tree)
        for kind, field in _undocumented(node, plain)
        if field not in words and field.removesuffix("s") not in words
    ]


def _glossary(root: Path) -> set[str]:
    """The words of its table that are one word."""
    page = root / "docs/ARCHITECTURE.md"
    text = GLOSSARY.search(page.read_text(encoding="utf-8") if page.exists() else "")
    rows = re.findall(r"^\| ([^|]+) \|", text[1] if text else "", re.MULTILINE)
    return {word.lower() for row in rows for word in re.sub(r" \(.*", "", row).split(", ")}


def _undocumented(node: ast.AST, plain: set[str]) -> Iterator[tuple[str, str]]:
    """(class, field without a word)."""
    if isinstance(node, ast.ClassDef) and node.name in plain:
        about = ast.get_docstring(node) or ""
        for item, after in zip(node.body, [*node.body[1:], None], strict=True):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
                and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
                and f"`{item.target.id}`" not in about
                and not _is_described(item.annotation)
            ):
                yield node.name, item.target.id
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "TypedDict":
        name, *fields = node.args
        for given in fields[:1]:
            for key, kind in (
                zip(given.keys, given.values, strict=True) if isinstance(given, ast.Dict) else ()
            ):
                if isinstance(key, ast.Constant) and not _is_described(kind):
                    yield ast.literal_eval(name), str(key.value)


def _is_described(kind: ast.expr) -> bool:
    return any(
        isinstance(node, ast.keyword) and node.arg == "description" for node in ast.walk(kind)
    )


A = "class A:\n    def __init__(self):\n        self.f = lambda: 1\n"
RULES: Rules = {
    no_callable_is_assigned_from_outside: [
        {"cli/a.py": A + "def g(a):\n    a.f = a.h\n"},
        {"cli/a.py": A + "def g(a):\n    a.x, a.f = 1, lambda: 2\n"},
        {"cli/a.py": "class A:\n    def f(self): ...\ndef h(): ...\ndef g(a):\n    a.f = h\n"},
        {"cli/a.py": "class A:\n    f: Callable[[], int]\ndef g(a, h):\n    a.f = h\n"},
        {
            "cli/a.py": "class A:\n    def __init__(self, f: None | Callable[[], int]):\n"
            "        self.f = f\ndef g(a, h):\n    a.f = h\n"
        },
    ],
    no_comparison_with_a_sentence: [
        {"cli/a.py": f"def f(why):\n    return {text}\n"}
        for text in (
            "why == 'not enough slots'",
            "'not enough' in why",
            "why not in ('', 'no slots')",
            "why.startswith('frozen')",
            "why.endswith(('rebooted', '.'))",
            "why == f'frozen: by {f}'",
        )
    ],
    every_field_is_documented: [
        {path: text}
        for path, text in (
            ("control_plane/state/a.py", "class A(Struct):\n    a: int\n"),
            (
                "events/records/types.py",
                "class A(Body):\n    a: int = 1\nclass Body(Struct): ...\n",
            ),
            ("control_plane/api/messages.py", "A = TypedDict('A', {'a': int})\n"),
            ("events/spec/policy.py", "class A(Struct):\n    '''Of a.'''\n    a: int\n"),
        )
    ],
}

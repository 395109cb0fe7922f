"""Writes what the pages say in the words of the source: run by `make docs`.

records.md comes from the docstrings of the records, support.md from the support table,
training-step.md and the diagram of the step's README.md from its table of transitions, the code map
of ARCHITECTURE.md from the first line of each file.
"""

from __future__ import annotations

import ast
from pathlib import Path

from unicron.events.spec import policy, support
from unicron.events.spec.policy import BOUNDS
from unicron.workers.training.step import progress

HEAD = """# Records

Every kind of record in the log, in the words of its own source. Written by `make docs`: change the
docstring, not this page. Times are seconds since 1970 unless a name says otherwise.

Each record travels in one envelope:

| field | meaning |
|---|---|
| `seq` | its place in the log: from 1, without a gap, also across epochs |
| `epoch` | the leader's term that wrote it |
| `at_s` | stamped by the leader; never decreases |
| `kind`, `v` | the kind of its body, as below, and the version of that kind |
| `source`, `source_seq` | who said it, and its number there; decisions have `heart` and 0 |
| `occurred_s` | the reporter's clock |
| `cause` | the seq that this one follows from; 0 for none |
| `incident` | the seq of the `IncidentOpened` that it belongs to; 0 for none |
| `ignorable` | true if it changes no state: readers that do not know it pass over it |
| `body` | the fields below |
"""
PAGES = (
    ("records/reports", "Reports: what happened"),
    ("records/decisions", "Decisions: what was concluded"),
    ("records/orders", "Orders: what is to be done"),
    ("records/types", "Types that several bodies share"),
    ("spec/policy", "Policy: what PolicySet sets"),
)


def render(root: Path) -> str:
    """The whole page, from the files of PAGES in events/ under `root`."""
    parts = [HEAD]
    types = ast.parse((root / "events/records/types.py").read_text(encoding="utf-8"))
    bases = {
        node.name: node.body[1:]
        for node in types.body
        if isinstance(node, ast.ClassDef) and node.name in ("Body", "RankReport")
    }
    for module, title in PAGES:
        source = (root / f"events/{module}.py").read_text(encoding="utf-8")
        lines = source.splitlines()
        parts.append(f"\n## {title}\n")
        shown = 0
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name not in bases:
                group = _group(lines, shown, node.lineno)
                shown = node.lineno
                parts += [f"\n*{group}*\n"] if group else []
                parts.append(_section(node, bases))
    return "".join(parts)


def _group(lines: list[str], begin: int, end: int) -> str:
    """The divider comment between two classes, if there is one."""
    found = [line.strip("#- \n") for line in lines[begin:end] if line.startswith("# ---")]
    return found[-1] if found else ""


def _section(node: ast.ClassDef, bases: dict[str, list[ast.stmt]]) -> str:
    """One class; `bases` has the fields of the base classes of records."""
    base = next((one.id for one in node.bases if isinstance(one, ast.Name) and one.id in bases), "")
    text = ast.get_docstring(node) or ""
    name = node.name if base else f"{node.name} (a part of others)"
    parts = [f"\n### {name}\n"] + ([f"\n{text}\n"] if text else [])
    rows: list[str] = []
    renamed: dict[str, str] = next(
        (ast.literal_eval(one.value) for one in node.keywords if one.arg == "rename"), {}
    )
    body = [*bases.get(base, ()), ast.Pass(), *node.body]
    for item, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            words = _docstring(after)
            if node.name == "Policy" and (ends := BOUNDS.get(item.target.id)):
                between = f"From {_number(ends[0])} to {_number(ends[1])}."
                words = f"{words} {between}" if words else between
            default = f", default {_value(item.value)}" if item.value is not None else ""
            kind = ast.unparse(item.annotation).replace("|", "or")
            name = item.target.id
            name = f"`{renamed[name]}` (in Python `{name}`)" if name in renamed else f"`{name}`"
            rows.append(f"- {name}: {kind}{default}" + (f". {words}" if words else ""))
    return "".join(parts) + ("\n" + "\n".join(rows) + "\n" if rows else "")


def _value(node: ast.expr) -> str:
    """A default; of a constant of policy.py its value."""
    named = getattr(policy, node.id, None) if isinstance(node, ast.Name) else None
    return ast.unparse(node) if named is None else repr(named)


def _number(end: float) -> str:
    return f"{end:g}" if isinstance(end, float) else str(end)


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


SUPPORT_HEAD = """# What heals in memory

Of what Megatron can do, in a task with `train:` and in a loop of one's own that has adopted
Unicron (`heal: in-memory`). Written by `make docs` from events/spec/support.py: change that, not
this page. `unicron doctor --support` prints the same. A loop is checked against it when it starts:
Unicron reports what is not supported, and the loop trains without healing, or ends as wrong input.

- **exact**: a fault is healed in memory, and training ends with what an undisturbed one ends with.
- **not run**: the code for it is written and should be exact; no test here runs it.
- **restart from memory**: it trains; at a fault all its processes start again, each from the state
  that it has stored in memory after some iteration (`loop.copy_every`). If their number changes, or
  nothing is in memory, they start from a checkpoint on disk, if there is one. Tests run four of
  these rows: FSDP, torch.compile, gradients scaled by the number of replicas, another optimizer.
- **restart**: as before, but always from a checkpoint on disk.
- **refused**: the job file is refused; a script ends before it trains, with one line.

Read against megatron-core 0.16.1.

"""


def render_support() -> str:
    lines = ["| | `train:` | a custom loop |", "|---|---|---|"]
    for row in support.ROWS:
        cells = [f"**{answer.grade}**: {answer.why}" for answer in (row.train, row.loop)]
        lines.append(f"| {row.what} | {cells[0]} | {cells[1]} |")
    return SUPPORT_HEAD + "\n".join(lines) + "\n"


MAP_BEGIN = "<!-- The code map is written by `make docs` from each file's first line. -->\n"
MAP_END = "<!-- End of the code map. -->\n"
HANDS = ("events", "control_plane", "workers", "cli")


def render_map(root: Path) -> str:
    """The packages, and in each package its files with their captions."""
    parts: list[str] = []
    folders = [path.parent for hand in HANDS for path in sorted((root / hand).rglob("__init__.py"))]
    for folder in folders:
        captions = {path.name: _caption(path) for path in sorted(folder.glob("*.py"))}
        about = captions.pop("__init__.py", "")
        parts.append(f"\n### {folder.relative_to(root).as_posix()}/\n\n{about}\n\n")
        parts += [f"- `{name}`: {caption}\n" for name, caption in captions.items()]
    return "".join(parts) + "\n"


def with_map(text: str, root: Path) -> str:
    """`text` with the part between the two marks replaced."""
    before, _, rest = text.partition(MAP_BEGIN)
    _, _, after = rest.partition(MAP_END)
    return before + MAP_BEGIN + render_map(root) + MAP_END + after


STEP_HEAD = """# The training step, as a table

How far a rank is in the current iteration, and what may happen then: `TABLE` of
[progress.py](../../workers/training/step/progress.py). Written by `make docs` from it. What has no
row is a bug: it raises, and changes nothing. [The README](../../workers/training/step/README.md) of
that folder has the diagram and the rules.

"""
STEP_README = "workers/training/step/README.md"
DIAGRAM_BEGIN = "<!-- The diagram is written by `make docs` from TABLE of progress.py. -->\n"
DIAGRAM_END = "<!-- End of the diagram. -->\n"


def render_step() -> str:
    """The table of transitions, a row each."""
    lines = ["| phase | what happened | if | next phase | what is done |", "|---|---|---|---|---|"]
    for row in progress.TABLE:
        condition = "" if row.on is progress.always else _in_words(row.on.__name__)
        done = _in_words(row.then.__name__) + (", zero the gradients" if row.clears else "")
        happened = _in_words(row.happened.__name__)
        lines.append(f"| {row.phase} | {happened} | {condition} | {row.to} | {done} |")
    about = [
        f"- **{_in_words(kind.__name__)}**: {' '.join((kind.__doc__ or '').split())}"
        for kind in dict.fromkeys(row.happened for row in progress.TABLE)
    ]
    return STEP_HEAD + "\n".join(lines) + "\n\n## What happens\n\n" + "\n".join(about) + "\n"


def with_diagram(text: str) -> str:
    """The step's README with the part between the two marks replaced."""
    before, _, rest = text.partition(DIAGRAM_BEGIN)
    _, _, after = rest.partition(DIAGRAM_END)
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in progress.TABLE:
        names = arrows.setdefault((row.phase, row.to), [])
        name = _in_words(row.happened.__name__)
        if row.phase != row.to and name not in names:
            names.append(name)
    drawn = [
        f"    {phase} --> {to}: {', '.join(names)}"
        for (phase, to), names in arrows.items()
        if names
    ]
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", *drawn, "```", ""])
    return before + DIAGRAM_BEGIN + diagram + DIAGRAM_END + after


def _in_words(name: str) -> str:
    """`the_sum_is_lost` and `SumDiscarded` in words."""
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
    return spaced.replace("_", " ").replace("micro batch", "micro-batch").strip()


def _caption(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    (here / "records.md").write_text(render(here.parent.parent), encoding="utf-8")
    (here / "support.md").write_text(render_support(), encoding="utf-8")
    (here / "training-step.md").write_text(render_step(), encoding="utf-8")
    readme = here.parent.parent / STEP_README
    readme.write_text(with_diagram(readme.read_text(encoding="utf-8")), encoding="utf-8")
    page = here.parent / "ARCHITECTURE.md"
    fresh = with_map(page.read_text(encoding="utf-8"), here.parent.parent)
    page.write_text(fresh, encoding="utf-8")

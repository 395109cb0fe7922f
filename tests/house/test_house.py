"""The rules of the code base: imports, sizes, names, contracts, errors, packaging.

Each rule is a function from a root folder to a list of violations; they lie in `rules/`, by
subject. Every rule runs on this tree, where it must find none but the debts of debts.txt, and on
small trees that violate it, where it must find one.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.rules import (
    arrows,
    contracts,
    errors_output,
    packaging,
    programs,
    purity,
    sizes_names,
)
from house.rules.tree import MAY_IMPORT, ROOT, Rule, Rules, imports, library, nodes, parsed

DEBTS = Path(__file__).with_name("debts.txt")
"""What does not follow a rule yet, a line each: `RULE: COMPLAINT`. It may only get shorter."""
RULES: Rules = {
    **arrows.RULES,
    **purity.RULES,
    **sizes_names.RULES,
    **contracts.RULES,
    **errors_output.RULES,
    **programs.RULES,
    **packaging.RULES,
}
VIOLATIONS = [(rule, tree) for rule, made in RULES.items() for tree in made]


@pytest.fixture(autouse=True, scope="module")
def clear_parsed_files() -> Iterator[None]:
    """No search for garbage among a million nodes: it would take longer than the rules do."""
    gc.disable()
    yield
    gc.enable()
    parsed.cache_clear()
    nodes.cache_clear()


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


# Lists the debts anew after a file was moved: PYTHONPATH=tests python tests/house/test_house.py
if __name__ == "__main__":
    listed = {line.partition(": ")[0] for line in DEBTS.read_text(encoding="utf-8").splitlines()}
    made = {f"{r.__name__}: {text}" for r in RULES if r.__name__ in listed for text in r(ROOT)}
    DEBTS.write_text("".join(f"{line}\n" for line in sorted(made)), encoding="utf-8")

"""The documentation agrees with the code: records, keys, commands, dependencies, links."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_process import unicron
from doc_scripts import script
from unicron.cli.files import job_file
from unicron.cli.files.job_file import load_policy as read_policy
from unicron.cli.simulate import compare
from unicron.control_plane.simulation import scenario
from unicron.events.spec.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
Rule = Callable[[Path], list[str]]


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every Markdown page."""
    found = [root.glob(p) for p in ("*.md", "docs/**/*.md", "deploy/**/*.md")]
    for path in sorted(path for paths in found for path in paths):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def every_dependency_has_a_page(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    found: list[str] = []
    tools = root / "docs/decisions/development-tools.md"
    said = tools.read_text(encoding="utf-8").lower() if tools.exists() else ""
    for text in [*project["dependencies"], *(text for extra in extras.values() for text in extra)]:
        package = re.split(r"[\[<>=;~! ]", text)[0].lower()
        if text in extras.get("dev", []):
            documented = f"**{package}**" in said
        else:
            documented = (root / f"docs/decisions/dependency-{package}.md").exists()
        found += [] if documented else [f"no page in docs/decisions for {package}"]
    return found


def every_command_is_documented(root: Path) -> list[str]:
    """docs/reference/cli.md equals the generated text of the current commands."""
    page = root / "docs/reference/cli.md"
    fresh = page.exists() and page.read_text(encoding="utf-8") == script("commands").render()
    return [] if fresh else ["docs/reference/cli.md is stale: make docs"]


def every_record_is_documented(root: Path) -> list[str]:
    """docs/reference/records.md equals the text generated from the current docstrings."""
    page = root / "docs/reference/records.md"
    fresh = page.exists() and page.read_text(encoding="utf-8") == script("generate").render(root)
    return [] if fresh else ["docs/reference/records.md is stale: make docs"]


def the_support_table_is_documented(root: Path) -> list[str]:
    """docs/reference/support.md equals the table of events/spec/support.py."""
    page = root / "docs/reference/support.md"
    fresh = (
        page.exists() and page.read_text(encoding="utf-8") == script("generate").render_support()
    )
    return [] if fresh else ["docs/reference/support.md is stale: make docs"]


def the_training_step_is_drawn(root: Path) -> list[str]:
    """docs/reference/training-step.md and the README of the step show the table of progress.py."""
    page, generate = root / "docs/reference/training-step.md", script("generate")
    readme = root / generate.STEP_README
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    fresh = (
        text != ""
        and page.exists()
        and page.read_text(encoding="utf-8") == generate.render_step()
        and generate.with_diagram(text) == text
    )
    return [] if fresh else [f"{page.name} or {generate.STEP_README} is stale: make docs"]


def the_picture_shows_the_output(root: Path) -> list[str]:
    """docs/demo.svg shows the output in docs/guides/demo.md."""
    page, output = root / "docs/demo.svg", root / "docs/guides/demo.md"
    fresh = (
        page.exists()
        and output.exists()
        and page.read_text(encoding="utf-8")
        == script("screen").render(output.read_text(encoding="utf-8"))
    )
    return [] if fresh else ["docs/demo.svg is stale: make docs"]


def every_file_is_on_the_map(root: Path) -> list[str]:
    """The code map of ARCHITECTURE.md equals the one generated from the current docstrings."""
    page = root / "docs/ARCHITECTURE.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    fresh = text != "" and script("generate").with_map(text, root) == text
    return [] if fresh else ["the code map in docs/ARCHITECTURE.md is stale: make docs"]


def every_spec_key_is_documented(root: Path) -> list[str]:
    """The reference has a row for each field of each struct of the job spec."""
    page = root / "docs/reference/job-spec.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found: list[str] = []
    tree = ast.parse((root / "events/spec/job.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    key = field.target.id.rstrip("_")
                    key = "apiVersion" if key == "api_version" else key
                    if not re.search(rf"^\| `([a-z_]+\.)*{key}` \|", text, re.MULTILINE):
                        found.append(f"docs/reference/job-spec.md: no row for {node.name}.{key}")
    return found


def every_link_leads_somewhere(root: Path) -> list[str]:
    """Relative links of Markdown point at files that exist."""
    found: list[str] = []
    for name, text in pages(root):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not ((root / name).parent / target).exists():
                found.append(f"{name} links to {target}")
    return found


def every_file_named_exists(root: Path) -> list[str]:
    """A page that names a file such as `events/log/port.py` names an existing file."""
    named = re.compile(
        r"(?<![\w/.-])((?:tests|events|control_plane|workers|cli|deploy)/[\w/.-]+\."
        r"(?:py|yaml|service))\b"
    )
    return [
        f"{name} names {path}"
        for name, text in pages(root)
        for path in named.findall(text)
        if not (root / path).exists()
    ]


PROJECT = '[project]\ndependencies = ["leftpad>=1"]\n'
REPORTS = '"""R."""\nclass Body: ...\nclass Fell(Body):\n    """It fell."""\n    node: str\n'
# Rule -> the smallest tree that violates it: path -> text.
RULES: dict[Rule, dict[str, str]] = {
    every_command_is_documented: {"docs/reference/cli.md": "# Commands\n"},
    every_dependency_has_a_page: {"pyproject.toml": PROJECT},
    every_record_is_documented: {
        "events/records/reports.py": REPORTS,
        "events/records/orders.py": REPORTS,
    },
    the_support_table_is_documented: {"docs/reference/support.md": "# What heals\n"},
    the_training_step_is_drawn: {"docs/reference/training-step.md": "# The training step\n"},
    the_picture_shows_the_output: {"docs/guides/demo.md": "# R\n"},
    every_file_is_on_the_map: {"docs/ARCHITECTURE.md": "# A\n", "events/a.py": "\n"},
    every_spec_key_is_documented: {"events/spec/job.py": "class JobSpec:\n    name: str\n"},
    every_link_leads_somewhere: {"docs/a.md": "see [b](b.md)\n"},
    every_file_named_exists: {"docs/a.md": "held by `tests/test_nothing.py`\n"},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_holds(rule: Rule) -> None:
    complaints = rule(ROOT)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_finds_a_violation(rule: Rule, tmp_path: Path) -> None:
    for name, text in RULES[rule].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert len(rule(tmp_path)) >= 1


def test_a_recorded_output_replaces_the_previous_one() -> None:
    page = (ROOT / "docs/guides/demo.md").read_text(encoding="utf-8")
    screen = script("screen")
    fresh = screen.record(page, "  0.0 s  setup    now\n", "abc1234", "2026-12-24")
    assert "What one run printed (2026-12-24, commit abc1234); your times will differ.\n" in fresh
    assert fresh.count("  0.0 s  setup ") == 1
    assert fresh.count("## ") == page.count("## ")
    assert ">  0.0 s  setup    now</text>" in screen.render(fresh)


JOBS = [*sorted(ROOT.glob("deploy/examples/*.yaml"))]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    assert job_file.load(path).name


def test_every_job_in_a_page_is_valid(tmp_path: Path) -> None:
    shown = [
        (name, block)
        for name, text in pages(ROOT)
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if re.search(r"^(train|command):", block, re.MULTILINE) and "horizon_s" not in block
    ]
    assert len(shown) >= 6
    for at, (name, block) in enumerate(shown):
        path = tmp_path / f"{at}.yaml"
        path.write_text(block, encoding="utf-8")
        result = unicron("submit", str(path), "--dry-run", folder=tmp_path)
        assert result.returncode == 0, f"{name}: {result.stderr}"
        train = job_file.load(path).train
        if name.startswith("docs/guides/") and train is not None:
            assert train.checkpoint_every, f"{name}: down loses all iterations of this task"


def test_every_scenario_shown_or_shipped_is_valid(tmp_path: Path) -> None:
    blocks = [
        block
        for _, text in pages(ROOT)
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if "horizon_s" in block
    ]
    assert blocks
    for at, block in enumerate(blocks):
        path = tmp_path / f"{at}.yaml"
        path.write_text(block, encoding="utf-8")
        given = scenario.parse(job_file.read_yaml(block))
        if isinstance(given.trace, str):
            (tmp_path / given.trace).write_text("at_s,node,event,cause\n", encoding="utf-8")
        compare.load(path)
    for path in sorted(ROOT.glob("deploy/scenarios/**/*.yaml")):
        compare.load(path)


def test_every_policy_in_a_page_is_valid(tmp_path: Path) -> None:
    shown = [
        block
        for _, text in pages(ROOT)
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if "moves_max" in block
    ]
    assert len(shown) >= 1
    for at, block in enumerate(shown):
        path = tmp_path / f"{at}.yaml"
        path.write_text(block, encoding="utf-8")
        assert read_policy(path) != Policy()


def test_the_page_names_the_pinned_versions_of_training() -> None:
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/guides/scripts.md").read_text(encoding="utf-8")
    section = page.partition("## In the Python of your training")[2].partition("\n## ")[0]
    section = " ".join(section.split())
    versions = dict(pin.split("==") for pin in pins["train"] if "==" in pin)
    assert f"torch {versions['torch']}" in section
    assert f"megatron-core {versions['megatron-core']}" in section
    assert "'.[gpu]'" in section
    assert "gpu" in pins

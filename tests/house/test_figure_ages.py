"""The ages of figures: commits are counted in real checkouts of a few commits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_scripts import script

ROOT = Path(__file__).resolve().parents[2]
ages = script("figure_ages")
PATHS = {"PATH": os.environ["PATH"]}
NAME = "planner"
"""The figure of these tests: it measures control_plane/planner."""
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


class Checkout:
    """A git checkout with the age tool, one page with one figure, and some commits."""

    def __init__(self, root: Path, page: str = "README.md") -> None:
        self.root, self.page = root, page
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        tool = root / "docs" / "reference" / "figure_ages.py"
        tool.parent.mkdir(parents=True)
        shutil.copy(ROOT / "docs" / "reference" / "figure_ages.py", tool)
        (root / "README.md").write_text("words\n")
        self.change("control_plane/planner/solver/a.py")

    def git(self, *arguments: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(self.root), *named, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.strip()

    def change(self, *files: str) -> str:
        """A commit that adds a line to each of the files; its name, in eight digits."""
        for file in files:
            path = self.root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as text:
                text.write("a line\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a change")
        return self.git("rev-parse", "--short=8", "HEAD")

    def measure(self, commit: str, name: str = NAME, columns: str = "", by: str = "") -> None:
        """Put a figure of this commit on the page."""
        text = f"{columns}\n\nMeasured at commit {commit} on 2026-11-24, n=5."
        (self.root / self.page).write_text(
            f"before\n<!-- figures{by}: {name} -->\n{text}\n<!-- end -->\nafter\n"
        )

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Exit status and output of the tool."""
        done = subprocess.run(
            [sys.executable, str(self.root / "docs/reference/figure_ages.py"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=env,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    def limit(self, commits_num: int) -> None:
        """Lower the limit of README's figures in this copy of the tool."""
        tool = self.root / "docs" / "reference" / "figure_ages.py"
        text = tool.read_text().replace("COMMITS_MAX = 300", f"COMMITS_MAX = {commits_num}")
        assert f"COMMITS_MAX = {commits_num}" in text
        tool.write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


def test_every_measurement_on_a_page_is_a_figure() -> None:
    """A page that names the commit of a measurement marks it, so that its age is counted."""
    names = [stamp.name for stamp in ages.stamps()]
    assert sorted(names) == sorted(ages.FIGURES)
    for stamp in ages.stamps():
        assert stamp.commits, f"{stamp.page}: {stamp.name} names no commit"
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        rest = ages.MARK.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"\bat\s+commit\s+[0-9a-f]{7}", rest), page


@pytest.mark.parametrize("name", ages.FIGURES)
def test_what_a_figure_measures_exists(name: str) -> None:
    figure = ages.FIGURES[name]
    assert re.search(rf"^{figure.verb.split()[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert (ROOT / figure.bench).exists()
    for package in figure.packages:
        assert (ROOT / package).is_dir(), package


@pytest.mark.parametrize(
    ("file", "commit"),
    [("docs/a.md", r"[0-9a-f]{7,40}"), ("events/a.py", r"[0-9a-f]{7,40}-dirty")],
    ids=["a page", "code"],
)
def test_code_alone_makes_a_measurement_dirty(checkout: Checkout, file: str, commit: str) -> None:
    """The tool itself writes pages: that must not make the next measurement dirty."""
    rows = checkout.root / "tests" / "bench" / "recovery" / "rows.py"
    rows.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "bench" / "recovery" / "rows.py", rows)
    checkout.change("docs/a.md", "events/a.py")

    def described() -> str:
        program = "import rows; print(rows.describe()['commit'])"
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command,
            cwd=rows.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip()

    assert described() == checkout.git("rev-parse", "--short", "HEAD")
    (checkout.root / file).write_text("changed\n")
    assert re.fullmatch(commit, described())
    shutil.rmtree(checkout.root / ".git")
    assert described() == "unknown"


def test_only_commits_that_changed_what_a_figure_measures_count(checkout: Checkout) -> None:
    before = checkout.change("control_plane/planner/a.py")
    checkout.change("control_plane/planner/a.py", "control_plane/planner/solver/b.py")
    checkout.change("control_plane/planner_of_others.py", "workers/a.py", "README.md")
    checkout.change("control_plane/planner/solver/b.py")
    checkout.measure(before)
    assert f"    2  {NAME}" in checkout.run()[1]
    assert checkout.run("--check") == (
        0,
        "figures    1; the oldest is 2 commits old (make figures)\n",
    )


def test_the_commits_of_a_branch_count_when_it_is_merged(checkout: Checkout) -> None:
    before = checkout.change("control_plane/planner/a.py")
    checkout.git("checkout", "-q", "-b", "other", f"{before}~1")
    checkout.change("control_plane/planner/b.py")
    checkout.change("control_plane/planner/b.py")
    checkout.git("checkout", "-q", "main")
    checkout.measure(before)
    assert f"    0  {NAME}" in checkout.run()[1]
    checkout.change("README.md")
    checkout.git("merge", "-q", "--no-ff", "-m", "merge", "other")
    assert f"    2  {NAME}" in checkout.run()[1]


def test_a_commit_that_only_lays_out_the_code_does_not_count(checkout: Checkout) -> None:
    before = checkout.change("control_plane/planner/a.py")
    checkout.change("control_plane/planner/a.py")
    full = checkout.git("rev-parse", "HEAD")
    checkout.measure(before)
    assert f"    1  {NAME}" in checkout.run()[1]
    (checkout.root / ".git-blame-ignore-revs").write_text(f"# the formatter\n{full}\n")
    assert f"    0  {NAME}" in checkout.run()[1]


def test_an_old_figure_fails_on_readme_alone(checkout: Checkout) -> None:
    before = checkout.change("control_plane/planner/a.py")
    for _ in range(3):
        checkout.change("control_plane/planner/a.py")
    checkout.limit(3)
    checkout.measure(before)
    assert checkout.run("--check")[0] == 0
    checkout.change("control_plane/planner/a.py")
    status, text = checkout.run("--check")
    assert status == 1
    assert f"{NAME} of README: 4 commits changed what it measures since it was measured" in text
    assert "hint: make bench-planner, then make figures" in text
    status, text = checkout.run()
    assert status == 0
    assert "make bench-planner; TOO OLD for README" in text
    (checkout.root / "README.md").write_text("words\n")
    checkout.page = "docs/page.md"
    checkout.measure(before)
    assert checkout.run("--check")[0] == 0
    assert f"    4  {NAME}" in checkout.run()[1]


def test_a_figure_that_needs_a_gpu_says_so_and_never_fails(checkout: Checkout) -> None:
    before = checkout.change("workers/a.py")
    checkout.change("workers/a.py")
    checkout.limit(0)
    checkout.measure(before, "gpu")
    assert checkout.run("--check")[0] == 0
    assert "    1  gpu" in checkout.run()[1]
    assert "make gpu-check; needs a GPU" in checkout.run()[1]


def test_a_page_that_readme_repeats_counts_as_readme(checkout: Checkout) -> None:
    before = checkout.change("events/log/a.py")
    checkout.change("events/log/a.py")
    checkout.limit(0)
    checkout.page = "docs/page.md"
    checkout.measure(before, "log")
    status, text = checkout.run("--check")
    assert status == 1
    assert "hint: make bench-log, then make figures" in text
    checkout.measure(before, "demo")
    assert (
        "hint: make demo > FILE, then docs/reference/screen.py FILE" in checkout.run("--check")[1]
    )
    checkout.measure(before, "log", by=" by hand")
    assert "hint: make bench-log, then write docs/page.md" in checkout.run("--check")[1]


def test_a_commit_that_was_rebased_away_is_named_and_does_not_fail(checkout: Checkout) -> None:
    lost = checkout.change("control_plane/planner/a.py")
    checkout.git("reset", "-q", "--hard", "HEAD~1")
    checkout.change("control_plane/planner/b.py")
    checkout.limit(0)
    checkout.measure(lost)
    assert re.search(rf"    \?  {NAME} .*; of an unknown commit", checkout.run()[1])
    status, text = checkout.run("--check")
    assert status == 0
    assert "figures    1, 1 of an unknown commit;" in text


def test_figures_of_a_dirty_tree_by_hand_or_of_older_columns_are_named(checkout: Checkout) -> None:
    commit = checkout.change("control_plane/planner/a.py")
    bench = checkout.root / "tests" / "bench" / "planner"
    bench.mkdir(parents=True)
    (bench / "main.py").write_text('METRICS = ("plan_ms",)\n')
    checkout.measure(f"{commit}-dirty", columns="| `plan_ms` | `table_ms` |")
    assert f"    0  {NAME}" in checkout.run()[1]
    assert "make bench-planner; of a dirty tree; older columns: table_ms\n" in checkout.run()[1]
    assert "figures    1, 1 of a dirty tree, 1 of older columns;" in checkout.run("--check")[1]
    checkout.measure(commit, columns="| `plan_ms` | `by_hand` |", by=" by hand")
    assert "make bench-planner; by hand\n" in checkout.run()[1]


def test_a_figure_without_an_end_fails(checkout: Checkout) -> None:
    checkout.measure(checkout.git("rev-parse", "--short=8", "HEAD"))
    page = checkout.root / checkout.page
    page.write_text(page.read_text().replace("<!-- end -->", ""))
    code, told = checkout.run("--check")
    assert code == 1
    assert (
        told
        == f"figures    {checkout.page}: a figure has no `<!-- end -->`, or its mark is wrong\n"
    )


def test_a_shallow_clone_is_not_counted(checkout: Checkout, tmp_path: Path) -> None:
    before = checkout.change("control_plane/planner/a.py")
    checkout.limit(0)
    checkout.measure(before)
    checkout.change("control_plane/planner/a.py")
    assert checkout.run("--check")[0] == 1
    shallow = tmp_path / "shallow"
    checkout.git("clone", "-q", "--depth=1", checkout.root.as_uri(), str(shallow))
    checkout.root = shallow
    assert checkout.run("--check") == (
        0,
        "figures    1, their ages are not counted: this clone is shallow (git fetch --unshallow)\n",
    )


def test_a_folder_without_git_is_not_counted(checkout: Checkout, tmp_path: Path) -> None:
    checkout.measure(checkout.change("control_plane/planner/a.py"))
    line = "figures    1, their ages are not counted: "
    assert checkout.run(env={"PATH": str(tmp_path)}) == (0, f"{line}git is not installed\n")
    shutil.rmtree(checkout.root / ".git")
    status, text = checkout.run("--check", env={"GIT_CEILING_DIRECTORIES": str(tmp_path)} | PATHS)
    assert (status, text.count("\n")) == (0, 1)
    assert text.startswith(f"{line}not a git repository")
    outer = Checkout(tmp_path / "outer")
    shutil.move(checkout.root, outer.root / "inner")
    checkout.root = outer.root / "inner"
    assert checkout.run("--check") == (
        0,
        f"{line}this folder is not the root of a git checkout\n",
    )

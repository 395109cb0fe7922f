"""Says how old each measured figure is: `make figures` lists them, `make check` counts them.

On a page, `<!-- figures: NAME -->`, or `<!-- figures by hand: NAME -->` where `make figures` did
not write it, begins a figure, and `<!-- end -->` ends it. It names the commit of its measurement.
Its age is the number of commits since then that changed the packages which it measures (FIGURES),
without those that only lay out the code (.git-blame-ignore-revs). Only pages, the benches' code and
git are read: nothing is imported, which takes 20 s.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README_COMMITS_MAX = 300
"""A figure of README that is older fails `make check`."""
BEGIN = "<!-- figures"
MARK = re.compile(rf"{BEGIN}( by hand)?: (\S+) -->\n((?:(?!{BEGIN}).)*?)<!-- end -->", re.DOTALL)
COMMIT = re.compile(r"\bcommits? ([0-9a-f]{7,40})(-dirty)?\b")
COLUMN = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
"""A name of a case or a metric, as benches print them."""
COLUMNS_NUM_MAX = 3
"""Columns that are named in the list."""
GIT_S_MAX = 60.0
HEALING = (
    "workers",
    "control_plane/decide",
    "control_plane/incidents",
    "control_plane/service",
    "events/log",
)
SIMULATION = (
    "control_plane/simulation",
    "control_plane/decide",
    "control_plane/planner",
    "control_plane/placement",
    "control_plane/throughput",
)
SIMULATION_SPEED = (*SIMULATION, "control_plane/fold", "control_plane/state")
TRAINING = ("workers/training", "workers/checkpoint_store", "workers/ipc")
RENDERED = "docs/reference/figures.py"


class Figure(NamedTuple):
    """`verb` measures it. `bench`: the files that name its columns. `packages`: whose commits
    count. `needs`: what most machines lack; such a figure never fails. `in_readme`: README repeats
    it. `written_by`: what puts it on its page."""

    verb: str
    bench: str
    packages: tuple[str, ...]
    needs: str = ""
    in_readme: bool = False
    written_by: str = "make figures"


DETECTION = (
    "workers/agent",
    "workers/diagnosis",
    "workers/ipc",
    "control_plane/incidents",
    "control_plane/service",
    "events/log",
)
WHOLE = ("events", "control_plane", "workers", "cli")
FIGURES = {
    "attack": Figure("attack", "tests/bench/attack", WHOLE),
    "fuzz": Figure("fuzz", "tests/fuzz", WHOLE),
    "paper-summary": Figure("bench-paper", "tests/bench/paper", SIMULATION),
    "paper": Figure("bench-paper", "tests/bench/paper", SIMULATION),
    "sensitivity": Figure("bench-paper", "tests/bench/paper", SIMULATION),
    "disasters": Figure("disasters", RENDERED, SIMULATION),
    "sim": Figure("bench-sim", "tests/bench/simulator", SIMULATION_SPEED),
    "simulate-choices": Figure("demo", RENDERED, SIMULATION),
    "planner": Figure("bench-planner", "tests/bench/planner", ("control_plane/planner",)),
    "throughput": Figure(
        "bench-throughput", "tests/bench/throughput", ("control_plane/throughput",)
    ),
    "detection": Figure("bench-detection", "tests/bench/detection", DETECTION),
    "detection-hangs": Figure("bench-detection", "tests/bench/detection", DETECTION),
    "detection-hosts": Figure("bench-detection", "tests/bench/detection", DETECTION),
    "recovery": Figure("bench-recovery", "tests/bench/recovery", HEALING),
    "layouts": Figure("bench-recovery", "tests/bench/recovery", HEALING),
    "recovery-default": Figure("bench-recovery", "tests/bench/recovery", HEALING),
    "settlement": Figure(
        "bench-settlement",
        "tests/bench/settlement",
        (
            "workers/training/communicators",
            "workers/training/recovery",
            "control_plane/decide",
            "control_plane/fold",
        ),
    ),
    "restore": Figure(
        "bench-restore",
        "tests/bench/restore",
        (
            "workers/training/checkpoint",
            "workers/training/recovery",
            "workers/checkpoint_store",
        ),
    ),
    "memory": Figure("bench-memory", "tests/bench/memory", TRAINING),
    "memory-1gb": Figure("bench-memory", "tests/bench/memory", TRAINING),
    "overhead": Figure("bench-overhead", "tests/bench/overhead", TRAINING),
    "overhead-bitwise": Figure("bench-overhead", "tests/bench/overhead", TRAINING),
    "overhead-counted": Figure("bench-overhead", "tests/bench/overhead", TRAINING),
    "overhead-mirror": Figure("bench-overhead", "tests/bench/overhead", TRAINING),
    "scale": Figure(
        "bench-scale",
        "tests/bench/scale",
        (
            "control_plane/service",
            "control_plane/decide",
            "control_plane/fold",
            "control_plane/state",
            "control_plane/planner",
            "control_plane/placement",
            "control_plane/incidents",
            "events",
            "workers/agent",
        ),
    ),
    "log": Figure(
        "bench-log",
        "tests/bench/log",
        (
            "events/log",
            "events/records",
            "control_plane/fold",
            "control_plane/history",
            "control_plane/service",
        ),
        in_readme=True,
    ),
    "mutants": Figure("mutants", "tests/mutants", WHOLE),
    "web": Figure("bench-web", "tests/bench/web", ("control_plane/web", "control_plane/api")),
    "screenshots": Figure(
        "screenshots",
        "tests/browser",
        ("control_plane/web", "control_plane/api"),
        in_readme=True,
    ),
    "demo": Figure(
        "demo > FILE",
        "tests/demo",
        WHOLE,
        in_readme=True,
        written_by="docs/reference/screen.py FILE",
    ),
    "chaos-training": Figure("chaos-training", "tests/drivers", HEALING),
    "chaos-training-bitwise": Figure("chaos-training EXACT=1", "tests/drivers", HEALING),
    "fault-matrix": Figure("fault-matrix", "tests/matrix", TRAINING),
    "fault-matrix-loops": Figure("fault-matrix", "tests/matrix", TRAINING),
    "fault-matrix-hangs": Figure("fault-matrix FAULTS=hang", "tests/matrix", HEALING),
    "fault-matrix-bitwise": Figure("fault-matrix EXACT=1", "tests/matrix", TRAINING),
    "hosts": Figure("demo-hosts", "tests/hosts", HEALING, "root"),
    "slurm": Figure("demo-slurm", "tests/slurm", (*HEALING, "deploy/slurm"), "Slurm"),
    "megatron-lm": Figure("megatron-lm", "tests/bench/megatron", HEALING, "a Megatron-LM clone"),
    "gpu": Figure("gpu-check", "tests/gpu", ("workers",), "a GPU", in_readme=True),
}


class Stamp(NamedTuple):
    """A figure as it stands on a page. `commits`: of its measurement, several if it has parts.
    `gone`: columns that its bench does not name any more."""

    name: str
    page: str
    by_hand: bool
    commits: tuple[str, ...]
    dirty: bool
    gone: tuple[str, ...]


class History(NamedTuple):
    """The commits of HEAD: the parents of each, and the files that it changed."""

    parents: dict[str, tuple[str, ...]]
    changed: dict[str, tuple[str, ...]]

    def num_since(self, short: str, packages: Iterable[str]) -> int | None:
        """How many commits that are not in this one changed a file of the packages. None if this
        one is not in the history."""
        todo = [commit for commit in self.parents if commit.startswith(short)]
        if not todo:
            return None
        old = set(todo)
        while todo:
            new = [commit for commit in self.parents[todo.pop()] if commit not in old]
            old.update(new)
            todo += new
        folders = tuple(f"{package}/" for package in packages)
        return sum(
            any(file.startswith(folders) for file in files)
            for commit, files in self.changed.items()
            if commit not in old
        )


class NoHistoryError(Exception):
    """Commits cannot be counted here. The text says why, and what to do."""


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """README and the pages of docs: (path, text)."""
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def stamps(root: Path = ROOT) -> list[Stamp]:
    """The figures on README and the pages of docs. Raises KeyError for one not in FIGURES."""
    told: list[Stamp] = []
    for page, written in pages(root):
        for by_hand, name, text in MARK.findall(written):
            commits = COMMIT.findall(text)
            named = set() if by_hand else set(COLUMN.findall(text))
            told.append(
                Stamp(
                    name,
                    page,
                    bool(by_hand),
                    tuple(commit for commit, _ in commits),
                    any(dirty for _, dirty in commits),
                    tuple(sorted(named - _words(root, FIGURES[name].bench))) if named else (),
                )
            )
    return told


def broken_pages(root: Path = ROOT) -> list[str]:
    """The pages with a mark that begins no figure: its end is missing, or it is misspelt."""
    return [page for page, text in pages(root) if text.count(BEGIN) != len(MARK.findall(text))]


def _words(root: Path, bench: str) -> set[str]:
    """The words of the code that measures and renders a figure."""
    files = [root / RENDERED, *(root / bench).rglob("*.py")]
    return {
        word
        for file in files
        if file.exists()
        for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))
    }


def history(root: Path = ROOT) -> History:
    """The history of the checkout at `root`, by one `git log`. Raises NoHistoryError."""
    above, shallow = _git(root, "rev-parse", "--show-cdup", "--is-shallow-repository").split("\n")[
        :2
    ]
    if above:
        raise NoHistoryError("this folder is not the root of a git checkout")
    if shallow == "true":
        raise NoHistoryError("this clone is shallow (git fetch --unshallow)")
    ignored = root / ".git-blame-ignore-revs"
    laid_out = ignored.read_text(encoding="utf-8").split() if ignored.exists() else []
    parents: dict[str, tuple[str, ...]] = {}
    changed: dict[str, tuple[str, ...]] = {}
    told = _git(root, "log", "-z", "--no-renames", "--name-only", "--format=%x01%H %P")
    for entry in told.split("\x01")[1:]:
        head, *files = entry.split("\0")
        commit, *before = head.split()
        parents[commit] = tuple(before)
        changed[commit] = () if commit in laid_out else tuple(file.strip() for file in files)
    return History(parents, changed)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=GIT_S_MAX,
        )
    except FileNotFoundError:
        raise NoHistoryError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise NoHistoryError(f"git {arguments[0]} took longer than {GIT_S_MAX:g} s") from None
    if done.returncode:
        why = [*done.stderr.strip().splitlines(), f"git exits with {done.returncode}"][0]
        raise NoHistoryError(why.removeprefix("fatal: "))
    return done.stdout


def age(stamp: Stamp, past: History) -> int | None:
    """The commits of the oldest part of a figure; None if none of its commits is in the history."""
    packages = FIGURES[stamp.name].packages
    nums = [past.num_since(commit, packages) for commit in stamp.commits]
    return max((num for num in nums if num is not None), default=None)


def too_old(stamp: Stamp, num: int | None) -> bool:
    """It is a figure of README that this machine can measure again, and it is above the limit."""
    figure = FIGURES[stamp.name]
    in_readme = figure.in_readme or stamp.page == "README.md"
    return in_readme and not figure.needs and (num or 0) > README_COMMITS_MAX


def remarks(stamp: Stamp, num: int | None) -> list[str]:
    """What a reader should know of a figure, besides its age."""
    figure = FIGURES[stamp.name]
    told = {
        "TOO OLD for README": too_old(stamp, num),
        "of an unknown commit": num is None,
        "by hand": stamp.by_hand,
        "of a dirty tree": stamp.dirty,
        f"older columns: {', '.join(stamp.gone[:COLUMNS_NUM_MAX])}": bool(stamp.gone),
        f"needs {figure.needs}": bool(figure.needs),
    }
    return [remark for remark, holds in told.items() if holds]


def listed(ages: Iterable[tuple[int | None, Stamp]]) -> list[str]:
    """A line for each figure: its age, its commit, its page, how to measure it again."""
    lines = ["figures    since each was measured, commits that changed what it measures:"]
    for num, stamp in ages:
        words = [f"make {FIGURES[stamp.name].verb}", *remarks(stamp, num)]
        commit = stamp.commits[0] if stamp.commits else "-"
        lines.append(
            f"{'?' if num is None else num:>5}  {stamp.name:<22}  {commit:<8}  {stamp.page:<32}  "
            + "; ".join(words)
        )
    return lines


def counted(ages: Sequence[tuple[int | None, Stamp]]) -> list[str]:
    """A line for all figures, and one with a hint for each that fails."""
    counts = {
        "by hand": sum(stamp.by_hand for _, stamp in ages),
        "of a dirty tree": sum(stamp.dirty for _, stamp in ages),
        "of older columns": sum(bool(stamp.gone) for _, stamp in ages),
        "of an unknown commit": sum(num is None for num, _ in ages),
    }
    some = "".join(f", {num} {what}" for what, num in counts.items() if num)
    oldest = max((num or 0 for num, _ in ages), default=0)
    lines = [f"figures    {len(ages)}{some}; the oldest is {oldest} commits old (make figures)"]
    for num, stamp in ages:
        figure = FIGURES[stamp.name]
        if too_old(stamp, num):
            lines += [
                f"figures    {stamp.name} of README: {num} commits changed what it measures since "
                f"it was measured, at most {README_COMMITS_MAX}",
                f"hint: make {figure.verb}, then "
                + (f"write {stamp.page}" if stamp.by_hand else figure.written_by),
            ]
    return lines


def main() -> int:
    """List all figures; with `--check` count them, and exit with 1 if one of README is too old."""
    stamped, check = stamps(), sys.argv[1:] == ["--check"]
    for page in (broken := broken_pages()):
        sys.stdout.write(
            f"figures    {page}: a figure has no `<!-- end -->`, or its mark is wrong\n"
        )
    if broken:
        return 1
    try:
        past = history()
    except NoHistoryError as why:
        sys.stdout.write(f"figures    {len(stamped)}, their ages are not counted: {why}\n")
        return 0
    ages = sorted(
        ((age(stamp, past), stamp) for stamp in stamped), key=lambda pair: -(pair[0] or 0)
    )
    sys.stdout.write("\n".join((counted if check else listed)(ages)) + "\n")
    return int(check and any(too_old(stamp, num) for num, stamp in ages))


if __name__ == "__main__":
    sys.exit(main())

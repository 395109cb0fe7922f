"""Nothing outlives its rank, whatever it does to leave: with cgroups, and without."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_driver import LocalNode, alive, command, local_node, until, until_gone, until_text
from memory_log import MemoryLog
from unicron.events.records.reports import RankExited, RankStarted
from unicron.workers.agent.processes.launcher import unlimited
from unicron.workers.host import rank_cgroups, rank_user
from unicron.workers.host.rank_cgroups import Limits, RankCgroups

pytestmark = pytest.mark.usefixtures("nothing_left")
ESCAPES = """
(setsid env -i /bin/sh -c 'echo $$ > "$0.new"; mv "$0.new" "$0"
    exec env -i $1 sleep 600 <&- >&- 2>&-' "$1" "$3" &)
while [ ! -e "$1" ]; do sleep 0.01; done
[ "$2" = exits ] && exit 3
sleep 600
"""
"""A rank whose grandchild leaves its group, its session and its environment, and closes its files.
Arguments: the file for the pid of the grandchild, `exits` or not, the grandchild's environment."""


@pytest.fixture(params=["cgroups", "adoption"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "adoption":
        monkeypatch.setenv("UNICRON_CGROUPS", "0")
    elif rank_cgroups.find() is None:
        pytest.skip("this process may make no cgroup")
    return str(request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which any user may write."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


async def escaped(
    node: LocalNode, folder: Path, rank: int, then: str = "", environment: str = ""
) -> int:
    """Start a rank; the process that has left it."""
    name = folder / f"pid-{rank}"
    script = command("/bin/sh", "-c", ESCAPES, "sh", str(name), then, environment)
    await node.start(script, rank=rank)
    return int(await until_text(name))


def cgroups_of_ranks() -> list[str]:
    base = rank_cgroups.find()
    return [path.name for path in base.glob("unicron-rank-*")] if base is not None else []


@pytest.mark.parametrize("user", ["", "nobody"])
async def test_what_has_left_a_cancelled_rank_ends_with_it_alone(
    memory: MemoryLog, tmp_path: Path, folder: Path, mode: str, user: str
) -> None:
    if user and os.geteuid():
        pytest.skip("needs root")
    changes = {"run_as": rank_user.find(user)} if user else {}
    async with local_node(memory, tmp_path, **changes) as node:
        stays, goes = [await escaped(node, folder, rank) for rank in (1, 0)]
        if mode == "cgroups":
            assert len(cgroups_of_ranks()) >= 2
        await node.stop_rank(0, grace_s=0.2)
        await node.leader.wait(RankExited)
        assert not alive(goes)
        assert alive(stays), "that of another rank runs on"
        await node.stop_rank(1, grace_s=0.2)
        await node.leader.wait(RankExited, 2)
        await until_gone(stays)


@pytest.mark.parametrize("then", ["exits", "claims another rank's name", "is killed"])
async def test_what_has_left_a_rank_ends_when_the_rank_ends(
    memory: MemoryLog, tmp_path: Path, folder: Path, mode: str, then: str
) -> None:
    async with local_node(memory, tmp_path) as node:
        other = await escaped(node, folder, 1)
        claims = f"UNICRON_PROCESS={tmp_path}:n1/7:1.1.1" if then.startswith("claims") else ""
        killed = then == "is killed"
        pid = await escaped(node, folder, 0, "" if killed else "exits", claims)
        if killed:
            (_, started) = await node.leader.wait(RankStarted, 2)
            os.kill(started.pid, signal.SIGKILL)
        await node.leader.wait(RankExited)
        await until_gone(pid)
        assert alive(other), "that of another rank runs on"
        await node.stop_rank(1, grace_s=0.1)
        await until_gone(other)


async def test_no_cgroup_is_left(memory: MemoryLog, tmp_path: Path, folder: Path) -> None:
    base = rank_cgroups.find()
    if base is None:
        pytest.skip("this process may make no cgroup")
    before = set(cgroups_of_ranks())
    async with local_node(memory, tmp_path) as node:
        await escaped(node, folder, 0, "exits")
        await node.leader.wait(RankExited)
        await until(lambda: None if set(cgroups_of_ranks()) - before else True)


# --- where cgroups may be made: trees as of other machines ---
def machine(root: Path, own: str, mounts: str, *folders: str) -> Path:
    """A /proc/self, and cgroups, as the kernel shows them."""
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(own)
    (proc / "mountinfo").write_text(mounts.replace("ROOT", str(root)))
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "cgroup.procs").write_text("")
    return proc


MOUNT = "41 31 0:38 {} ROOT/cg{} rw,relatime shared:1 - cgroup2 cgroup2 rw\n"
V1 = "36 31 0:33 / ROOT/cg/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("own", "mounts", "made", "base"),
    [
        ("0::/a.service\n", MOUNT.format("/", ""), "cg/a.service", "cg/a.service"),
        ("9:memory:/x\n0::/\n", V1 + MOUNT.format("/", "/unified"), "cg/unified", "cg/unified"),
        (f"0::/a/{rank_cgroups.AGENT}\n", MOUNT.format("/", ""), "cg/a", "cg/a"),
        ("0::/pod/c\n", MOUNT.format("/pod/c", "\\040x"), "cg x", "cg x"),
        ("0::/../other\n", MOUNT.format("/pod/c", ""), "cg", ""),
        ("0::/not/there\n", MOUNT.format("/", ""), "cg", ""),
        ("4:memory:/\n", V1, "cg/memory", ""),
    ],
)
def test_the_cgroup_is_found_by_mountinfo(
    tmp_path: Path, own: str, mounts: str, made: str, base: str
) -> None:
    proc = machine(tmp_path, own, mounts, made)
    assert rank_cgroups.find(proc) == (tmp_path / base if base else None)


def test_a_cgroup_gets_the_limits_that_its_controllers_know(tmp_path: Path) -> None:
    cgroups = RankCgroups(tmp_path, "n1", Limits(pids=100, memory=1 << 30))
    path = cgroups.make("1.0.1")
    assert not (path / "pids.max").exists(), "without its controller there is no such file"
    (path / "pids.max").write_text("max")
    assert (cgroups.make("1.0.1") / "pids.max").read_text() == "100"


def test_controllers_come_from_a_cgroup_without_processes(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "cgroup.subtree_control").write_text("\n")
    (tmp_path / "cgroup.procs").write_text("")
    assert rank_cgroups.limiting(tmp_path) == {"memory", "pids"}
    (tmp_path / "cgroup.procs").write_text("12\n")
    assert rank_cgroups.limiting(tmp_path) == set()


def test_an_agent_says_which_limits_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_cgroups, "find", lambda: None)
    assert unlimited(Limits()) == ()
    assert unlimited(Limits(pids=9, memory=9)) == ("pids", "memory")
    monkeypatch.setattr(rank_cgroups, "find", lambda: Path("base"))
    monkeypatch.setattr(rank_cgroups, "limiting", lambda base: frozenset(("memory",)))
    assert unlimited(Limits(pids=9, memory=9)) == ("pids",)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_of_an_agent_that_was_killed_nothing_is_left() -> None:
    base = rank_cgroups.find()
    if base is None:
        pytest.skip("this process may make no cgroup")
    mark = f"test:{os.getpid()}"
    path = RankCgroups(base, mark, Limits()).make("1.0.1")
    inner = path / "inner"
    inner.mkdir()
    sleeper = subprocess.Popen(["sleep", "600"])
    (inner / "cgroup.procs").write_text(str(sleeper.pid))
    RankCgroups(base, mark, Limits()).clear({"1.0.1"})
    assert sleeper.poll() is None
    RankCgroups(base, mark, Limits()).clear(())
    assert sleeper.wait(60) == -signal.SIGKILL
    assert RankCgroups(base, mark, Limits()).clear(())
    assert not path.exists()


def test_a_shortage_of_descriptors_does_not_say_that_a_process_has_no_cgroup() -> None:
    """What has no cgroup of its own may be killed as an orphan."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            rank_cgroups.path_of(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert rank_cgroups.path_of(2**22 + 1) == ""

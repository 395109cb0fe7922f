"""`--run-as`: which users are taken, and what is checked as that user before an agent starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import msgspec
import pytest
from unicron.events.errors import UsageError
from unicron.events.records.envelope import Record
from unicron.events.records.orders import PublishCheckpoint
from unicron.workers.agent.publish import Publisher, PublishRefused, Superseded
from unicron.workers.host import rank_user
from unicron.workers.host.checkpoint_index import Chunk, Index
from unicron.workers.host.rank_user import RankUser

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start others")
AS_NOBODY = """
import os, pathlib
from unicron.workers.host import rank_user
rank_user.become(rank_user.find("nobody"))
print(os.getresuid(), os.getresgid(), 0 in os.getgroups())
pathlib.Path("/proc/self/environ").read_bytes()
try:
    os.setuid(0)
except PermissionError:
    print("for good")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter; pytest's may not be entered."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    rmtree(path)


def run(*words: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "unicron.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        user=user,
        env={**os.environ, "UNICRON_TOKEN": "x"},
    )


def test_no_name_is_no_user() -> None:
    assert rank_user.find("") is None


@root_only
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("root", "root is root"),
        ("no-such-user", "there is no user 'no-such-user'"),
        ("a\0b", "there is no user"),
        ("0", "there is no user '0'"),
    ],
)
def test_a_user_that_cannot_be_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"--run-as: {words}"):
        rank_user.find(name)


@root_only
def test_up_and_agent_refuse_it_in_one_line(tmp_path: Path) -> None:
    for words in (
        ["up", "--state", str(tmp_path)],
        ["agent", "--state", str(tmp_path), "--url", "http://127.0.0.1:1"],
    ):
        done = run(*words, "--run-as", "no-such-user")
        assert done.returncode == 2, done
        assert "error: --run-as: there is no user 'no-such-user'" in done.stderr
        assert "Traceback" not in done.stderr
    assert not list((tmp_path / "pids").glob("control-plane*")), "nothing was started"


def test_without_root_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="only root can start processes as another user"):
        rank_user.find("nobody")


@root_only
def test_a_process_gives_up_its_rights_for_good() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", AS_NOBODY],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    user = rank_user.find("nobody")
    assert user is not None
    assert done.stdout.splitlines() == [f"{(user.uid,) * 3} {(user.gid,) * 3} False", "for good"], (
        done.stderr
    )


def user_of_tests() -> RankUser:
    user = rank_user.find("nobody")
    assert user is not None
    try:
        rank_user.check(user, Path("/proc/1/fd"))
    except UsageError as error:
        pytest.skip(str(error))
    return user


@root_only
async def test_latest_is_moved_with_the_rights_of_the_user(
    open_folder: Path, tmp_path: Path
) -> None:
    """Root would write through the links that the user has laid."""
    user, folder = user_of_tests(), open_folder / "out"
    (folder / "gen-1" / "iter-5").mkdir(parents=True)
    os.chown(folder, user.uid, user.gid)
    order = PublishCheckpoint(
        nodes=("n1",), task=1, generation=1, output=str(folder), path="gen-1/iter-5"
    )
    record = Record(
        seq=7,
        epoch=1,
        at_s=1.0,
        occurred_s=1.0,
        source="heart",
        source_seq=0,
        cause=0,
        incident=0,
        body=order,
    )
    publisher = Publisher("c", user)
    await publisher.publish(order, record)
    assert os.readlink(folder / "latest") == "gen-1/iter-5"
    assert {(folder / name).lstat().st_uid for name in os.listdir(folder)} - {0} == {user.uid}
    with pytest.raises(Superseded, match="the later order 7 has already published"):
        await publisher.publish(order, msgspec.structs.replace(record, seq=6))

    target, missing = tmp_path / "roots", tmp_path / "new"
    target.write_text("kept")
    (folder / ".published.json.new").symlink_to(target)
    with pytest.raises(PublishRefused, match="Permission denied"):
        await publisher.publish(order, record)
    assert target.read_text() == "kept"
    (folder / ".published.lock").unlink()
    (folder / ".published.lock").symlink_to(missing)
    with pytest.raises(PublishRefused, match="Permission denied"):
        await publisher.publish(order, record)
    assert not missing.exists()


@root_only
def test_what_ranks_need_is_checked_as_their_user(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, private = user_of_tests(), tmp_path / "state"
    private.mkdir(mode=0o700)
    ours, theirs = open_folder / "ours", open_folder / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    os.chown(theirs, user.uid, user.gid)
    rank_user.check(user, private, str(theirs))
    with pytest.raises(UsageError, match=f"--run-as nobody: it cannot write in {ours}"):
        rank_user.check(user, private, str(theirs), str(ours))
    with pytest.raises(UsageError, match=f"it can read {open_folder}"):
        rank_user.check(user, open_folder)
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    with pytest.raises(UsageError, match=f"it cannot run {ours}/python"):
        rank_user.check(user, private)


def write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    index = Index(2, 5, "__0_0.distcp", 4, [Chunk("w", "", (), (), 0, 4, zlib.crc32(b"data"))])
    (folder / index.file).write_bytes(b"data")
    (folder / "__0_0.index").write_bytes(msgspec.msgpack.encode(index))
    (folder / ".metadata").write_bytes(b"metadata")


@root_only
async def test_old_checkpoints_are_removed_with_the_rights_of_the_user(
    open_folder: Path, tmp_path: Path
) -> None:
    """Root would remove what a link of the user leads to."""
    user, folder, others = user_of_tests(), open_folder / "out", tmp_path / "others"
    for path in ("gen-1/iter-5", "gen-1/iter-9", "gen-3/iter-12"):
        write_checkpoint(folder / path)
    write_checkpoint(others / "iter-3")
    (folder / "gen-2").symlink_to(others)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
    order = PublishCheckpoint(
        nodes=("n1",),
        task=1,
        generation=3,
        output=str(folder),
        path="gen-3/iter-12",
        remove=("gen-1/iter-5", "gen-2/iter-3"),
    )
    publisher = Publisher("c", user)
    async with asyncio.TaskGroup() as group:
        publisher.begin_removal(order, group)
    assert [path.name for path in (folder / "gen-1").iterdir()] == ["iter-9"]
    assert (others / "iter-3/.metadata").exists()

"""A rank that prints much: its output takes a bounded part of the disk, also without an agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from agent_driver import PlaneStub, alive, until
from unicron.events.bounded_file import HEAD_BYTES, LOG_BYTES_MAX
from unicron.events.log.port import FileRequest
from unicron.events.records import reports as r
from unicron.workers.agent.output_files import read_part
from unicron.workers.agent.processes import former_outputs

MIB = 1 << 20
BOUND = 8 * MIB
OVER = 240 * MIB
"""What a rank may write between two looks of a machine that is busy with other tests."""
CHATTY = """
import os, sys
sys.stdout.write("the first words\\n")
sys.stdout.flush()
binary = os.urandom(1_000_000).translate(bytes(range(1, 256)) + b" ").replace(b"\\n", b" ")
while not os.path.exists(sys.argv[1]):
    sys.stdout.write("x" * 1_000_000)
    sys.stdout.flush()
    os.write(2, binary)
sys.stdout.write("\\nRuntimeError: the last words\\n")
sys.exit(7)
"""
"""One line without end, of text and binary data."""


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


async def most_taken(path: Path) -> int:
    """The most that the file takes while it gets much larger than what it may take."""
    size, most, last_s = path.stat().st_size, 0, time.monotonic() + 60
    while path.stat().st_size < size + BOUND + OVER + 50 * MIB:
        most = max(most, taken(path))
        assert time.monotonic() < last_s, "it does not print"
        await asyncio.sleep(0.01)
    return most


async def test_a_chatty_rank_is_bounded_with_and_without_its_agent(
    plane: PlaneStub, tmp_path: Path
) -> None:
    plane.output_bytes_max = BOUND
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(CHATTY, str(tmp_path / "go"))
    await plane.start("pass", rank=1)
    (started, quiet) = await plane.wait(r.RankStarted, 2)
    path = Path(started.log_path)
    assert await most_taken(path) < BOUND + OVER
    first.kill()
    first.wait()
    assert await most_taken(path) < BOUND + OVER
    assert alive(started.pid)
    plane.agent()
    await plane.wait(r.AgentRestarted)
    assert await most_taken(path) < BOUND + OVER
    (tmp_path / "go").touch()
    exits = {exited.rank: exited for exited in await plane.wait(r.RankExited, 2)}
    assert exits[0].exit_code == 7
    # A busy machine may take longer than SEARCH_S_MAX.
    assert exits[0].tail.endswith(("RuntimeError: the last words\n", "it took too long)"))
    assert exits[1].exit_code == 0
    assert Path(quiet.log_path).read_bytes() == b""
    await until(lambda: taken(path) <= BOUND + 2 * HEAD_BYTES or None)

    def part(offset: int) -> tuple[int, bytes]:
        found = read_part(path.parent, FileRequest(number="1", path=str(path), offset=offset))
        return found.begin, found.data

    begin, head = part(0)
    assert (begin, len(head), head[:16]) == (0, HEAD_BYTES, b"the first words\n")
    begin, tail = part(HEAD_BYTES)
    assert path.stat().st_size - BOUND < begin < path.stat().st_size - BOUND // 4
    assert tail.strip(b"\0") == tail


def outputs(folder: Path, rank: int = 0) -> list[int]:
    return sorted(
        int(path.name.split("-")[2].removesuffix(".log"))
        for path in folder.glob(f"rank-{rank}.attempt-*.log")
    )


def test_former_outputs_of_a_rank_are_removed_from_the_oldest_on(tmp_path: Path) -> None:
    folder, errors = tmp_path / "1-job", tmp_path / "errors"
    folder.mkdir()
    errors.mkdir()
    for attempt in range(1, 12):
        (folder / f"rank-0.attempt-{attempt}.log").write_bytes(b"x" * 2 * MIB)
        (errors / f"rank-0.attempt-{attempt}.error.json").write_bytes(b"{}")
    for name in ("rank-1.attempt-1.log", "rank-10.attempt-1.log", "rank-0.attempt-1.txt", "a.log"):
        (folder / name).write_bytes(b"x" * 2 * MIB)
    former_outputs.remove_attempts(folder / "rank-0.attempt-12.log", errors, BOUND)
    assert outputs(folder) == [8, 9, 10, 11]
    assert len(list(errors.iterdir())) == 4
    (folder / "rank-0.attempt-11.log").write_bytes(b"x" * 2 * BOUND)
    former_outputs.remove_attempts(folder / "rank-0.attempt-12.log", errors, BOUND)
    assert outputs(folder) == [11], "the newest stays, however large"
    assert len(list(folder.iterdir())) == 5, "nothing else is removed"


def test_the_oldest_outputs_of_ended_tasks_are_removed_as_the_disk_fills(
    mounted: Callable[[str, str], Path],
) -> None:
    logs, now_s = mounted("tmpfs", "60m"), time.time()
    for task in range(1, 7):
        path = logs / f"{task}-job" / "rank-0.attempt-1.log"
        path.parent.mkdir()
        path.write_bytes(b"x" * 5 * MIB)
        os.utime(path, (now_s, now_s - 2 * former_outputs.AGE_S_MIN + task))
        (path.parent / "flight-rank-0.json").write_bytes(b"{}")
    kept = logs / "5-job" / "rank-1.attempt-1.log"
    kept.write_bytes(b"x" * 5 * MIB)  # it is new
    with (logs / "1-job" / "rank-0.attempt-1.log").open("ab") as log:
        former_outputs.mark_used(log.fileno())
        with subprocess.Popen(["sleep", "60"], stdout=log) as process:
            log.close()
            former_outputs.remove_oldest(logs)
            assert {path.name for path in logs.iterdir()} == {"1-job", "5-job", "6-job"}
            assert kept.exists()
            assert outputs(logs / "5-job") == []
            process.kill()
    (logs / "others").write_bytes(b"x" * 20 * MIB)
    former_outputs.remove_oldest(logs)
    assert {path.name for path in logs.iterdir()} == {"5-job", "6-job", "others"}


def test_what_is_no_output_does_not_keep_the_others(mounted: Callable[[str, str], Path]) -> None:
    logs, old_s = mounted("tmpfs", "20m"), time.time() - 2 * former_outputs.AGE_S_MIN
    for task in range(1, 5):
        folder = logs / f"{task}-job"
        folder.mkdir()
        (folder / "rank-0.attempt-1.log").write_bytes(b"x" * 4 * MIB)
        os.utime(folder / "rank-0.attempt-1.log", (old_s, old_s + task))
    odd = logs / "1-job" / "rank-0.attempt-2.log"
    odd.symlink_to("nowhere")
    folder = logs / "3-job" / "rank-0.attempt-2.log"
    folder.mkdir()
    os.utime(folder, (old_s, old_s))
    former_outputs.remove_oldest(logs)
    assert [path.parent.name for path in sorted(logs.glob("*/rank-0.attempt-1.log"))] == ["4-job"]
    assert odd.is_symlink()
    assert folder.is_dir()


async def test_a_rank_that_starts_a_thousand_times_is_bounded(
    plane: PlaneStub, tmp_path: Path
) -> None:
    folder = tmp_path / "state" / "logs" / "1-job"
    folder.mkdir(parents=True)
    for attempt in range(1, 1000):
        (folder / f"rank-0.attempt-{attempt}.log").write_text("of an earlier attempt\n")
    plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start("print('now')", attempt=1000)
    await plane.wait(r.RankExited)
    assert outputs(folder) == list(range(1000 - former_outputs.NUM_MAX, 1001))


async def test_the_log_of_a_checkpoint_store_is_bounded(plane: PlaneStub) -> None:
    """Strangers who reach its port make it log."""
    plane.agent()
    (joined,) = await plane.wait(r.NodeJoined)
    host, _, port = joined.keeper.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    path = plane.state_dir / "logs" / "checkpoint-store-n1.log"
    await until(lambda: path.exists() or None)
    with path.open("ab") as log:
        log.write(b"x" * (LOG_BYTES_MAX + MIB))
    await until(lambda: taken(path) < LOG_BYTES_MAX or None)
    writer.close()

"""Locks by file: with the kernel's flock, and on file systems that refuse it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import refusing_files
from unicron.events.file_lock import FileLock, Held, Machine, Owner, is_held

CHILD_S_MAX = 120.0
LOCK = """
import sys, time
from pathlib import Path
from unicron.events import file_lock
from unicron.events.file_lock import FileLock, Held, LockLost, is_held
path = Path(sys.argv[1])
"""
COUNT = """
counter = path.with_name("counter")
for _ in range(10):
    with FileLock(path).acquire(waits=True):
        number = int(counter.read_text())
        time.sleep(0.003)
        counter.write_text(str(number + 1))
"""
HOLD = """
lock = FileLock(path).acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
print("released", flush=True)
time.sleep(60)
"""
TRY = """
file_lock.LEASE_S, file_lock.RENEW_S = 1.0, 0.2
began_s = time.monotonic()
try:
    FileLock(path).acquire().release()
    print("taken", round(time.monotonic() - began_s, 1))
except Held as held:
    print("held", held.holder, "|", held.hint)
"""

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    return refusing_files.compiled(tmp_path_factory.mktemp("library"))


@pytest.fixture
def run(library: Path) -> Iterator[Run]:
    """Starts Python processes for which some folders refuse locks."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", LOCK + code, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "LD_PRELOAD": str(library)},
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(CHILD_S_MAX)


@pytest.fixture(params=["flock", "noflock", "nolinks"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / request.param
    folder.mkdir()
    return folder / "the.lock"


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    (tmp_path / "noflock").mkdir()
    return tmp_path / "noflock" / "the.lock"


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=CHILD_S_MAX)[0].strip()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_process_at_a_time_holds_it_also_after_a_killed_one(run: Run, path: Path) -> None:
    path.with_name("counter").write_text("0")
    holder = run(HOLD, path)
    assert read_line(holder) == "held"
    counters = [run(COUNT, path) for _ in range(4)]
    holder.send_signal(signal.SIGKILL)
    holder.wait(CHILD_S_MAX)
    for one in counters:
        assert (said(one), one.returncode) == ("", 0)
    assert path.with_name("counter").read_text() == "40"
    left = sorted(one.name for one in path.parent.iterdir())
    assert left[:2] == ["counter", "the.lock"]
    assert len(left[2:]) == (0 if path.parent.name == "flock" else 1), left


def test_it_is_held_until_the_release(run: Run, path: Path) -> None:
    holder = run(HOLD, path)
    assert read_line(holder) == "held"
    by = "" if path.parent.name == "flock" else f"pid {holder.pid} on {os.uname().nodename}"
    assert said(run(TRY, path)) == f"held {by} |"
    assert said(run("print(is_held(path))", path)) == "True"
    assert holder.stdin is not None
    holder.stdin.close()
    assert read_line(holder) == "released"
    assert said(run("print(is_held(path))", path)) == "False"
    assert said(run(TRY, path)).startswith("taken 0.")
    assert holder.poll() is None, "it was the release that freed it"


def test_a_stopped_process_of_this_machine_keeps_it(run: Run, path: Path) -> None:
    holder = run(HOLD, path)
    assert read_line(holder) == "held"
    holder.send_signal(signal.SIGSTOP)
    for file in path.parent.glob("the.lock.*"):
        os.utime(file, (1.0, 1.0))
    assert said(run(TRY, path)).startswith("held")


FAR = Owner(machine=Machine(host="elsewhere", boot="b", pids="p"), pid=7, start="1")


def test_a_holder_elsewhere_keeps_it_while_it_renews(run: Run, refused: Path) -> None:
    file = refused.with_name("the.lock.3")
    file.write_bytes(msgspec.json.encode(FAR))
    assert said(run(TRY, refused)) == "held pid 7 on elsewhere |"
    # Its clock is wrong by an hour, and it renews.
    stop = threading.Event()

    def renew() -> None:
        hour_ago_s = time.time() - 3600.0
        while not stop.wait(0.2):
            hour_ago_s += 0.2
            os.utime(file, (hour_ago_s, hour_ago_s))

    renewing = threading.Thread(target=renew)
    renewing.start()
    time.sleep(0.5)
    try:
        assert said(run(TRY, refused)) == "held pid 7 on elsewhere |"
    finally:
        stop.set()
        renewing.join()
    taken, seconds = said(run(TRY, refused)).split()
    assert taken == "taken"
    assert float(seconds) >= 1.0, "it waits for a lease"
    assert [one.name for one in refused.parent.glob("the.lock.*")] == ["the.lock.4.free"]


def test_a_cut_file_of_a_holder_counts_for_one_lease(run: Run, refused: Path) -> None:
    file = refused.with_name("the.lock.3")
    file.write_bytes(msgspec.json.encode(FAR)[:20])
    assert said(run(TRY, refused)) == "held  |"
    os.utime(file, (1.0, 1.0))
    assert said(run(TRY, refused)).startswith("taken")


def test_a_holder_elsewhere_that_nobody_renews_is_for_a_person(run: Run, refused: Path) -> None:
    """The server of a log, whose starter has ended."""
    file = refused.with_name("the.lock.3")
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(FAR, is_renewed=False)))
    os.utime(file, (1.0, 1.0))
    assert said(run(TRY, refused)) == (f"held pid 7 on elsewhere | if it has ended, remove {file}")
    assert said(run("FileLock(path).acquire(); print('taken')", refused.with_name("other")))


def test_a_holder_that_was_overtaken_knows_it(run: Run, refused: Path) -> None:
    code = """
lock = FileLock(path).acquire()
lock.check()
path.with_name("the.lock.2").write_bytes(path.with_name("the.lock.1").read_bytes())
try:
    lock.check()
except LockLost as error:
    print(error)
lock.release()
print(is_held(path))
"""
    assert said(run(code, refused)).splitlines() == [
        f"{refused} is locked by another process by now",
        "True",
    ]


def test_a_lock_is_handed_over_to_a_child(run: Run, path: Path) -> None:
    code = """
import subprocess
from unicron.events.process_identity import start_time
lock = FileLock(path).acquire()
child = subprocess.Popen(["sleep", "60"], pass_fds=(lock.fd,), stdout=subprocess.DEVNULL)
lock.hand_over(child.pid, start_time(child.pid))
lock.release()
print(child.pid)
"""
    child = int(said(run(code, path)))
    assert said(run(TRY, path)).startswith("held")
    os.kill(child, signal.SIGKILL)
    deadline_s = time.monotonic() + CHILD_S_MAX
    while said(run(TRY, path)).startswith("held"):
        assert time.monotonic() < deadline_s


def test_where_flock_works_nothing_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "the.lock"
    with FileLock(path).acquire() as lock:
        lock.check()
        assert is_held(path)
        with pytest.raises(Held):
            FileLock(path).acquire()
    assert not is_held(path)
    assert [one.name for one in tmp_path.iterdir()] == ["the.lock"]


# --- its users ---
def test_one_up_has_the_state_folder(run: Run, refused: Path) -> None:
    code = """
from unicron.cli.cluster.state_dir import StateDir
from unicron.events.errors import UsageError
state = StateDir(path.parent / "state")
state.create()
try:
    lock = state.lock()
    print("held", state.is_held(), flush=True)
    sys.stdin.read()
except UsageError as error:
    print(error)
"""
    first = run(code, refused)
    assert read_line(first) == "held True"
    folder = refused.parent / "state"
    assert said(run(code, refused)) == (
        f"{folder} is locked by unicron up, pid {first.pid} "
        f"(pid {first.pid} on {os.uname().nodename})"
    )
    first.kill()
    first.wait(CHILD_S_MAX)
    assert said(run(code, refused)) == "held True"


def test_the_server_of_the_log_keeps_its_folder(run: Run, refused: Path) -> None:
    code = """
from unicron.events.errors import ServerError
from unicron.events.log import embedded_server
folder = path.parent / "server"
try:
    server = embedded_server.start(folder)
    print(server.pid)
except ServerError as error:
    print(error)
    embedded_server.adopt(folder).stop()
"""
    pid = said(run(code, refused))
    assert pid.isdecimal(), pid
    folder = refused.parent / "server"
    assert said(run(code, refused)) == f"{folder} is in use by server {pid}"
    again = said(run(code, refused))
    assert again.isdecimal(), again
    said(run(code, refused))  # stops it


def test_a_checkpoint_is_published_without_flock(run: Run, refused: Path) -> None:
    code = """
from unicron.workers.agent.publish import publish
output = path.parent
publish(
    cluster="c", order=int(sys.argv[2]), at_s=1.0, task=1, generation=1,
    output=str(output), path=f"gen-1/iter-{sys.argv[2]}",
)
print((output / "latest").readlink())
"""
    for number in ("5", "9"):
        (refused.parent / f"gen-1/iter-{number}").mkdir(parents=True)
        assert said(run(code, refused, number)) == f"gen-1/iter-{number}"

"""A site's own checks: executables that answer, hang, flood their output or leave children."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from agent_driver import alive, go, new_shim, plane, until, until_gone, until_text
from unicron.cli.app import run_command
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands.up import UpOptions, kept
from unicron.events.errors import UsageError
from unicron.events.log import embedded_server
from unicron.events.records.reports import AgentRestarted, HealthChanged, NodeJoined, NodeLeft
from unicron.workers.agent.health.custom_checks import (
    CheckOptions,
    CheckResult,
    CheckRunner,
    CheckSchedule,
    find_checks,
    finding,
    skipped_files,
)
from unicron.workers.agent.health.finding import Finding
from unicron.workers.agent.health.limits import CHECK_READ_BYTES, CHECKS_NUM_MAX, REASON_CHARS_MAX
from unicron.workers.host import linux

CHECKS = Path(__file__).resolve().parents[3] / "deploy/checks"


def script(folder: Path, name: str, text: str, mode: int = 0o755) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f".{name}.new"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    path.rename(folder / name)  # atomically, because another run may begin at any moment
    return folder / name


def ask(path: Path, s_max: float = 20.0) -> CheckResult:
    """Run a check once, in an event loop of its own."""

    async def test() -> None:
        shim = new_shim(path.parent)
        run = CheckRunner(
            shim, {**os.environ, "UNICRON_NODE": "n7"}, ("UNICRON_PROCESS", f"{path.parent}:n7/1:")
        )
        answers.append(await run(path.name, path, s_max))
        assert linux.dead_children(shim.pid) == []
        shim.end()

    answers: list[CheckResult] = []
    go(test)
    return answers[0]


@pytest.mark.parametrize(
    ("text", "code", "health", "why"),
    [
        ("echo all well; exit 0", 0, "healthy", "all well"),
        ("echo slow; echo more; exit 1", 1, "degraded", "slow"),
        ("echo; echo '  broken  '; exit 2", 2, "unhealthy", "broken"),
        ("exit 3", 3, "unknown", "exit code 3"),
        ("echo strange; exit 4", 4, "unknown", "exit code 4: strange"),
        ("no-such-command", 127, "unknown", "exit code 127, it cannot be run"),
        ("kill -9 $$", None, "unknown", "ended by signal 9"),
    ],
)
def test_the_exit_code_decides_the_health(
    tmp_path: Path, text: str, code: int | None, health: str, why: str
) -> None:
    answer = ask(script(tmp_path, "c", text))
    found = finding("c", answer, 2)
    assert (answer.code, found.check, found.health, found.why) == (code, "check/c", health, why)


def test_a_file_that_cannot_be_executed_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    found = finding("c", ask(path), 2)
    assert found.health == "unknown"
    assert "it cannot be run" in found.why


NICE_NUM_MAX = 19
"""The highest nice value of a process. The tests themselves may already have a nice value."""


def test_the_environment_of_a_check(tmp_path: Path) -> None:
    answer = ask(
        script(tmp_path, "c", 'echo "$UNICRON_NODE $UNICRON_CHECK $(nice) $(cat | wc -c)"')
    )
    assert answer.output.split() == ["n7", "c", str(min(os.nice(0) + 10, NICE_NUM_MAX)), "0"]


def test_a_hanging_check_ends_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    path = script(
        tmp_path / "checks",
        "c",
        f"""
        sh -c 'trap "" TERM; echo $$ >> {note}; sleep 300' &
        echo $$ >> {note}
        echo waiting for the disk
        sleep 300""",
    )
    began_s = time.monotonic()
    answer = ask(path, 1.0)
    assert time.monotonic() - began_s < 120.0, "the check was not ended"
    assert finding("c", answer, 1) == Finding(
        "check/c", "unknown", "no answer within 1 s: waiting for the disk", rule="check"
    )
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_child_processes_of_a_check_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    answer = ask(script(tmp_path / "checks", "c", f"sleep 300 & echo $! > {note}; echo well"))
    assert (answer.code, answer.output) == (0, "well\n")
    assert not alive(int(note.read_text()))


def test_a_flood_of_output_is_cut(tmp_path: Path) -> None:
    answer = ask(
        script(
            tmp_path,
            "c",
            r"""printf 'bad\033[31m\007 %0900d' 7
        head -c 20000000 /dev/zero | tr '\0' x; exit 2""",
        )
    )
    assert answer.code == 2
    assert len(answer.output) == CHECK_READ_BYTES
    found = finding("c", answer, 1)
    assert found.why.startswith("bad [31m  000")
    assert len(found.why) == REASON_CHARS_MAX


def test_output_that_is_not_utf8(tmp_path: Path) -> None:
    assert finding("c", ask(script(tmp_path, "c", r"printf '\377\376 x'; exit 1")), 1).why == "�� x"


@pytest.mark.parametrize(
    ("output", "devices", "why"),
    [
        ("gpu1: hot", (1,), "hot"),
        ("gpu3, gpu0: hot", (0, 3), "hot"),
        ("GPU1 gpu2: x", (1, 2), "x"),
        ("gpu4: not ours", (), "gpu4: not ours"),
        ("gpu1 is hot", (), "gpu1 is hot"),
        ("gpus: none", (), "gpus: none"),
    ],
)
def test_a_check_may_name_slots(output: str, devices: tuple[int, ...], why: str) -> None:
    found = finding("c", CheckResult(2, output), 4)
    assert (found.devices, found.why) == (devices, why)


# --- the folder ---------------------------------------------------------------------------------
def test_which_files_are_checks(tmp_path: Path) -> None:
    for name in ("disk", "b.sh", ".hidden", "old~", "a name"):
        script(tmp_path, name, "exit 0")
    script(tmp_path, "not-executable", "exit 0", 0o644)
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("disk")
    found, passed = find_checks(tmp_path)
    assert sorted(found) == ["b.sh", "disk", "linked"]
    assert passed == {
        "a name": "not a plain name",
        "dangling": "not a file",
        "folder": "not a file",
        "not-executable": "not executable",
    }
    assert skipped_files(passed) == Finding(
        "checks/files",
        "unknown",
        "not run: a name (not a plain name), dangling (not a file), folder (not a file) and 1 more",
        rule="check",
    )
    assert skipped_files({"README.md": "not executable"}).health == "healthy"
    for number in range(CHECKS_NUM_MAX):
        script(tmp_path, f"check-{number:03}", "exit 0")
    assert len(find_checks(tmp_path)[0]) == CHECKS_NUM_MAX


def test_the_cli_refuses_a_missing_folder_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("agent", "up"):
        assert run_command([command, "--state", str(tmp_path / "s"), "--checks", "absent"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].endswith("absent: no such file or directory")
        assert lines[1].startswith("hint: check the path")


def test_up_stores_the_absolute_folder_and_none_removes_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    wanted = UpOptions(checks=kept(Path("mine")), checks_every_s=5.0).wanted(None, state)
    assert (wanted.checks, wanted.checks_every_s) == (str(Path.cwd() / "mine"), 5.0)
    assert UpOptions().wanted(wanted, state) == wanted
    with pytest.raises(UsageError, match="--checks differs"):
        UpOptions(checks=kept(tmp_path)).refuse_other(wanted, state)
    assert UpOptions(checks=kept(Path("none"))).wanted(wanted, state).checks == ""


# --- rounds -------------------------------------------------------------------------------------
async def test_unhealthy_is_confirmed_and_checks_come_and_go(tmp_path: Path) -> None:
    folder, note = tmp_path / "checks", tmp_path / "runs"
    # Unhealthy at its first run only.
    script(folder, "once", f'echo x >> {note}; [ "$(wc -l < {note})" -gt 1 ] && exit 0; exit 2')
    script(folder, "bad", "echo gpu0: worn; exit 2")
    found: list[Finding] = []
    shim = new_shim(tmp_path)
    rounds = CheckSchedule(
        CheckOptions(folder=folder, every_s=0.1, s_max=20.0),
        CheckRunner(shim, os.environ, ("UNICRON_PROCESS", f"{tmp_path}:n1/1:")),
        1,
        found.append,
    )
    running = asyncio.create_task(rounds.run())
    seen = "checks", "healthy"
    changes = lambda: [f for f in found if (f.check, f.health) != seen]  # noqa: E731
    (bad,) = await until(lambda: changes() or None)
    assert (bad.check, bad.health, bad.why, bad.devices) == ("check/bad", "unhealthy", "worn", (0,))
    await until(lambda: len(note.read_text().split()) > 3 or None)
    (folder / "bad").unlink()
    script(folder, "new", "exit 1")
    await until(lambda: changes()[2:] or None)
    assert sorted((f.check, f.health) for f in changes()[1:]) == [
        ("check/bad", "healthy"),
        ("check/new", "degraded"),
    ]
    script(folder, "later", "exit 2", 0o644)
    *_, none = await until(lambda: changes()[3:] or None)
    assert (none.check, none.health, none.why) == (
        "checks/files",
        "unknown",
        "not run: later (not executable)",
    )
    (folder / "later").unlink()
    *_, well = await until(lambda: changes()[4:] or None)
    assert (well.check, well.health) == ("checks/files", "healthy"), "each change is reported once"
    shutil.rmtree(folder)
    await until(lambda: [f for f in found if (f.check, f.health) == ("checks", "unknown")] or None)
    running.cancel()
    await asyncio.wait((running,))
    shim.end()


# --- the agent ----------------------------------------------------------------------------------
async def test_an_agent_reports_a_check_that_fails_and_recovers(
    own_server: embedded_server.Server, tmp_path: Path
) -> None:
    """A restarted agent knows what the former one has reported. With the agent its checks end."""
    state, folder = tmp_path / "state", tmp_path / "checks"
    script(folder, "scratch", "echo gpu1: fine; exit 0")
    script(folder, "hangs", f"setsid sh -c 'echo $$ > {tmp_path}/hanging; exec sleep 300'\nwait")
    async with plane(own_server.url, state) as one:
        agent = one.agent(UNICRON_HEALTH="on", CHECKS=str(folder))
        await one.wait(NodeJoined)
        await asyncio.sleep(0.5)
        assert _of(one.all(HealthChanged)) == []
        script(folder, "scratch", "echo gpu1: /scratch is full; exit 2")
        (bad,) = await until(lambda: _of(one.all(HealthChanged)) or None)
        assert bad == HealthChanged(
            node="n1",
            incarnation=one.all(NodeJoined)[0].incarnation,
            check="check/scratch",
            health="unhealthy",
            why="/scratch is full",
            devices=(1,),
            rule="check",
        )
        agent.kill()
        agent.wait()
        hanging = int(await until_text(tmp_path / "hanging"))
        (tmp_path / "hanging").unlink()
        second = one.agent(UNICRON_HEALTH="on", CHECKS=str(folder))
        await until_gone(hanging)  # it runs outside the session of its check
        await one.wait(AgentRestarted)
        script(folder, "scratch", "exit 0")
        _, well = await until(
            lambda: (_of(one.all(HealthChanged))[1:] and _of(one.all(HealthChanged))) or None
        )
        assert (well.check, well.health, well.why) == ("check/scratch", "healthy", "exit code 0")
        hanging = int(await until_text(tmp_path / "hanging"))
        second.send_signal(signal.SIGTERM)
        assert await until(second.poll) == 0, one.said()
        await one.wait(NodeLeft)
        await until_gone(hanging)
        left = [
            proc.pid
            for proc in linux.table()
            if any(
                entry.startswith(f"UNICRON_PROCESS={state}:".encode())
                for entry in linux.environ(proc.pid)
            )
        ]
        assert left == []


def _of(changes: list[HealthChanged]) -> list[HealthChanged]:
    """The changes of the check under test. The machine may report changes of its own."""
    return [change for change in changes if change.check == "check/scratch"]


# --- the checks that are shipped ------------------------------------------------------------------
def _shipped(name: str, tmp_path: Path, **env: str) -> Finding:
    done = subprocess.run(
        [CHECKS / name],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=30.0,
        check=False,
    )
    assert done.stderr == ""
    return finding(name, CheckResult(done.returncode, done.stdout), 4)


def test_the_shipped_check_of_free_space(tmp_path: Path) -> None:
    here = {"UNICRON_CHECK_FOLDERS": str(tmp_path)}
    assert _shipped("scratch-room", tmp_path, **here).health == "healthy"
    full = _shipped("scratch-room", tmp_path, **here, UNICRON_CHECK_FREE_PERCENT="101")
    assert full.health == "degraded"
    assert f"{tmp_path}: " in full.why
    gone = _shipped("scratch-room", tmp_path, UNICRON_CHECK_FOLDERS=f"{tmp_path} /no/such")
    assert (gone.health, gone.why) == ("unhealthy", "/no/such is not there")


SMI = "0, 0000:1B:00.0, {}, No\n1, 0000:9B:00.0, {}, {}"


@pytest.mark.parametrize(
    ("output", "health", "devices", "why"),
    [
        (SMI.format("0", "0", "No"), "healthy", (), "2 GPUs without uncorrectable ECC errors"),
        (SMI.format("[N/A]", "[N/A]", "[N/A]"), "healthy", (), "2 GPUs"),
        (SMI.format("0", "7", "No"), "degraded", (1,), "7 uncorrectable ECC errors"),
        (SMI.format("0", "0", "Yes"), "degraded", (1,), "memory waits to be remapped"),
        (
            "Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error",
            "unknown",
            (),
            "nvidia-smi says: Unable to determine",
        ),
    ],
)
def test_the_shipped_check_of_gpu_memory(
    tmp_path: Path, output: str, health: str, devices: tuple[int, ...], why: str
) -> None:
    """A fake nvidia-smi prints the output, so the test needs no GPU."""
    script(
        tmp_path,
        "nvidia-smi",
        f"cat <<'X'\n{output}\nX\n" + ("exit 15" if output.startswith("Unable") else ""),
    )
    found = _shipped("gpu-ecc", tmp_path)
    assert (found.health, found.devices) == (health, devices)
    assert found.why.startswith(why)


def test_the_shipped_check_of_gpu_memory_without_gpus(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi is here")
    assert _shipped("gpu-ecc", tmp_path).health == "unknown"

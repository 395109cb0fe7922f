"""A real hang of gloo ranks: the flight recorder dumps that the agent requests locate it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import mmap
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_driver import new_shim, start
from guards import unguarded
from rank_driver import Driver
from unicron.cli.app import run_command
from unicron.control_plane.incidents.hang_locator import HangLocation, locate
from unicron.workers.agent.monitoring import flight_recorder_dumps
from unicron.workers.agent.processes.pipe import Pipe
from unicron.workers.diagnosis.dump_files import read_files
from unicron.workers.ipc.pipe_protocol import Unpacker, WriteDump

RANKS = [0, 1, 2]
HUNG_S = 1.2
"""A wait of this length counts as a hang: it is longer than hang_locator.WAIT_S_MIN."""
APPEARS_S_MAX = 20.0


def request_dumps(driver: Driver, folder: Path, ranks: list[int]) -> None:
    """Ask all ranks for dumps, as the agent does, and wait for the files of `ranks`."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"flight-rank-{rank}.json" for rank in RANKS]
    for rank, path in zip(RANKS, paths, strict=True):
        driver.processes[rank].send(WriteDump(path=str(path)))
    driver.until(lambda: all(paths[rank].exists() for rank in ranks))


def wait_for_hang(driver: Driver, folder: Path, ranks: list[int]) -> HangLocation:
    """Request dumps until these ranks have waited long enough for a hang."""
    last_s = time.monotonic() + APPEARS_S_MAX
    while True:
        time.sleep(HUNG_S)
        for old in (folder / "dumps").glob("*.json"):
            old.unlink()
        request_dumps(driver, folder / "dumps", ranks)
        found = locate(read_files([folder / "dumps"]).dumps)
        if found.verdict != "none":
            return found
        assert time.monotonic() < last_s, driver.story()


def test_the_rank_that_does_not_enter_is_named(
    drive: Callable[..., Driver], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = drive(iterations=6)
    driver.start(*RANKS)
    hold = driver.hold(1, "reduce", 3)
    driver.form(RANKS)
    driver.strike(1, iteration=3, event="held")
    wait_for_hang(driver, tmp_path, RANKS)
    assert run_command(["locate", str(tmp_path / "dumps"), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["rank"], one["state"]) for one in found["suspects"]] == [(1, "not entered")]
    assert {one["rank"]: one["ranks"] for one in found["waiting"]} == {0: [1], 2: [1]}
    hold.unlink()
    driver.finish(RANKS)


def test_a_stopped_rank_is_named_by_its_missing_dump(
    drive: Callable[..., Driver], tmp_path: Path
) -> None:
    """The hang is in a second generation, in which a member's position differs from its rank."""
    driver = drive(iterations=400)
    driver.start(*RANKS)
    driver.form(RANKS)
    driver.strike(0, iteration=2, event="step")
    driver.quiesce(RANKS, "boundary")
    members = [2, 0, 1]
    driver.form(members)
    driver.strike(2, iteration=6, event="step")
    driver.processes[0].signal(signal.SIGSTOP)
    try:
        found = wait_for_hang(driver, tmp_path, [1, 2])
    finally:
        driver.processes[0].signal(signal.SIGCONT)
    assert [(one.rank, one.state) for one in found.suspects] == [(0, "no dump")]
    assert {one.rank for one in found.waiting} == {1, 2}


@pytest.mark.thorough
def test_dump_requests_harm_no_healthy_rank(drive: Callable[..., Driver], tmp_path: Path) -> None:
    driver = drive(iterations=30)
    driver.start(*RANKS)
    driver.form(RANKS)
    for turn in range(5):
        request_dumps(driver, tmp_path / f"dumps-{turn}", RANKS)
        assert locate(read_files([tmp_path / f"dumps-{turn}"]).dumps).verdict == "none"
    driver.finish(RANKS)


def test_an_unwritable_dump_path_is_logged(drive: Callable[..., Driver], tmp_path: Path) -> None:
    driver = drive(iterations=6)
    driver.start(*RANKS)
    driver.processes[0].send(WriteDump(path=str(tmp_path / "none" / "flight-rank-0.json")))
    driver.says(0, "flight recorder dump failed: ")
    driver.form(RANKS)
    driver.finish(RANKS)


def test_the_agent_requests_a_dump_of_each_rank(tmp_path: Path) -> None:
    """The dump lies next to the rank's log. A dump of an earlier hang is removed first."""
    old = tmp_path / "flight-rank-5.json"
    old.write_text("{}")

    async def main() -> None:
        shim = new_shim(tmp_path)
        process = start(
            shim, ["sleep", "60"], tmp_path / "rank-5.attempt-1.log", ("UNICRON_TEST", "dumps")
        )
        pipe = Pipe(lambda frame: None, lambda: unguarded((1, 0, 1), "pipe"))
        try:
            requested = flight_recorder_dumps.request_dumps(
                [(5, process, pipe), (6, None, None), (7, process, None)]
            )
            assert requested == {5: old}
            (frame,) = Unpacker().feed(pipe.theirs.recv(1 << 16))
            assert frame.body == WriteDump(path=str(old))
        finally:
            pipe.close()
            assert await process.end_group(10.0)
            shim.end()

    asyncio.run(main())
    assert not old.exists()


# --- names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("FlightRecorder.hpp", ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")),
        (
            "ProcessGroupNCCL.hpp",
            (
                "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
                "TORCH_NCCL_ENABLE_MONITORING",
                "TORCH_NCCL_RETHROW_CUDA_ERRORS",
            ),
        ),
    ],
)
def test_torch_knows_the_variables_that_are_set_or_named(
    header: str, names: tuple[str, ...]
) -> None:
    """Reads torch's headers, because a torch without CUDA contains no NCCL library."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    text = (Path(found.origin).parent / "include/torch/csrc/distributed/c10d" / header).read_text()
    assert [name for name in names if f'"{name}"' not in text] == []


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_torch_knows_where_dumps_are_to_be_written(name: str) -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    library = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data.find(name.encode()) >= 0

"""NCCL's asynchronous errors: asked for through the library's interface, as a real shared object.

No NCCL runs here: the object is compiled from C with the signatures of nccl.h, and torch's groups
are those of a build with NCCL, as far as they are asked. `make gpu-check CHECKS=nccl_errors` asks a
real one.
"""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unicron.workers.agent.monitoring import nccl_ras
from unicron.workers.diagnosis.classifier import classify
from unicron.workers.ipc import rank_variables
from unicron.workers.training.communicators.nccl_errors import (
    NcclError,
    NcclErrors,
    NcclLibrary,
    loaded_library,
)

CPU = torch.device("cpu")
WAIT_S = 60.0
LAST = (
    "NET/IB: Got completion from peer 10.0.0.2<4791> with status=12 opcode=0 len=0 vendor err 129"
)
SOURCE = """
#include <stddef.h>
typedef struct ncclComm { int answer; int code; const char *last; } *ncclComm_t;
typedef int ncclResult_t;
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *code) {
    *code = comm->code;
    return comm->answer;
}
const char *ncclGetErrorString(ncclResult_t code) {
    if (code == 6) return "remote process exited or there was a network error";
    return "unhandled system error";
}
const char *ncclGetLastError(ncclComm_t comm) { return comm ? comm->last : NULL; }
"""
MISMATCH = """NCCL version 2.28.3 compiled with CUDA 13.0

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  Rank 4 -- GPU 4 managed by process 1532307 on node 172.16.64.211
"""


class Communicator(ctypes.Structure):
    """The struct of the compiled library."""

    _fields_ = (("answer", ctypes.c_int), ("code", ctypes.c_int), ("last", ctypes.c_char_p))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text(SOURCE)
    library = folder / "libnccl.so.2"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "nccl.c")],
        check=True,
        timeout=120,
    )
    return str(library)


def group(communicator: Communicator | None, error: str = "SUCCESS") -> Any:
    """A group of torch's with NCCL; without a communicator, before its first collective."""

    def address() -> int:
        if communicator is None:
            raise RuntimeError("no communicator")
        return ctypes.addressof(communicator)

    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=error), _comm_ptr=address)
    return SimpleNamespace(_get_backend=lambda device: backend)


def told(errors: Callable[[Any], NcclErrors]) -> tuple[NcclErrors, list[tuple[int, NcclError]]]:
    found: list[tuple[int, NcclError]] = []
    return errors(lambda generation, error: found.append((generation, error))), found


def wait_for(found: list[Any]) -> None:
    last_s = time.monotonic() + WAIT_S
    while not found:
        assert time.monotonic() < last_s
        time.sleep(0.01)


def test_the_library_says_what_happened_and_with_whom(path: str) -> None:
    library = NcclLibrary(path)
    remote = Communicator(0, 6, LAST.encode())
    words = library.error_of(ctypes.addressof(remote))
    assert words == (
        "NCCL error 6: remote process exited or there was a network error; last error: " + LAST
    )
    verdict = classify(words)
    assert verdict.status, "a status of the network"
    assert verdict.peer == "10.0.0.2:4791"
    assert library.error_of(ctypes.addressof(Communicator(0, 0, None))) == ""
    assert library.error_of(ctypes.addressof(Communicator(0, 7, b"x"))) == "", "still in progress"
    assert library.error_of(ctypes.addressof(Communicator(2, 0, None))) == (
        "NCCL error 2: unhandled system error"
    )


def test_an_error_is_told_once_with_its_group(path: str) -> None:
    good, bad = Communicator(0, 0, None), Communicator(0, 0, None)
    errors, found = told(lambda tell: NcclErrors(tell, CPU, lambda: NcclLibrary(path), 0.01))
    shared = group(good)
    errors.watch(4, {"dp": shared, "dp_cp": shared, "tp": group(bad), "pp": group(None)})
    time.sleep(0.2)
    assert not found, "no error yet"
    bad.last, bad.code = LAST.encode(), 6
    wait_for(found)
    time.sleep(0.1)
    ((generation, error),) = found
    assert (generation, error.role) == (4, "tp")
    assert LAST in error.words
    errors.forget()


def test_without_the_library_torch_is_asked() -> None:
    errors, found = told(lambda tell: NcclErrors(tell, CPU, lambda: None, 0.01))
    errors.watch(2, {"world": group(None, "COMM_ERROR")})
    wait_for(found)
    assert found == [(2, NcclError("world", "torch: COMM_ERROR"))]


def test_a_group_of_another_backend_has_no_error() -> None:
    """gloo's has no `get_error`, or it raises."""

    def get_error() -> None:
        raise RuntimeError("Backend gloo does not support getError")

    errors, found = told(lambda tell: NcclErrors(tell, CPU, lambda: None, 0.01))
    raising = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(get_error=get_error))
    errors.watch(1, {"a": raising, "b": SimpleNamespace(), "c": -100})
    time.sleep(0.2)
    errors.forget()
    assert not found


class Slow:
    """A library that is asked while the generation ends."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.num_running = self.num_asked = 0

    def error_of(self, communicator: int) -> str:
        self.num_asked += 1
        self.num_running += 1
        self.asked.set()
        assert self.go_on.wait(WAIT_S)
        self.num_running -= 1
        return "NCCL error 6: too late"


def test_no_communicator_is_used_once_its_abort_may_begin() -> None:
    slow = Slow()
    errors, found = told(lambda tell: NcclErrors(tell, CPU, lambda: slow, 0.01))
    communicator = Communicator(0, 0, None)
    errors.watch(1, {"world": group(communicator)})
    assert slow.asked.wait(WAIT_S)
    ending = threading.Thread(target=errors.forget)
    ending.start()
    time.sleep(0.1)
    assert ending.is_alive(), "an abort waits for the call that runs"
    slow.go_on.set()
    ending.join(WAIT_S)
    assert not ending.is_alive()
    assert slow.num_running == 0
    num_asked = slow.num_asked
    time.sleep(0.1)
    assert slow.num_asked == num_asked, "and none begins afterwards"
    assert not found, "what the old generation has to say is no news"


def test_a_torch_that_waits_for_its_own_lock_holds_up_no_abort() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def address() -> int:
        asked.set()
        assert go_on.wait(WAIT_S)
        return 1

    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"), _comm_ptr=address)
    errors, _ = told(lambda tell: NcclErrors(tell, CPU, Slow, 0.01))
    errors.watch(1, {"world": SimpleNamespace(_get_backend=lambda device: backend)})
    assert asked.wait(WAIT_S)
    errors.forget()  # returns
    go_on.set()


def test_the_loaded_library_is_found_by_the_maps_of_the_process(path: str, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f0-7f1 r-xp 00000000 08:01 42    {path}\n")
    assert loaded_library(maps) is not None
    maps.write_text("7f0-7f1 r-xp 00000000 08:01 42    /lib/libc.so.6\n")
    assert loaded_library(maps) is None
    maps.write_text(f"7f0-7f1 r-xp 00000000 08:01 42    {tmp_path}/libnccl.so.2 (deleted)\n")
    assert loaded_library(maps) is None


def test_torchs_watchdog_ends_no_rank() -> None:
    """Each variable by which torch's threads would end the process is set."""
    assert rank_variables.NEEDED == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    name = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    code = (
        "import os; from unicron.workers.training import rank; rank._prepare(); "
        f"print(os.environ[{name!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "0\n"


# --- NCCL's RAS service ---
async def _served(answers: list[bytes], ask: Callable[[str], Any]) -> Any:
    """What `ask` finds at a service that answers each line with the next of `answers`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            lines.append((await reader.readline()).decode())
            writer.write(answer)
        writer.close()

    lines: list[str] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await ask(f"127.0.0.1:{port}"), lines


def test_the_report_of_the_ras_service_is_read_by_its_protocol() -> None:
    answers = [b"SERVER PROTOCOL 2\n", b"OK\n", MISMATCH.encode()]
    report, lines = asyncio.run(_served(answers, nccl_ras.status))
    assert lines == ["CLIENT PROTOCOL 2\n", "TIMEOUT 1\n", "VERBOSE STATUS\n"]
    assert report == MISMATCH
    trouble = nccl_ras.trouble(report)
    assert "Process 3487984 on node 172.16.64.213 managing GPU 5" in trouble
    assert "Rank 4 -- GPU 4 managed by process 1532307 on node 172.16.64.211" in trouble
    assert "Job summary" not in trouble
    assert nccl_ras.trouble(report.partition("Errors")[0]) == ""


@pytest.mark.parametrize(
    "answers",
    [
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        [b"SERVER PROTOCOL 2\n", b"no\n"],
        [b"x" * (1 << 20)],
        [],
    ],
)
def test_a_service_that_is_not_ncclras_says_nothing(answers: list[bytes]) -> None:
    assert asyncio.run(_served(answers, nccl_ras.status))[0] == ""


def test_a_service_that_is_silent_is_waited_for_a_second_at_most() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(WAIT_S)

    async def ask() -> str:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await asyncio.wait_for(nccl_ras.status(f"127.0.0.1:{port}"), WAIT_S)
        finally:
            server.close()

    assert asyncio.run(ask()) == ""


def test_its_address_is_that_of_the_ranks_environment() -> None:
    assert nccl_ras.address({}) == "localhost:28028"
    assert nccl_ras.address({"NCCL_RAS_ADDR": "localhost:12345"}) == "localhost:12345"
    assert nccl_ras.address({"NCCL_RAS_ENABLE": "0", "NCCL_RAS_ADDR": "localhost:12345"}) == ""
    assert asyncio.run(nccl_ras.status("no port")) == ""

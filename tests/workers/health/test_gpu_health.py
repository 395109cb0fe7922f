"""GPU health from NVML and the kernel log: the slot of each error, and floods of messages."""

from __future__ import annotations

import inspect
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_driver import until
from health_driver import Clock, write
from unicron.events.records.statuses import (
    ECC_ERRORS,
    GPU_DRIVER_ERRORS,
    ILLEGAL_MEMORY_ACCESS,
    NVLINK_ERRORS,
    TASK_HANG,
)
from unicron.workers.agent.health import gpu as nvml
from unicron.workers.agent.health import kernel_log
from unicron.workers.agent.health.finding import DeviceError, Finding, Reading
from unicron.workers.agent.health.gpu import Gpus
from unicron.workers.agent.health.kernel_log import (
    KMSG,
    GpuSlots,
    KernelLog,
    normalize_address,
    slots_from_driver,
)
from unicron.workers.agent.health.limits import GPU_EVERY_S, LINES_NUM_MAX, RETRY_S
from unicron.workers.diagnosis.classifier import NOTHING, Verdict, classify

SUPPORTED = 0
NOT_SUPPORTED, TIMEOUT, LIBRARY_NOT_FOUND, LOST = 3, 10, 12, 15
BAD, SLOW = "unhealthy", "degraded"
RECORDS = (Path(__file__).parents[2] / "data/health/kmsg.log").read_bytes()


class NVMLError(Exception):
    """Like pynvml's NVMLError: `value` is the error number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeGpu:
    """One GPU as its driver describes it. None means that a value is not supported."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = False
        self.ecc: int | None = 0
        self.rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
        self.pages: list[int] = []
        self.pages_pending = 0
        self.links: list[int] = [1] * 18
        self.fields: dict[int, int] = {38: 0, 45: 0, 52: 0, 59: 0, 230: 0}
        self.reasons = 0x4  # a power cap, which is normal for a busy GPU
        self.clock_mhz = 1980


class FakeNvml:
    """A fake pynvml: functions with the same names, arguments and errors."""

    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, init_error: int = 0) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.num_inits = 0
        self.xids: queue.Queue[tuple[int, FakeGpu]] = queue.Queue()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> FakeNvml:
        return self

    def nvmlInit(self) -> None:
        self.num_inits += 1
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._there(self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> FakeGpu:
        return self._there(self.gpus[int(uuid.decode().removeprefix("GPU-"))])

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=handle.address.encode())

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, since: int) -> int:
        assert kind == 1
        return self._known(handle, handle.ecc) + 1000 * since

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        return self._known(handle, handle.rows)

    def nvmlDeviceGetRetiredPages(self, handle: Any, cause: int) -> list[int]:
        return self._known(handle, handle.pages) if cause else []

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any) -> int:
        return self._known(handle, handle.pages_pending)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        return self._known(handle, handle.links[link] if link < len(handle.links) else None)

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[int]) -> list[Any]:
        self._there(handle)
        return [
            SimpleNamespace(
                fieldId=field,
                valueType=3,
                nvmlReturn=SUPPORTED if field in handle.fields else NOT_SUPPORTED,
                value=SimpleNamespace(ullVal=handle.fields.get(field, 0)),
            )
            for field in fields
        ]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._known(handle, handle.reasons)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return self._known(handle, handle.clock_mhz)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        return 1980

    def nvmlEventSetCreate(self) -> object:
        return self.xids

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: object) -> None:
        assert kinds == 8

    def nvmlEventSetWait_v2(self, events: object, wait_ms: int) -> Any:
        try:
            code, gpu = self.xids.get(timeout=wait_ms / 1000)
        except queue.Empty:
            raise NVMLError(TIMEOUT) from None
        return SimpleNamespace(device=gpu, eventType=8, eventData=code)

    def _there(self, gpu: FakeGpu) -> FakeGpu:
        self.may_answer.wait(60.0)
        if gpu.lost:
            raise NVMLError(LOST)
        return gpu

    def _known(self, gpu: FakeGpu, value: Any) -> Any:
        self._there(gpu)
        if value is None:
            raise NVMLError(NOT_SUPPORTED)
        return value


class Node:
    """Two GPUs and a reader that has read them once."""

    def __init__(self) -> None:
        self.a, self.b = FakeGpu("00000000:1B:00.0"), FakeGpu("00000000:9B:00.0")
        self.library, self.clock = FakeNvml(self.a, self.b), Clock()
        self.gpus = Gpus(("1", "GPU-0"), self.library, self.clock)
        assert [f.health for f in self.look().findings] == ["healthy", "healthy"]

    def look(self, after_s: float = GPU_EVERY_S) -> Reading:
        self.clock.now_s += after_s
        return self.gpus.read()

    def slot(self, number: int) -> Finding:
        return self.look().findings[number]


@pytest.fixture
def node() -> Node:
    return Node()


def test_slots_are_found_by_index_and_uuid(node: Node) -> None:
    slots = node.gpus.slots()
    assert slots.is_known
    assert (slots.find("PCI:0000:9b:00"), slots.find("0000:1b:00.0")) == (0, 1)
    node.b.fields[230] = 1
    assert node.slot(0) == Finding(
        "gpu/0",
        BAD,
        "the driver requests: reset the GPU",
        (0,),
        GPU_DRIVER_ERRORS,
        "nvml-recovery-action",
        True,
    )


@pytest.mark.parametrize(
    ("changes", "health", "status", "why"),
    [
        ({"rows": (3, 2, 1, 0)}, SLOW, ECC_ERRORS, "a memory row waits to be remapped"),
        ({"rows": (3, 9, 1, 1)}, BAD, ECC_ERRORS, "a memory row could not be remapped (9 are)"),
        ({"rows": None, "pages": [0] * 64}, BAD, ECC_ERRORS, "64 memory pages are retired"),
        ({"rows": None, "pages_pending": 1}, SLOW, ECC_ERRORS, "a memory page waits"),
        ({"fields": {230: 2}}, BAD, GPU_DRIVER_ERRORS, "the driver requests: reboot the node"),
        (
            {"fields": {230: 4}},
            SLOW,
            GPU_DRIVER_ERRORS,
            "the driver requests: drain it, then reset it",
        ),
        ({"links": [1] * 16 + [0, 0]}, BAD, NVLINK_ERRORS, "NVLink down: link 16, 17"),
        ({"reasons": 0x48, "clock_mhz": 1140}, SLOW, "", "thermal slowdown, 1980 -> 1140 MHz"),
        ({"reasons": 0x88, "clock_mhz": 345}, SLOW, "", "power brake, 1980 -> 345 MHz"),
        ({"lost": True}, BAD, GPU_DRIVER_ERRORS, "GPU is lost"),
    ],
)
def test_the_state_of_a_gpu_decides_its_health(
    node: Node, changes: dict[str, object], health: str, status: str, why: str
) -> None:
    for name, value in changes.items():
        setattr(node.a, name, value)
    found = node.slot(1)
    assert (found.check, found.devices, found.health, found.status) == (
        "gpu/1",
        (1,),
        health,
        status,
    )
    assert found.why.startswith(why)
    assert node.slot(0).health == "healthy"


@pytest.mark.parametrize(
    "changes",
    [
        {"reasons": 0x4},
        {"reasons": 0x1},
        {"ecc": None},
        {"rows": None},
        {"fields": {}},
        {"links": []},
        {"ecc": None, "rows": None, "fields": {}, "links": [], "reasons": None},
    ],
)
def test_normal_or_unsupported_values_are_healthy(changes: dict[str, object]) -> None:
    gpu = FakeGpu("0:1:0.0")
    for name, value in changes.items():
        setattr(gpu, name, value)
    gpus = Gpus(("0",), FakeNvml(gpu), Clock())
    assert [gpus.read() for _ in range(2)] == [
        Reading([Finding("gpu/0", "healthy", devices=(0,))], [])
    ] * 2


def test_links_that_never_were_up_are_not_reported() -> None:
    gpu = FakeGpu("0:1:0.0")
    gpu.links = [1] * 12 + [0] * 6
    gpus = Gpus(("0",), FakeNvml(gpu), Clock())
    assert gpus.read().findings[0].health == "healthy"
    gpu.links[0] = 0
    assert gpus.read().findings[0].why == "NVLink down: link 0"


def test_only_new_uncorrectable_errors_are_reported(node: Node) -> None:
    assert node.look().erred == []
    node.a.ecc = 2
    look = node.look()
    assert look.erred == [
        DeviceError(
            "nvml",
            ECC_ERRORS,
            "nvml-ecc-uncorrectable",
            "gpu 1: 2 new uncorrectable ECC errors, 2 since the driver was loaded, 1002 in total",
            (1,),
        )
    ]
    assert look.findings[1].health == "healthy", "only remapped rows show wear"
    assert node.look().erred == []


def test_nvlink_errors_by_kind_and_rate(node: Node) -> None:
    node.a.fields[59] = 1
    look = node.look()
    assert [(e.status, e.rule) for e in look.erred] == [(NVLINK_ERRORS, "nvml-nvlink-recovery")]
    assert look.findings[1].health == "healthy", "one recovery does not degrade the GPU"
    node.a.fields[59] = 2
    assert node.slot(1).rule == "nvml-nvlink-recovery"
    node.look(61.0)
    node.a.fields[38] = 500
    assert node.slot(1).health == "healthy", "50 CRC errors a second are normal"
    node.a.fields[38] = 3500
    assert node.slot(1).why == "300 NVLink CRC errors a second"


# --- a missing library or driver ------------------------------------------------------------------
def test_without_the_library_there_are_no_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail
    gpus = Gpus(("0",), clock=Clock())
    assert [list(gpus.read().findings) for _ in range(3)] == [[]] * 3
    assert capsys.readouterr().out.count("nvidia-ml-py is not installed") == 1


def test_a_driver_that_fails_is_logged_once_and_retried(capsys: pytest.CaptureFixture[str]) -> None:
    library, clock = FakeNvml(FakeGpu("0:1:0.0"), init_error=LIBRARY_NOT_FOUND), Clock()
    gpus = Gpus(("0",), library, clock)
    for _ in range(12):
        assert not gpus.read().findings
        clock.now_s += RETRY_S / 3
    assert library.num_inits == 4
    assert capsys.readouterr().out.count("NVML cannot open") == 1
    library.init_error = 0
    clock.now_s += RETRY_S
    assert gpus.read().findings[0].health == "healthy"


def test_a_gpu_that_is_lost_before_the_agent_starts(node: Node) -> None:
    node.b.lost = True
    gpus = Gpus(("0", "1"), node.library, node.clock)
    found = gpus.read().findings[0]
    assert (found.check, found.health, found.devices) == ("gpu/1", BAD, (1,))
    assert gpus.read().findings[0] == found
    assert gpus.lost == {1}
    node.b.lost = False
    node.clock.now_s += RETRY_S
    assert [f.health for f in gpus.read().findings] == ["healthy", "healthy"]
    assert not gpus.lost
    node.a.lost = True
    gpus.read()
    assert gpus.lost == {0}, "of those that are open, too"


def test_without_gpus_no_slot_is_known() -> None:
    assert not Gpus(()).slots().is_known


# --- XIDs ---------------------------------------------------------------------------------------
async def test_an_xid_is_reported_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_code(text: str) -> Verdict:
        assert text == "NVRM: Xid (PCI:00000000:1B:00.0): 79, reported by NVML"
        return Verdict(GPU_DRIVER_ERRORS, "xid-79", code=79, device="00000000:1B:00.0")

    monkeypatch.setattr(nvml, "classify", by_code)
    node.library.xids.put((79, node.a))
    (error,) = await until(lambda: node.gpus.take_xids() or None)
    assert (error.origin, error.status, error.devices, error.code) == (
        "nvml",
        GPU_DRIVER_ERRORS,
        (1,),
        79,
    )


# --- the library itself ---------------------------------------------------------------------------
def test_pynvml_and_the_fake_have_every_function_that_is_called(tmp_path: Path) -> None:
    names = {name for name, _ in inspect.getmembers(FakeNvml) if name.startswith("nvml")}
    called = {
        str(name)
        for file in (nvml.__file__,)
        for name in re.findall(r"nvml\.(nvml\w+)", Path(file).read_text("utf-8"))
    }
    assert len(names) == 16
    assert names == called
    library = pytest.importorskip("pynvml", reason="nvidia-ml-py is an extra")
    for name in names:
        ours = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        there = list(inspect.signature(getattr(library, name)).parameters)
        assert len(ours) == len(there), name
    assert library.nvmlEventTypeXidCriticalError == nvml.XID_MASK
    assert library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == nvml.ACTION_CODE
    assert (
        library.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        library.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    ) == nvml.CRC_FIELDS
    assert library.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL == nvml.REPLAY_CODE
    assert library.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL == nvml.RECOVERY_CODE
    assert library.NVML_ERROR_GPU_IS_LOST == nvml.LOST_CODE
    assert library.NVML_ERROR_RESET_REQUIRED == nvml.RESET_REQUIRED_CODE
    assert library.NVML_NVLINK_MAX_LINKS == nvml.LINKS_NUM_MAX
    types = [library.NVML_VALUE_TYPE_DOUBLE, library.NVML_VALUE_TYPE_UNSIGNED_SHORT]
    assert types == [0, 6]
    value = library.c_nvmlFieldValue_t()
    value.valueType, value.value.usVal = 6, 7
    assert nvml.number_of(value) == 7
    with pytest.raises(library.NVMLError) as missing:  # test machines usually have no driver
        library.nvmlDeviceGetHandleByIndex(10_000)
    assert nvml.code_of(missing.value) > 0


# --- the kernel's log ----------------------------------------------------------------------------
def by_these_rules(text: str) -> Verdict:
    """Three simple rules, so that these tests do not depend on the classifier."""
    if found := re.search(r"Xid \(PCI:([0-9a-f:]+)\): (\d+)", text):
        code = int(found[2])
        status = ILLEGAL_MEMORY_ACCESS if code == 31 else GPU_DRIVER_ERRORS
        return Verdict(status, f"xid-{code}", code=code, device=found[1], line=text)
    if "blocked for more than" in text:
        return Verdict(TASK_HANG, "hung-task", line=text)
    if "timed out" in text:
        return Verdict(TASK_HANG, "timeout", second_hand=True, line=text)
    return NOTHING


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KernelLog, int]]:
    """A KernelLog that reads a pipe, and the descriptor to write records to."""
    monkeypatch.setattr(kernel_log, "classify", by_these_rules)
    os.mkfifo(tmp_path / "kmsg")
    reader = KernelLog(
        lambda: GpuSlots({0: "00000000:05:00.0", 1: "0000000D:00:00.0"}, 2), tmp_path / "kmsg"
    )
    fd = os.open(tmp_path / "kmsg", os.O_WRONLY)
    yield reader, fd
    os.close(fd)
    reader.close()


def test_real_records_become_errors_of_the_right_slots(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    assert reader.look() == []
    os.write(fd, RECORDS[:-100])
    os.write(fd, RECORDS[-100:])  # the first write ends within a record
    assert [(one.status, one.devices, one.code, one.pid) for one in reader.look()] == [
        (GPU_DRIVER_ERRORS, (0,), 79, 0),
        # PCI:0009:01:00 is a GPU of this machine, but not a slot of this agent
        (ILLEGAL_MEMORY_ACCESS, (1,), 31, 3234),
        (TASK_HANG, (), 0, 136986),
    ]
    assert reader.look() == [], "each record is reported once"


def test_without_known_slots_an_error_concerns_the_whole_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "classify", by_these_rules)
    path = tmp_path / "kmsg"
    path.touch()
    reader = KernelLog(GpuSlots, path)
    path.write_bytes(RECORDS)
    assert [(one.devices, one.code) for one in reader.look()] == [
        ((), 79),
        ((), 154),
        ((), 31),
        ((), 0),
    ]


def test_processes_killed_by_the_oom_killer_are_found(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    assert reader.killed(23793) is None
    os.write(fd, RECORDS)
    line = reader.killed(23793)  # `killed` reads the log itself, without a call of `look`
    assert line is not None
    assert line.startswith("Memory cgroup out of memory: Killed process 23793 (leaker)")
    assert reader.killed(3234) is None, "the record names pid 3234, but not as killed"
    for text in (
        "Out of memory: Killed process 123, UID 48, (httpd).",
        "Out of memory: Kill process 456 (python) score 50 or sacrifice child",
    ):
        os.write(fd, f"3,5000,1,-;{text}\n".encode())
    assert (reader.killed(123) is None, reader.killed(456) is None) == (False, False)
    assert [one.code for one in reader.look()] == [79, 31, 0], "an OOM kill is not a device error"


def test_messages_of_other_programs_are_ignored(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    xid = b"NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
    os.write(fd, b"30,1,1,-;systemd[1]: " + xid + b"\n")  # facility 3: a daemon
    os.write(fd, b"nonsense\n;\nx,1,1,-;" + xid + b"\n\xff\xfe,1;\n")
    assert reader.look() == []
    os.write(fd, b"12,2,1,-;" + xid + b"\n")  # facility 1: written by root, as in a drill
    assert [one.code for one in reader.look()] == [79]


def test_a_flood_is_read_to_its_end_and_classified_in_part(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    os.set_blocking(fd, False)
    line = b"3,1,1,-;INFO: task sh:7 blocked for more than 120 seconds.\n"
    for _ in range(20):
        os.write(fd, line * 50)
        assert reader.killed(1) is None
    assert len(reader.look()) == LINES_NUM_MAX
    assert reader.look() == []


def test_indirect_evidence_is_no_device_error(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    os.write(fd, b"3,1,1,-;nfs: server not responding, timed out\n")
    assert reader.look() == []


def test_reading_continues_after_lost_records_and_ends_on_an_error(
    log: tuple[KernelLog, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/kmsg returns EPIPE if records were overwritten. A pipe does not: the test raises it."""
    reader, fd = log
    os.write(fd, RECORDS)
    real, errors = os.read, [OSError(32, "Broken pipe")]

    def breaks(of: int, num: int) -> bytes:
        if errors:
            raise errors.pop()
        return real(of, num)

    monkeypatch.setattr(os, "read", breaks)
    assert len(reader.look()) == 3
    os.write(fd, RECORDS)
    errors.append(OSError(5, "Input/output error"))
    assert (reader.look(), reader.look()) == ([], []), "the reader is closed"


def test_an_unreadable_log_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = KernelLog(GpuSlots, tmp_path / "no-such")
    assert (reader.look(), reader.killed(1)) == ([], None)
    assert "kernel messages cannot be read" in capsys.readouterr().out


def test_the_log_of_this_machine_is_read_from_now_on() -> None:
    """Needs a readable log. Messages from before the start are not reported."""
    if not os.access(KMSG, os.R_OK):
        pytest.skip("/dev/kmsg may not be read here")
    reader = KernelLog(GpuSlots)
    try:
        assert reader.killed(os.getpid()) is None
        found: list[DeviceError] = reader.look()
        assert len(found) < LINES_NUM_MAX
    finally:
        reader.close()


# --- the slot of a GPU --------------------------------------------------------------------------
def test_all_spellings_of_an_address_are_normalized() -> None:
    ways = (
        "0000:05:00",
        "00000000:05:00.0",
        "0000:05:00.0",
        "05:00",
        "PCI:0000:05:00",
        "0000:05:00.0 ",
    )
    assert {normalize_address(way) for way in ways} == {"0000:05:00"}
    assert normalize_address("000D:00:00") == "000d:00:00"
    assert normalize_address("GPU-1") == "gpu-1"


def test_slots_from_the_drivers_files(tmp_path: Path) -> None:
    for address, uuid in (
        ("0000:9b:00.0", "GPU-bb"),
        ("0000:1b:00.0", "GPU-aa"),
        ("0001:00:00.0", "GPU-ab"),
    ):
        write(tmp_path / address, {"information": f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}"})
    by_index = slots_from_driver(("1", "0"), tmp_path)
    assert by_index.is_known
    assert (by_index.find("0000:9b:00"), by_index.find("0000:1b:00")) == (0, 1)
    assert by_index.find("0001:00:00") is None
    by_uuid = slots_from_driver(("GPU-ab", "GPU-b"), tmp_path)
    assert (by_uuid.find("1:00:00"), by_uuid.find("0000:9b:00")) == (0, 1)
    assert not slots_from_driver(("GPU-a", "0"), tmp_path).is_known, "GPU-a is ambiguous"
    assert not slots_from_driver(("0",), tmp_path / "none").is_known


def test_real_records_with_the_real_classifier(tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    reader = KernelLog(
        lambda: GpuSlots({0: "0:05:00", 1: "9:01:00", 2: "d:00:00"}, 3), tmp_path / "kmsg"
    )
    (tmp_path / "kmsg").write_bytes(RECORDS)
    assert [(one.status, one.devices, one.code) for one in reader.look()] == [
        (GPU_DRIVER_ERRORS, (0,), 79),
        (GPU_DRIVER_ERRORS, (1,), 154),
        (ILLEGAL_MEMORY_ACCESS, (2,), 31),
        (TASK_HANG, (), 0),
    ]
    reader.close()
    line = "NVRM: Xid (PCI:00000000:05:00.0): 79, reported by NVML"
    error = kernel_log.device_error_of("nvml", classify(line), line, GpuSlots({0: "0:05:00"}, 1))
    assert error is not None
    assert (error.origin, error.devices, error.code) == ("nvml", (0,), 79)

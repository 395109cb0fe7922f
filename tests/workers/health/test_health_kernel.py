"""The kernel's log, in real records: errors and whose they are, who was killed, floods."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from health_driver import write
from unicron.events.records.statuses import GPU_DRIVER_ERRORS, ILLEGAL_MEMORY_ACCESS, TASK_HANG
from unicron.workers.agent.health import kernel_log
from unicron.workers.agent.health.finding import DeviceError
from unicron.workers.agent.health.gpu_slots import GpuSlots, normalize_address, slots_from_driver
from unicron.workers.agent.health.kernel_log import KMSG, KernelLog
from unicron.workers.agent.health.limits import LINES_NUM_MAX
from unicron.workers.diagnosis.classifier import NOTHING, Verdict, classify

RECORDS = (Path(__file__).parents[2] / "data/health/kmsg.log").read_bytes()


def by_these_rules(text: str) -> Verdict:
    """Three rules, so that these tests are of the log and not of the classifier."""
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
    """A log that reads a pipe, and where to write records."""
    monkeypatch.setattr(kernel_log, "classify", by_these_rules)
    os.mkfifo(tmp_path / "kmsg")
    reader = KernelLog(lambda: GpuSlots({0: "00000000:05:00.0", 1: "0000000D:00:00.0"}, 2),
                       tmp_path / "kmsg")
    fd = os.open(tmp_path / "kmsg", os.O_WRONLY)
    yield reader, fd
    os.close(fd)
    reader.close()


def test_real_records_become_errors_of_the_right_slots(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    assert reader.look() == []
    os.write(fd, RECORDS[:-100])
    os.write(fd, RECORDS[-100:])  # in the middle of a record
    assert [(one.status, one.devices, one.code, one.pid) for one in reader.look()] == [
        (GPU_DRIVER_ERRORS, (0,), 79, 0),
        # PCI:0009:01:00 is on this machine, and not a slot of this agent
        (ILLEGAL_MEMORY_ACCESS, (1,), 31, 3234),
        (TASK_HANG, (), 0, 136986)]
    assert reader.look() == [], "each once"


def test_where_nobody_knows_whose_gpu_it_is_the_whole_node_is_meant(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "classify", by_these_rules)
    path = tmp_path / "kmsg"
    path.touch()
    reader = KernelLog(GpuSlots, path)
    path.write_bytes(RECORDS)
    assert [(one.devices, one.code) for one in reader.look()] == [
        ((), 79), ((), 154), ((), 31), ((), 0)]


def test_who_was_killed_for_want_of_memory(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    assert reader.killed(23793) is None
    os.write(fd, RECORDS)
    said = reader.killed(23793)  # it reads by itself: nobody looked in between
    assert said is not None
    assert said.startswith("Memory cgroup out of memory: Killed process 23793 (leaker)")
    assert reader.killed(3234) is None, "named, but not killed"
    for text in ("Out of memory: Killed process 123, UID 48, (httpd).",
                 "Out of memory: Kill process 456 (python) score 50 or sacrifice child"):
        os.write(fd, f"3,5000,1,-;{text}\n".encode())
    assert (reader.killed(123) is None, reader.killed(456) is None) == (False, False)
    assert [one.code for one in reader.look()] == [79, 31, 0], "no error of a device"


def test_what_other_programs_write_there_is_not_believed(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    xid = b"NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
    os.write(fd, b"30,1,1,-;systemd[1]: " + xid + b"\n")  # facility 3: a daemon's
    os.write(fd, b"nonsense\n;\nx,1,1,-;" + xid + b"\n\xff\xfe,1;\n")
    assert reader.look() == []
    os.write(fd, b"12,2,1,-;" + xid + b"\n")  # facility 1: what root writes, a drill
    assert [one.code for one in reader.look()] == [79]


def test_a_flood_is_read_to_its_end_and_judged_in_part(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    os.set_blocking(fd, False)
    line = b"3,1,1,-;INFO: task sh:7 blocked for more than 120 seconds.\n"
    for _ in range(20):
        os.write(fd, line * 50)
        assert reader.killed(1) is None
    assert len(reader.look()) == LINES_NUM_MAX
    assert reader.look() == []


def test_second_hand_news_are_no_error_of_a_device(log: tuple[KernelLog, int]) -> None:
    reader, fd = log
    os.write(fd, b"3,1,1,-;nfs: server not responding, timed out\n")
    assert reader.look() == []


def test_records_lost_meanwhile_and_a_log_that_breaks(
        log: tuple[KernelLog, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """EPIPE is how /dev/kmsg says that it went on without us; a pipe cannot say so."""
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
    assert (reader.look(), reader.look()) == ([], []), "closed"


def test_a_log_that_may_not_be_read_is_said_once(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = KernelLog(GpuSlots, tmp_path / "no-such")
    assert (reader.look(), reader.killed(1)) == ([], None)
    assert "kernel messages cannot be read" in capsys.readouterr().out


def test_this_machines_own_log_from_now_on() -> None:
    """Where it may be read: nothing of what was said before is taken for news."""
    if not os.access(KMSG, os.R_OK):
        pytest.skip("/dev/kmsg may not be read here")
    reader = KernelLog(GpuSlots)
    try:
        assert reader.killed(os.getpid()) is None
        found: list[DeviceError] = reader.look()
        assert len(found) < LINES_NUM_MAX
    finally:
        reader.close()


# --- whose GPU ----------------------------------------------------------------------------------
def test_an_address_is_the_same_however_it_is_written() -> None:
    ways = ("0000:05:00", "00000000:05:00.0", "0000:05:00.0", "05:00", "PCI:0000:05:00",
            "0000:05:00.0 ")
    assert {normalize_address(way) for way in ways} == {"0000:05:00"}
    assert normalize_address("000D:00:00") == "000d:00:00"
    assert normalize_address("GPU-1") == "gpu-1"


def test_slots_by_the_drivers_own_files(tmp_path: Path) -> None:
    for address, uuid in (("0000:9b:00.0", "GPU-bb"), ("0000:1b:00.0", "GPU-aa"),
                          ("0001:00:00.0", "GPU-ab")):
        write(tmp_path / address, {"information": f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}"})
    by_index = slots_from_driver(("1", "0"), tmp_path)
    assert by_index.is_known
    assert (by_index.find("0000:9b:00"), by_index.find("0000:1b:00")) == (0, 1)
    assert by_index.find("0001:00:00") is None
    by_uuid = slots_from_driver(("GPU-ab", "GPU-b"), tmp_path)
    assert (by_uuid.find("1:00:00"), by_uuid.find("0000:9b:00")) == (0, 1)
    assert not slots_from_driver(("GPU-a", "0"), tmp_path).is_known, "two begin so"
    assert not slots_from_driver(("0",), tmp_path / "none").is_known


def test_by_the_classifier_itself(tmp_path: Path) -> None:
    """What means something in those records, and nothing else; NVML's XIDs in the same words."""
    (tmp_path / "kmsg").touch()
    reader = KernelLog(lambda: GpuSlots({0: "0:05:00", 1: "9:01:00", 2: "d:00:00"}, 3),
                       tmp_path / "kmsg")
    (tmp_path / "kmsg").write_bytes(RECORDS)
    assert [(one.status, one.devices, one.code) for one in reader.look()] == [
        (GPU_DRIVER_ERRORS, (0,), 79), (GPU_DRIVER_ERRORS, (1,), 154),
        (ILLEGAL_MEMORY_ACCESS, (2,), 31), (TASK_HANG, (), 0)]
    reader.close()
    line = "NVRM: Xid (PCI:00000000:05:00.0): 79, reported by NVML"
    told = kernel_log.device_error_of("nvml", classify(line), line, GpuSlots({0: "0:05:00"}, 1))
    assert told is not None
    assert (told.origin, told.devices, told.code) == ("nvml", (0,), 79)

"""GPUs by NVML, over a library of the same names: memory, NVLink, the driver's wish, throttling."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from agent_driver import go, until
from fake_nvml import LIBRARY_NOT_FOUND, FakeGpu, FakeNvml
from health_driver import Clock
from unicron.events.records.statuses import ECC_ERRORS, GPU_DRIVER_ERRORS, NVLINK_ERRORS
from unicron.workers.agent.health import gpu as nvml
from unicron.workers.agent.health import gpu_inventory as gpus_file
from unicron.workers.agent.health.finding import DeviceError, Finding, Reading
from unicron.workers.agent.health.gpu_inventory import Gpus
from unicron.workers.agent.health.limits import GPU_EVERY_S, RETRY_S
from unicron.workers.diagnosis.classifier import Verdict

BAD, SLOW = "unhealthy", "degraded"


class Node:
    """Two GPUs and their reader, which has looked once."""

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


def test_slots_are_told_apart_by_index_and_uuid(node: Node) -> None:
    slots = node.gpus.slots()
    assert slots.is_known
    assert (slots.find("PCI:0000:9b:00"), slots.find("0000:1b:00.0")) == (0, 1)
    node.b.fields[230] = 1
    assert node.slot(0) == Finding("gpu/0", BAD, "the driver requests: reset the GPU", (0,),
                                   GPU_DRIVER_ERRORS, "nvml-recovery-action", True)


@pytest.mark.parametrize(("changes", "health", "status", "why"), [
    ({"rows": (3, 2, 1, 0)}, SLOW, ECC_ERRORS, "a memory row waits to be remapped"),
    ({"rows": (3, 9, 1, 1)}, BAD, ECC_ERRORS, "a memory row could not be remapped (9 are)"),
    ({"rows": None, "pages": [0] * 64}, BAD, ECC_ERRORS, "64 memory pages are retired"),
    ({"rows": None, "pages_pending": 1}, SLOW, ECC_ERRORS, "a memory page waits"),
    ({"fields": {230: 2}}, BAD, GPU_DRIVER_ERRORS, "the driver requests: reboot the node"),
    ({"fields": {230: 4}}, SLOW, GPU_DRIVER_ERRORS, "the driver requests: drain it, then reset it"),
    ({"links": [1] * 16 + [0, 0]}, BAD, NVLINK_ERRORS, "NVLink down: link 16, 17"),
    ({"reasons": 0x48, "clock_mhz": 1140}, SLOW, "", "thermal slowdown, 1980 -> 1140 MHz"),
    ({"reasons": 0x88, "clock_mhz": 345}, SLOW, "", "power brake, 1980 -> 345 MHz"),
    ({"lost": True}, BAD, GPU_DRIVER_ERRORS, "GPU is lost"),
])
def test_what_a_gpu_says(node: Node, changes: dict[str, object], health: str, status: str,
                         why: str) -> None:
    for name, value in changes.items():
        setattr(node.a, name, value)
    found = node.slot(1)
    assert (found.check, found.devices, found.health, found.status) == ("gpu/1", (1,), health,
                                                                        status)
    assert found.why.startswith(why)
    assert node.slot(0).health == "healthy"


@pytest.mark.parametrize("changes", [
    {"reasons": 0x4}, {"reasons": 0x1}, {"ecc": None}, {"rows": None}, {"fields": {}},
    {"links": []}, {"ecc": None, "rows": None, "fields": {}, "links": [], "reasons": None}])
def test_what_is_normal_or_not_supported_is_healthy(changes: dict[str, object]) -> None:
    gpu = FakeGpu("0:1:0.0")
    for name, value in changes.items():
        setattr(gpu, name, value)
    gpus = Gpus(("0",), FakeNvml(gpu), Clock())
    assert [gpus.read() for _ in range(2)] == [Reading([Finding("gpu/0", "healthy", devices=(0,))],
                                                    [])] * 2


def test_links_that_never_were_up_are_not_missed() -> None:
    gpu = FakeGpu("0:1:0.0")
    gpu.links = [1] * 12 + [0] * 6
    gpus = Gpus(("0",), FakeNvml(gpu), Clock())
    assert gpus.read().findings[0].health == "healthy"
    gpu.links[0] = 0
    assert gpus.read().findings[0].why == "NVLink down: link 0"


def test_new_uncorrectable_errors_are_told_and_old_ones_are_not(node: Node) -> None:
    assert node.look().erred == []
    node.a.ecc = 2
    look = node.look()
    assert look.erred == [DeviceError(
        "nvml", ECC_ERRORS, "nvml-ecc-uncorrectable",
        "gpu 1: 2 new uncorrectable ECC errors, 2 since the driver was loaded, 1002 in total",
        (1,))]
    assert look.findings[1].health == "healthy", "whether it is worn out, remapped rows say"
    assert node.look().erred == []


def test_nvlink_errors_by_kind_and_rate(node: Node) -> None:
    node.a.fields[59] = 1
    look = node.look()
    assert [(e.status, e.rule) for e in look.erred] == [(NVLINK_ERRORS, "nvml-nvlink-recovery")]
    assert look.findings[1].health == "healthy", "one alone"
    node.a.fields[59] = 2
    assert node.slot(1).rule == "nvml-nvlink-recovery"
    node.look(61.0)
    node.a.fields[38] = 500
    assert node.slot(1).health == "healthy", "50 CRC errors a second cost nothing"
    node.a.fields[38] = 3500
    assert node.slot(1).why == "300 NVLink CRC errors a second"


# --- a library or a driver that is not there ------------------------------------------------------
def test_without_the_library_nothing_is_asked(monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    gpus = Gpus(("0",), clock=Clock())
    assert [list(gpus.read().findings) for _ in range(3)] == [[]] * 3
    assert capsys.readouterr().out.count("nvidia-ml-py is not installed") == 1


def test_a_driver_that_does_not_answer_is_said_once_and_asked_again(
        capsys: pytest.CaptureFixture[str]) -> None:
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
    node.b.lost = False
    node.clock.now_s += RETRY_S
    assert [f.health for f in gpus.read().findings] == ["healthy", "healthy"]


def test_no_gpu_no_library() -> None:
    assert not Gpus(()).slots().is_known


# --- XIDs ---------------------------------------------------------------------------------------
def test_an_xid_is_heard_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_code(text: str) -> Verdict:
        assert text == "NVRM: Xid (PCI:00000000:1B:00.0): 79, reported by NVML"
        return Verdict(GPU_DRIVER_ERRORS, "xid-79", code=79, device="00000000:1B:00.0")

    monkeypatch.setattr(gpus_file, "classify", by_code)

    async def test() -> None:
        node.library.xids.put((79, node.a))
        (heard,) = await until(lambda: node.gpus.take_xids() or None)
        assert (heard.origin, heard.status, heard.devices, heard.code) == (
            "nvml", GPU_DRIVER_ERRORS, (1,), 79)

    go(test)


# --- the library itself ---------------------------------------------------------------------------
def test_all_that_is_called_is_there_in_the_library_and_in_its_double(tmp_path: Path) -> None:
    names = {name for name, _ in inspect.getmembers(nvml.Nvml) if name.startswith("nvml")}
    assert len(names) == 16
    assert all(callable(getattr(FakeNvml, name)) for name in names)
    library = pytest.importorskip("pynvml", reason="nvidia-ml-py is an extra")
    for name in names:
        asked = list(inspect.signature(getattr(nvml.Nvml, name)).parameters)[1:]
        there = list(inspect.signature(getattr(library, name)).parameters)
        assert len(asked) == len(there), name
    assert library.nvmlEventTypeXidCriticalError == nvml.XID_MASK
    assert library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == nvml.ACTION_CODE
    assert (library.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            library.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL) == nvml.CRC_FIELDS
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
    with pytest.raises(library.NVMLError) as missing:  # no driver where tests run, as a rule
        library.nvmlDeviceGetHandleByIndex(10_000)
    assert nvml.code_of(missing.value) > 0

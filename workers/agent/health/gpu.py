"""Reads the node's GPUs by NVML: memory errors, NVLink, recovery actions, throttling, XIDs."""

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog

from ....events.records.reports import CheckHealth
from ....events.records.statuses import ECC_ERRORS, GPU_DRIVER_ERRORS, NVLINK_ERRORS
from ....events.words import install
from ...diagnosis.classifier import classify
from . import limits
from .finding import DeviceError, Finding, Reading, worst
from .kernel_log import GpuSlots, device_error_of, slots_from_driver
from .network import MINUTE_S, GrowthCounter

_log = structlog.get_logger("agent")

# Constants of nvml.h, which do not change. An older driver rejects unknown fields one by one.
LOST_RULE = "nvml-lost"
TIMEOUT_CODE, LOST_CODE, RESET_REQUIRED_CODE = 10, 15, 16
ABSENT_CODES = (9, 12, 13)
"""No driver, no library, a library without the function."""
UNCORRECTED_CODE, VOLATILE_CODE, AGGREGATE_CODE, SM_CODE = 1, 0, 1, 1
RETIRED_CAUSE_CODES = (0, 1)
XID_MASK = 0x8
LINKS_NUM_MAX = 36
CRC_FIELDS = (38, 45)
REPLAY_CODE, RECOVERY_CODE = 52, 59
"""NVLink errors, all lanes: CRC of flow control and of data; replays; recoveries."""
ACTION_CODE = 230
"""The recovery action that the driver requires."""


Nvml = Any
"""nvidia-ml-py, which has no types. Its functions raise NVMLError; the code is its `value`."""


def load() -> Nvml | None:
    """Import the library; None, with a log line, if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        _log.warning(
            "GPUs are monitored by kernel messages only: nvidia-ml-py is not installed",
            hint=install("gpu"),
        )
        return None


def code_of(error: Exception) -> int:
    """The number of an NVMLError."""
    return int(getattr(error, "value", 0))


def number_of(value: Any) -> int | None:
    """The value of a c_nvmlFieldValue_t; None if the driver does not know the field."""
    if value.nvmlReturn != 0:
        return None
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return int(getattr(value.value, names[int(value.valueType)]))


T = TypeVar("T")

# nvmlDeviceGpuRecoveryAction_t. If running work may finish first, the GPU is only degraded.
ACTIONS: dict[int, tuple[CheckHealth, str]] = {
    1: ("unhealthy", "reset the GPU"),
    2: ("unhealthy", "reboot the node"),
    3: ("degraded", "drain its peer traffic"),
    4: ("degraded", "drain it, then reset it"),
    5: ("degraded", "recover the IMEX domain"),
    6: ("unhealthy", "reset its bus"),
    7: ("unhealthy", "reboot the whole system"),
}
# nvmlClocksEventReason*. A software power cap is normal operation, not a fault.
SLOWDOWNS = (
    (0x40, "thermal slowdown"),
    (0x20, "thermal slowdown by software"),
    (0x80, "power brake"),
    (0x08, "hardware slowdown"),
)


class Gpu:
    """The GPU of one slot. Parts that the driver does not support are skipped."""

    def __init__(
        self, nvml: Nvml, handle: object, slot: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._handle = handle
        self._slot = slot
        self._clock = clock
        self._links: tuple[bool, ...] | None = None
        self._errors = GrowthCounter(MINUTE_S)
        self._nvlink = {
            field: GrowthCounter(MINUTE_S) for field in (*CRC_FIELDS, REPLAY_CODE, RECOVERY_CODE)
        }
        self._crc_at_s = clock()

    def look(self) -> tuple[Finding, list[DeviceError]]:
        """Read the GPU: one finding for all its parts, and new errors."""
        found: list[Finding] = []
        erred: list[DeviceError] = []
        try:
            self._memory(found, erred)
            self._fields(found, erred)
            self._link_state(found)
            self._throttling(found)
        except self._nvml.NVMLError as error:
            found.append(
                self._bad(
                    "unhealthy",
                    "GPU is lost: it is no longer on the bus",
                    GPU_DRIVER_ERRORS,
                    LOST_RULE,
                )
                if code_of(error) == LOST_CODE
                else self._bad(
                    "unhealthy",
                    "the driver refuses the GPU until it is reset",
                    GPU_DRIVER_ERRORS,
                    "nvml-reset-required",
                )
            )
        return worst(f"gpu/{self._slot}", found)._replace(devices=(self._slot,)), erred

    def _call(self, call: Callable[[], T]) -> T | None:
        """Call NVML; None if unsupported. Raises NVMLError if the GPU is lost or needs a reset."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            if code_of(error) in (LOST_CODE, RESET_REQUIRED_CODE):
                raise
            return None

    def _bad(
        self, health: CheckHealth, why: str, status: str, rule: str, is_fact: bool = True
    ) -> Finding:
        return Finding("", health, why, (self._slot,), status, rule, is_fact)

    def _erred(self, status: str, rule: str, text: str) -> DeviceError:
        return DeviceError("nvml", status, rule, f"gpu {self._slot}: {text}", (self._slot,))

    def _memory(self, found: list[Finding], erred: list[DeviceError]) -> None:
        nvml, gpu = self._nvml, self._handle
        now = self._call(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, UNCORRECTED_CODE, VOLATILE_CODE)
        )
        if grown := self._errors.see(now, self._clock()):
            ever = self._call(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, UNCORRECTED_CODE, AGGREGATE_CODE)
            )
            erred.append(
                self._erred(
                    ECC_ERRORS,
                    "nvml-ecc-uncorrectable",
                    f"{grown} new uncorrectable ECC errors, {now} since the "
                    f"driver was loaded, {ever if ever is not None else '?'} "
                    "in total",
                )
            )
        rows = self._call(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
        if rows is not None:
            _, for_errors, is_pending, has_failed = rows
            if has_failed:
                found.append(
                    self._bad(
                        "unhealthy",
                        f"a memory row could not be remapped ({for_errors} are): replace the GPU",
                        ECC_ERRORS,
                        "nvml-row-remap-failed",
                    )
                )
            elif is_pending:
                found.append(
                    self._bad(
                        "degraded",
                        "a memory row waits to be remapped: reset the GPU when it is free",
                        ECC_ERRORS,
                        "nvml-row-remap-pending",
                    )
                )
            return
        pages = [
            self._call(partial(nvml.nvmlDeviceGetRetiredPages, gpu, cause))
            for cause in RETIRED_CAUSE_CODES
        ]
        num_pages = sum(len(found_pages or ()) for found_pages in pages)
        if num_pages > limits.RETIRED_PAGES_NUM_MAX:
            found.append(
                self._bad(
                    "unhealthy",
                    f"{num_pages} memory pages are retired: replace the GPU",
                    ECC_ERRORS,
                    "nvml-retired-pages",
                )
            )
        elif self._call(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)):
            found.append(
                self._bad(
                    "degraded",
                    "a memory page waits to be retired: reset the GPU when it is free",
                    ECC_ERRORS,
                    "nvml-retired-pending",
                )
            )

    def _fields(self, found: list[Finding], erred: list[DeviceError]) -> None:
        fields = self._call(
            lambda: self._nvml.nvmlDeviceGetFieldValues(
                self._handle, [*CRC_FIELDS, REPLAY_CODE, RECOVERY_CODE, ACTION_CODE]
            )
        )
        values = {value.fieldId: number_of(value) for value in fields or ()}
        action = values.get(ACTION_CODE) or 0
        if action:
            health, words = ACTIONS.get(action, ("degraded", f"action {action}"))
            found.append(
                self._bad(
                    health,
                    f"the driver requests: {words}",
                    GPU_DRIVER_ERRORS,
                    "nvml-recovery-action",
                )
            )
        at_s = self._clock()
        in_s, self._crc_at_s = max(at_s - self._crc_at_s, 1.0), at_s
        num_crc = sum(self._nvlink[field].see(values.get(field), at_s) for field in CRC_FIELDS)
        if num_crc > limits.NVLINK_CRC_HZ_MAX * in_s:
            found.append(
                self._bad(
                    "degraded",
                    f"{num_crc / in_s:.0f} NVLink CRC errors a second",
                    NVLINK_ERRORS,
                    "nvml-nvlink-crc",
                    is_fact=False,
                )
            )
        for field, name in ((REPLAY_CODE, "replay"), (RECOVERY_CODE, "recovery")):
            counter = self._nvlink[field]
            if grown := counter.see(values.get(field), at_s):
                erred.append(
                    self._erred(
                        NVLINK_ERRORS,
                        f"nvml-nvlink-{name}",
                        f"NVLink {name} errors grew by {grown}",
                    )
                )
            if counter.num > grown:  # again within a minute
                found.append(
                    self._bad(
                        "degraded",
                        f"NVLink {name} errors grow, {counter.num} in a minute",
                        NVLINK_ERRORS,
                        f"nvml-nvlink-{name}",
                        is_fact=False,
                    )
                )

    def _link_state(self, found: list[Finding]) -> None:
        """Report links that are down and were up at the first look."""
        now: list[bool] = []
        for link in range(LINKS_NUM_MAX):
            state = self._call(partial(self._nvml.nvmlDeviceGetNvLinkState, self._handle, link))
            if state is None:
                break
            now.append(bool(state))
        if self._links is None:
            self._links = tuple(now)
        lost = [
            str(link)
            for link, was in enumerate(self._links)
            if was and not (link < len(now) and now[link])
        ]
        if lost:
            found.append(
                self._bad(
                    "unhealthy",
                    f"NVLink down: link {', '.join(lost)}",
                    NVLINK_ERRORS,
                    "nvml-nvlink-down",
                    is_fact=False,
                )
            )

    def _throttling(self, found: list[Finding]) -> None:
        nvml, gpu = self._nvml, self._handle
        reasons = self._call(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)) or 0
        words = next((words for mask, words in SLOWDOWNS if reasons & mask), "")
        if words:
            most = self._call(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, SM_CODE))
            now = self._call(lambda: nvml.nvmlDeviceGetClockInfo(gpu, SM_CODE))
            clocks = f", {most} -> {now} MHz" if most and now else ""
            found.append(
                self._bad("degraded", f"{words}{clocks}", "", "nvml-throttled", is_fact=False)
            )


# --- The GPUs of the node ---
def _lost_slots(findings: Iterable[Finding]) -> frozenset[int]:
    lost = [finding for finding in findings if finding.rule == LOST_RULE]
    return frozenset(slot for finding in lost for slot in finding.devices)


class Gpus:
    """Reads all GPUs. `devices`: for each slot an entry of CUDA_VISIBLE_DEVICES (index or UUID).
    Only `read` calls the driver, and may hang."""

    name = "gpu"
    every_s, s_max = limits.GPU_EVERY_S, limits.GPU_S_MAX

    def __init__(
        self,
        devices: Sequence[str],
        load: Callable[[], Nvml | None] = load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices = devices
        self._load = load
        self._clock = clock
        self._nvml: Nvml | None = None
        self._is_absent = False
        self._gpus: list[Gpu] = []
        self._lost: list[Finding] = []
        self.lost = frozenset[int]()
        """The slots whose GPUs were lost at the last reading."""
        self._xids: list[DeviceError] = []
        self._lock = threading.Lock()
        self._last_error = ""
        self._retry_at_s = 0.0
        self._slots = slots_from_driver(devices) if devices else GpuSlots()

    def slots(self) -> GpuSlots:
        """The mapping of PCI addresses to slots; it may be unknown at first."""
        return self._slots

    def read(self) -> Reading:
        """Read each GPU. Raises OSError if the driver fails as a whole."""
        if not self._gpus and not self._begin():
            self.lost = _lost_slots(self._lost)
            return Reading(self._lost)
        findings: list[Finding] = []
        erred: list[DeviceError] = []
        for gpu in self._gpus:
            finding, errors = gpu.look()
            findings.append(finding)
            erred += errors
        self.lost = _lost_slots(findings)
        return Reading(findings, [*erred, *self.take_xids()])

    def take_xids(self) -> list[DeviceError]:
        """New XIDs; does not call the driver."""
        with self._lock:
            xids, self._xids = self._xids, []
        return xids

    def _begin(self) -> bool:
        if self._is_absent or self._clock() < self._retry_at_s:
            return False
        nvml = self._nvml or self._load()
        if nvml is None:
            self._is_absent = True
            return False
        self._nvml = nvml
        handles: list[object] = []
        try:
            nvml.nvmlInit()
            for device in self._devices:
                handles.append(
                    nvml.nvmlDeviceGetHandleByIndex(int(device))
                    if device.isdecimal()
                    else nvml.nvmlDeviceGetHandleByUUID(device.encode())
                )
            pci = {
                slot: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
                for slot, handle in enumerate(handles)
            }
        except nvml.NVMLError as error:
            if code_of(error) == LOST_CODE and len(handles) < len(self._devices):
                slot = len(handles)
                self._lost = [
                    Finding(
                        f"gpu/{slot}",
                        "unhealthy",
                        "GPU is lost: NVML cannot open it",
                        (slot,),
                        GPU_DRIVER_ERRORS,
                        LOST_RULE,
                        True,
                    )
                ]
            self._retry_at_s = self._clock() + limits.RETRY_S
            if str(error) != self._last_error:
                self._last_error = str(error)
                _log.warning(
                    "NVML cannot open the GPUs; the agent retries",
                    why=str(error),
                    hint="run nvidia-smi"
                    if code_of(error) not in ABSENT_CODES
                    else "is the driver loaded, and its libraries in the container?",
                )
            return False
        self._slots, self._lost = GpuSlots(pci, len(self._devices)), []
        self._gpus = [Gpu(nvml, handle, slot, self._clock) for slot, handle in enumerate(handles)]
        _log.info("monitors GPUs by NVML", num_gpus=len(handles))
        self._listen(nvml, handles)
        return True

    def _listen(self, nvml: Nvml, handles: Sequence[object]) -> None:
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in handles:
                nvml.nvmlDeviceRegisterEvents(handle, XID_MASK, events)
        except nvml.NVMLError as error:
            _log.warning("XIDs are seen in kernel messages only", why=str(error))
            return
        threading.Thread(
            target=self._collect_xids, args=(nvml, events), name="xid", daemon=True
        ).start()

    def _collect_xids(self, nvml: Nvml, events: object) -> None:
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, limits.XID_WAIT_MS)
                address = _text(nvml.nvmlDeviceGetPciInfo(event.device).busId)
            except nvml.NVMLError as error:
                if code_of(error) != TIMEOUT_CODE:
                    _log.warning("XIDs are seen in kernel messages only", why=str(error))
                    return
                continue
            # The line has the kernel's format, so that the same rules classify it.
            line = f"NVRM: Xid (PCI:{address}): {int(event.eventData)}, reported by NVML"
            erred = device_error_of("nvml", classify(line), line, self._slots)
            if erred is not None:
                with self._lock:
                    self._xids.append(erred)


def _text(value: bytes | str) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value

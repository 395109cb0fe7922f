"""Reads one GPU by NVML: memory errors, NVLink, recovery actions, throttling."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog

from ....events.records.reports import CheckHealth
from ....events.records.statuses import ECC_ERRORS, GPU_DRIVER_ERRORS, NVLINK_ERRORS
from . import limits
from .finding import DeviceError, Finding, worst
from .network import MINUTE_S, GrowthCounter

_log = structlog.get_logger("agent")

# Constants of nvml.h, which do not change. An older driver rejects unknown fields one by one.
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
        _log.warning("GPUs are monitored by kernel messages only: nvidia-ml-py is not installed",
                     hint="pip install unicron[gpu]")
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
SLOWDOWNS = ((0x40, "thermal slowdown"), (0x20, "thermal slowdown by software"),
             (0x80, "power brake"), (0x08, "hardware slowdown"))


class Gpu:
    """The GPU of one slot. Parts that the driver does not support are skipped."""

    def __init__(self, nvml: Nvml, handle: object, slot: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._handle = handle
        self._slot = slot
        self._clock = clock
        self._links: tuple[bool, ...] | None = None
        self._errors = GrowthCounter(MINUTE_S)
        self._nvlink = {field: GrowthCounter(MINUTE_S)
                        for field in (*CRC_FIELDS, REPLAY_CODE, RECOVERY_CODE)}
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
                self._bad("unhealthy", "GPU is lost: it is no longer on the bus",
                          GPU_DRIVER_ERRORS, "nvml-lost") if code_of(error) == LOST_CODE else
                self._bad("unhealthy", "the driver refuses the GPU until it is reset",
                          GPU_DRIVER_ERRORS, "nvml-reset-required"))
        return worst(f"gpu/{self._slot}", found)._replace(devices=(self._slot,)), erred

    def _call(self, call: Callable[[], T]) -> T | None:
        """Call NVML; None if unsupported. Raises NVMLError if the GPU is lost or needs a reset."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            if code_of(error) in (LOST_CODE, RESET_REQUIRED_CODE):
                raise
            return None

    def _bad(self, health: CheckHealth, why: str, status: str, rule: str,
             is_fact: bool = True) -> Finding:
        return Finding("", health, why, (self._slot,), status, rule, is_fact)

    def _erred(self, status: str, rule: str, text: str) -> DeviceError:
        return DeviceError("nvml", status, rule, f"gpu {self._slot}: {text}", (self._slot,))

    def _memory(self, found: list[Finding], erred: list[DeviceError]) -> None:
        nvml, gpu = self._nvml, self._handle
        now = self._call(lambda: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, UNCORRECTED_CODE, VOLATILE_CODE))
        if grown := self._errors.see(now, self._clock()):
            ever = self._call(lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, UNCORRECTED_CODE, AGGREGATE_CODE))
            erred.append(self._erred(ECC_ERRORS, "nvml-ecc-uncorrectable",
                                     f"{grown} new uncorrectable ECC errors, {now} since the "
                                     f"driver was loaded, {ever if ever is not None else '?'} "
                                     "in total"))
        rows = self._call(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
        if rows is not None:
            _, for_errors, is_pending, has_failed = rows
            if has_failed:
                found.append(self._bad("unhealthy", f"a memory row could not be remapped "
                                       f"({for_errors} are): replace the GPU", ECC_ERRORS,
                                       "nvml-row-remap-failed"))
            elif is_pending:
                found.append(self._bad("degraded", "a memory row waits to be remapped: reset the "
                                       "GPU when it is free", ECC_ERRORS,
                                       "nvml-row-remap-pending"))
            return
        pages = [self._call(partial(nvml.nvmlDeviceGetRetiredPages, gpu, cause))
                 for cause in RETIRED_CAUSE_CODES]
        num_pages = sum(len(found_pages or ()) for found_pages in pages)
        if num_pages > limits.RETIRED_PAGES_NUM_MAX:
            found.append(self._bad("unhealthy", f"{num_pages} memory pages are retired: replace "
                                   "the GPU", ECC_ERRORS, "nvml-retired-pages"))
        elif self._call(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)):
            found.append(self._bad("degraded", "a memory page waits to be retired: reset the GPU "
                                   "when it is free", ECC_ERRORS, "nvml-retired-pending"))

    def _fields(self, found: list[Finding], erred: list[DeviceError]) -> None:
        fields = self._call(lambda: self._nvml.nvmlDeviceGetFieldValues(
            self._handle, [*CRC_FIELDS, REPLAY_CODE, RECOVERY_CODE, ACTION_CODE]))
        values = {value.fieldId: number_of(value) for value in fields or ()}
        action = values.get(ACTION_CODE) or 0
        if action:
            health, words = ACTIONS.get(action, ("degraded", f"action {action}"))
            found.append(self._bad(health, f"the driver requests: {words}", GPU_DRIVER_ERRORS,
                                   "nvml-recovery-action"))
        at_s = self._clock()
        in_s, self._crc_at_s = max(at_s - self._crc_at_s, 1.0), at_s
        num_crc = sum(self._nvlink[field].see(values.get(field), at_s) for field in CRC_FIELDS)
        if num_crc > limits.NVLINK_CRC_HZ_MAX * in_s:
            found.append(self._bad("degraded", f"{num_crc / in_s:.0f} NVLink CRC errors a second",
                                   NVLINK_ERRORS, "nvml-nvlink-crc", is_fact=False))
        for field, name in ((REPLAY_CODE, "replay"), (RECOVERY_CODE, "recovery")):
            counter = self._nvlink[field]
            if grown := counter.see(values.get(field), at_s):
                erred.append(self._erred(NVLINK_ERRORS, f"nvml-nvlink-{name}",
                                         f"NVLink {name} errors grew by {grown}"))
            if counter.num > grown:  # again within a minute
                found.append(self._bad("degraded", f"NVLink {name} errors grow, {counter.num} in "
                                       "a minute", NVLINK_ERRORS, f"nvml-nvlink-{name}",
                                       is_fact=False))

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
        lost = [str(link) for link, was in enumerate(self._links)
                if was and not (link < len(now) and now[link])]
        if lost:
            found.append(self._bad("unhealthy", f"NVLink down: link {', '.join(lost)}",
                                   NVLINK_ERRORS, "nvml-nvlink-down", is_fact=False))

    def _throttling(self, found: list[Finding]) -> None:
        nvml, gpu = self._nvml, self._handle
        reasons = self._call(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)) or 0
        words = next((words for mask, words in SLOWDOWNS if reasons & mask), "")
        if words:
            most = self._call(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, SM_CODE))
            now = self._call(lambda: nvml.nvmlDeviceGetClockInfo(gpu, SM_CODE))
            clocks = f", {most} -> {now} MHz" if most and now else ""
            found.append(self._bad("degraded", f"{words}{clocks}", "", "nvml-throttled",
                                   is_fact=False))

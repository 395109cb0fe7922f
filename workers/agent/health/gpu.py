"""One GPU, by NVML: memory errors, NVLink, what the driver asks for, throttling."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import structlog

from ....events.records.reports import CheckHealth
from ....events.records.statuses import ECC_ERRORS, GPU_DRIVER_ERRORS, NVLINK_ERRORS
from .finding import NVLINK_CRC_HZ_MAX, RETIRED_PAGES_NUM_MAX, Erred, Finding, worst
from .network import MINUTE_S, Grown

# --- NVIDIA's management library, as far as it is asked: loaded where there are GPUs, never fatal.
# ---

_log = structlog.get_logger("agent")

# Numbers of nvml.h, which do not change. Names of fields and reasons that a driver does not know
# yet are refused by it, one by one.
NOT_SUPPORTED_CODE, TIMEOUT_CODE, LOST_CODE, RESET_REQUIRED_CODE = 3, 10, 15, 16
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
"""What the driver asks for, to get the GPU well again."""


class Event(Protocol):
    """c_nvmlEventData_t."""

    device: object
    eventType: int
    eventData: int


class Value(Protocol):
    """c_nvmlFieldValue_t; `value` is a union that `valueType` opens."""

    fieldId: int
    valueType: int
    nvmlReturn: int
    value: Any


class Nvml(Protocol):
    """The functions of nvidia-ml-py that are called. Each raises NVMLError, with a `value`."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> object: ...
    def nvmlDeviceGetPciInfo(self, handle: object) -> Any: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: object, kind: int, since: int) -> int: ...
    def nvmlDeviceGetRemappedRows(self, handle: object) -> tuple[int, int, int, int]: ...
    def nvmlDeviceGetRetiredPages(self, handle: object, cause: int) -> Sequence[object]: ...
    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: object) -> int: ...
    def nvmlDeviceGetNvLinkState(self, handle: object, link: int) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> Sequence[Value]: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: object) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: object, kind: int) -> int: ...
    def nvmlEventSetCreate(self) -> object: ...
    def nvmlDeviceRegisterEvents(self, handle: object, kinds: int, events: object) -> None: ...
    def nvmlEventSetWait_v2(self, events: object, wait_ms: int) -> Event: ...


def load() -> Nvml | None:
    """The library's module; None, and a line, where it is not installed."""
    try:
        return cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        _log.warning("GPUs are watched by kernel messages only: nvidia-ml-py is not installed",
                     hint="pip install unicron[gpu]")
        return None


def code_of(error: Exception) -> int:
    """The number of an NVMLError."""
    return int(getattr(error, "value", 0))


def number_of(value: Value) -> int | None:
    """What a field says; None where the driver does not know it."""
    if value.nvmlReturn != 0:
        return None
    name = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[value.valueType]
    return int(getattr(value.value, name))

T = TypeVar("T")

# nvmlDeviceGpuRecoveryAction_t. Where running work may end first, the GPU is degraded.
ACTIONS: dict[int, tuple[CheckHealth, str]] = {
    1: ("unhealthy", "reset the GPU"),
    2: ("unhealthy", "reboot the node"),
    3: ("degraded", "drain its peer traffic"),
    4: ("degraded", "drain it, then reset it"),
    5: ("degraded", "recover the IMEX domain"),
    6: ("unhealthy", "reset its bus"),
    7: ("unhealthy", "reboot the whole system"),
}
# nvmlClocksEventReason*. A power cap by software is how a GPU is run, and no fault.
SLOWDOWNS = ((0x40, "thermal slowdown"), (0x20, "thermal slowdown by software"),
             (0x80, "power brake"), (0x08, "hardware slowdown"))


class Gpu:
    """The GPU of one slot. Each part that its driver does not know is passed over."""

    def __init__(self, nvml: Nvml, handle: object, slot: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._handle = handle
        self._slot = slot
        self._clock = clock
        self._links: tuple[bool, ...] | None = None
        self._errors = Grown(MINUTE_S)
        self._nvlink = {field: Grown(MINUTE_S) for field in (*CRC_FIELDS, REPLAY_CODE,
                                                             RECOVERY_CODE)}
        self._crc_at_s = clock()

    def look(self) -> tuple[Finding, list[Erred]]:
        """What it says as a whole, and new errors."""
        found: list[Finding] = []
        erred: list[Erred] = []
        try:
            self._memory(found, erred)
            self._fields(found, erred)
            self._link_state(found)
            self._throttling(found)
        except self._nvml.NVMLError as error:
            found.append(self._gone(error))
        return worst(f"gpu/{self._slot}", found)._replace(devices=(self._slot,)), erred

    def _ask(self, call: Callable[[], T]) -> T | None:
        """None where this GPU or its driver does not know. Raises NVMLError where it is gone."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            if code_of(error) in (LOST_CODE, RESET_REQUIRED_CODE):
                raise
            return None

    def _gone(self, error: Exception) -> Finding:
        why = ("GPU is lost: it is no longer on the bus" if code_of(error) == LOST_CODE
               else "the driver does not use the GPU before it is reset")
        return self._bad("unhealthy", why, GPU_DRIVER_ERRORS,
                         "nvml-lost" if code_of(error) == LOST_CODE else "nvml-reset-required")

    def _bad(self, health: CheckHealth, why: str, status: str, rule: str,
             is_fact: bool = True) -> Finding:
        return Finding("", health, why, (self._slot,), status, rule, is_fact)

    def _erred(self, status: str, rule: str, text: str) -> Erred:
        return Erred("nvml", status, rule, f"gpu {self._slot}: {text}", (self._slot,))

    def _memory(self, found: list[Finding], erred: list[Erred]) -> None:
        nvml, gpu = self._nvml, self._handle
        now = self._ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, UNCORRECTED_CODE, VOLATILE_CODE))
        if grown := self._errors.see(now, self._clock()):
            ever = self._ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, UNCORRECTED_CODE, AGGREGATE_CODE))
            erred.append(self._erred(ECC_ERRORS, "nvml-ecc-uncorrectable",
                                     f"{grown} uncorrectable ECC errors more, {now} since the "
                                     f"driver was loaded, {ever if ever is not None else '?'} "
                                     "ever"))
        rows = self._ask(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
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
        pages = [self._ask(partial(self._retired, cause)) for cause in RETIRED_CAUSE_CODES]
        num_pages = sum(num or 0 for num in pages)
        if num_pages > RETIRED_PAGES_NUM_MAX:
            found.append(self._bad("unhealthy", f"{num_pages} memory pages are retired: replace "
                                   "the GPU", ECC_ERRORS, "nvml-retired-pages"))
        elif self._ask(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)):
            found.append(self._bad("degraded", "a memory page waits to be retired: reset the GPU "
                                   "when it is free", ECC_ERRORS, "nvml-retired-pending"))

    def _retired(self, cause: int) -> int:
        return len(self._nvml.nvmlDeviceGetRetiredPages(self._handle, cause))

    def _fields(self, found: list[Finding], erred: list[Erred]) -> None:
        told = self._ask(lambda: self._nvml.nvmlDeviceGetFieldValues(
            self._handle, [*CRC_FIELDS, REPLAY_CODE, RECOVERY_CODE, ACTION_CODE]))
        said = {value.fieldId: number_of(value) for value in told or ()}
        action = said.get(ACTION_CODE) or 0
        if action:
            health, words = ACTIONS.get(action, ("degraded", f"action {action}"))
            found.append(self._bad(health, f"the driver asks to {words}", GPU_DRIVER_ERRORS,
                                   "nvml-recovery-action"))
        at_s = self._clock()
        in_s, self._crc_at_s = max(at_s - self._crc_at_s, 1.0), at_s
        num_crc = sum(self._nvlink[field].see(said.get(field), at_s) for field in CRC_FIELDS)
        if num_crc > NVLINK_CRC_HZ_MAX * in_s:
            found.append(self._bad("degraded", f"{num_crc / in_s:.0f} NVLink CRC errors a second",
                                   NVLINK_ERRORS, "nvml-nvlink-crc", is_fact=False))
        for field, name in ((REPLAY_CODE, "replay"), (RECOVERY_CODE, "recovery")):
            counter = self._nvlink[field]
            if grown := counter.see(said.get(field), at_s):
                erred.append(self._erred(NVLINK_ERRORS, f"nvml-nvlink-{name}",
                                         f"NVLink {name} errors grew by {grown}"))
            if counter.num > grown:  # again within a minute
                found.append(self._bad("degraded", f"NVLink {name} errors grow, {counter.num} in "
                                       "a minute", NVLINK_ERRORS, f"nvml-nvlink-{name}",
                                       is_fact=False))

    def _link_state(self, found: list[Finding]) -> None:
        """Links that were up and are down. Which ought to be up only the first look can say."""
        now: list[bool] = []
        for link in range(LINKS_NUM_MAX):
            state = self._ask(partial(self._nvml.nvmlDeviceGetNvLinkState, self._handle, link))
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
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)) or 0
        words = next((words for mask, words in SLOWDOWNS if reasons & mask), "")
        if words:
            most = self._ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, SM_CODE))
            now = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, SM_CODE))
            clocks = f", {most} -> {now} MHz" if most and now else ""
            found.append(self._bad("degraded", f"{words}{clocks}", "", "nvml-throttled",
                                   is_fact=False))

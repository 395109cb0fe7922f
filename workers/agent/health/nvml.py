"""NVIDIA's management library, as far as it is asked: loaded where there are GPUs, never fatal."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

import structlog

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

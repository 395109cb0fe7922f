"""A library with the functions of nvidia-ml-py that are called, over GPUs that a test describes."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

SUPPORTED = 0
NOT_SUPPORTED, TIMEOUT, LIBRARY_NOT_FOUND, LOST = 3, 10, 12, 15


class NVMLError(Exception):
    """As pynvml's: its number is `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeGpu:
    """One GPU as its driver describes it; None: not supported."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = False
        self.ecc: int | None = 0
        self.rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
        self.pages: list[int] = []
        self.pages_pending = 0
        self.links: list[int] = [1] * 18
        self.fields: dict[int, int] = {38: 0, 45: 0, 52: 0, 59: 0, 230: 0}
        self.reasons = 0x4  # a power cap: how a busy GPU is run
        self.clock_mhz = 1980


class FakeNvml:
    """Functions by the names of pynvml, with the same arguments and errors."""

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
        return [SimpleNamespace(
            fieldId=field, valueType=3, nvmlReturn=SUPPORTED if field in handle.fields
            else NOT_SUPPORTED, value=SimpleNamespace(ullVal=handle.fields.get(field, 0)))
            for field in fields]

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

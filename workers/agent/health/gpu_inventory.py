"""Finds the node's GPUs by NVML, reads their health and listens for XIDs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from ....events.records.statuses import GPU_DRIVER_ERRORS
from ...diagnosis.classifier import classify
from . import gpu as library
from . import limits
from .finding import DeviceError, Finding, Reading
from .gpu import ABSENT_CODES, LOST_CODE, TIMEOUT_CODE, XID_MASK, Gpu, Nvml, code_of
from .gpu_slots import GpuSlots, slots_from_driver
from .kernel_log import device_error_of

_log = structlog.get_logger("agent")


class Gpus:
    """Reads all GPUs. `devices`: for each slot an entry of CUDA_VISIBLE_DEVICES (index or UUID).
    Only `read` calls the driver, and may hang."""

    name = "gpu"
    every_s, s_max = limits.GPU_EVERY_S, limits.GPU_S_MAX

    def __init__(self, devices: Sequence[str], load: Callable[[], Nvml | None] = library.load,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices
        self._load = load
        self._clock = clock
        self._nvml: Nvml | None = None
        self._is_absent = False
        self._gpus: list[Gpu] = []
        self._lost: list[Finding] = []
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
            return Reading(self._lost)
        findings: list[Finding] = []
        erred: list[DeviceError] = []
        for gpu in self._gpus:
            finding, errors = gpu.look()
            findings.append(finding)
            erred += errors
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
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdecimal()
                               else nvml.nvmlDeviceGetHandleByUUID(device.encode()))
            pci = {slot: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
                   for slot, handle in enumerate(handles)}
        except nvml.NVMLError as error:
            if code_of(error) == LOST_CODE and len(handles) < len(self._devices):
                slot = len(handles)
                self._lost = [Finding(f"gpu/{slot}", "unhealthy", "GPU is lost: NVML cannot open "
                                      "it", (slot,), GPU_DRIVER_ERRORS, "nvml-lost", True)]
            self._retry_at_s = self._clock() + limits.RETRY_S
            if str(error) != self._last_error:
                self._last_error = str(error)
                _log.warning(
                    "NVML cannot open the GPUs; the agent retries", why=str(error),
                    hint="run nvidia-smi" if code_of(error) not in ABSENT_CODES
                    else "is the driver loaded, and its libraries in the container?")
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
        threading.Thread(target=self._collect_xids, args=(nvml, events), name="xid",
                         daemon=True).start()

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

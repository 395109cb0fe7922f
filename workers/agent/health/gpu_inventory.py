"""The GPUs of the node: found once the driver answers, looked at, listened to for XIDs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from ....events.records.statuses import GPU_DRIVER_ERRORS
from ...diagnosis.classifier import classify
from . import gpu as library
from .finding import GPU_EVERY_S, GPU_S_MAX, RETRY_S, XID_WAIT_MS, Erred, Finding, Look
from .gpu import ABSENT_CODES, LOST_CODE, TIMEOUT_CODE, XID_MASK, Gpu, Nvml, code_of
from .gpu_slots import Slots, by_driver
from .kernel_log import erred_of

_log = structlog.get_logger("agent")


class Gpus:
    """`devices` has one entry of CUDA_VISIBLE_DEVICES for each slot: an index, or a UUID.

    Its methods but `slots` call the driver and may hang.
    """

    name = "gpu"
    every_s, s_max = GPU_EVERY_S, GPU_S_MAX

    def __init__(self, devices: Sequence[str], load: Callable[[], Nvml | None] = library.load,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices
        self._load = load
        self._clock = clock
        self._nvml: Nvml | None = None
        self._is_absent = False
        self._gpus: list[Gpu] = []
        self._lost: list[Finding] = []
        self._heard: list[Erred] = []
        self._lock = threading.Lock()
        self._said = ""
        self._again_s = 0.0
        self._slots = by_driver(devices) if devices else Slots()

    def slots(self) -> Slots:
        """Whose GPU an address is; it may be known later only."""
        return self._slots

    def read(self) -> Look:
        """One look at each GPU. Raises OSError where a call of the driver failed as a whole."""
        if not self._gpus and not self._begin():
            return Look(self._lost)
        findings: list[Finding] = []
        erred: list[Erred] = []
        for gpu in self._gpus:
            finding, told = gpu.look()
            findings.append(finding)
            erred += told
        with self._lock:
            erred += self._heard
            self._heard = []
        return Look(findings, erred)

    def take_heard(self) -> list[Erred]:
        """XIDs since; without a call of the driver."""
        with self._lock:
            heard, self._heard = self._heard, []
        return heard

    def _begin(self) -> bool:
        if self._is_absent or self._clock() < self._again_s:
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
                handles.append(self._handle(nvml, device))
            pci = {slot: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
                   for slot, handle in enumerate(handles)}
        except nvml.NVMLError as error:
            if code_of(error) == LOST_CODE and len(handles) < len(self._devices):
                slot = len(handles)
                self._lost = [Finding(f"gpu/{slot}", "unhealthy", "GPU is lost: NVML cannot open "
                                      "it", (slot,), GPU_DRIVER_ERRORS, "nvml-lost", True)]
            self._again_s = self._clock() + RETRY_S
            if str(error) != self._said:
                self._said = str(error)
                _log.warning("NVML does not answer for the GPUs; they are asked again", why=str(
                    error), hint="run nvidia-smi" if code_of(error) not in ABSENT_CODES
                    else "is the driver loaded, and its libraries in the container?")
            return False
        self._slots, self._lost = Slots(pci, len(self._devices)), []
        self._gpus = [Gpu(nvml, handle, slot, self._clock) for slot, handle in enumerate(handles)]
        _log.info("watches GPUs by NVML", num_gpus=len(handles))
        self._listen(nvml, handles)
        return True

    def _handle(self, nvml: Nvml, device: str) -> object:
        if device.isdecimal():
            return nvml.nvmlDeviceGetHandleByIndex(int(device))
        return nvml.nvmlDeviceGetHandleByUUID(device.encode())

    def _listen(self, nvml: Nvml, handles: Sequence[object]) -> None:
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in handles:
                nvml.nvmlDeviceRegisterEvents(handle, XID_MASK, events)
        except nvml.NVMLError as error:
            _log.warning("XIDs are seen in kernel messages only", why=str(error))
            return
        threading.Thread(target=self._hear, args=(nvml, events), name="xid", daemon=True).start()

    def _hear(self, nvml: Nvml, events: object) -> None:
        """For ever, in a thread that dies with the agent: one line for each XID."""
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, XID_WAIT_MS)
                address = _text(nvml.nvmlDeviceGetPciInfo(event.device).busId)
            except nvml.NVMLError as error:
                if code_of(error) != TIMEOUT_CODE:
                    _log.warning("XIDs are seen in kernel messages only", why=str(error))
                    return
                continue
            # In the kernel's words, so that one table reads both.
            line = f"NVRM: Xid (PCI:{address}): {int(event.eventData)}, told by NVML"
            erred = erred_of("nvml", classify(line), line, self._slots)
            if erred is not None:
                with self._lock:
                    self._heard.append(erred)


def _text(told: bytes | str) -> str:
    return told.decode("ascii", "replace") if isinstance(told, bytes) else told

"""GPU health from the real driver, by Unicron's own readers: NVML, the trial of a device before
its slot is in service again (`unicron lift`), and the XID of a real fault.

The fault is an illegal access by a process of its own: an ordinary program error, which harms no
other process. The driver reports it as XID 31 (or 13), by NVML and in the kernel log.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.recovery.rows import Row
from gpu.result import NotPossible, of
from unicron.events.records.statuses import ILLEGAL_MEMORY_ACCESS
from unicron.events.words import install
from unicron.workers.agent.health import gpu as nvml
from unicron.workers.agent.health.device_trial import try_devices
from unicron.workers.agent.health.finding import DeviceError
from unicron.workers.agent.health.gpu import Gpus
from unicron.workers.agent.health.kernel_log import KMSG, KernelLog

READS_NUM = 5
XID_S_MAX = 10.0
FAULT_S_MAX = 120.0
FAULTS = """
import ctypes, os, torch
found = torch.ones(64 << 20, device="cuda")  # large enough for an allocation of its own
torch.cuda.synchronize()
(runtime,) = {line.split()[-1] for line in open("/proc/self/maps") if "libcudart.so" in line}
free = ctypes.CDLL(runtime).cudaFree
free.argtypes = [ctypes.c_void_p]
assert free(found.data_ptr()) == 0
try:
    found.add_(1)
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "illegal memory access" in str(error), error
    os._exit(0)
os._exit(9)
"""
"""Uses memory of the GPU that it has freed."""


def devices() -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES, or the index of each GPU."""
    import torch

    given = [
        one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()
    ]
    return given or [str(index) for index in range(torch.cuda.device_count())]


def check(folder: Path, device: str) -> list[Row]:
    """Read the health of each GPU."""
    if nvml.load() is None:
        raise NotPossible(f"nvidia-ml-py is not installed: {install('gpu')}")
    gpus, times_s = Gpus(devices()), list[float]()
    for _ in range(READS_NUM):
        began_s = time.monotonic()
        reading = gpus.read()
        times_s.append(time.monotonic() - began_s)
    assert len(reading.findings) == len(devices()), f"NVML opened no GPU: {reading}"
    assert gpus.slots().is_known, "the PCI addresses of some GPUs are unknown"
    ill = [
        f"{one.check} {one.health}: {one.why}"
        for one in reading.findings
        if one.health != "healthy"
    ]
    return [
        of("nvml", "read_s", times_s, "s", f"{len(reading.findings)} GPUs"),
        of("nvml", "healthy", [float(len(reading.findings) - len(ill))], "", "; ".join(ill)),
    ]


def check_trial(folder: Path, device: str) -> list[Row]:
    """Try each GPU as an agent does: its memory is written and read back."""
    began_s, names = time.monotonic(), devices()
    answers = asyncio.run(try_devices(names, range(len(names))))
    times_s = [time.monotonic() - began_s]
    ill = [f"{names[slot]}: {why}" for slot, why in answers.items() if why]
    return [
        of("trial", "took_s", times_s, "s", f"{len(names)} GPUs"),
        of("trial", "healthy", [float(len(names) - len(ill))], "", "; ".join(ill)),
    ]


def check_xid(folder: Path, device: str) -> list[Row]:
    """Provoke a real XID; both readers must say on which slot it was."""
    gpus = Gpus(devices())
    gpus.read()  # begins to listen
    kernel = KernelLog(gpus.slots)
    reads_kernel = os.access(KMSG, os.R_OK) and kernel._fd >= 0
    log, code = folder / "fault.log", 0
    began_s = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(
            [sys.executable, "-c", FAULTS],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=FAULT_S_MAX,
            check=False,
        ).returncode
    assert code == 0, f"no illegal access: exit code {code}\n{log.read_text()[-2000:]}"
    found: dict[str, tuple[DeviceError, float]] = {}
    last_s = time.monotonic() + XID_S_MAX
    while len(found) < 1 + reads_kernel and time.monotonic() < last_s:
        for error in (*gpus.take_xids(), *kernel.look()):
            if error.status == ILLEGAL_MEMORY_ACCESS:
                found.setdefault(error.origin, (error, time.monotonic() - began_s))
        time.sleep(0.01)
    kernel.close()
    assert found, "neither NVML nor the kernel log has reported the XID"
    for error, _ in found.values():
        assert error.devices == (0,), f"on the wrong slot: {error}"
    missing = [] if reads_kernel else [f"{KMSG} cannot be read"]
    missing += [
        f"nothing by {one}" for one in ("nvml", "kernel")[: 1 + reads_kernel] if one not in found
    ]
    return [
        of(
            "xid",
            f"{origin}_s",
            [after_s],
            "s",
            "; ".join([f"XID {error.code}", "from the start of the faulty process", *missing]),
        )
        for origin, (error, after_s) in found.items()
    ]

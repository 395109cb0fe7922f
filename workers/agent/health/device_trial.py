"""Tries the device of a slot, in a process of its own: a driver that hangs hangs only that."""

import asyncio
import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

from . import limits
from .gpu import ABSENT_CODES, Gpu, code_of, load

ARGV = (sys.executable, "-P", "-m", __name__)
CUDA = "libcuda.so.1"
TRIED_BYTES = 1 << 24
PATTERN_CODE = 0x5A17C0DE
"""Any word that memory of zeros, or of ones, does not have."""


async def try_devices(devices: Sequence[str], slots: Iterable[int]) -> dict[int, str]:
    """What is wrong with the device of each slot, "" for nothing. `devices`, by slot, as in
    CUDA_VISIBLE_DEVICES; a slot without one is healthy."""
    wanted = [slot for slot in dict.fromkeys(slots) if 0 <= slot < len(devices)]
    found = await asyncio.gather(*(_try(devices[slot]) for slot in wanted))
    return dict.fromkeys(slots, "") | dict(zip(wanted, found, strict=True))


async def _try(device: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *ARGV,
        device,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
    )
    try:
        async with asyncio.timeout(limits.TRIAL_S_MAX):
            output, _ = await process.communicate()
    except TimeoutError:
        return f"it does not answer within {limits.TRIAL_S_MAX:g} s"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, TimeoutError):
                process.kill()  # without effect while it is blocked in the driver
                await asyncio.wait_for(process.wait(), limits.CHECK_END_S_MAX)
    text = " ".join(output.decode("utf-8", "replace").split())[: limits.REASON_CHARS_MAX]
    if process.returncode == 0:
        return text
    return text or f"its trial ended with code {process.returncode}"


# --- in that process ---
def trial(device: str) -> str:
    """What is wrong with the device, the only one that CUDA sees; "" for nothing."""
    return seen_by_nvml(device) or used_by_cuda()


def seen_by_nvml(device: str) -> str:
    """What the driver says of it: lost, to be reset, out of spare rows. "" without NVML."""
    nvml = load()
    if nvml is None:
        return ""
    try:
        nvml.nvmlInit()
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(device))
            if device.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(device.encode())
        )
    except nvml.NVMLError as error:
        return "" if code_of(error) in ABSENT_CODES else f"NVML cannot open it: {error}"
    finding, _ = Gpu(nvml, handle, 0).look()
    return finding.why if finding.health == "unhealthy" else ""


def used_by_cuda() -> str:
    """Write a pattern to the device's memory, and read it back through a context of its own."""
    try:
        cuda = ctypes.CDLL(CUDA)
    except OSError as error:
        return f"CUDA's driver cannot be loaded: {error}"
    device, count = ctypes.c_int(), ctypes.c_int()
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    num_words = TRIED_BYTES // 4
    words = (ctypes.c_uint32 * num_words)()
    for name, args in (
        ("cuInit", (0,)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
        ("cuCtxSetCurrent", (context,)),
        ("cuMemAlloc_v2", (ctypes.byref(memory), ctypes.c_size_t(TRIED_BYTES))),
        ("cuMemsetD32_v2", (memory, PATTERN_CODE, ctypes.c_size_t(num_words))),
        ("cuMemcpyDtoH_v2", (words, memory, ctypes.c_size_t(TRIED_BYTES))),
        ("cuMemFree_v2", (memory,)),
    ):
        if code := getattr(cuda, name)(*args):
            return f"{name}: {_name_of(cuda, code)}"
    wrong = sum(word != PATTERN_CODE for word in words)
    return f"{wrong} of {num_words} words of its memory are read back wrong" if wrong else ""


def _name_of(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"").decode("ascii", "replace") or f"CUDA error {code}"


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # what a library logs is no answer
    os.write(answer, trial(sys.argv[1]).encode())
    os._exit(0)  # a driver that is broken may hang at the exit

"""Reads device errors and OOM kills from the kernel log."""

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import structlog

from ...diagnosis.classifier import Verdict, classify
from . import limits
from .finding import DeviceError

# --- Which slot a GPU is: by PCI address, UUID or index ---
GPUS = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_ADDRESS = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.\d)?$", re.IGNORECASE)


class GpuSlots:
    """PCI addresses of the slots' GPUs. `is_known`: the mapping is complete."""

    def __init__(self, addresses: Mapping[int, str] | None = None, num_slots: int = 0) -> None:
        self._by_address = {
            normalize_address(address): slot for slot, address in (addresses or {}).items()
        }
        self.is_known = num_slots > 0 and len(self._by_address) == num_slots

    def find(self, device: str) -> int | None:
        """The slot of a PCI address; None if the GPU is not ours, or unknown."""
        return self._by_address.get(normalize_address(device))


def normalize_address(address: str) -> str:
    """Normalize a PCI address to domain:bus:device; kernel, NVML and tools pad it differently."""
    found = _ADDRESS.search(address.strip())
    if found is None:
        return address.strip().lower()
    domain, bus, device = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def slots_from_driver(devices: Sequence[str], gpus: Path = GPUS) -> GpuSlots:
    """Read the mapping from the driver's /proc files, without NVML. `devices`, as
    CUDA_VISIBLE_DEVICES: a UUID, a prefix of one, or an index by PCI address as in nvidia-smi."""
    found: dict[str, str] = {}
    try:
        folders = sorted(gpus.iterdir(), key=lambda folder: normalize_address(folder.name))
        for number, folder in enumerate(folders):
            found[str(number)] = folder.name
            uuid = _UUID.search((folder / "information").read_text(encoding="utf-8"))
            if uuid is not None:
                found[uuid[1]] = folder.name
    except OSError:
        return GpuSlots()
    addresses: dict[int, str] = {}
    for slot, device in enumerate(devices):
        matches = [
            address
            for name, address in found.items()
            if name == device or (device.startswith("GPU-") and name.startswith(device))
        ]
        if len(matches) == 1:
            addresses[slot] = matches[0]
    return GpuSlots(addresses, len(devices))


KMSG = Path("/dev/kmsg")
_KERNEL_CODE, _USER_CODE = 0, 1
"""Accepted facilities: the kernel's own, and `user`, in which only root can write (for tests)."""
_READS_NUM_MAX = 1000
_PENDING_BYTES_MAX = 1 << 16
# The lines of mm/oom_kill.c: the requesting process, a summary, the killed process, its memory.
_OOM = re.compile(r"^oom[-_]|^(?:Memory cgroup out|Out) of memory\b|\binvoked oom-killer:")
_KILLED = re.compile(r"\bKill(?:ed)? process (\d+)\b|^oom-kill:.*\bpid=(\d+)\b")
# The pid in the line of an XID, and in the line of a hung task.
_PID = re.compile(r"\bpid='?(\d+)\b|^INFO: task \S+:(\d+) blocked ")
_log = structlog.get_logger("agent")


class KernelLog:
    """Reads the messages after its own creation; none, with a log line, if it may not. `slots` maps
    the GPU of a line to its slot."""

    def __init__(self, slots: Callable[[], GpuSlots], path: Path = KMSG) -> None:
        self._slots = slots
        self._fd = _open(path)
        self._pending = b""
        self._lines: list[str] = []
        self._killed: dict[int, str] = {}
        self._num_skipped = 0

    def killed(self, pid: int) -> str | None:
        """The kernel's line on the OOM kill of this process; None: there is none. Reads to the end
        of the log first: the kernel writes the line before the process can be reaped. In another
        pid namespace (most containers) always None, because the kernel's pids differ."""
        self._read()
        return self._killed.get(pid)

    def look(self) -> list[DeviceError]:
        """Errors since the last look, from at most LINES_NUM_MAX lines."""
        self._read()
        lines, self._lines = self._lines, []
        found = [
            erred
            for line in lines
            if (erred := device_error_of("kernel", classify(line), line, self._slots())) is not None
        ]
        if self._num_skipped:
            _log.warning("too many kernel messages; some were skipped", num_lines=self._num_skipped)
            self._num_skipped = 0
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        for _ in range(_READS_NUM_MAX if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, limits.RECORD_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # unread records were overwritten
                    self._num_skipped += 1
                    continue
                _log.warning("kernel messages can no longer be read", why=error.strerror)
                self.close()
                return
            if not data:
                return
            *lines, rest = (self._pending + data).split(b"\n")
            self._pending = rest[-_PENDING_BYTES_MAX:]
            for line in lines:
                self._take(line.decode("utf-8", errors="replace"))

    def _take(self, record: str) -> None:
        """One record, `priority,seq,timestamp,flags;text` (Documentation/ABI/testing/dev-kmsg)."""
        head, semicolon, text = record.partition(";")
        priority = head.partition(",")[0]
        # A line that begins with a space is not a record, but part of a record's dictionary.
        if not semicolon or not (priority.isascii() and priority.isdigit()):
            return
        if int(priority) >> 3 not in (_KERNEL_CODE, _USER_CODE):
            return
        if _OOM.search(text):
            # An OOM kill is reported with the exit of the killed process, through `killed`.
            found = _KILLED.search(text)
            if found is None:
                return
            pid = int(found[1] or found[2])
            if pid not in self._killed or text.startswith(("Out of", "Memory cgroup")):
                self._killed[pid] = text
            if len(self._killed) > limits.KILLED_NUM_MAX:
                del self._killed[next(iter(self._killed))]
        elif len(self._lines) < limits.LINES_NUM_MAX:
            self._lines.append(text)
        else:
            self._num_skipped += 1


def device_error_of(
    origin: Literal["kernel", "nvml"], verdict: Verdict, line: str, slots: GpuSlots
) -> DeviceError | None:
    """The error in a line. None if there is none, or if the GPU is not one of this agent."""
    if not verdict.status or verdict.second_hand:
        return None
    devices: tuple[int, ...] = ()
    if verdict.device:
        slot = slots.find(verdict.device)
        if slot is None and slots.is_known:
            return None
        devices = () if slot is None else (slot,)
    found = _PID.search(line)
    pid = int(found[1] or found[2]) if found else 0
    return DeviceError(origin, verdict.status, verdict.rule, line, devices, verdict.code, pid)


def _open(path: Path) -> int:
    hints = {
        errno.EPERM: "give the agent CAP_SYSLOG, or set kernel.dmesg_restrict=0",
        errno.EACCES: "let the agent's user read it",
    }
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        _log.warning(
            "kernel messages cannot be read: no XIDs and no OOM kills from there",
            file=str(path),
            why=error.strerror,
            hint=hints.get(error.errno or 0, ""),
        )
        return -1
    with suppress(OSError):  # a pipe: all its content is new
        os.lseek(fd, 0, os.SEEK_END)
    return fd

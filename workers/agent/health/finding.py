"""What a health check found, and the limits of all checks with their sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from ....events.records.reports import CheckHealth

RANKED: tuple[CheckHealth, ...] = ("healthy", "unknown", "degraded", "unhealthy")
"""From good to bad. Not knowing is worse than well, and better than a known fault."""


class Finding(NamedTuple):
    """What one check says now (events/records/reports.py, HealthChanged)."""

    check: str
    health: CheckHealth
    why: str = ""
    devices: tuple[int, ...] = ()
    status: str = ""
    rule: str = ""
    is_fact: bool = False
    """A driver or a counter states it: it is true at the first look."""


class Erred(NamedTuple):
    """One error that somebody told of (events/records/reports.py, DeviceErred)."""

    origin: Literal["kernel", "nvml", "network"]
    status: str
    rule: str
    text: str
    devices: tuple[int, ...] = ()
    code: int = 0
    pid: int = 0


class Look(NamedTuple):
    """All that one look of a reader found: what each of its checks says, and errors since."""

    findings: Sequence[Finding] = ()
    erred: Sequence[Erred] = ()


class Reader(Protocol):
    """Looks at one part of the node. `read` may block: it is called in a thread of its own.

    `read` raises OSError, ValueError or LookupError where the part says nothing sensible.
    """

    name: str
    every_s: float
    s_max: float

    def read(self) -> Look: ...


def worst(check: str, found: Sequence[Finding]) -> Finding:
    """What `check` says as a whole: the worst of its parts; why names all that are as bad."""
    if not found:
        return Finding(check, "healthy")
    first = max(found, key=lambda one: RANKED.index(one.health))
    same = [one for one in found if one.health == first.health]
    return first._replace(check=check, why="; ".join(one.why for one in same if one.why))


# --- Every limit of the health readers, each with its source. ---

# --- how often, how long ------------------------------------------------------------------------
GPU_EVERY_S, GPU_S_MAX = 10.0, 20.0
NETWORK_EVERY_S, NETWORK_S_MAX = 5.0, 10.0
MEMORY_EVERY_S, MEMORY_S_MAX = 10.0, 10.0
DISK_EVERY_S, DISK_S_MAX = 30.0, 20.0
"""A write of a few bytes that takes so long holds up every checkpoint (ours)."""
BLOCKED_EVERY_S, BLOCKED_S_MAX = 15.0, 10.0
"""It reads one file for each process of the node: about 20 us each (measured)."""
KERNEL_EVERY_S = 0.25
XID_WAIT_MS = 5000
RETRY_S = 60.0
"""Between two tries to reach a driver that did not answer."""
LOOKS_WORSE_NUM, LOOKS_BETTER_NUM = 2, 3
"""So many looks in a row must say so before it is told: one alone may be noise (ours)."""

# --- GPU ----------------------------------------------------------------------------------------
RETIRED_PAGES_NUM_MAX = 63
"""NVIDIA DCGM, dcgm_gpu_hardware_limits.h: more of them, and the GPU is to be replaced."""
NVLINK_CRC_HZ_MAX = 100.0
"""NVIDIA DCGM, the same file: CRC errors matter at 100 a second and more."""

# --- network ------------------------------------------------------------------------------------
# Which counters are fatal, and the three rates: NVIDIA NVSentinel, NIC health monitor. Where it
# replaces the machine on the first, we tell of it, and call the port bad when it goes on.
SYMBOL_ERRORS_HZ_MAX = 10.0
SYMBOL_ERRORS_PER_HOUR_NUM_MAX = 120
"""Beyond the bit error rate of 1e-12 that the InfiniBand specification allows."""
RECOVERIES_PER_MINUTE_NUM_MAX = 5
FLAPS_NUM_MAX = 3
FLAPS_WITHIN_S = 300.0
"""A link that went down so often within this time is flapping (ours)."""

# --- disk ---------------------------------------------------------------------------------------
FREE_BYTES_DEGRADED, FREE_BYTES_UNHEALTHY = 1 << 30, 64 << 20
"""`unicron doctor` asks for 1 GiB; with less than 64 MiB no log of a rank has room (ours)."""
INODES_SHARE_DEGRADED, INODES_SHARE_UNHEALTHY = 0.05, 0.002
"""5 %: the kubelet's nodefs.inodesFree. Below 0.2 % a checkpoint of many files fails (ours)."""
PROBE_BYTES = 4096
PROBE_S_DEGRADED = 5.0
"""A write of PROBE_BYTES and its fsync; a healthy disk takes milliseconds (ours)."""

# --- memory -------------------------------------------------------------------------------------
AVAILABLE_SHARE_DEGRADED = 0.03
"""Of the machine, or of what the container may use (ours). Never "unhealthy": it is most often
the task's doing, and would follow it to the next node."""
STALLED_PERCENT_DEGRADED = 20.0
"""PSI "full avg10": so much of the time nothing ran, for want of memory (ours; systemd-oomd kills
at 60)."""
BACK_RATIO = 1.25
"""What was too low must come so far above its limit to be well again."""

# --- processes ----------------------------------------------------------------------------------
BLOCKED_S = 30.0
"""In state D, without having run in between; the kernel's own watchdog waits for 120 s."""

# --- kernel messages ----------------------------------------------------------------------------
RECORD_BYTES_MAX = 8192
"""A shorter read of /dev/kmsg fails (kernel: CONSOLE_EXT_LOG_MAX)."""
LINES_NUM_MAX = 50
"""So many lines of one look are classified; the rest of a flood is counted."""
LINE_CHARS_MAX = 400
KILLED_NUM_MAX = 256
BURST_QUIET_S, BURST_S_MAX = 10.0, 60.0
"""A burst of equal errors ends when they pause, or is told of again when it goes on."""
ERRED_NUM_MAX, ERRED_WITHIN_S = 20, 60.0

# --- a site's checks ----------------------------------------------------------------------------
CHECKS_EVERY_S, CHECKS_S_MAX = 60.0, 30.0
CHECKS_NUM_MAX = 64
CHECKS_AT_ONCE_NUM = 2
CHECKS_AGAIN_S = 1.0
"""Until what got worse is asked a second time."""
CHECK_LOOKS_BETTER_NUM = 2
CHECK_NICE_NUM = 10
CHECK_READ_BYTES = 4096
REASON_CHARS_MAX = 200
END_S_MAX = 5.0

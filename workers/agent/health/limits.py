"""The limits of all health checks, with their sources."""

# --- periods and time limits --------------------------------------------------------------------
GPU_EVERY_S, GPU_S_MAX = 10.0, 20.0
NETWORK_EVERY_S, NETWORK_S_MAX = 5.0, 10.0
MEMORY_EVERY_S, MEMORY_S_MAX = 10.0, 10.0
DISK_EVERY_S, DISK_S_MAX = 30.0, 20.0
"""If a small write takes longer than DISK_S_MAX, every checkpoint is delayed (our choice)."""
DISK_AGAIN_S = 2.0
"""Time between two looks while it is unhealthy: nothing starts until it has recovered."""
BLOCKED_EVERY_S, BLOCKED_S_MAX = 15.0, 10.0
"""This check reads one file for each process of the node: about 20 us each (measured)."""
KERNEL_EVERY_S = 0.25
TRIAL_S_MAX = 30.0
"""A trial of a device before its slot is given back. It takes seconds: a driver without
persistence mode first initialises the GPU (our choice)."""
XID_WAIT_MS = 5000
RETRY_S = 60.0
"""Time between two tries to open a driver that failed."""
LOOKS_WORSE_NUM, LOOKS_BETTER_NUM = 2, 3
"""Consecutive readings needed for a report, because one reading may be noise (our choice)."""

# --- GPU ----------------------------------------------------------------------------------------
RETIRED_PAGES_NUM_MAX = 63
"""NVIDIA DCGM, dcgm_gpu_hardware_limits.h: with more, the GPU must be replaced."""
NVLINK_CRC_HZ_MAX = 100.0
"""NVIDIA DCGM, the same file: CRC errors matter from 100 a second on."""

# --- network ------------------------------------------------------------------------------------
# Source of the fatal counters and the three rates: NVIDIA NVSentinel, NIC health monitor.
# NVSentinel replaces the machine at the first fatal count. Unicron reports the count, and degrades
# the port if the counter grows again within a minute.
SYMBOL_ERRORS_HZ_MAX = 10.0
SYMBOL_ERRORS_PER_HOUR_NUM_MAX = 120
"""This is above the bit error rate of 1e-12 that the InfiniBand specification allows."""
RECOVERIES_PER_MINUTE_NUM_MAX = 5
FLAPS_NUM_MAX = 3
FLAPS_WITHIN_S = 300.0
"""A link that went down this often within this time is flapping (our choice)."""

# --- disk ---------------------------------------------------------------------------------------
FREE_BYTES_DEGRADED, FREE_BYTES_UNHEALTHY = 1 << 30, 64 << 20
"""`unicron doctor` requires 1 GiB; 64 MiB is too little for a rank's log (our choice)."""
INODES_SHARE_DEGRADED, INODES_SHARE_UNHEALTHY = 0.05, 0.002
"""5 %: the kubelet's nodefs.inodesFree. At 0.2 % a checkpoint of many files fails (our choice)."""
PROBE_BYTES = 4096
PROBE_S_DEGRADED = 5.0
"""A write of PROBE_BYTES and its fsync; a healthy disk takes milliseconds (our choice)."""

# --- memory -------------------------------------------------------------------------------------
AVAILABLE_SHARE_DEGRADED = 0.03
"""Share of the machine's memory, or of the container's limit (our choice). Low memory is never
"unhealthy": usually the task is the cause, and would use up the memory of the next node too."""
STALLED_PERCENT_DEGRADED = 20.0
"""PSI "full avg10": share of time in which all stalled (our choice; systemd-oomd kills at 60)."""
BACK_RATIO = 1.25
"""Hysteresis: a low value must rise to its limit times this ratio to be healthy again."""

# --- processes ----------------------------------------------------------------------------------
BLOCKED_S = 30.0
"""Time in state D without running. The kernel's own watchdog for this waits for 120 s."""

# --- kernel messages ----------------------------------------------------------------------------
RECORD_BYTES_MAX = 8192
"""A shorter read of /dev/kmsg fails (kernel: CONSOLE_EXT_LOG_MAX)."""
LINES_NUM_MAX = 50
"""Lines of one reading that are classified; further lines are only counted."""
LINE_CHARS_MAX = 400
KILLED_NUM_MAX = 256
BURST_QUIET_S, BURST_S_MAX = 10.0, 60.0
"""A burst ends after BURST_QUIET_S without an error. After BURST_S_MAX it is reported again."""
ERRED_NUM_MAX, ERRED_WITHIN_S = 20, 60.0

# --- a site's checks ----------------------------------------------------------------------------
CHECKS_EVERY_S, CHECKS_S_MAX = 60.0, 30.0
CHECKS_NUM_MAX = 64
CHECKS_CONCURRENT_NUM = 2
CHECKS_CONFIRM_S = 1.0
"""Time until a worse result is checked again."""
CHECK_LOOKS_BETTER_NUM = 2
CHECK_NICE_NUM = 10
CHECK_READ_BYTES = 4096
REASON_CHARS_MAX = 200
CHECK_END_S_MAX = 5.0

"""The identity of a process: its start time and its boot distinguish it from a later one.

The kernel gives the pid of a process that has ended to another one.
"""

import subprocess
from pathlib import Path

PS_S_MAX = 2.0


def start_time(pid: int) -> str:
    """Start time of the process as the OS reports it; "" if the process is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _start_time_ps(pid)
    except ProcessLookupError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def boot_id() -> str:
    """The kernel's id of this boot; "" if /proc has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_time_ps(pid: int) -> str:
    """`start_time` without /proc (macOS)."""
    done = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PS_S_MAX,
    )
    state, _, began = done.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else began.strip()

"""The signal at which a rank's process writes its Python stacks to a file, and that file."""

import signal
from pathlib import Path

SIGNAL = signal.Signals.SIGRTMIN + 7
"""One that no library uses: glibc has those below SIGRTMIN, Slurm and torch SIGUSR1 and SIGUSR2."""
VARIABLE = "UNICRON_STACKS"
"""Environment of a rank: the path of the file."""


def dump_file_of(log_path: Path, folder: Path) -> Path:
    """The file, in that folder, of the process whose log this is."""
    return folder / log_path.with_suffix(".faulthandler").name


def answers(pid: int) -> bool:
    """Whether the process has a handler for the signal: any other one would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)

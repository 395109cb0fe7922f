"""The user that ranks run as, if an agent was started with `--run-as`: its checks, its rights."""

import ctypes
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ...events.errors import UsageError

PROBE_S_MAX = 60.0
_DUMPABLE_CODE = 4
_libc = ctypes.PyDLL(None, use_errno=True)  # see linux.py
_PROBE = """
import os, sys
private, *folders = sys.argv[1:]
if os.access(private, os.X_OK):
    sys.exit(f"it can read {private}")
for one in folders:
    if os.path.exists(one) and not os.access(one, os.R_OK | os.W_OK | os.X_OK):
        sys.exit(f"it cannot write in {one}")
import unicron.workers.ipc.pipe_protocol
"""


class RankUser(NamedTuple):
    """A user of this machine. `groups`: all that it is in."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def find(name: str) -> RankUser | None:
    """The user of that name, for this process to start others as; "": None. Raises UsageError."""
    if not name:
        return None
    if os.geteuid() != 0:
        raise UsageError(
            "--run-as: only root can start processes as another user",
            "start it as root, or leave --run-as out: ranks are then trusted as you",
        )
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise UsageError(f"--run-as: there is no user {name!r}", "useradd --system NAME") from None
    if entry.pw_uid == 0:
        raise UsageError(f"--run-as: {name} is root", "give a user without rights")
    return RankUser(
        name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)), entry.pw_dir
    )


def check(user: RankUser, private: Path, *folders: str) -> None:
    """Check, as this user, that Python and this package can be loaded, that the temporary folder,
    /dev/shm and `folders` can be written, and `private` cannot be entered. Raises UsageError."""
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-c",
                _PROBE,
                str(private),
                tempfile.gettempdir(),
                "/dev/shm",
                *folders,
            ],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_S_MAX,
            preexec_fn=lambda: become(user),
        )
        why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.SubprocessError) as error:
        why = [f"it cannot run {sys.executable}: {error}"]
    for line in why:
        raise UsageError(
            f"--run-as {user.name}: {line}",
            "ranks need Python, Unicron, their data, and to write their output, as "
            "docs/guides/threat-model.md lists; the state folder must be closed",
        )


def become(user: RankUser | None) -> None:
    """Give up this process's rights for those of the user. Call it in a child, before code of
    others runs; between fork and exec it is safe. Does nothing for None."""
    if user is None:
        return
    os.setgroups(user.groups)
    os.setgid(user.gid)
    os.setuid(user.uid)
    # Without exec the files in /proc/self would stay root's, and the rank could not read its own.
    _libc.prctl(_DUMPABLE_CODE, 1, 0, 0, 0)

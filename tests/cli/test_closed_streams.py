"""A command whose standard streams are closed, as by a bare cron: never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

UNICRON = Path(sys.executable).parent / "unicron"
LIMIT_S = 60


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["classify LOG", "classify", "--version", "doctor",
                                   "locate none", "status"])
def test_a_command_survives_closed_streams(words: str, closed: str, tmp_path: Path) -> None:
    log = "CUDA error: unknown error\n"
    (tmp_path / "LOG").write_text(log, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" {words} {closed}', str(UNICRON)], cwd=tmp_path, timeout=LIMIT_S,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == (2 if words in ("locate none", "status") else 0)
    assert (tmp_path / "LOG").read_text(encoding="utf-8") == log

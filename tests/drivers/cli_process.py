"""The CLI as a user runs it: output, errors, exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from unicron.cli.app import run_command

LIMIT_S = 60


def unicron(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command with no cluster in the environment. All but `up` run in this process."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    clean |= {"COLUMNS": "100", "NO_COLOR": "1"}
    if folder is not None:
        clean["UNICRON_STATE"] = str(folder / "state")
    if arguments[:1] != ("up",):
        return in_process(arguments, folder, clean)
    return subprocess.run(
        [sys.executable, "-P", "-m", "unicron.cli.main", *arguments],
        text=True,
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
        cwd=folder,
        env=clean,
    )


def in_process(
    arguments: tuple[str, ...], folder: Path | None, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the command through `run_command`, without starting an interpreter."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(folder or Path.cwd()),
    ):
        code = run_command(arguments)
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


def refused(result: subprocess.CompletedProcess[str], words: str, code: int = 2) -> None:
    """The command failed with one error line, one hint line and nothing on stdout."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")
    assert len(hint) > len("hint: ")

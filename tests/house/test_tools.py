"""The project's tools refuse impossible arguments before they start anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import chaos_training
import pytest
from bench.recovery import main
from matrix import run


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (chaos_training, ["--rounds", "0"], "--rounds must be at least 1"),
        (
            chaos_training,
            ["--picture", "/proc/none"],
            "--picture /proc/none: No such file or directory",
        ),
        (run, ["--points", "nowhere"], "POINTS: none begins with 'nowhere'; there are "),
        (
            run,
            ["--faults", "SIGSTOP", "--variants", "bf16"],
            "no point of these meets such a fault",
        ),
        (main, ["-n", "0"], "-n must be at least 1"),
        (main, ["--systems", "slurm"], "slurm is none of unicron, bare_torch"),
    ],
)
def test_impossible_arguments_are_refused(
    tool: ModuleType,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_verb_without_its_folder_says_which_variable_names_it() -> None:
    done = subprocess.run(
        ["make", "-s", "-o", "setup", "-o", "types", "megatron-lm", "DIR="],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "megatron-lm    name a clone of Megatron-LM: DIR=/path/to/it\n"

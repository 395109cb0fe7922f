"""The units of deploy/systemd: systemd accepts them, and they start commands of this version."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from started_commands import options

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))


def complaints(text: str, name: str, folder: Path) -> str:
    """What systemd says about a unit whose program is that of this environment."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = folder / name
    programs = str(Path(sys.executable).parent).replace(" ", r"\x20")
    unit.write_text(text.replace("/opt/unicron/.venv/bin", programs))
    done = subprocess.run(
        [tool, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def service(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    return parser["Service"]


def command(unit: Path) -> list[str]:
    """The words of ExecStart, without what the unit's user adds."""
    *words, more = service(unit)["ExecStart"].split()
    assert more == "$UNICRON_OPTIONS"
    return words


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    assert complaints(unit.read_text(), unit.name, tmp_path) == ""


@pytest.mark.parametrize("fault", ["Restart=perhaps", "TimeoutStopSecs=1", "ExecStart=/nowhere/x"])
def test_a_fault_in_a_unit_is_found(fault: str, tmp_path: Path) -> None:
    text = UNITS[0].read_text()
    key = fault.partition("=")[0]
    broken = "\n".join(fault if line.startswith(f"{key}=") else line for line in text.splitlines())
    broken = broken if broken != text.rstrip() else text.replace("[Service]", f"[Service]\n{fault}")
    assert complaints(broken, UNITS[0].name, tmp_path) != ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_unit_starts_a_command_of_this_version(unit: Path) -> None:
    program, *arguments = command(unit)
    assert program.endswith("/unicron")
    assert str(options(arguments)["state"]) == "/var/lib/unicron"
    assert service(unit)["StateDirectory"] == "unicron"


def test_an_agent_has_time_to_drain() -> None:
    unit = FOLDER / "unicron-agent.service"
    asked = options(command(unit)[1:])
    assert int(service(unit)["TimeoutStopSec"]) >= asked["drain_limit"] + 30

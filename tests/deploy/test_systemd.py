"""The units of deploy/systemd: systemd accepts them, and they start commands of this version."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from started_commands import options

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNITS = sorted(FOLDER.glob("*.service"))
GUIDE = (FOLDER.parents[1] / "docs/guides/systemd.md").read_text(encoding="utf-8")
CONTROL_PLANE, AGENT = FOLDER / "unicron-control-plane.service", FOLDER / "unicron-agent.service"
EXPOSURE_MAX = {CONTROL_PLANE: 2.0, AGENT: 9.0}
"""As systemd-analyze security counts it, from 0 to 10."""
NO_NEW_PRIVILEGES = {
    "LockPersonality",
    "MemoryDenyWriteExecute",
    "NoNewPrivileges",
    "PrivateDevices",
    "ProtectClock",
    "ProtectHostname",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "RestrictAddressFamilies",
    "RestrictNamespaces",
    "RestrictRealtime",
    "RestrictSUIDSGID",
    "SystemCallArchitectures",
    "SystemCallFilter",
}
"""With User= each of them takes the rights of setuid programs away. Source: systemd.exec(5)."""


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
    parser = configparser.ConfigParser(interpolation=None, strict=False)
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


def directives(unit: Path) -> set[str]:
    """Those that limit what the service may do."""
    sandbox = re.compile(
        "Protect|Private|Restrict|SystemCall|Lock|Memory|NoNew|Capab|Ambient|UMask"
    )
    return {name for name in service(unit) if sandbox.match(name)} | (
        {"Delegate", "ExecStopPost"} & set(service(unit))
    )


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_guide_has_a_reason_for_each_limit(unit: Path) -> None:
    found = directives(unit)
    assert found
    for name in found:
        assert f"`{name}=" in GUIDE, f"docs/guides/systemd.md has no reason for {name}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_counts_what_a_unit_may_do(unit: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    most = round(EXPOSURE_MAX[unit] * 10)
    done = subprocess.run(
        [tool, "security", "--offline=true", f"--threshold={most}", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd is older than 250")
    assert done.returncode == 0, done.stdout[-400:] + done.stderr


def test_a_rank_keeps_what_it_needs() -> None:
    """A GPU's setuid helper, devices, /dev/kmsg, any output folder, temporary files of its user."""
    found = set(service(AGENT))
    assert not found & NO_NEW_PRIVILEGES
    assert not found & {"ProtectHome", "PrivateTmp", "DeviceAllow", "DevicePolicy", "RemoveIPC"}
    assert service(AGENT)["ProtectSystem"] == "full"
    dropped = service(AGENT)["CapabilityBoundingSet"]
    assert dropped.startswith("~"), "what follows is taken away"
    for needed in ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "IPC_LOCK", "SYSLOG"):
        assert f"CAP_{needed}" not in dropped


def test_the_next_agent_may_start_beside_the_ranks_of_a_crashed_one(tmp_path: Path) -> None:
    """What systemd runs after a crash takes back what the agent's cgroup hands on."""
    assert service(AGENT)["Delegate"] == "yes"
    words = service(AGENT)["ExecStopPost"]
    (script,) = re.findall(r"^-\+/bin/sh -c '(.*)'$", words)
    script = script.replace("$$", "$").replace("\\\\", "\\")  # as systemd reads it
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("1:name=systemd:/x\n0::/a.slice/u.service/.control\n")
    handed = groups / "a.slice/u.service/cgroup.subtree_control"
    handed.parent.mkdir(parents=True)
    handed.write_text("pids\n")
    here = script.replace("/proc/self/cgroup", str(own)).replace("/sys/fs/cgroup", str(groups))
    subprocess.run(["/bin/sh", "-c", here], check=True, timeout=60)
    assert handed.read_text() == "-pids\n"

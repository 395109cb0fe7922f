"""`unicron doctor` on a host whose name server does not answer, in namespaces of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import network_namespaces
import pytest

SERVER = "127.0.0.54"
LIMIT_S = 60.0
SILENT = f"""
import socket
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("{SERVER}", 53))
from unicron.cli.commands import doctor
found = doctor.peer_names()
print(found.grade, found.result, found.hint, sep="|")
"""


@pytest.mark.skipif(bool(network_namespaces.why_not()), reason=network_namespaces.why_not())
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_name_server_that_does_not_answer_is_told(tmp_path: Path, is_listed: bool) -> None:
    resolver, hosts = tmp_path / "resolv.conf", tmp_path / "hosts"
    resolver.write_text(f"nameserver {SERVER}\noptions timeout:1 attempts:1\n")
    hosts.write_text("127.0.0.1 localhost\n" + "::ffff:127.0.0.1 localhost\n" * is_listed)
    within = (
        f"ip link set lo up && mount --bind {resolver} /etc/resolv.conf && "
        f'mount --bind {hosts} /etc/hosts && exec "$@"'
    )
    told = subprocess.run(
        ["unshare", "-n", "-m", "sh", "-c", within, "sh", sys.executable, "-P", "-c", SILENT],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout
    grade, result, hint = told.strip().split("|")
    assert "torch looks up the name of ::ffff:127.0.0.1 in " in result
    assert grade == ("ok" if is_listed else "note")
    assert ("each also in this form: ::ffff:127.0.0.1" in hint) is not is_listed

"""The commands that a person types in an incident: the control plane answers, not the whole log."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from bench.log.read import control_plane
from bench.log.sealed import SealedCluster
from unicron.cli.cluster.client import Client
from unicron.cli.commands import incident, logs, status, tasks
from unicron.cli.terminal.format import Plain
from unicron.events.errors import UsageError

NUM_SEALED, NUM_REST = 22_000, 200
"""More than two segments: there are snapshots, and records before those of the newest incident."""
NOW = re.compile(r"as of .* ago|for [0-9.]+ m?s")
"""What depends on the present time; so do the lines that begin with these words."""
OF_NOW = ("unicron status", "silent", "finish", "NEEDS", "pace")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that clients in this process ask control planes for."""
    paths, open_here = list[str](), Client._open_here

    def recorded(self: Client, method: str, path: str, **request: Any) -> Any:
        paths.append(path)
        return open_here(self, method, path, **request)

    monkeypatch.setattr(Client, "_open_here", recorded)
    return paths


def lines(capsys: pytest.CaptureFixture[str], call: Any, *given: Any, **options: Any) -> list[str]:
    """What a command prints, but for the present time."""
    with suppress(typer.Exit):  # a status from files
        call(*given, **options)
    return [NOW.sub("", line) for line in capsys.readouterr().out.splitlines()[1:]
            if not line.startswith(OF_NOW)]


def test_nobody_reads_the_whole_log_while_the_control_plane_answers(
        tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cluster = SealedCluster(tmp_path / "state")
    state = cluster.state
    try:
        asyncio.run(cluster.write(NUM_SEALED, NUM_REST))
        with control_plane(cluster):
            view: Plain = tasks.connect(state).get("/v1/state")
            task = next(one["name"] for one in view["tasks"] if one["state"] == "running")
            numbers = sorted(one["id"] for one in view["incidents"])
            plain = {"watch": False, "as_json": False}
            wanted: list[tuple[Any, str, Plain]] = [
                (status.status, task, plain),
                (status.status, task, plain | {"at": str(NUM_SEALED - 100)}),
                *((incident.incident, which, {"every": False, "as_json": False})
                  for which in (f"inc-{numbers[-1]}", str(numbers[0]), "")),
                (incident.incident, "", {"every": True, "as_json": False})]
            answered = [lines(capsys, call, state, None, what, **options)
                        for call, what, options in wanted]
            assert all(len(one) > 5 for one in answered)
            assert answered[2] == answered[4]
            for which in (str(numbers[0] + 1), "inc-999999"):
                with pytest.raises(UsageError, match="no incident") as refused:
                    incident.incident(state, None, which, every=False, as_json=False)
                assert f"the newest: inc-{numbers[-1]}, " in refused.value.hint
            with pytest.raises(UsageError, match=f"rank 99 of task {task} has not started yet"):
                logs.logs(state, None, task, 99, follow=False)
        assert "/v1/log" not in asked
    finally:
        cluster.stop()
    asked.clear()
    for (call, what, options), before in zip(wanted, answered, strict=True):
        assert lines(capsys, call, state, None, what, **options) == before, (what, options)
    assert asked == [], "these were read from the files"

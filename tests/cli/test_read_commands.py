"""The commands that a person types in an incident: the control plane answers, not the whole log."""

from __future__ import annotations

import asyncio
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
OF_NOW = ("unicron status", "you ", "           ")
"""The lines that depend on the present: the nodes of this log do not answer."""


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
    """What a command prints of the past."""
    with suppress(typer.Exit):  # a status from files
        call(*given, **options)
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(OF_NOW)]


def test_nobody_reads_the_whole_log_while_the_control_plane_answers(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = SealedCluster(tmp_path / "state")
    state, plain = cluster.state, {"as_json": False}
    try:
        asyncio.run(cluster.write(NUM_SEALED, NUM_REST))
        with control_plane(cluster):
            view: Plain = tasks.connect(state).get("/v1/state")
            task = next(one["name"] for one in view["tasks"] if one["state"] == "running")
            closed = [one["id"] for one in view["incidents"] if one["outcome"]]
            past: list[tuple[Any, str, Plain]] = [
                (status.status, task, {"watch": False, "at": str(NUM_SEALED - 100)}),
                *((incident.incident, f"inc-{one}", {"every": False}) for one in closed[::9]),
            ]
            present: list[tuple[Any, str, Plain]] = [
                (status.status, task, {"watch": False}),
                (incident.incident, "", {"every": False}),
                (incident.incident, "", {"every": True}),
            ]
            answered = [
                lines(capsys, call, state, None, what, **options, **plain)
                for call, what, options in (*past, *present)
            ]
            assert all(len(one) > 5 for one in answered)
            for which in (f"{closed[0] + 1}", "inc-999999"):
                with pytest.raises(UsageError, match="no incident") as refused:
                    incident.incident(state, None, which, every=False, as_json=False)
                assert "the newest: inc-" in refused.value.hint
            with pytest.raises(UsageError, match=f"rank 99 of task {task} has not started yet"):
                logs.logs(state, None, task, 99, follow=False)
        assert "/v1/log" not in asked
    finally:
        cluster.stop()
    asked.clear()
    for (call, what, options), before in zip(past, answered, strict=False):
        assert lines(capsys, call, state, None, what, **options, **plain) == before, what
    assert asked == [], "these were read from the files"

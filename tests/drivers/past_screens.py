"""The screens of a history that a test has read: of `status TASK` and of `incident --all`."""

from __future__ import annotations

from typing import Any

from unicron.cli.screens import incident, task
from unicron.control_plane.api.timeline_answer import incidents_of, past_of
from unicron.control_plane.history.history import History

Plain = dict[str, Any]


def task_status(
    view: Plain, shown: Plain, history: History, *, now_s: float, option: str = ""
) -> list[str]:
    past = {**past_of(history, shown["id"], now_s)}
    return task.task_status(view, shown, past, now_s=now_s, option=option)


def every(history: History, *, now_s: float, option: str = "") -> list[str]:
    return incident.every({**incidents_of(history, 0.0, now_s)}, option=option)

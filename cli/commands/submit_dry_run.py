"""`unicron submit --dry-run`: the layouts of a job, and the plan that would follow."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import msgspec

from ...control_plane.api.requests import NO_ROOM
from ...control_plane.throughput.layout_choices import Choices, choices
from ...events.errors import UnicronError, UsageError
from ...events.spec.job import JobSpec
from ..cluster.client import DRY_RUN_S_MAX, Client, Unreachable, connect
from ..cluster.state_dir import StateDir
from ..files import job_file
from ..screens import layouts
from ..screens import plan as plan_screen
from ..terminal import console
from ..terminal.format import Plain, labelled
from .tasks import check_files, check_output, option_for, slots_in_words

SMALLER = "a larger slots.max, or a smaller model"


def dry_run(state: StateDir, url: str | None, path: Path, *, as_json: bool) -> None:
    """Print the layouts of numbers of slots. Where a cluster runs, print the plan that would
    follow. Raises UsageError for a job that cannot have a layout, or that the cluster refuses."""
    spec = job_file.load(path)
    found = choices(spec)
    if found.refused:
        if as_json:
            _print_json(found)
        raise UsageError(f"{job_file.shown_name(path)}: {found.refused}",
                         NO_ROOM if spec.training is not None else SMALLER)
    client = _client(state, url)
    if not as_json:
        console.lines(layouts.page(spec, found, slots_in_words(spec.slots)))
    plan = None
    try:
        plan = _plan(client, spec, url, path) if client is not None else None
    except UnicronError as error:  # the layouts are printed even if this cluster refuses the job
        if as_json:
            _print_json(found, plan_refused=str(error))
        raise
    if as_json:
        _print_json(found, plan)
        return
    if plan is None:
        console.lines(["", *labelled("plan", "no cluster runs here: with one, the plan that would "
                                             "follow is shown too")])
        return
    typed = f"--submit {shlex.quote(str(path))}"
    console.lines(["", *plan_screen.dry_run(plan, typed, option=option_for(state))])


def _print_json(found: Choices, plan: Plain | None = None, plan_refused: str = "") -> None:
    """`plan_refused`: why the cluster has no plan with this job."""
    console.out(json.dumps({**msgspec.to_builtins(found), "plan": plan,
                            "plan_refused": plan_refused}))


def _client(state: StateDir, url: str | None) -> Client | None:
    """A client of the cluster that is named, or that runs on the state folder; None if none."""
    if url or os.environ.get("UNICRON_URL"):
        return connect(state, url)
    try:
        client = connect(state)
        client.get("/v1/state")
    except Unreachable:
        return None
    return client


def _plan(client: Client, spec: JobSpec, url: str | None, path: Path) -> Plain:
    check_files(spec, client, url, path)
    check_output(spec, client, path)
    change: Plain = {"submit": msgspec.to_builtins(spec, str_keys=True)}
    found: Plain = client.post("/v1/plan/dry-run", change, DRY_RUN_S_MAX)
    return found

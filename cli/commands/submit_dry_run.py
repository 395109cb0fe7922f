"""`unicron submit --dry-run`: the layouts of a job, and the plan that would follow."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from ...control_plane.api.requests import NO_ROOM
from ...control_plane.throughput.layout_choices import Choices, choices
from ...events.errors import UsageError
from ...events.spec.job import JobSpec
from ..cluster.client import Client, Refused, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..files import job_file
from ..screens import layouts
from ..screens import plan as plan_screen
from ..terminal import console
from ..terminal.format import Plain, labelled
from .tasks import check_files, check_output, option_for, slots_in_words

OF_ITS_STATE = (409, 422)
"""Refusals that follow from the cluster as it is now; a larger or emptier one takes the job."""
SMALLER = "a larger slots.max, or a smaller model"


def dry_run(state: StateDir, url: Urls, path: Path, *, as_json: bool) -> None:
    """Print the layouts of numbers of slots, and where a cluster runs the plan that would follow,
    or why it would refuse the job now. Raises UsageError for a job that no cluster could run so."""
    spec = job_file.load(path)
    found = choices(spec)
    if found.refused:
        if as_json:
            _print_json(found)
        raise UsageError(f"{job_file.shown_name(path)}: {found.refused}",
                         NO_ROOM if spec.training is not None else SMALLER)
    client = _client(state, url)
    check_files(spec, client, url, path)
    if client is not None:
        check_output(spec, client, path)
    if not as_json:
        console.lines(layouts.page(spec, found, slots_in_words(spec.slots)))
    plan, refused, hint = None, "", ""
    try:
        plan = _plan(client, spec) if client is not None else None
    except Refused as error:
        if error.status not in OF_ITS_STATE:
            raise
        refused, hint = str(error), error.hint
    if as_json:
        _print_json(found, plan, refused)
        return
    if plan is None:
        told = (f"this cluster would refuse the job now: {refused} ({hint})" if refused else
                "no cluster runs here: with one, the plan that would follow is shown too")
        console.lines(["", *labelled("plan", told)])
        return
    typed = f"--submit {shlex.quote(str(path))}"
    console.lines(["", *plan_screen.dry_run(plan, typed, option=option_for(state))])


def _print_json(found: Choices, plan: Plain | None = None, plan_refused: str = "") -> None:
    """`plan_refused`: why the cluster has no plan with this job."""
    console.data({**msgspec.to_builtins(found), "plan": plan, "plan_refused": plan_refused})


def _client(state: StateDir, url: Urls) -> Client | None:
    """A client of the cluster that is named, or that runs on the state folder; None if none."""
    if url or os.environ.get("UNICRON_URL"):
        return connect(state, url)
    try:
        client = connect(state)
        client.get("/v1/state")
    except Unreachable:
        return None
    return client


def _plan(client: Client, spec: JobSpec) -> Plain:
    change: Plain = {"submit": msgspec.to_builtins(spec, str_keys=True)}
    return client.dry_run(change)

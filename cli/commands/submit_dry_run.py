"""`unicron submit --dry-run`: the layouts of a job, and the plan that would follow."""

import os
import shlex
import textwrap
from pathlib import Path

import msgspec

from ...control_plane.api.requests import NO_ROOM
from ...control_plane.throughput.layout_choices import Choice, Choices, choices
from ...control_plane.throughput.memory import RESERVED_BYTES, in_gib
from ...events.errors import UsageError
from ...events.spec.job import JobSpec
from ..cluster.client import Client, Refused, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..files import job_file, megatron_command
from ..screens import plan as plan_screen
from ..terminal import console
from ..terminal import format as fmt
from .outputs import check_folder, check_output
from .tasks import check_files, option_for, slots_in_words

OF_ITS_STATE = (409, 422)
"""Refusals that follow from the cluster as it is now; a larger or emptier one takes the job."""
SMALLER = "a larger slots.max, or a smaller model"


def dry_run(state: StateDir, url: Urls, path: Path, *, as_json: bool) -> None:
    """Print the layouts of numbers of slots, and where a cluster runs the plan that would follow,
    or why it would refuse the job now. Raises UsageError for a job that cannot have a layout, for a
    data file that the ranks would miss, and for an output folder with the checkpoints of another
    task."""
    spec = job_file.load(path)
    found = choices(spec)
    if found.refused:
        if as_json:
            _print_json(found)
        raise UsageError(
            f"{job_file.shown_name(path)}: {found.refused}",
            NO_ROOM if spec.training is not None else SMALLER,
        )
    client = _client(state, url)
    check_files(spec, client, url, path)
    if client is not None:
        check_output(spec, client, path)
    check_folder(spec, url)
    if not as_json:
        console.lines(page(spec, found, slots_in_words(spec.slots)))
    plan, refused, hint = None, "", ""
    try:
        if client is not None:
            plan = client.dry_run({"submit": msgspec.to_builtins(spec, str_keys=True)})
    except Refused as error:
        if error.status not in OF_ITS_STATE:
            raise
        refused, hint = str(error), error.hint
    if as_json:
        _print_json(found, plan, refused)
        return
    if plan is None:
        told = (
            f"this cluster would refuse the job now: {refused} ({hint})"
            if refused
            else "no cluster runs here: with one, the plan that would follow is shown too"
        )
        console.lines(["", *fmt.labelled("plan", told)])
        return
    console.lines(
        [
            "",
            *plan_screen.dry_run(
                plan, f"--submit {shlex.quote(str(path))}", option=option_for(state)
            ),
        ]
    )


def _print_json(found: Choices, plan: fmt.Plain | None = None, plan_refused: str = "") -> None:
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


# --- The page of the layouts. ---
UNKNOWN, INDENT = "-", " " * 7


def page(spec: JobSpec, found: Choices, slots: str) -> list[str]:
    """The layouts of a job. `slots`: the permitted numbers in words."""
    size = fmt.scaled(found.num_parameters, " parameters")
    about = [f"{size} on {found.gpu}" if found.gpu else size] if found.num_parameters else []
    heals = megatron_command.healing(spec)
    lines = fmt.labelled("job", "; ".join([f"{spec.name}, {slots} slots", *about, heals]))
    if not found.choices:
        return [
            *lines,
            *fmt.labelled(
                "layout", "none is searched: the job names no model, its command lays out its ranks"
            ),
        ]
    lines += fmt.labelled("memory", _memory(spec, found))
    if (work := spec.training) is not None and work.reproducible != "rounding":
        tensor = work.parallel.tensor[0]
        lines += fmt.labelled(
            "sums",
            "; ".join(
                (
                    f"reproducible: {work.reproducible}"
                    + ", if the script can" * bool(spec.command),
                    f"a digest of the state every {work.digest_every} iterations"
                    if work.digest_every
                    else "no digests",
                    f"tensor parallel stays {tensor}"
                    + (", so slots beyond a multiple of it train nothing" if tensor > 1 else ""),
                )
            ),
        )
    if spec.training is not None and spec.training.copy_every:
        lines += fmt.labelled("copies", _copies(spec, found))
    timed = found.choices[0].iteration_s is not None
    lines += [] if timed else fmt.labelled("speed", "as modelled, relative to the first row")
    head = (
        "SLOTS",
        "LAYOUT",
        *(("ITERATION", "RATE", "OF EACH") if timed else ("SPEED",)),
        "MEMORY",
        "KEPT SUM",
        *(("COPIES",) if _has_node_copies(found) else ()),
    )
    rows = [_row(one, copies=_has_node_copies(found)) for one in found.choices]
    drawn = fmt.table(head, rows, right=(0, *range(2, len(head))))
    lines += ["", drawn[0]]
    for one, line in zip(found.choices, drawn[1:], strict=True):
        lines += [
            fmt.clipped(line, fmt.SCREEN_COLUMNS),
            *textwrap.wrap(
                "; ".join(one.notes),
                fmt.SCREEN_COLUMNS,
                initial_indent=INDENT,
                subsequent_indent=INDENT,
                break_on_hyphens=False,
            ),
        ]
    if found.num_others:
        others = fmt.number_of(found.num_others, "other number")
        lines += ["", f"and {others} of slots with a layout"]
    return lines


def _memory(spec: JobSpec, found: Choices) -> str:
    """What the numbers of memory are, and against what they are checked."""
    if found.choices[0].memory_bytes is None:
        return "unknown: write loop.model, and layouts are checked against the GPU's memory"
    work = spec.training
    kept = (
        f"KEPT SUM is the part of the integers of {work.reproducible_bits} bits in which "
        "gradients are summed"
        if work and work.reproducible != "rounding"
        else "KEPT SUM is the part that holds a copy of the rank's own gradients, 4 bytes a "
        "parameter: if a fault interrupts their sum over the ranks, no micro-batch is run again"
        if found.choices[0].kept_bytes
        else "a fault while gradients are summed redoes the iteration (kept_sum: false)"
        if spec.training is not None
        else "no gradients are kept, since nothing heals in memory"
    )
    against = (
        f", of the {in_gib(found.capacity_bytes)} of a {found.gpu}"
        if found.gpu
        else f"; not checked: the spec names no GPU, of which {in_gib(RESERVED_BYTES)} more "
        "would be reserved"
    )
    return f"as predicted for the fullest rank{against}; {kept}"


def _has_node_copies(found: Choices) -> bool:
    return any(one.node_copies_bytes for one in found.choices)


def _copies(spec: JobSpec, found: Choices) -> str:
    """The host memory that in-memory checkpoints take on a node, by the number of nodes."""
    if not found.copies_bytes:
        return "their host memory is unknown until the first one: write loop.model"
    if _has_node_copies(found):
        return (
            "COPIES is their host memory on each node: two versions of the state, each in two "
            "stores if there are two nodes"
        )
    half, quarter = in_gib(found.copies_bytes / 2), in_gib(found.copies_bytes / 4)
    return (
        f"in host memory, {half} a node on one or two nodes, {quarter} on four, and so on: "
        "two versions of the state, each in two stores if there are two nodes"
    )


def _row(one: Choice, *, copies: bool) -> list[str]:
    timed = (
        [f"{one.speed:.2f}"]
        if one.iteration_s is None or one.rate_flops is None
        else [
            fmt.span(one.iteration_s),
            fmt.scaled(one.rate_flops, "FLOP/s"),
            fmt.scaled(one.rate_flops / one.slots, "FLOP/s"),
        ]
    )
    return [
        fmt.count(one.slots),
        one.layout,
        *timed,
        *(
            in_gib(value) if value else UNKNOWN
            for value in (
                one.memory_bytes,
                one.kept_bytes,
                *([one.node_copies_bytes] if copies else ()),
            )
        ),
    ]

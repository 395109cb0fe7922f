"""The page of a job's layouts: `unicron submit --dry-run`."""

from __future__ import annotations

import textwrap

from ...control_plane.throughput.layout_choices import Choice, Choices
from ...control_plane.throughput.memory import RESERVED_BYTES, in_gib
from ...events.spec.job import JobSpec
from ..files import megatron_command
from ..terminal import format as fmt

UNKNOWN, INDENT = "-", " " * 7


def page(spec: JobSpec, found: Choices, slots: str) -> list[str]:
    """The layouts of a job. `slots`: the permitted numbers in words."""
    size = fmt.scaled(found.num_parameters, " parameters")
    about = [f"{size} on {found.gpu}" if found.gpu else size] if found.num_parameters else []
    heals = megatron_command.healing(spec)
    lines = fmt.labelled("job", "; ".join([f"{spec.name}, {slots} slots", *about, heals]))
    if not found.choices:
        return [*lines, *fmt.labelled("layout", "none is searched: a command without model: lays "
                                                "out its processes itself")]
    lines += fmt.labelled("memory", _memory(spec, found))
    lines += fmt.labelled("copies", _copies(spec, found)) if _makes_copies(spec) else []
    timed = found.choices[0].iteration_s is not None
    lines += [] if timed else fmt.labelled("speed", "as modelled, relative to the first row")
    head = ("SLOTS", "LAYOUT", *(("ITERATION", "RATE", "OF EACH") if timed else ("SPEED",)),
            "MEMORY", "KEPT SUM", *(("COPIES",) if _has_node_copies(found) else ()))
    rows = [_row(one, copies=_has_node_copies(found)) for one in found.choices]
    drawn = fmt.table(head, rows, right=(0, *range(2, len(head))))
    lines += ["", drawn[0]]
    for one, line in zip(found.choices, drawn[1:], strict=True):
        lines += [fmt.clipped(line, fmt.SCREEN_COLUMNS), *textwrap.wrap(
            "; ".join(one.notes), fmt.SCREEN_COLUMNS, initial_indent=INDENT,
            subsequent_indent=INDENT, break_on_hyphens=False)]
    if found.num_others:
        others = fmt.number_of(found.num_others, "other number")
        lines += ["", f"and {others} of slots with a layout"]
    return lines


def _memory(spec: JobSpec, found: Choices) -> str:
    """What the numbers of memory are, and against what they are checked."""
    if found.choices[0].memory_bytes is None:
        return "unknown: write loop.model, and layouts are checked against the GPU's memory"
    kept = ("KEPT SUM is the part that holds a copy of the rank's own gradients, 4 bytes a "
            "parameter: if a fault interrupts their sum over the ranks, no micro-batch is run again"
            if found.choices[0].kept_bytes
            else "a fault while gradients are summed redoes the iteration (kept_sum: false)"
            if spec.training is not None
            else "no gradients are kept, since nothing heals in memory")
    against = (f", of the {in_gib(found.capacity_bytes)} of a {found.gpu}" if found.gpu
               else f"; not checked: the spec names no GPU, of which {in_gib(RESERVED_BYTES)} more "
                    "would be reserved")
    return f"as predicted for the fullest rank{against}; {kept}"


def _makes_copies(spec: JobSpec) -> bool:
    return spec.training is not None and spec.training.copy_every > 0


def _has_node_copies(found: Choices) -> bool:
    return any(one.node_copies_bytes for one in found.choices)


def _copies(spec: JobSpec, found: Choices) -> str:
    """The host memory that in-memory checkpoints take on a node, by the number of nodes."""
    if not found.copies_bytes:
        return "their host memory is unknown until the first one: write loop.model"
    if _has_node_copies(found):
        return ("COPIES is their host memory on each node: two versions of the state, each in two "
                "stores if there are two nodes")
    half, quarter = in_gib(found.copies_bytes / 2), in_gib(found.copies_bytes / 4)
    return (f"in host memory, {half} a node on one or two nodes, {quarter} on four, and so on: "
            "two versions of the state, each in two stores if there are two nodes")


def _row(one: Choice, *, copies: bool) -> list[str]:
    timed = ([f"{one.speed:.2f}"] if one.iteration_s is None or one.rate_flops is None else
             [fmt.span(one.iteration_s), fmt.scaled(one.rate_flops, "FLOP/s"),
              fmt.scaled(one.rate_flops / one.slots, "FLOP/s")])
    return [fmt.count(one.slots), one.layout, *timed,
            *(in_gib(value) if value else UNKNOWN for value in (
                one.memory_bytes, one.kept_bytes, *([one.node_copies_bytes] if copies else ())))]

"""`unicron plan` for a running cluster: the present plan, dry runs, and applying a dry run."""

import math
import shlex
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from ...events.errors import UsageError
from ..cluster.client import Client, Refused, Urls, connect
from ..cluster.state_dir import StateDir
from ..files import job_file
from ..screens import plan as plan_screen
from ..terminal import console
from ..terminal.format import Plain
from .names import pick
from .operate import WEIGHT, paused_lines, pick_nodes, reason_or_user
from .request_outcome import outcome_of, plan_lines, view_before
from .tasks import check_files, option_for

CHANGED_CODE = 412
"""HTTP status if the input differs from --check."""


class PlanOptions(Struct, frozen=True, kw_only=True):
    """The options as typed."""

    without: tuple[str, ...] = ()
    """Names, also comma-separated."""
    slots: int | None = None
    weights: tuple[str, ...] = ()
    """TASK=W."""
    submit: Path | None = None
    apply: bool = False
    check: int | None = None
    seq: int | None = None
    """The record whose plan is shown."""
    reason: str = ""

    @property
    def is_change(self) -> bool:
        return bool(
            self.without or self.weights or self.submit is not None or self.slots is not None
        )

    @property
    def typed(self) -> str:
        """The options of the change, quoted for a shell."""
        words = [f"--without {name}" for name in self.without]
        words += [f"--with {self.slots}"] if self.slots is not None else []
        words += [f"--weight {shlex.quote(one)}" for one in self.weights]
        words += [f"--submit {shlex.quote(str(self.submit))}"] if self.submit is not None else []
        return " ".join(words)


def plan(state: StateDir, url: Urls, asked: PlanOptions, *, as_json: bool) -> None:
    """Print the plan. Raises UsageError."""
    _validate(asked)
    job = job_file.load(asked.submit) if asked.submit is not None else None
    client, option = connect(state, url), option_for(state)
    if not asked.is_change:
        found: Plain = client.plan("" if asked.seq is None else str(asked.seq))
        now_s = time.time() if asked.seq is None else found["at_s"]
        console.show(found, plan_screen.present(found, now_s=now_s, option=option), as_json=as_json)
        return
    change = _change(client.get("/v1/state"), asked)
    if job is not None and asked.submit is not None:
        check_files(job, client, url, asked.submit)
        change["submit"] = msgspec.to_builtins(job, str_keys=True)
    if asked.apply:
        _apply(state, client, asked, change, as_json=as_json)
        return
    found = client.dry_run(change)
    console.show(found, plan_screen.dry_run(found, asked.typed, option=option), as_json=as_json)


def _apply(
    state: StateDir, client: Client, asked: PlanOptions, change: Plain, *, as_json: bool
) -> None:
    before: Plain = client.get("/v1/state")
    try:
        seq = client.apply(change, asked.check or 0, reason_or_user(asked.reason))
    except Refused as error:
        if error.status != CHANGED_CODE:
            raise
        again = f"unicron plan {asked.typed}{option_for(state)} shows what it would do now"
        raise Refused(error.status, str(error), again) from None
    followed = outcome_of(client, seq)
    if as_json:
        console.data(msgspec.structs.asdict(followed))
        return
    after: Plain = client.get("/v1/state")
    console.out(f"applied  {asked.typed} (seq {followed.seq})")
    console.lines(
        [*plan_lines(followed, view_before(before, after)), *paused_lines(after, option_for(state))]
    )
    console.out(f"look     unicron status -w{option_for(state)}")


def _validate(asked: PlanOptions) -> None:
    """Raises UsageError for options that exclude each other."""
    if asked.apply and not asked.is_change:
        raise UsageError("--apply has nothing to apply", "unicron plan --without NODE first")
    if asked.is_change and asked.seq is not None:
        raise UsageError(
            "--seq shows a past plan: nothing can be dry-run on it", f"unicron plan {asked.typed}"
        )
    if asked.apply and asked.slots is not None:
        raise UsageError(
            "--with cannot be applied: it names no machine",
            "to add slots, run unicron agent on a new machine",
        )
    if asked.apply and asked.check is None:
        raise UsageError(
            "--apply needs --check INPUT",
            f"unicron plan {asked.typed} shows what would be, and the input to check",
        )
    if asked.check is not None and not asked.apply:
        raise UsageError(
            "--check goes with --apply",
            f"unicron plan {asked.typed} --apply --check {asked.check}"
            if asked.is_change
            else "unicron plan --without NODE --apply --check INPUT",
        )
    if asked.reason and not asked.apply:
        raise UsageError(
            "--reason goes with --apply: a dry run leaves nothing in the log", "leave --reason out"
        )


def _change(view: Plain, asked: PlanOptions) -> Plain:
    """The change in the control plane's format. Raises UsageError for unknown nodes and tasks."""
    change: Plain = {"slots": asked.slots or 0}
    change["without"] = (
        [node["id"] for node in pick_nodes(view["nodes"], asked.without)] if asked.without else []
    )
    change["weights"] = {}
    for words in asked.weights:
        name, equals, number = words.rpartition("=")
        if not equals or not name:
            raise UsageError(f"--weight {words!r} is not TASK=W", "for example --weight alpha=2")
        task = pick(view["tasks"], name)
        if str(task["id"]) in change["weights"]:
            raise UsageError(f"task {name} is weighed twice", "give each task one weight")
        change["weights"][str(task["id"])] = _weight(number)
    return change


def _weight(text: str) -> float:
    hint = "for example --weight alpha=2"
    try:
        weight = float(text.replace("_", "?"))  # Python would read 1_0 as ten
    except ValueError:
        raise UsageError(f"{text!r} is not a number: {WEIGHT}", hint) from None
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"{text} is not a weight: {WEIGHT}", hint)
    return weight

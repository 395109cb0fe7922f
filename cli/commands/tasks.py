"""`submit`, `cancel` and `wait`; finding a task by name or id."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from ...control_plane.api.needs import ENDED
from ...events.errors import UnicronError, UsageError
from ...events.network_address import is_loopback
from ...events.spec.job import JobSpec, Slots
from ...events.whole_numbers import whole_number
from ..cluster.answers import Interrupted
from ..cluster.client import Client, Refused, Unable, Unreachable, Urls, connect
from ..cluster.local_cluster import START_S_MAX
from ..cluster.state_dir import StateDir, default
from ..files import job_file, megatron_command
from ..terminal import console
from ..terminal.format import Plain, listed, span
from .names import chosen, pick
from .outputs import check_folder, check_output
from .request_outcome import outcome_of, plan_lines, view_before

HELD_S_MAX, POLL_S = 1.0, 0.1
"""How long `submit` waits for an `up` to begin."""
WAIT_POLL_S = 0.5
REACHED = {
    "running": ("running", "degraded"),
    "finished": ("finished",),
    "healed": ("running", "degraded", "saving", "finishing", "finished"),
}
"""The states of a task that each wish is fulfilled by; healed: also no incident is open, nor
recovering."""


def submit(state: StateDir, url: Urls, paths: Sequence[Path], *, as_json: bool) -> None:
    """Validate the job files and submit each. Raises UsageError, before the first is submitted for
    a file that is not valid."""
    specs = [(path, job_file.load(path)) for path in paths]
    client = _connect_soon(state, url)
    for path, spec in specs:
        check_files(spec, client, url, path)
        check_output(spec, client, path)
        check_folder(spec, url)
    for path, spec in specs:
        try:
            _submit(state, client, spec, as_json=as_json)
        except Refused as error:
            raise Refused(
                error.status, f"{job_file.shown_name(path)}: {error}", error.hint
            ) from None


def _connect_soon(state: StateDir, url: Urls) -> Client:
    """As `connect`; while an `up` starts here, waits until its control plane answers."""
    begun_s = time.monotonic()
    while True:
        try:
            client = connect(state, url)
            client.get("/v1/health")
            return client
        except Unreachable:
            starts = not (url or os.environ.get("UNICRON_URL")) and state.is_held()
            if time.monotonic() - begun_s > (START_S_MAX if starts else HELD_S_MAX):
                raise
        time.sleep(POLL_S)


def _submit(state: StateDir, client: Client, spec: JobSpec, *, as_json: bool) -> None:
    before: Plain = {} if as_json else client.get("/v1/state")
    answer = client.post("/v1/tasks", msgspec.to_builtins(spec, str_keys=True))
    if as_json:
        console.data(answer)
        return
    console.out(
        f"task {answer['task']}  {spec.name}, weight {spec.weight:g}, "
        f"{slots_in_words(spec.slots)} slots"
    )
    after: Plain = client.get("/v1/state")
    console.lines(plan_lines(outcome_of(client, answer["seq"]), view_before(before, after)))
    layouts = [task["modelled_layout"] for task in after["tasks"] if task["id"] == answer["task"]]
    if spec.training is not None and layouts and layouts[0]:
        console.out(f"layout   {spec.name} {layouts[0]}")
    if (healing := after["cluster"]["healing"]) != "on":
        console.out(f"paused   {healing}: it is planned, and does not start")
    if spec.training is None:
        console.talk(
            "note: command: is supervised and restarted only; train: heals in memory, "
            "and so does a loop that has adopted Unicron (heal: in-memory)"
        )
    elif megatron_command.why_not(spec):
        console.talk(f"note: it {megatron_command.healing(spec)}")
    option = option_for(state)
    console.talk(f"next: unicron status {spec.name}{option}   unicron logs {spec.name} -f{option}")


def check_files(spec: JobSpec, client: Client | None, url: Urls, path: Path) -> None:
    """Raises UsageError for a data file that is missing; only warns if ranks may run on other
    hosts. `client` None: no cluster runs here."""
    missing = [
        f"train.data[{index}]: {name} is not a readable file"
        for index, name in enumerate(spec.train.data if spec.train is not None else ())
        if not (os.path.isfile(name) and os.access(name, os.R_OK))
    ]
    if not missing:
        return
    nodes = client.get("/v1/state")["nodes"] if client is not None else ()
    hosts = {node["host"] for node in nodes if node["contact"] != "left"}
    if not (url or os.environ.get("UNICRON_URL")) and hosts and all(map(is_loopback, hosts)):
        raise UsageError(
            f"{path}: {missing[0]}", f"correct the path; a relative one begins at {Path.cwd()}"
        )
    console.talk(f"note: {missing[0]} on this host; each node needs it at the same path")


def cancel(state: StateDir, url: Urls, task: Sequence[str], reason: str, *, as_json: bool) -> None:
    """Cancel tasks. Raises UsageError."""
    client = connect(state, url)
    tasks: list[Plain] = client.get("/v1/state")["tasks"]
    live = [one for one in tasks if one["state"] not in ENDED]
    for found in chosen(task, tasks, live):
        answer = client.post(f"/v1/tasks/{found['id']}/cancel", {"reason": reason})
        console.show(
            answer,
            [f"task {found['id']}  {found['name']} cancelled (seq {answer['seq']})"],
            as_json=as_json,
        )
    if not as_json:
        console.talk(
            f"next: unicron status{option_for(state)}   (the others are planned again at its end)"
        )


def wait(
    state: StateDir,
    url: Urls,
    task: Sequence[str],
    until: str,
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Return when every task is so. Raises UnicronError after `timeout_s`, or for a task
    that cannot come to be so any more, and Unreachable."""
    began_s = time.monotonic()
    tasks: list[Plain] = connect(state, url).get("/v1/state")["tasks"]
    ids = [one["id"] for one in chosen(task, tasks, tasks)]
    while True:
        late = timeout_s is not None and time.monotonic() - began_s > timeout_s
        try:
            view: Plain = connect(state, url).get("/v1/state")
        except (Interrupted, Unable, Unreachable):
            if late:
                raise
            time.sleep(WAIT_POLL_S)
            continue
        open_ = {one["task"] for one in view["incidents"] if not one["outcome"]}
        found = [one for one in view["tasks"] if one["id"] in ids]
        left = [
            one
            for one in found
            if one["state"] not in REACHED[until] or (until == "healed" and one["id"] in open_)
        ]
        for one in left:
            if one["state"] in ENDED:
                raise UnicronError(
                    f"{one['name']} {one['state']}",
                    f"unicron status {one['id']}{option_for(state)}",
                )
        if not left:
            console.show(found, [f"{x['name']} {x['state']}" for x in found], as_json=as_json)
            return
        if late:
            names = [one["name"] for one in left]
            is_whole = left[0]["state"] in REACHED[until]
            raise UnicronError(
                f"{listed(names, 1)} not {until} after {span(timeout_s or 0.0)}, but "
                f"{'recovering' if is_whole else left[0]['state']}",
                f"unicron status {names[0]}{option_for(state)}",
            )
        time.sleep(WAIT_POLL_S)


def incident_id(text: str, hint: str = "for example 41 or inc-41") -> int:
    """`41` or `inc-41`. Raises UsageError."""
    number = whole_number(text.removeprefix("inc-"))
    if number is None:
        raise UsageError(f"{text[:40]!r} is not an incident", hint)
    return number


def number_of(client: Client, view: Plain, wanted: str) -> int:
    """The id of a task, also of one that has left the state. Raises UsageError as `pick` does."""
    try:
        return int(pick(view["tasks"], wanted)["id"])
    except UsageError:
        with suppress(UsageError):
            return int(past_of(client, wanted)["task"])
        raise


def past_of(client: Client, wanted: object, at: int = 0, *, whole: bool = True) -> Plain:
    """The past of a task by id or name; `at`: until that record, 0: the last. `whole`: wait until
    the control plane has read all of it. Raises UsageError."""
    from .offline import read_to_end

    found: Plain = read_to_end(
        client,
        f"/v1/tasks/{quote(str(wanted), safe='')}/curves",
        whole=whole,
        **({"at": at} if at else {}),
    )
    return found


def option_for(state: StateDir) -> str:
    """` --state DIR` quoted for a shell; empty for the default folder."""
    return "" if state.path == default() else f" {state.option}"


def slots_in_words(slots: Slots) -> str:
    """The allowed numbers of slots: `8 to 64 in steps of 8`, `8, 16 or 32`."""
    if slots.sizes:
        *first, last = map(str, slots.sizes)
        return f"{', '.join(first)} or {last}" if first else last
    step = f" in steps of {slots.multiple_of}" if slots.multiple_of > 1 else ""
    return f"{slots.min} to {slots.max}{step}"

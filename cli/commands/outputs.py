"""What is known here of an output folder before a task writes there: whose it is, what it lacks."""

import os
import shlex
from contextlib import suppress
from pathlib import Path

from ...control_plane.api.needs import ENDED
from ...events import object_storage
from ...events.errors import UsageError
from ...events.object_storage import Store
from ...events.spec.job import JobSpec, is_url
from ...workers.host import folder_trial, output_owner
from ...workers.host.output_owner import NotOwner, Owner
from ..cluster.client import Client, Urls
from ..terminal import console
from ..terminal.format import Plain


def check_output(spec: JobSpec, client: Client, path: Path) -> None:
    """Raises UsageError for an output folder that is another task's, by whatever name, or that has
    checkpoints of an earlier task, which this one would overwrite. Folders that this host does not
    see are not checked, and of scripts with --load, only whose folder it is."""
    training = spec.training
    if training is None:
        return
    loads = any(word.partition("=")[0] == "--load" for word in spec.command)
    what = f"{path}: {'train' if spec.train is not None else 'loop'}.output"
    check_free(training.output, what, client, loads=loads)


def check_free(output: str, what: str, client: Client, *, loads: bool = False) -> None:
    """Raises UsageError as `check_output`, for an output that `what` names to the user."""
    local = output_owner.local_folder(output)
    if local is None or not local.is_dir():
        return
    state: Plain = client.get("/v1/state")
    same = [task for task in state["tasks"] if _normalised(task["output"]) == _normalised(output)]
    if any(task["state"] not in ENDED for task in same):  # the cluster refuses it, and says why
        return
    _check_owner(output, local, state, what)
    checkpoints = local.glob("gen-*/iter-*")
    if loads or not any(folder.name[5:].isdecimal() for folder in checkpoints):
        return
    owner = f"task {same[-1]['id']} ({same[-1]['name']})" if same else "an earlier task"
    name = os.path.normpath(local)
    raise UsageError(
        f"{what}: {name} has checkpoints of {owner}, which this one would overwrite",
        "name another output, or move them away: "
        f"mv {shlex.quote(name)} {shlex.quote(name + '.before')}",
    )


def check_folder(spec: JobSpec, url: Urls) -> None:
    """Says what the output folder lacks as this host and this user see it, which is no proof. A
    folder that is not there yet is one of the ranks' if the cluster is this host's."""
    from ...control_plane.throughput.state_size import state_bytes  # numpy: only where needed

    training = spec.training
    if training is None or is_url(training.output):
        return
    if _is_elsewhere(url) and not os.path.isdir(training.output):
        return
    output, every, keep = Path(training.output), training.checkpoint_every, training.checkpoint_keep
    num_all = (training.iterations - 1) // every + 1 if every else 1
    num = num_all if keep == "all" else min(keep + 1, num_all)
    short = folder_trial.shortage(output, num, state_bytes(spec))
    flaws = folder_trial.flaws(output) if output.is_dir() else []
    where = "train" if spec.train is not None else "loop"
    for flaw in [*flaws, *filter(None, [short])]:
        console.talk(f"note: {where}.output: {flaw.text}: {flaw.hint}")


def check_possible(output: str, what: str, url: Urls) -> None:
    """Raises UsageError for a path that can be no folder on this host; says what else is wrong with
    an output as this host and this user see it, which is no proof."""
    if is_url(output):
        if object_storage.is_installed():
            object_storage.check_driver(output, what)
            try:
                Store(output).check_writable()
            except OSError as error:
                console.talk(f"note: {what}: {output}, tried here: {object_storage.reason(error)}")
        return
    if _is_elsewhere(url):
        return
    folder = Path(output)
    try:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            folder.stat()  # a loop of links, a name that is too long
        least = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not least.is_dir():
            raise UsageError(f"{what}: {least} is not a folder", folder_trial.ANOTHER)
    except OSError as error:
        raise UsageError(
            f"{what}: {object_storage.reason(error).lower()}", folder_trial.ANOTHER
        ) from None
    for flaw in folder_trial.flaws(folder):
        console.talk(f"note: {what}: {flaw.text}: {flaw.hint}")


def _is_elsewhere(url: Urls) -> bool:
    return bool(url or os.environ.get("UNICRON_URL"))


def _normalised(output: str) -> str:
    return os.path.normpath(output_owner.local_folder(output) or output) if output else ""


def _check_owner(output: str, folder: Path, state: Plain, what: str) -> None:
    """Raises UsageError for the folder of a live task under another name (a link, a bind mount),
    or of another cluster."""
    for task in state["tasks"]:
        theirs = task["output"]
        local = output_owner.local_folder(theirs) if theirs else None
        if task["state"] in ENDED or local is None:
            continue
        if local.is_dir() and local.samefile(folder):
            raise UsageError(
                f"{what}: {folder} is being written, by task {task['id']} ({task['name']}), "
                f"which names it {theirs}",
                f"unicron cancel {task['id']}, or give this one another output",
            )
    cluster = state["cluster"]
    if not cluster.get("id"):  # an older control plane
        return
    me = Owner(cluster=cluster["name"], cluster_id=cluster["id"], output=output)
    try:
        output_owner.check(folder, me, takes_over=True)
    except NotOwner as error:
        raise UsageError(f"{what}: {error}", error.hint) from None
    except OSError:
        return  # it is not readable here

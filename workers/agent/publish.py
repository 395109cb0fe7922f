"""Publishes a checkpoint: moves `<output>/latest` forward, never back.

In a folder, `latest` is a link that is replaced atomically under a lock. A URL has neither links
nor locks: there it is a small object that is written in one request. If two agents publish to a URL
at the same moment, it may name the older checkpoint; a restart is not affected: the log says which
checkpoint is published.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec
import structlog
from msgspec import Struct

from ...events import object_storage
from ...events.decoding import from_json
from ...events.detached_thread import aside
from ...events.errors import UnicronError, UsageError
from ...events.file_lock import FileLock
from ...events.records.envelope import Record
from ...events.records.orders import PublishCheckpoint
from ...events.spec.job import is_url
from ..host import output_owner
from ..host.output_owner import Owner
from ..host.rank_user import RankUser
from .removal import NotRemoved, remove_old

PUBLISH_S_MAX = 60.0
SAID_BYTES_MAX = 1_000
_DONE = "done"
_LATEST = "latest"
_NOTE = output_owner.PUBLISHED_FILE
_LOCK = ".published.lock"

_log = structlog.get_logger("agent")


class PublishRefused(UnicronError):
    """The checkpoint was not published; `str()` gives the reason."""


class Superseded(PublishRefused):
    """A later order has already published."""


class Publisher:
    """Publishes the checkpoints that orders name, one at a time, as the user of the ranks."""

    def __init__(self, cluster: str, user: RankUser | None = None, cluster_id: str = "") -> None:
        self._cluster, self._cluster_id = cluster, cluster_id
        self._user = user
        self._publish = partial(_publish_as, user) if user else publish
        self._publishing, self._removing = asyncio.Lock(), asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()

    async def publish(self, order: PublishCheckpoint, record: Record) -> None:
        """Run `publish` in a thread, in call order. Raises PublishRefused, Superseded."""
        async with self._publishing:
            try:
                async with asyncio.timeout(PUBLISH_S_MAX):
                    await asyncio.to_thread(
                        self._publish,
                        cluster=self._cluster,
                        cluster_id=self._cluster_id,
                        order=record.seq,
                        at_s=record.at_s,
                        task=order.task,
                        generation=order.generation,
                        output=order.output,
                        path=order.path,
                    )
            except (OSError, subprocess.TimeoutExpired) as error:  # also TimeoutError
                raise PublishRefused(str(error) or "no answer from disk") from error

    def begin_removal(self, order: PublishCheckpoint, group: asyncio.TaskGroup) -> None:
        """Remove the order's old checkpoints beside all else: that takes as long as to read a
        checkpoint. What stays, and why, is in the log of the agent."""
        removal = group.create_task(self._remove_old(order), name=f"removal of task {order.task}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def stop(self) -> None:
        """Wait for no removal: a later order names what is left."""
        for removal in self._removals:
            removal.cancel()

    async def _remove_old(self, order: PublishCheckpoint) -> None:
        owner = Owner(
            cluster=self._cluster, cluster_id=self._cluster_id, task=order.task, output=order.output
        )
        remove = partial(_remove_as, self._user) if self._user else remove_old
        call = partial(remove, output=order.output, path=order.path, old=order.remove, owner=owner)
        async with self._removing:
            try:
                removed = await aside(call)
            except (UnicronError, OSError) as error:
                why = object_storage.reason(error)
                _log.warning("old checkpoints stay", task=order.task, why=why)
            else:
                if removed:
                    _log.info("old checkpoints removed", task=order.task, removed=removed)


class _Note(Struct, frozen=True, kw_only=True):
    """The last order that moved `latest`, and the `at_s` of its record. Within one log `at_s` never
    decreases. A new log of the same cluster numbers its orders from 1 again; `at_s` shows that they
    are later."""

    cluster: str
    order: int
    at_s: float = 0.0
    task: int
    generation: int
    path: str


def publish(
    *,
    cluster: str,
    order: int,
    at_s: float,
    task: int,
    generation: int,
    output: str,
    path: str,
    cluster_id: str = "",
) -> None:
    """Point `<output>/latest` at `path`, which is relative to `output`. In a folder this is one
    compare-and-set under a lock file. An order older than the last executed one is refused, as one
    of a task that is not the folder's owner; a repeated one does no harm. Blocks on the disk: call
    it in a thread. Raises PublishRefused, Superseded, OSError."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise PublishRefused(f"{path!r} is not a path inside the output folder")
    note = _Note(
        cluster=cluster, order=order, at_s=at_s, task=task, generation=generation, path=path
    )
    if is_url(output):
        _publish_url(output, note)
        return
    folder = Path(output)
    if not (folder / relative).is_dir():
        raise PublishRefused(f"{folder / relative} does not exist")
    publisher = Owner(cluster=cluster, cluster_id=cluster_id, task=task, output=output)
    with FileLock(folder / _LOCK, 0o644).acquire(waits=True) as lock:
        store = object_storage.PathStore(folder)
        output_owner.check(folder, publisher)
        _refuse_older(note, _decode(store.read(_NOTE)))
        lock.check()
        _move_link(folder, relative)
        store.write(_NOTE, msgspec.json.encode(note))  # with the link, as the folder is synced


def _publish_as(user: RankUser, **what: object) -> None:
    kind, why = _run_as(user, "publish", what, PUBLISH_S_MAX)
    if kind != _DONE:
        raise (Superseded if kind == Superseded.__name__ else PublishRefused)(
            why or f"no answer as {user.name}"
        )


def _remove_as(user: RankUser, **what: object) -> list[str]:
    kind, why = _run_as(user, "remove", what, None)
    if kind != _DONE:
        raise NotRemoved(why or f"no answer as {user.name}")
    return why.split()


def _run_as(
    user: RankUser, call: str, what: dict[str, object], s_max: float | None
) -> tuple[str, str]:
    """Run a call in a process of the user, who may lay links in the folder: with rights of the
    agent they would be followed. Returns what the process prints, which is the user's word: how it
    went, and why."""
    with tempfile.TemporaryFile() as said:
        subprocess.run(
            [sys.executable, "-P", "-m", __name__, call, msgspec.json.encode(what)],
            cwd="/",
            env={**os.environ, "HOME": user.home},
            user=user.uid,
            group=user.gid,
            extra_groups=user.groups,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=s_max,
        )
        said.seek(0)
        kind, _, why = said.read(SAID_BYTES_MAX).decode(errors="replace").partition(" ")
    return kind, why


def _publish_url(output: str, note: _Note) -> None:
    try:
        store = object_storage.Store(output)
    except UsageError as error:
        raise PublishRefused(f"{error} ({error.hint})") from None
    if not store.has(f"{note.path}/{object_storage.COMPLETE_MARK}"):
        raise PublishRefused(f"{output}/{note.path} is missing or incomplete")
    _refuse_older(note, _decode(store.read(_LATEST)))
    store.write(_LATEST, msgspec.json.encode(note) + b"\n")


def _refuse_older(note: _Note, last: _Note | None) -> None:
    if (
        last is not None
        and last.cluster == note.cluster
        and (last.at_s, last.order) > (note.at_s, note.order)
    ):
        raise Superseded(f"the later order {last.order} has already published {last.path}")


def _move_link(folder: Path, relative: PurePosixPath) -> None:
    latest, new = folder / _LATEST, folder / ".latest.new"
    if latest.exists() and not latest.is_symlink():
        raise PublishRefused(f"{latest} is not a link: move it away")
    new.unlink(missing_ok=True)
    new.symlink_to(relative, target_is_directory=True)
    new.replace(latest)


def _decode(data: bytes | None) -> _Note | None:
    try:
        return from_json(data, _Note) if data is not None else None
    except msgspec.MsgspecError:
        return None


if __name__ == "__main__":
    try:
        what = from_json(sys.argv[2])
        if sys.argv[1] == "publish":
            publish(**what)
            sys.stdout.write(_DONE)
        else:
            owner = msgspec.convert(what.pop("owner"), Owner)
            sys.stdout.write(" ".join([_DONE, *remove_old(**what, owner=owner)]))
    except (UnicronError, OSError) as error:
        sys.stdout.write(f"{type(error).__name__} {error}")

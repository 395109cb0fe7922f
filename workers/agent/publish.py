"""Publishes a checkpoint: moves `<output>/latest` forward, never back.

In a folder, `latest` is a link that is replaced atomically under a lock. A URL has neither links
nor locks: there it is a small object that is written in one request. If two agents publish to a URL
at the same moment, it may name the older checkpoint; a restart is not affected: the log says which
checkpoint is published.
"""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from ...events import object_storage
from ...events.errors import UnicronError, UsageError
from ...events.records.envelope import Record
from ...events.records.orders import PublishCheckpoint
from ...events.spec.job import is_url
from ..host.rank_user import RankUser

PUBLISH_S_MAX = 60.0
SAID_BYTES_MAX = 1_000
_DONE = "done"
_LATEST = "latest"
_NOTE = ".published.json"
_LOCK = ".published.lock"


class PublishRefused(UnicronError):
    """The checkpoint was not published; `str()` gives the reason."""


class Superseded(PublishRefused):
    """A later order has already published."""


class Publisher:
    """Publishes the checkpoints that orders name, one at a time, as the user of the ranks."""

    def __init__(self, cluster: str, user: RankUser | None = None) -> None:
        self._cluster = cluster
        self._publish = partial(_publish_as, user) if user else publish
        self._publishing = asyncio.Lock()

    async def publish(self, order: PublishCheckpoint, record: Record) -> None:
        """Run `publish` in a thread, in call order. Raises PublishRefused, Superseded."""
        async with self._publishing:
            try:
                async with asyncio.timeout(PUBLISH_S_MAX):
                    await asyncio.to_thread(
                        self._publish,
                        cluster=self._cluster,
                        order=record.seq,
                        at_s=record.at_s,
                        task=order.task,
                        generation=order.generation,
                        output=order.output,
                        path=order.path,
                    )
            except (OSError, subprocess.TimeoutExpired) as error:  # also TimeoutError
                raise PublishRefused(str(error) or "no answer from disk") from error


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
    *, cluster: str, order: int, at_s: float, task: int, generation: int, output: str, path: str
) -> None:
    """Point `<output>/latest` at `path`, which is relative to `output`. In a folder this is one
    compare-and-set under a lock file. An order older than the last executed one is refused; a
    repeated one does no harm. Blocks on the disk: call it in a thread. Raises PublishRefused,
    Superseded, OSError."""
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
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = object_storage.PathStore(folder)
        _refuse_older(note, _decode(store.read(_NOTE)))
        _move_link(folder, relative)
        store.write(_NOTE, msgspec.json.encode(note))  # with the link, as the folder is synced
    finally:
        os.close(lock)


def _publish_as(user: RankUser, **what: object) -> None:
    """`publish` in a process of the user, who may lay links in the folder: with rights of the
    agent they would be followed. What the process prints is the user's word."""
    with tempfile.TemporaryFile() as said:
        subprocess.run(
            [sys.executable, "-P", "-m", __name__, json.dumps(what)],
            cwd="/",
            env={**os.environ, "HOME": user.home},
            user=user.uid,
            group=user.gid,
            extra_groups=user.groups,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=PUBLISH_S_MAX,
        )
        said.seek(0)
        kind, _, why = said.read(SAID_BYTES_MAX).decode(errors="replace").partition(" ")
    if kind != _DONE:
        raise (Superseded if kind == Superseded.__name__ else PublishRefused)(
            why or f"no answer as {user.name}"
        )


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
        return msgspec.json.decode(data, type=_Note) if data is not None else None
    except msgspec.MsgspecError:
        return None


if __name__ == "__main__":
    try:
        publish(**json.loads(sys.argv[1]))
        sys.stdout.write(_DONE)
    except (PublishRefused, OSError) as error:
        sys.stdout.write(f"{type(error).__name__} {error}")

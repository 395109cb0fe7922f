"""`log`: the sealed part of the log, in its folder: what it has, verify, restore, prune."""

import asyncio
import os
import time
from bisect import bisect

from ...events.errors import CorruptLog, LogError, UsageError
from ...events.log import append_only_file, embedded_server
from ...events.log.redis_streams import RedisLog
from ...events.log.segments import Folder, SealedLog, Segment, Snapshot
from ...events.object_storage import reason
from ...events.secret_environment import REDIS_URL
from ..cluster.client import Urls
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import count, number_of, rfc3339
from .offline import connect_to_read, folder_of
from .replay import CorruptError


def status(state: StateDir, url: Urls, *, segments: str, as_json: bool) -> None:
    """Print what is sealed, and how many records only the server has. Raises UsageError."""
    folder = folder_of(state, segments)
    sealed = _sealed(folder)
    last = int(connect_to_read(state, url).state()["cluster"]["seq"])
    snapshots = folder.snapshots()
    facts = {
        "folder": folder.where,
        "segments": len(sealed.chain),
        "first": sealed.first,
        "sealed": sealed.last,
        "last": last,
        "unsealed": last - sealed.last,
        "snapshots": len(snapshots),
        "snapshot": snapshots[-1].seq if snapshots else 0,
    }
    console.show(
        facts,
        [
            f"folder     {folder.where}",
            f"sealed     records {count(sealed.first)} to {count(sealed.last)} in "
            f"{len(sealed.chain)} segments"
            if sealed.chain
            else "sealed     nothing yet",
            *[f"pruned     records 1 to {count(sealed.first - 1)}"] * (sealed.first > 1),
            f"snapshots  {len(snapshots)}"
            + (f", the newest after seq {count(snapshots[-1].seq)}" if snapshots else ""),
            f"server     {count(last - sealed.last)} records more, lost if it loses its disk",
        ],
        as_json=as_json,
    )


def verify(state: StateDir, *, segments: str) -> None:
    """Read every segment and snapshot. Raises CorruptError that says which records are gone."""
    folder, sealed = _segments(state, segments)
    bad = list[str]()
    files: list[Segment | Snapshot] = [*sealed.chain, *folder.snapshots()]
    for one in files:
        try:
            if isinstance(one, Segment):
                folder.read(one)
            else:
                folder.read_snapshot(one)
        except CorruptLog as error:
            bad.append(str(error))
        except OSError as error:
            bad.append(f"{one.name}: {reason(error)}")
    if sealed.first > 1 and all(one.seq != sealed.first - 1 for one in folder.snapshots()):
        bad.append(
            f"the snapshot after record {sealed.first - 1} is missing: the log begins with "
            "it, since older records were pruned"
        )
    for why in bad:
        console.out(f"DAMAGED  {why}")
    if bad:
        raise CorruptError(
            f"{folder.where}: {number_of(len(bad), 'damaged file')}",
            "put back a copy of each; a damaged snapshot may be removed",
        )
    console.out(
        f"WHOLE    records {count(sealed.first)} to {count(sealed.last)}: "
        f"{len(sealed.chain)} segments, {len(folder.snapshots())} snapshots"
        + (f"; the records before {count(sealed.first)} were pruned" if sealed.first > 1 else "")
    )


def prune(state: StateDir, *, segments: str, keep: float) -> None:
    """Remove the segments whose records are all older than `keep` days, and older snapshots. The
    newest segment stays, and a snapshot of the state before the oldest one left: a start and a
    restore need both. Raises UsageError, CorruptError."""
    from ...control_plane.service import snapshots

    folder, sealed = _segments(state, segments)
    try:
        # Times in the log never fall: find the first segment that ends after that time.
        at = bisect(
            sealed.chain[:-1], time.time() - 86400 * keep, key=lambda one: folder.read(one)[-1].at_s
        )
        first = sealed.chain[at].first
        if first > sealed.first:
            snapshots.write_at(folder, sealed, first - 1)
        old = folder.prune(sealed.chain, first) if first > 1 else []
    except CorruptLog as error:
        raise CorruptError(f"{error}; nothing was pruned", "unicron log verify") from None
    except OSError as error:
        raise _unreadable(folder, error) from None
    num = sum(isinstance(one, Segment) for one in old)
    console.out(
        f"pruned   {num} segments and {len(old) - num} snapshots"
        if old
        else f"nothing  is older than {keep:g} days, but for what must stay"
    )
    console.out(f"left     records from {count(first)} on")


def restore(state: StateDir, *, segments: str) -> None:
    """Fill an empty server with the log of the folder. Raises UsageError."""
    from ...control_plane.fold.fold import fold
    from ...control_plane.service import snapshots

    folder, sealed = _segments(state, segments)
    last = sealed.chain[-1]
    try:
        records = folder.read(last)
        folded, _ = snapshots.newest(folder, last.last)
        for record in sealed.records(after=folded.seq):
            fold(folded, record)
    except CorruptLog as error:
        raise UsageError(str(error), "unicron log verify") from None
    except OSError as error:
        raise _unreadable(folder, error) from None
    url = os.environ.get(REDIS_URL) or _empty_server(state)

    async def fill() -> None:
        log = RedisLog(url, folder.cluster, folder=folder)
        try:
            await log.restore(records, last, folded.epoch, folded.sources)
        finally:
            await log.close()

    try:
        asyncio.run(fill())
    except LogError as error:
        raise UsageError(str(error), "unicron doctor") from None
    newest = max((one.seq for one in folder.snapshots()), default=0)
    console.out(
        f"restored  records {count(sealed.first)} to {count(last.last)}, of "
        f"{rfc3339(records[-1].at_s)}"
    )
    least = f" to {count(newest)} at least" * (newest > last.last)
    console.out(
        f"missing   records from {count(last.last + 1)}{least or ', if there were any'}: "
        "they were only on the lost server; agents report again what they still hold, "
        "requests have to be made again"
    )
    if least:
        folder.remove(one for one in folder.snapshots() if one.seq > last.last)
    console.talk("next: start the control plane")


def _empty_server(state: StateDir) -> str:
    """The URL of the folder's server. None is started on files that only a server reads: it would
    not be empty either. Raises UsageError, ServerError."""
    running = embedded_server.adopt(state.server)
    if running is None and (snapshot := append_only_file.check(state.server)):
        raise UsageError(
            f"{state.server} has {snapshot}, and a log is restored into an empty server",
            "move server/ away, then again",
        )
    return (running or embedded_server.start(state.server)).url


def _segments(state: StateDir, where: str) -> tuple[Folder, SealedLog]:
    """The folder and its sealed log, which has segments. Raises UsageError, CorruptError."""
    folder = folder_of(state, where)
    sealed = _sealed(folder)
    if not sealed.chain:
        raise UsageError(
            f"{folder.where} has no segment",
            "name the folder with --segments or "
            "--state; a young log is on the server alone: unicron log status",
        )
    return folder, sealed


def _sealed(folder: Folder) -> SealedLog:
    try:
        return SealedLog(folder)
    except CorruptLog as error:
        raise CorruptError(str(error), "unicron log verify names every damaged file") from None
    except OSError as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Folder, error: OSError) -> UsageError:
    return UsageError(f"{folder.where}: {reason(error)}", "name the folder with --segments")

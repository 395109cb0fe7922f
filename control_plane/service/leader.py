"""The leader of the log: one epoch, the folded state, and atomic appends."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import structlog
from msgspec import Struct
from msgspec.structs import replace

from ...events.errors import CorruptLog, Fenced, LogError, TooLarge, Unavailable
from ...events.log.identity import RESERVED_NAMES
from ...events.log.port import Rejected, Sent, size_error
from ...events.log.redis_streams import RedisLog
from ...events.log.segments import Folder
from ...events.object_storage import reason
from ...events.records.bounds import cut, excess
from ...events.records.codec import encode_record
from ...events.records.decisions import PlanChosen
from ...events.records.envelope import Record, Report
from ...events.records.reports import EpochStarted, OutageEnded, PolicySet, ReportsLost
from ...events.records.types import Body
from ...events.spec.policy import Policy
from ..decide.advance import accepts, advance
from ..decide.speakers import foreign, stranger
from ..fold.fold import fold
from ..state.cluster import DECIDER_VERSION, SCHEMA, ClusterState, open_orders
from . import snapshots
from .dead_letters import DeadLetters

PAGE_RECORDS_MAX = 1_000
LEASE_S = 1.5
"""How long after its last sign of life a leader is succeeded. Renewed three times in that time."""
TRACE_LINES_NUM = 5

_logger = structlog.get_logger("control_plane")


class Spoiled(LogError):
    """A report has left the state invalid: fold the log again. The report is passed over then; or
    refused, if it is the request of the operator `source`."""

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source


class Effort(Struct):
    """What decisions have cost."""

    plan_s: float = 0.0
    """How long the last decision with a plan took."""
    turn_bytes: int = 0
    """The size of the records that the current `commit` has decided so far."""


class Leader:
    """Epoch, state and intake cursor of one control plane. The caller retries; see `recover`.

    Before it leads, `fold_along` follows the log of another leader, until `take_over` succeeds.
    Every call may raise Conflict, Ambiguous, Unavailable or Spoiled: the state is then invalid, and
    `recover` folds the log again. Fenced means that a newer leader exists: stop. CorruptLog means
    that the log cannot be trusted.
    """

    def __init__(
        self,
        log: RedisLog,
        *,
        clock: Callable[[], float],
        nonce: str,
        code: str,
        policy: Policy,
        folder: Folder | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """`folder`: where the segments and snapshots of the log are; None: nowhere."""
        self._dead_letters = dead_letters or DeadLetters()
        self._unfit: dict[tuple[str, int], Report] = {}
        """What is written in place of reports that raise, by (source, source_seq)."""
        self._folder = folder
        self._log, self._clock, self._code, self._policy = log, clock, code, policy
        self._offset_s = 0.0
        self.source = f"leader/{nonce}"
        self._nonce = nonce
        self.url = ""
        """Where other control planes' clients find this one."""
        self.epoch = 0
        self.state = ClusterState()
        self._last: Record | None = None
        """The last record known to be in the log."""
        self._lost: tuple[int, int] | None = None
        """The first and the last record that the log has lost at least, until a record says so."""
        self._above = 0
        """The epoch of the lost ones. To agents, a new epoch must come after it."""
        self.position = "0-0"
        """The intake's cursor: the state includes all reports up to this cursor."""
        self.effort = Effort()
        self.answers: dict[str, int] = {}
        """Operator's source -> seq of its first report, for the latest NUM_REQUESTS_MAX sources."""
        self.old_agents: set[str] = set()
        """Nodes whose last report was in the list that agents of release 0.3.0 share."""

    def now_s(self) -> float:
        """The clock, but never before the log's last time: another host's clock may be ahead."""
        return self._clock() + self._offset_s

    def report(self, body: Body) -> Report:
        """A report of this leader, with its next source_seq."""
        return Report(
            source=self.source,
            source_seq=self.state.sources.get(self.source, 0) + 1,
            occurred_s=self.now_s(),
            body=body,
        )

    async def take_over(self) -> None:
        """Start a new epoch. When this returns, every older leader is fenced. Raises Leased while
        another one leads."""
        self.epoch = await self._log.start_epoch(
            self._nonce, url=self.url, lease_s=LEASE_S, above=self._above
        )

    async def renew(self) -> list[str]:
        """Go on leading for LEASE_S; returns the URLs of those that follow."""
        return await self._log.renew(self._nonce, epoch=self.epoch, url=self.url, lease_s=LEASE_S)

    async def release(self, to: str) -> None:
        """Let another one lead at once, the one at the URL `to` first. Nothing may be appended in
        this epoch any more."""
        await self._log.release(self._nonce, url=to, lease_s=LEASE_S)

    async def fold_along(self) -> AsyncIterator[list[Record]]:
        """Fold what the log has behind the state, and yield it in pages. A log that does not have
        the last record of the state any more is folded anew, and an error tells that."""
        await self._find_lost()
        if self.state.seq == 0 and self._folder is not None:
            await self._begin_with_snapshot(self._folder)
        while page := await self._log.read(after=self.state.seq, num_max=PAGE_RECORDS_MAX):
            for record in page:
                if record.seq != self.state.seq + 1:
                    raise CorruptLog(self.state.seq + 1, f"is missing; the next is {record.seq}")
                fold(self.state, record)
                if self._last is None or record.seq > self._last.seq:
                    self._last = record
                if (
                    isinstance(record.body, OutageEnded)
                    and record.body.lost_from
                    and record.epoch > self._above
                ):
                    self._lost = None
            snapshots.remember(self.answers, page)
            yield page

    async def _find_lost(self) -> None:
        """Forget the state if the log does not have its last record any more."""
        last = self._last
        if last is None:
            return
        ends_at = await self._log.last_seq()
        # A record that is in a segment, the server may nevertheless have lost.
        if ends_at >= last.seq and await self._log.read(after=last.seq - 1, num_max=1) == [last]:
            return
        lost_from, known = min(ends_at + 1, last.seq), self._log.first_seq - 1
        while lost_from - known > 1:  # a leader that knows nothing of it may have gone on
            middle = (known + lost_from) // 2
            found = await self._log.read(after=middle - 1, num_max=1)
            if found and found[0].epoch > last.epoch:
                lost_from = middle
            else:
                known = middle
        self._lost = lost_from, last.seq
        self._above = max(self._above, self.epoch, last.epoch)
        _logger.error(
            "the log has lost records: its server went back to an earlier time",
            lost_from=lost_from,
            lost_to=last.seq,
            epoch=last.epoch,
        )
        self._forget()
        self._last = None

    def _forget(self) -> None:
        self.state, self.answers = ClusterState(), {}

    async def recover(self) -> None:
        """Fold the log, start this epoch, restore the orders. Safe to repeat."""
        await self._log.check_durable()
        if self.state.epoch == self.epoch:  # an append of ours may have failed
            self._forget()
        if self._folder is not None:
            await self._log.open_segments()  # the leader before may have sealed more
        async for _ in self.fold_along():
            pass
        state = self.state
        # Read the cursor after the fold. If an append of ours still arrives in between, it moves
        # log and cursor. The next append then finds its seq taken, which is a Conflict.
        position = await self._log.cursor()
        if state.epoch > self.epoch:
            raise Fenced(f"epoch {state.epoch} holds the log, this is {self.epoch}")
        if self.epoch <= self._above:
            await self.take_over()
        self.position = position
        self._offset_s = max(self._offset_s, state.at_s - self._clock())
        if state.epoch == self.epoch and not self._policy.replicas_min:
            # This epoch has started before; its appends wrote log and streams atomically.
            return
        # Before the first order of this epoch, so that open orders come before new orders.
        acked = {
            source: num
            for source, num in state.sources.items()
            if source.partition("/")[0] not in RESERVED_NAMES
        }
        await self._log.rebuild_orders(open_orders(state), epoch=self.epoch, acked=acked)
        if state.epoch != self.epoch:
            await self.commit(self._epoch_reports())
            self._lost = None

    def _epoch_reports(self) -> Iterator[Report]:
        """The first reports of an epoch, in one append: the log always has a policy."""
        first = self.state.seq == 0
        yield self.report(
            EpochStarted(
                nonce=self._nonce,
                code=self._code,
                heart=DECIDER_VERSION,
                durability=self._policy.durability,
                replicas_min=self._policy.replicas_min,
            )
        )
        if self._lost:
            yield self.report(
                OutageEnded(
                    what="server",
                    since_s=self.now_s(),
                    length_s=0.0,
                    lost_from=self._lost[0],
                    lost_to=self._lost[1],
                )
            )
        if first or self._policy != self.state.policy:
            yield self.report(PolicySet(policy=self._policy))

    async def commit(self, reports: Iterable[Report | Sent]) -> list[Record]:
        """Decide on each report in order, then append all records in one write and return them.

        `reports` is consumed one at a time, so that a generator sees the state after the earlier
        reports. An entry of the intake is read here, and the intake's cursor moves behind it. What
        is no report is kept as a dead letter. A report that is not the next of its source is
        dropped: a duplicate is in the log already, and a later one will be sent again.
        """
        now_s, expect, self.effort.turn_bytes = self.now_s(), self.state.seq, 0
        records: list[Record] = []
        acked: dict[str, int] = {}
        rejected: list[Rejected] = []
        cursor = ""
        for item in reports:
            report: Report | Rejected = item if isinstance(item, Report) else self._read(item)
            cursor = item.cursor if isinstance(item, Sent) else cursor
            if isinstance(report, Report):
                began_s, made = self._clock(), self._decide(report, now_s, rejected)
                if any(isinstance(one.body, PlanChosen) for one in made):
                    self.effort.plan_s = self._clock() - began_s
                records += made
                if made and _is_of_agent(report):
                    acked[report.source] = report.source_seq
            else:
                rejected.append(report)
        if records or rejected:  # of these a successor must not make dead letters again
            await self._log.append(
                records, epoch=self.epoch, expect=expect, cursor=cursor, acked=acked
            )
        if records:
            self._last = records[-1]
            self._unfit = {
                (source, number): lost
                for (source, number), lost in self._unfit.items()
                if number > self.state.sources.get(source, 0)  # a turn may end before it
            }
        if cursor:
            self.position = cursor
        self._dead_letters.keep(rejected)  # only now: a turn that fails takes them again
        snapshots.remember(self.answers, records)
        return records

    def _read(self, sent: Sent) -> Report | Rejected:
        """The report of an entry of the intake, as the log can hold it and its source may send it;
        for one that cannot be decided on, that it is lost."""
        report = self._log.read_report(sent)
        if isinstance(report, Rejected):
            return report
        if not sent.node:
            self.old_agents.add(report.source.rpartition("/")[0])
        else:
            self.old_agents.discard(sent.node)
        return self._unfit.get((report.source, report.source_seq), report)

    def _decide(self, report: Report, at_s: float, rejected: list[Rejected]) -> list[Record]:
        """The records that follow from a report; none if it is dropped. One that raises, or that
        its agent may not send, is a dead letter, and in the log it is lost. Raises Spoiled if it
        has changed the state before."""
        is_of_agent = _is_of_agent(report)
        try:
            if accepts(self.state, report) != "next":
                return []
            if is_of_agent and (why := stranger(self.state, report)):
                rejected.append(self._letter(report, why))
                return []
            if is_of_agent:
                report = replace(report, body=cut(report.body))
                if why := excess(report.body) or foreign(self.state, report):
                    rejected.append(self._letter(report, why))
                    report = _lost(report)
        except Exception as error:  # one report must not end the control plane
            if not is_of_agent:
                raise
            rejected.append(self._raised(report, error))
            return []
        try:
            made = advance(self.state, report, epoch=self.epoch, at_s=at_s)
            # What the log cannot hold must not be in the state either.
            sizes = [len(encode_record(record)) for record in made]
            if why := size_error(sizes):
                raise TooLarge(why)
            self.effort.turn_bytes += sum(sizes)
            return made
        except Exception as error:
            name = report.source, report.source_seq
            if isinstance(error, TooLarge) and report.source.startswith("operator/"):
                raise Spoiled(str(error), report.source) from error
            if not is_of_agent or name in self._unfit:
                raise
            self._dead_letters.keep([self._raised(report, error)])
            self._unfit[name] = _lost(report)
            raise Spoiled(f"a report of {report.source} could not be decided on") from error

    def _letter(self, report: Report, why: str) -> Rejected:
        """The dead letter of a report."""
        return Rejected(
            why=f"{type(report.body).__name__} {report.source_seq}: {why}",
            source=report.source,
            data=self._log.entry(report),
        )

    def _raised(self, report: Report, error: Exception) -> Rejected:
        letter = self._letter(report, f"it raises {error!r}")
        _logger.error(
            "a report raises, and is passed over",
            source=report.source,
            why=letter.why,
            trace="".join(traceback.format_exception(error, limit=-TRACE_LINES_NUM)),
        )
        return letter

    def why_dropped(self, report: Report) -> str:
        """Why `commit` would drop a report of an agent; "": it would not."""
        number, source = report.source_seq, report.source
        try:
            verdict = accepts(self.state, report)
            body = cut(report.body)
            why = stranger(self.state, report) or excess(body) or foreign(self.state, report)
        except Exception as error:  # noqa: BLE001 - as in `_decide`
            return f"it raises {error!r}"
        if verdict == "duplicate":
            return f"the log has report {number} of {source} already, or says that it is lost"
        if verdict == "later":
            return f"the log lacks the report before it, {number - 1} of {source}"
        return why

    async def _begin_with_snapshot(self, folder: Folder) -> None:
        """Take the state of the newest snapshot. Raises CorruptLog if the server lacks anything
        that is in the folder, Unavailable."""
        await self._log.open_segments()
        try:
            state, answers = await asyncio.to_thread(snapshots.newest, folder)
            last = await self._log.last_seq()
            if (seq := max(state.seq, self._log.sealed_seq)) > last:
                raise CorruptLog(
                    last + 1,
                    f"the server has lost records {last + 1} to {seq}, "
                    "which were acknowledged: unicron log restore, into an empty "
                    "server",
                    "unicron log status",
                )
            if state.seq + 1 < (first := self._log.first_seq):
                raise CorruptLog(
                    first,
                    f"the records before it were pruned, and {folder.where} "
                    f"has no good snapshot of {SCHEMA}: put one back, or use the "
                    "Unicron that wrote it",
                )
            if state.seq >= first:
                (record,) = await self._log.read(after=state.seq - 1, num_max=1)
                if record.epoch != state.epoch:
                    raise CorruptLog(
                        state.seq,
                        f"is of epoch {record.epoch}, and in a snapshot of "
                        f"epoch {state.epoch}: the server has another log",
                    )
                self._last = self._last or record
            self.state, self.answers = state, answers
        except OSError as error:
            raise Unavailable(f"{folder.where}: {reason(error)}") from None


def _lost(report: Report) -> Report:
    """What is in the log in place of a report, so that its source goes on."""
    node = report.source.rpartition("/")[0]
    return replace(report, body=ReportsLost(node=node, num_lost=1))


def _is_of_agent(report: Report) -> bool:
    return report.source.partition("/")[0] not in RESERVED_NAMES

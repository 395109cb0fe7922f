"""The leader's hold on the log: one epoch, the fold of it, and appends that stand or do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from ...events.errors import CorruptLog, Fenced
from ...events.log.port import LogPort
from ...events.records.envelope import Record, Report
from ...events.records.reports import EpochStarted, PolicySet
from ...events.records.types import Body
from ...events.spec.policy import Policy
from ..decide.advance import HEART, accepts, advance
from ..fold.fold import fold
from ..state.cluster import NUM_REQUESTS_MAX, ClusterState, open_orders

PAGE_RECORDS_MAX = 1_000


class Committed(Struct, frozen=True):
    """What one append wrote. `answers` maps each operator's source in it to the seq it got."""

    records: tuple[Record, ...]
    answers: dict[str, int]


class Leader:
    """Epoch, memory and cursor of one control plane. The caller retries; see `recover`.

    Every call may raise Conflict, Ambiguous or Unavailable: the memory is then worth nothing, and
    `recover` folds the log again. Fenced means that a newer leader rules: stop. CorruptLog means
    that the log cannot be trusted.
    """

    def __init__(self, log: LogPort, *, clock: Callable[[], float], nonce: str, code: str,
                 policy: Policy) -> None:
        self._log, self._clock, self._code, self._policy = log, clock, code, policy
        self._ahead_s = 0.0
        self.source = f"leader/{nonce}"
        self._nonce = nonce
        self.epoch = 0
        self.state = ClusterState()
        self.position = "0-0"
        """The intake's cursor behind which this memory has decided everything."""
        self.answers: dict[str, int] = {}
        """Operators' sources -> the seq of their first report, the newest NUM_REQUESTS_MAX."""

    def now_s(self) -> float:
        """The clock, never behind the log: else deadlines of a faster host's log would sleep."""
        return self._clock() + self._ahead_s

    def report(self, body: Body) -> Report:
        """A report of this leader's own, the next of its source."""
        return Report(source=self.source, source_seq=self.state.sources.get(self.source, 0) + 1,
                      occurred_s=self.now_s(), body=body)

    async def take_over(self) -> None:
        """Start a new epoch. Every older leader is fenced when this returns."""
        self.epoch = await self._log.start_epoch(self._nonce)

    async def recover(self) -> list[Record]:
        """Fold the log into a fresh memory, make this epoch stand in it, restore the orders.

        Safe to repeat at any point; returns what it appended. O(log), in pages.
        """
        state, answers = await self._fold_log()
        # Read after the fold: were an append of ours still on its way, it would move both, and
        # the next append would find the seq taken.
        position = await self._log.cursor()
        if state.epoch > self.epoch:
            raise Fenced(f"epoch {state.epoch} holds the log, this is {self.epoch}")
        self.state, self.answers, self.position = state, answers, position
        self._ahead_s = max(self._ahead_s, state.at_s - self._clock())
        if state.epoch == self.epoch:
            # This epoch has begun before; its appends wrote log and streams in one step.
            return []
        # Before the epoch's first order, so that what is still open keeps its place.
        await self._log.rebuild_orders(open_orders(state), epoch=self.epoch)
        return list((await self.commit(self._opening())).records)

    def _opening(self) -> Iterator[Report]:
        """What an epoch begins with, in one append: a log without its policy cannot be."""
        first = self.state.seq == 0
        yield self.report(EpochStarted(nonce=self._nonce, code=self._code, heart=HEART))
        if first or self._policy != self.state.policy:
            yield self.report(PolicySet(policy=self._policy))

    async def commit(self, reports: Iterable[Report], *, cursor: str = "") -> Committed:
        """Decide upon each report in order, then append all in one write.

        `reports` is asked for one at a time, so that a generator sees the state that those before
        have made. Reports that are not the next of their source fall away: a duplicate is in the
        log, a later one will be told again. `cursor` is where the intake stands behind them.
        """
        now_s, expect = self.now_s(), self.state.seq
        records: list[Record] = []
        acked: dict[str, int] = {}
        answers: dict[str, int] = {}
        for report in reports:
            if accepts(self.state, report) != "next":
                continue
            made = advance(self.state, report, epoch=self.epoch, at_s=now_s)
            records += made
            if report.source.startswith("operator/"):
                answers.setdefault(report.source, made[0].seq)
            elif report.source != self.source:
                acked[report.source] = report.source_seq
        if records:
            await self._log.append(records, epoch=self.epoch, expect=expect, cursor=cursor,
                                   acked=acked)
        if cursor:
            self.position = cursor
        _remember(self.answers, answers)
        return Committed(records=tuple(records), answers=answers)

    async def _fold_log(self) -> tuple[ClusterState, dict[str, int]]:
        state = ClusterState()
        answers: dict[str, int] = {}
        while True:
            page = await self._log.read(after=state.seq, num_max=PAGE_RECORDS_MAX)
            for record in page:
                if record.seq != state.seq + 1:
                    raise CorruptLog(state.seq + 1, f"is missing; the log goes on at {record.seq}")
                fold(state, record)
                if record.source.startswith("operator/") and record.source_seq == 1:
                    _remember(answers, {record.source: record.seq})
            if len(page) < PAGE_RECORDS_MAX:
                return state, answers


def _remember(answers: dict[str, int], new: dict[str, int]) -> None:
    answers.update(new)
    while len(answers) > NUM_REQUESTS_MAX:
        del answers[next(iter(answers))]

"""Replay: folds a log to its state, and recomputes and compares every decision."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct, field

from ...events.records import reports as r
from ...events.records.codec import UnknownBody, encode_record, to_plain
from ...events.records.envelope import Record, Report
from ..fold.fold import fold
from ..state.cluster import DECIDER_VERSION, ClusterState, state_hash
from .advance import accepts, decision_record, report_record
from .decide import decide

DIFFERENT_NUM_MAX = 100
"""Different decisions that a verdict names; the others are only counted."""


class Different(Struct, frozen=True):
    """A decision of another decider version that this version makes otherwise. None: there is no
    such decision. Those that follow it from the same report are not compared."""

    seq: int
    recorded: dict[str, Any] | None
    now: dict[str, Any] | None


class Verdict(Struct, kw_only=True):
    """The result of `verify`. `seq` is the first record that differs, or 0. Decisions that another
    decider version made otherwise are no corruption: `differ` counts them by kind, `different` has
    the first. What no decision depends on (a loss, a text) only `log_hash` covers."""

    seq: int = 0
    problem: str = ""
    expected: dict[str, Any] | None = None
    recorded: dict[str, Any] | None = None
    num_records: int = 0
    recomputed: dict[str, int] = field(default_factory=dict[str, int])
    """Recomputed decisions that are equal, by kind."""
    differ: dict[str, int] = field(default_factory=dict[str, int])
    different: list[Different] = field(default_factory=list[Different])
    hearts: list[int] = field(default_factory=list[int])
    state_hash: str = ""
    log_hash: str = ""

    @property
    def ok(self) -> bool:
        """True if the log is intact; decisions of another decider version may still differ."""
        return self.seq == 0

    @property
    def words(self) -> str:
        """One line that summarises the result."""
        equal, other = sum(self.recomputed.values()), sum(self.differ.values())
        if not self.ok:
            return f"CORRUPT at seq {self.seq}: {self.problem}"
        if other:
            versions = ", ".join(map(str, self.hearts))
            return (
                f"state equal, {other} of {equal + other} decisions differ: written by "
                f"decider version {versions}, recomputed by version {DECIDER_VERSION}"
            )
        return f"VERIFIED: {self.num_records} records, {equal} of {equal} decisions"


class _Difference(Exception):
    """The first record that differs from the expected one."""

    def __init__(
        self, seq: int, problem: str, expected: Record | None, recorded: Record | None
    ) -> None:
        super().__init__(problem)
        self.seq, self.problem = seq, problem
        self.expected, self.recorded = expected, recorded


def replay(records: Iterable[Record], state: ClusterState | None = None) -> ClusterState:
    """The fold of all records on `state`, which is changed; None: the empty one."""
    state = state or ClusterState()
    for record in records:
        fold(state, record)
    return state


def verify(
    records: Iterable[Record],
    *,
    complete: bool = True,
    state: ClusterState | None = None,
    watch: Callable[[ClusterState, Record], None] | None = None,
) -> Verdict:
    """Fold the log, recompute and compare every decision; errors are in the verdict. If not
    `complete`, the log may end inside a batch. `watch` is called with each record after its
    fold."""
    state = state or ClusterState()
    verdict = Verdict(hearts=[state.heart] * bool(state.heart))
    try:
        _Check(verdict, state, complete, watch).run(records)
    except _Difference as found:
        verdict.seq, verdict.problem = found.seq, found.problem
        verdict.expected = to_plain(found.expected) if found.expected is not None else None
        verdict.recorded = to_plain(found.recorded) if found.recorded is not None else None
    except AssertionError as bug:
        verdict.seq, verdict.problem = state.seq, f"the decider fails here: {bug}"
    verdict.state_hash = state_hash(state)
    return verdict


class _Check:
    """One pass over the log, with a look-ahead of one record."""

    def __init__(
        self,
        verdict: Verdict,
        state: ClusterState,
        complete: bool,
        watch: Callable[[ClusterState, Record], None] | None,
    ) -> None:
        self.verdict, self.state, self.complete = verdict, state, complete
        self._watch = watch
        self._digest = hashlib.blake2b(digest_size=8)
        self._rest: Iterator[Record] = iter(())
        self._ahead: Record | None = None

    def run(self, records: Iterable[Record]) -> None:
        self._rest = iter(records)
        self._ahead = next(self._rest, None)
        while self._ahead is not None:
            if _is_decision(self._ahead):
                self._envelope(self._ahead)
                raise _Difference(self._ahead.seq, "a decision without a report", None, self._ahead)
            self._batch(self._ahead)
        self.verdict.log_hash = self._digest.hexdigest()

    def _batch(self, report: Record) -> None:
        self._envelope(report)
        if isinstance(report.body, r.EpochStarted) and (
            report.body.heart not in self.verdict.hearts
        ):
            self.verdict.hearts.append(report.body.heart)
        given = Report(
            source=report.source,
            source_seq=report.source_seq,
            occurred_s=report.occurred_s,
            body=report.body,
        )
        if accepts(self.state, given) != "next":
            last = self.state.sources.get(report.source, 0)
            raise _Difference(
                report.seq,
                f"report {report.source_seq} of {report.source} follows its report {last}",
                None,
                report,
            )
        want = report_record(self.state, given, epoch=report.epoch, at_s=report.at_s)
        if want != report:
            raise _Difference(report.seq, "the envelope differs", want, report)
        self._take(report)
        for body in decide(self.state, report):
            want = decision_record(self.state, body, cause=report)
            got = self._ahead
            if got is None and not self.complete:
                return
            if got is not None:
                self._envelope(got)
            if got != want:
                problem = (
                    "another decision was recorded"
                    if got is not None
                    else (f"the log ends where {want.kind} must follow")
                )
                self._differs(want.seq, problem, want, got)
                break
            assert got is not None
            self._count(self.verdict.recomputed, got)
            self._take(got)
        else:
            if self._ahead is not None and _is_decision(self._ahead):
                self._envelope(self._ahead)
                self._differs(
                    self._ahead.seq, "a decision that the decider does not make", None, self._ahead
                )
        while self._ahead is not None and _is_decision(self._ahead):
            self._envelope(self._ahead)
            self._count(self.verdict.differ, self._ahead)
            self._take(self._ahead)

    def _differs(self, seq: int, problem: str, now: Record | None, recorded: Record | None) -> None:
        """Only another version of the decider may decide otherwise."""
        if self._is_same_version():
            raise _Difference(seq, problem, now, recorded)
        if now is not None and (recorded is None or not _is_decision(recorded)):
            self._count(self.verdict.differ, now)
            recorded = None
        if len(self.verdict.different) < DIFFERENT_NUM_MAX:
            self.verdict.different.append(
                Different(
                    seq, *(to_plain(one) if one is not None else None for one in (recorded, now))
                )
            )

    def _envelope(self, record: Record) -> None:
        state = self.state
        if record.seq != state.seq + 1:
            raise _Difference(
                state.seq + 1, f"seq {record.seq} where {state.seq + 1} must be", None, record
            )
        if record.at_s < state.at_s:
            raise _Difference(record.seq, "time runs backwards", None, record)
        starts = isinstance(record.body, r.EpochStarted)
        if record.epoch <= state.epoch if starts else record.epoch != state.epoch:
            raise _Difference(
                record.seq, f"epoch {record.epoch} in epoch {state.epoch}", None, record
            )
        if (
            isinstance(record.body, UnknownBody)
            and _is_decision(record)
            and self._is_same_version()
        ):
            raise _Difference(record.seq, f"unknown kind {record.body.kind}", None, record)

    def _is_same_version(self) -> bool:
        return self.state.heart in (0, DECIDER_VERSION)

    def _take(self, record: Record) -> None:
        fold(self.state, record)
        if self._watch is not None:
            self._watch(self.state, record)
        self._digest.update(encode_record(record))
        self.verdict.num_records += 1
        self._ahead = next(self._rest, None)

    @staticmethod
    def _count(counts: dict[str, int], record: Record) -> None:
        counts[record.kind] = counts.get(record.kind, 0) + 1


def _is_decision(record: Record) -> bool:
    return record.source == "heart"

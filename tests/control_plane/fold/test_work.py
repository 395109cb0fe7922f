"""A rank that is waited for: its limit is a time without progress, and says so when it acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from decider import Driver, kinds, spec
from msgspec.structs import replace
from unicron.cli.screens import task as screen
from unicron.control_plane.api.view import task_view
from unicron.control_plane.fold.work import NAMED_SINCE_HEART, why_late
from unicron.control_plane.state import limits
from unicron.control_plane.state.cluster import decode_state, encode_state
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.spec.policy import Policy
from unicron.events.words import amount

POLICY = Policy()
GB = 10**9
TOTAL = 980 * GB


@dataclass
class Waited:
    """A task that reconfigures: a member reads a state of 980 GB."""

    d: Driver
    task: int

    @property
    def deadline(self) -> str:
        it = self.d.state.tasks[self.task]
        return f"reconfigure/{it.id}/{it.generation}"

    def tell(self, rank: int = 0, **changes: Any) -> None:
        it = self.d.state.tasks[self.task]
        process = it.ranks[rank]
        body = r.RankWorked(
            task=it.id,
            rank=rank,
            attempt=process.attempt,
            generation=it.generation,
            what="reads its checkpoint",
            unit="B",
            done=0,
            total=TOTAL,
            moved_bytes=0,
            idle_s=0.0,
        )
        told = self.d.tell(self.d.source(process.slot.node), replace(body, **changes))
        assert kinds(told) == [], "nothing follows from progress"

    def read(self, until_s: float, *, bytes_per_s: float) -> int:
        """Rank 0 reads until then, and is told of at each third of the limit; returns what it has
        read."""
        began_s, done = self.d.now_s, 0
        while self.d.now_s < until_s:
            self.d.now_s += POLICY.reconfigure_s_max / 3
            done = int((self.d.now_s - began_s) * bytes_per_s)
            assert self.d.now_s < self.d.state.deadlines[self.deadline].due_s
            self.tell(done=done)
        return done


@pytest.fixture
def waited(d: Driver, task: int) -> Waited:
    d.exit(task, 2)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    assert d.state.tasks[task].phase == "reconfiguring"
    return Waited(d, task)


def last(d: Driver, *of: type[Any]) -> Any:
    """The newest body of one of these kinds."""
    return next(record.body for record in reversed(d.log) if isinstance(record.body, of))


def last_incident(d: Driver) -> Any:
    return last(d, decisions.IncidentOpened, decisions.IncidentEscalated)


def test_what_reads_for_an_hour_comes_up(waited: Waited) -> None:
    d = waited.d
    waited.read(d.now_s + 3600, bytes_per_s=0.27 * GB)
    d.do(last(d, o.Reconfigure))
    it = d.state.tasks[waited.task]
    assert it.phase == "training"
    assert all(rank.work is None for rank in it.ranks.values())


def test_orders_say_how_often_agents_tell_and_how_long_stores_may_be_silent(
    waited: Waited,
) -> None:
    order = last(waited.d, o.Reconfigure)
    assert order.tell_s == pytest.approx(POLICY.reconfigure_s_max / 3)
    assert order.restore_s_max == POLICY.restore_s_max
    starts = [x.body for x in waited.d.log if isinstance(x.body, o.StartRank)]
    assert {order.tell_s for order in starts} == {POLICY.start_s_max / 3}


def test_the_limit_acts_when_nothing_moves_and_says_what_moved_last(waited: Waited) -> None:
    d = waited.d
    waited.read(d.now_s + 200, bytes_per_s=1.5 * GB)
    last_s = d.now_s
    d.due(waited.deadline)
    assert d.now_s == pytest.approx(last_s + POLICY.reconfigure_s_max, abs=0.1)
    opened = last_incident(d)
    assert "reconfigure_s_max: nothing moved for 30 s" in opened.why
    assert "rank 0 reads its checkpoint, 3" in opened.why
    assert " of 980 GB, moved 30 s ago" in opened.why


def test_a_limit_names_itself_if_nothing_was_ever_told(waited: Waited) -> None:
    waited.d.due(waited.deadline)
    assert "(reconfigure_s_max: nothing moved for 30 s)" in last_incident(waited.d).why


def test_storage_may_stand_still_for_longer(waited: Waited) -> None:
    d = waited.d
    waited.tell(done=GB, is_storage=True)
    d.now_s += POLICY.storage_s_max / 2
    waited.tell(done=2 * GB, is_storage=True)
    last_s = d.now_s
    d.due(waited.deadline)
    assert d.now_s == pytest.approx(last_s + POLICY.storage_s_max, abs=0.1)
    why = last_incident(d).why
    assert "(storage_s_max: nothing moved for 120 s; rank 0 reads its checkpoint, 2 of" in why


def test_an_idle_time_before_the_report_counts(waited: Waited) -> None:
    d = waited.d
    d.now_s += 15
    waited.tell(done=GB, idle_s=10.0)
    due_s = d.state.deadlines[waited.deadline].due_s
    assert due_s == pytest.approx(d.now_s - 10 + POLICY.reconfigure_s_max, abs=0.1)


def test_to_compute_counts_for_silent_s_max(waited: Waited) -> None:
    d, began_s = waited.d, waited.d.now_s
    while d.now_s < d.state.deadlines[waited.deadline].due_s - 10:
        d.now_s += 10
        idle_s = d.now_s - began_s
        waited.tell(what="builds its model", unit="", total=0, computes=True, idle_s=idle_s)
    d.due(waited.deadline)
    assert d.now_s - began_s == pytest.approx(POLICY.silent_s_max, abs=1)
    why = last_incident(d).why
    assert "silent_s_max: nothing moved for 1800 s; rank 0 builds its model, moved 30 min" in why


def test_logs_of_earlier_deciders_keep_their_words(waited: Waited) -> None:
    state = decode_state(encode_state(waited.d.state))
    late = state.tasks[waited.task].living_members()
    limit = limits.of(state.policy, "reconfigure_s_max")
    assert why_late(state, limit, late)
    state.heart = NAMED_SINCE_HEART - 1
    assert why_late(state, limit, late) == ""


def test_a_rank_that_loads_is_not_ended_before_it_is_ready() -> None:
    d = Driver()
    records = d.tell("operator/a", r.TaskSubmitted(spec=spec()))
    task = records[0].seq
    name = f"start/{task}/0/1"
    process = d.state.tasks[task].ranks[0]
    body = r.RankWorked(
        task=task,
        rank=0,
        attempt=1,
        generation=0,
        what="starts",
        unit="",
        done=0,
        total=0,
        moved_bytes=0,
        idle_s=0.0,
    )
    for number in range(10):
        d.now_s += POLICY.start_s_max * 0.9
        assert d.now_s < d.state.deadlines[name].due_s
        d.tell(d.source(process.slot.node), replace(body, moved_bytes=number << 20))
    d.due(name)
    why = last_incident(d).why
    assert "rank 0 did not get ready in time (start_s_max: nothing moved for 180 s; " in why
    assert "rank 0 starts, moved 3 min ago)" in why


def shown(waited: Waited) -> str:
    d = waited.d
    plain = task_view(d.state, d.state.tasks[waited.task])
    return " ".join(" ".join(screen._works(plain, d.now_s)).split())


def test_status_shows_the_progress_with_an_estimate(waited: Waited) -> None:
    d = waited.d
    assert shown(waited) == ""
    waited.read(d.now_s + 300, bytes_per_s=1.0 * GB)
    waited.tell(done=312 * GB)
    d.now_s += 5
    words = shown(waited)
    assert words.startswith("works rank 0: reads its checkpoint, 312 of 980 GB, 11 min left")
    assert "nothing moved" not in words
    d.now_s += 20
    assert "nothing moved for 25 s (reconfigure_s_max: 30 s)" in shown(waited)
    waited.tell(1, done=100 * GB)
    assert "ranks 0 1: reads its checkpoint, 0.412 of 1.96 TB" in shown(waited)


@pytest.mark.parametrize(
    ("done", "total", "unit", "words"),
    [
        (312 * GB, 980 * GB, "B", "312 of 980 GB"),
        (5_000, 2 * GB, "B", "5e-06 of 2 GB"),
        (0, 0, "B", "0 B"),
        (3, 8, "parts", "3 of 8 parts"),
        (1200, 0, "files", "1,200 files"),
    ],
)
def test_how_much_is_done_in_words(done: int, total: int, unit: str, words: str) -> None:
    assert amount(done, total, unit) == words

"""The fold accepts any report at any time, and stale reports change nothing."""

from __future__ import annotations

import hashlib
import string
from typing import Any

import msgspec
import pytest
from decider import Driver, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace
from rank_bodies import body_of
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.advance import accepts, advance
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.fold.fold import HANDLERS, fold
from unicron.control_plane.state.cluster import (
    DECIDER_VERSION,
    NUM_REQUESTS_MAX,
    SCHEMA,
    ClusterState,
    decode_state,
    encode_state,
    open_orders,
    state_hash,
)
from unicron.events.errors import NewerLog
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import IGNORABLE, KINDS, Record, Report

SMALL = st.integers(-1, 6)
NODES = st.sampled_from(["n1", "n2", "n3", ""])
WORDS = st.text(string.printable, max_size=8)
TIMES = st.sampled_from([0.0, 1.0, 1.5, 9.0, -1.0, 1e-300, 1e300])
LOSSES = st.lists(st.floats(0, 9), max_size=3).map(tuple)


def _rank(kind: type[t.Body], **more: st.SearchStrategy[object]) -> st.SearchStrategy[t.Body]:
    return st.builds(
        kind,
        task=st.sampled_from([4, 4, 4, 0, 5, 99]),
        rank=st.integers(-1, 4),
        attempt=st.integers(0, 3),
        **more,
    )


BODIES: st.SearchStrategy[t.Body] = st.one_of(
    st.builds(r.NodeUnreachable, node=NODES, incarnation=SMALL, silence_s=st.just(5.0)),
    st.builds(r.NodeReachable, node=NODES, incarnation=SMALL),
    st.builds(
        r.NodeJoined,
        node=NODES,
        incarnation=SMALL,
        host=st.just("h"),
        pid=SMALL,
        num_slots=st.integers(-1, 3),
    ),
    st.builds(r.NodeLeft, node=NODES, incarnation=SMALL, reason=WORDS),
    st.builds(r.ReportsLost, node=NODES, num_lost=SMALL),
    _rank(r.RankReportsDropped, num_dropped=SMALL, kinds=st.just(("TaskProgressed",))),
    st.builds(
        r.TokenChanged, act=st.sampled_from(["created", "enrolled"]), name=WORDS, token_role=WORDS
    ),
    st.builds(r.DeadLettersHandled, act=st.just("dropped"), num=SMALL, numbers=st.just((1,))),
    st.builds(r.OrderRefused, node=NODES, order=st.integers(0, 80), why=WORDS),
    st.builds(r.TaskCancelRequested, task=st.sampled_from([4, 5, 77]), reason=WORDS),
    st.builds(r.DeadlineReached, deadline=WORDS),
    st.builds(
        r.TaskSubmitted,
        spec=st.sampled_from(
            [
                spec(name="beta"),
                spec(train=None, command=["true"], slots={"min": 2, "max": 2}),
                spec(slots={"min": 9, "max": 9}),
            ]
        ),
    ),
    _rank(r.RankStarted, node=NODES, pid=SMALL, log_path=WORDS),
    _rank(
        r.RankReady,
        endpoint=WORDS,
        num_params=SMALL,
        state_bytes=SMALL,
        iteration_flops=st.just(1.0),
        data_digest=WORDS,
    ),
    _rank(
        r.RankErrored,
        generation=SMALL,
        iteration=SMALL,
        error=st.sampled_from(["ECC errors", "connection reset", "what", "CUDA errors"]),
        text=WORDS,
    ),
    _rank(
        r.RankExited,
        pid=SMALL,
        exit_code=st.sampled_from([None, 0, 1]),
        signal=st.sampled_from([None, 9]),
    ),
    _rank(r.CollectiveFailed, generation=SMALL, iteration=SMALL, error=WORDS),
    _rank(
        r.Quiesced,
        generation=SMALL,
        step_version=SMALL,
        micro_batches=st.just((0,)),
        buckets_reduced=SMALL,
        num_buckets=SMALL,
    ),
    _rank(
        r.Reconfigured,
        generation=SMALL,
        step_version=SMALL,
        kept_micro_batches=st.just((0,)),
        remaining_micro_batches=st.just((1,)),
        reassigned_micro_batches=st.just((1,)),
        source=SMALL,
        received_bytes=SMALL,
        down_s=st.just(0.1),
        up_s=st.just(0.1),
        settle_s=st.just(0.1),
    ),
    _rank(r.ReconfigureFailed, generation=SMALL, error=WORDS),
    _rank(r.RankFinished, generation=SMALL, step_version=SMALL, forward_calls=SMALL),
    st.builds(
        r.TaskProgressed,
        task=st.sampled_from([4, 5]),
        generation=SMALL,
        first_iteration=SMALL,
        losses=LOSSES,
        step_s=LOSSES,
        rate_flops=st.just(1.0),
        micro_batches=SMALL,
    ),
    _rank(
        r.IterationsLogged,
        iteration=SMALL,
        iterations=SMALL,
        num_iterations=SMALL,
        step_s=st.floats(0, 9),
        global_batch=SMALL,
        skipped=SMALL,
    ),
    st.builds(r.LossNotFinite, task=st.just(4), generation=SMALL, iteration=SMALL, text=WORDS),
    st.builds(
        r.CheckpointSaved,
        task=st.just(4),
        generation=SMALL,
        step_version=SMALL,
        path=WORDS,
        ckpt_bytes=SMALL,
        final=st.booleans(),
    ),
    st.builds(r.CheckpointPublished, task=st.just(4), order=st.integers(0, 80), path=WORDS),
    _rank(
        r.CheckpointFailed,
        generation=SMALL,
        step_version=SMALL,
        what=st.sampled_from(["checkpoint", "export", "copy"]),
        path=WORDS,
        why=WORDS,
        errno=st.sampled_from(["", "ENOSPC"]),
        final=st.booleans(),
    ),
    st.builds(r.TaskOutputSet, task=st.just(4), output=WORDS),
    _rank(
        r.RankStalled,
        generation=SMALL,
        iteration=SMALL,
        where=st.sampled_from(["own", "collective"]),
        what=WORDS,
        collective=SMALL,
        in_s=TIMES,
        normal_s=TIMES,
    ),
    _rank(r.RankUnstalled, generation=SMALL, iteration=SMALL, stalled_s=TIMES),
    _rank(
        r.StepTimeChanged,
        generation=SMALL,
        iteration=SMALL,
        num_iterations=SMALL,
        iteration_s=TIMES,
        own_s=TIMES,
        normal_s=TIMES,
    ),
)
DUE = st.just("due")
"""The next deadline of the state passes."""
OBEY = st.just("obey")
"""The newest open order is carried out."""


def _play(driver: Driver, actions: list[t.Body | str]) -> None:
    for action in actions:
        if isinstance(action, t.Body):
            driver.tell("absurd/0", action)
        elif action == "due":
            due = sorted(driver.state.deadlines, key=lambda x: driver.state.deadlines[x].due_s)
            if due:
                driver.due(due[0])
        else:
            orders = open_orders(driver.state)
            if orders:
                driver.do_any(orders[-1].body)


@given(st.lists(BODIES | DUE | OBEY, max_size=25), st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_reports_in_any_order(actions: list[t.Body | str], trains: bool) -> None:
    """No call raises, the log verifies, and the state survives a snapshot and can be viewed."""
    driver = Driver()
    if trains:
        assert driver.running() == 4
    _play(driver, actions)
    verdict = verify(driver.log)
    assert verdict.ok, verdict.words
    assert verdict.state_hash == state_hash(driver.state)
    assert decode_state(encode_state(driver.state)) == driver.state
    view(driver.state)
    tasks = driver.state.tasks.values()
    assert driver.state.num_running == sum(len(task.ranks) for task in tasks)


@given(st.lists(BODIES, min_size=1, max_size=10))
@settings(max_examples=150, deadline=None)
def test_stale_reports_change_nothing(bodies: list[t.Body]) -> None:
    driver = Driver()
    driver.running()
    for body in map(_stale, bodies):
        if body is None:
            continue
        before = decode_state(encode_state(driver.state))
        new = driver.tell("absurd/0", body)
        assert len(new) == 1, new
        after = driver.state
        before.seq, before.at_s, before.sources = after.seq, after.at_s, after.sources
        assert after.observed_slot_s > before.observed_slot_s, "time passes"
        before.observed_slot_s = after.observed_slot_s
        assert before == after


def _stale(body: t.Body) -> t.Body | None:
    if hasattr(body, "attempt"):
        return replace(body, attempt=7)
    if hasattr(body, "generation"):
        return replace(body, generation=99)
    if isinstance(body, r.DeadlineReached):
        return body
    return None


OF_A_MEMBER: tuple[type[t.Body], ...] = (
    r.StepTimeChanged,
    r.CollectiveFailed,
    r.Quiesced,
    r.Reconfigured,
    r.ReconfigureFailed,
    r.RankFinished,
    r.RankStalled,
    r.RankUnstalled,
)
"""Reports of one generation of a member."""


@pytest.mark.parametrize("generation", [0, 2], ids=["old", "new"])
@pytest.mark.parametrize("kind", OF_A_MEMBER, ids=lambda kind: kind.__name__)
def test_a_report_of_another_generation_changes_nothing(
    kind: type[t.Body], generation: int
) -> None:
    """The task, the process and its attempt are right."""
    driver = Driver()
    task = driver.state.tasks[driver.running()]
    rank = task.ranks[1]
    stall = r.RankStalled(
        task=task.id,
        rank=1,
        attempt=1,
        generation=task.generation,
        iteration=1,
        where="own",
        what="",
        collective=0,
        in_s=1.0,
        normal_s=1.0,
    )
    driver.tell(f"{rank.slot.node}/1", stall)
    assert (task.generation, list(task.stalls)) == (1, [1])
    before = msgspec.to_builtins(task)
    body = body_of(kind, task=task.id, rank=1, attempt=1, generation=generation)
    assert len(driver.tell(f"{rank.slot.node}/1", body)) == 1
    assert msgspec.to_builtins(task) == before


def test_reports_of_a_source_are_taken_in_order() -> None:
    driver = Driver()

    def classify(source: str, seq: int, body: t.Body | None = None) -> str:
        return accepts(
            driver.state,
            Report(
                source=source,
                source_seq=seq,
                occurred_s=0.0,
                body=body or r.NodeReachable(node="n1", incarnation=1),
            ),
        )

    assert classify("n1/1", 1) == "duplicate"
    assert classify("n1/1", 2) == "next"
    assert classify("n1/1", 3) == "later"
    assert classify("n1/1", 9, r.ReportsLost(node="n1", num_lost=7)) == "next"
    assert classify("n1/2", 1) == "next"
    driver.join("n1", incarnation=2)
    assert classify("n1/1", 2) == "next", "the previous agent's spool still counts"
    driver.join("n1", incarnation=3)
    assert classify("n1/1", 1) == "duplicate", "reports of older agents are refused"
    driver.tell("n1/3", r.ReportsLost(node="n1", num_lost=7))
    assert driver.state.reports_lost == 7


def test_a_new_epoch_restarts_every_deadline() -> None:
    driver = Driver()
    driver.submit(spec())
    lengths = {name: x.length_s for name, x in driver.state.deadlines.items()}
    assert lengths
    driver.now_s += 100
    driver.tell("leader/def", r.EpochStarted(nonce="def", code="1", heart=DECIDER_VERSION), epoch=2)
    now_s = driver.state.at_s
    assert {name: x.due_s for name, x in driver.state.deadlines.items()} == {
        name: now_s + length_s for name, length_s in lengths.items()
    }
    assert [x for x in driver.state.sources if x.startswith("leader/")] == ["leader/def"]


def test_an_early_deadline_report_is_ignored() -> None:
    driver = Driver()
    driver.submit(spec())
    name = next(iter(driver.state.deadlines))
    driver.tell("leader/abc", r.DeadlineReached(deadline=name))
    assert name in driver.state.deadlines


def test_time_never_runs_backwards() -> None:
    driver = Driver()
    before_s = driver.state.at_s
    advance(
        driver.state,
        Report(
            source="n1/1", source_seq=2, occurred_s=1.0, body=r.ReportsLost(node="n1", num_lost=0)
        ),
        epoch=1,
        at_s=5.0,
    )
    assert driver.state.at_s == before_s


def unknown(heart: int, source: str = "n1/1", *, ignorable: bool = False) -> ClusterState:
    """The fold of a record of a later version, in the epoch of a leader with that decider."""
    state, source_seq = ClusterState(), int(source != "heart")
    leader = r.EpochStarted(nonce="a", code="0.9.0", heart=heart)
    later = UnknownBody(kind="Later", version=1, raw=b"\x80", ignorable=ignorable)
    for seq, one, number, body in ((1, "leader/a", 1, leader), (2, source, source_seq, later)):
        fold(
            state,
            Record(
                seq=seq,
                epoch=1,
                at_s=1.0,
                occurred_s=1.0,
                source=one,
                source_seq=number,
                cause=0,
                incident=0,
                body=body,
            ),
        )
    return state


def test_an_ignorable_record_of_a_later_version_changes_nothing_else() -> None:
    state = unknown(DECIDER_VERSION + 1, ignorable=True)
    assert (state.seq, state.sources["n1/1"]) == (2, 1)
    assert {HANDLERS[KINDS[kind]] for kind in IGNORABLE} == {HANDLERS[o.InjectFault]}


def test_a_later_agents_report_had_no_effect_on_its_leader_either() -> None:
    assert unknown(DECIDER_VERSION).seq == 2


@pytest.mark.parametrize(
    ("heart", "source"), [(DECIDER_VERSION + 1, "n1/1"), (DECIDER_VERSION, "heart")]
)
def test_another_record_of_a_later_version_names_the_version_that_it_needs(
    heart: int, source: str
) -> None:
    with pytest.raises(
        NewerLog,
        match=rf"seq 2: Later \(version 1\) needs Unicron 0\.9\.0, "
        rf"decider version {heart}; this one has {DECIDER_VERSION}",
    ) as error:
        unknown(heart, source)
    assert (error.value.exit_code, "that version" in error.value.hint) == (2, True)


def test_sources_of_operators_are_bounded() -> None:
    driver = Driver()
    for _ in range(1100):
        driver.tell(f"operator/{len(driver.seqs)}", r.TaskCancelRequested(task=0))
    assert len([x for x in driver.state.sources if x.startswith("operator/")]) == NUM_REQUESTS_MAX


def test_a_state_of_another_shape_has_another_schema() -> None:
    """SCHEMA is part of every hash, so that hashes of different shapes are never equal. If this
    test fails, give SCHEMA a new name (once between two releases) and update the digest below.
    """
    shape = "\n".join(sorted(_fields(inspect.type_info(ClusterState))))
    digest = hashlib.blake2b(shape.encode(), digest_size=4).hexdigest()
    assert (SCHEMA, digest) == ("unicron-state-9", "28482e73")


def _fields(kind: inspect.Type) -> set[str]:
    """`Struct.field: type` of each struct that is reachable from `kind`, as encoded."""
    found, todo = set[str](), [kind]
    seen: list[Any] = []
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.append(one)
        match one:
            case inspect.StructType():
                found |= {
                    f"{one.cls.__name__}.{part.encode_name}: {type(part.type).__name__}"
                    for part in one.fields
                }
                todo += [part.type for part in one.fields]
            case inspect.VarTupleType() | inspect.ListType():
                todo.append(one.item_type)
            case inspect.DictType():
                todo += [one.key_type, one.value_type]
            case inspect.UnionType():
                todo += one.types
            case _:
                pass
    return found

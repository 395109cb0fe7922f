"""The phases of an iteration: each step is a row of the table, an illegal one changes nothing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import interrupted_member
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from interrupted_member import KINDS, Member
from unicron.events.spec.model import Axes
from unicron.workers.training.process.orders import NoOrders
from unicron.workers.training.recovery.settlement import MemberAssignment, Settlement
from unicron.workers.training.step import progress
from unicron.workers.training.step.progress import (
    PHASES,
    TABLE,
    BarrierEntered,
    Began,
    Happening,
    IllegalStep,
    Interrupted,
    IterationState,
    Phase,
    Reduced,
    ReductionBegan,
    Settled,
    UnitPassed,
    advance,
)
from unicron.workers.training.step.results import Done

# --- the table -----------------------------------------------------------------------------------
ITEMS = some.lists(some.integers(0, 5), unique=True).map(lambda items: tuple(sorted(items)))
NUMBERS = some.integers(0, 3)
HAPPENINGS: some.SearchStrategy[Any] = some.one_of(
    some.builds(Began, NUMBERS),
    some.builds(UnitPassed, ITEMS),
    some.builds(progress.SumDiscarded),
    some.builds(ReductionBegan),
    some.builds(Reduced),
    some.builds(BarrierEntered),
    some.builds(progress.Overflowed),
    some.builds(progress.Differed),
    some.builds(progress.StepBegan),
    some.builds(progress.StepTaken, some.sampled_from([(), (1.0, 0.0, 0.0)])),
    some.builds(progress.Assigned, ITEMS, NUMBERS),
    some.builds(Interrupted, some.booleans()),
    some.builds(progress.Undone, some.booleans()),
    some.builds(
        Settled,
        NUMBERS,
        ITEMS,
        ITEMS,
        NUMBERS,
        some.booleans(),
        NUMBERS,
        some.booleans(),
    ),
    some.builds(progress.StateReplaced, some.integers(-1, 3)),
    some.builds(progress.ModelReplaced, some.booleans()),
)


def check_state(state: IterationState) -> None:
    """What is true of every state that the table leads to."""
    if state.phase == "assigned":
        assert not state.done, "micro-batches of an iteration that has not begun"
    if state.phase in ("reducing", "reduced", "ready", "stepping"):
        assert not state.todo, "a reduction without some of its own micro-batches"


@given(some.lists(HAPPENINGS, max_size=40))
def test_each_step_is_one_row_or_changes_nothing(happenings: list[Any]) -> None:
    state = IterationState()
    for happening in happenings:
        before = copy.deepcopy(state)
        rows = [
            row
            for row in TABLE
            if row.phase == state.phase
            and row.happened is type(happening)
            and row.on(state, happening)
        ]
        assert len(rows) <= 1, "two rows apply"
        if not rows:
            with pytest.raises(IllegalStep):
                advance(state, happening)
            assert state == before
            continue
        assert advance(state, happening) is rows[0]
        assert state.phase == rows[0].to
        assert not (rows[0].clears and state.done), "cleared, and yet counted"
        if state.step_version != before.step_version:
            assert isinstance(happening, progress.StepTaken | progress.StateReplaced | Settled), (
                "another state without a step"
            )
        check_state(state)


def test_the_table_names_every_phase_and_happening() -> None:
    assert {row.phase for row in TABLE} == set(PHASES) == set(get_args(Phase))
    assert {row.happened for row in TABLE} == set(get_args(Happening))
    reached: set[str] = {"assigned"}
    for _ in PHASES:
        reached |= {row.to for row in TABLE if row.phase in reached}
    assert reached == set(PHASES)


def test_a_settlement_cannot_keep_what_a_member_does_not_have() -> None:
    state = IterationState(phase="passing", step_version=4, done=[1], owned=(1, 2))
    before = copy.deepcopy(state)
    for kept, version in (((2,), 4), ((1, 2), 4), ((1,), 5)):
        with pytest.raises(IllegalStep):
            advance(state, Settled(version, kept, (), 2, is_begun=True, redone=0, has_sum=True))
        assert state == before


# --- every kind of interruption in every phase, with a real thread, order and group ---------------
class Expected(NamedTuple):
    """After an interruption in a phase: the next phase, and the micro-batches that it keeps."""

    phase: str
    kept: tuple[int, ...]


AFTER = {
    "assigned": Expected("assigned", ()),
    "passing": Expected("passing", ()),  # gradients of a half micro-batch are in the sum
    "reducing": Expected("passing", (0, 1)),
    "ready": Expected("ready", (0, 1)),
}


@pytest.fixture(scope="module")
def interrupted() -> dict[tuple[str, str], dict[str, Any]]:
    """By phase and kind: what a member says after it was interrupted there."""
    script = str(Path(interrupted_member.__file__))
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {tuple(each["interrupted"]): each for each in told}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", AFTER)
def test_an_interruption_in_a_phase(
    interrupted: dict[tuple[str, str], dict[str, Any]], phase: str, kind: str
) -> None:
    told = interrupted[phase, kind]
    is_order = kind in ("order before", "abort", "SIGSTOP")
    assert told["result"] == ("Stopped" if is_order else "Failed")
    assert told["is_abandoned"] == (kind == "SIGSTOP")
    assert Expected(told["phase"], tuple(told["kept"])) == AFTER[phase]
    assert told["ready"] == (phase == "ready")


@pytest.fixture
def member(request: pytest.FixtureRequest) -> Iterator[Member]:
    made = Member(NoOrders(), overlap=getattr(request, "param", False))
    yield made
    made.close()


def test_nothing_waits_between_reduction_and_barrier() -> None:
    """An interruption there would be a bug: the member has a sum that nobody else knows of."""
    state = IterationState(phase="reduced", step_version=1)
    for is_lost in (False, True):
        with pytest.raises(IllegalStep):
            advance(state, Interrupted(is_lost))
    assert state == IterationState(phase="reduced", step_version=1)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_ready_member_that_does_not_step_has_its_local_sum_again(
    member: Member, is_kept: bool
) -> None:
    member.part.engine.gradients.has_backup = is_kept
    member.advance_to("passing")
    assert member.iteration.passes.run([1]) is None
    local = [own.clone() for own in member.part.engine.gradients.flat]
    member.part.happened(ReductionBegan())
    result = member.part.sum.run(member.iteration.passes.own_stats(), member.part.losses)
    assert isinstance(result, Done)
    member.part.happened(Reduced())
    member.part.happened(BarrierEntered())
    for own in member.part.engine.gradients.flat:
        own.mul_(3)  # as if others had added theirs
    member.part.undo()
    assert member.part.kept == ((0, 1) if is_kept else ())
    own_sum = member.part.engine.gradients.flat
    check: Callable[[Any], bool] = (
        (lambda pair: bool(pair[0].equal(pair[1]))) if is_kept else (lambda pair: not pair[0].any())
    )
    assert all(check(pair) for pair in zip(own_sum, local, strict=True))


def test_a_step_that_raises_leaves_a_state_of_which_nothing_is_claimed(member: Member) -> None:
    """The gradients may be divided, and parameters stepped: so the process ends (Member._join)."""
    member.advance_to("ready")
    optimizer = member.part.engine.optimizer

    def out_of_memory() -> None:
        raise RuntimeError("CUDA out of memory")

    optimizer.register_step_pre_hook(lambda *_: out_of_memory())
    settlement = Settlement(step_version=1, begun=False, shares=(), barrier=(1.0, 0.0, 0.0))
    share = MemberAssignment(kept=(), todo=(0, 1), reassigned=(), steps=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        member.part.finish_step(settlement, share)
    assert member.part.state.phase == "stepping"
    for again in (
        lambda: member.part.take(0, share, 2, begun=True),
        lambda: member.part.reset_to(1),
        lambda: member.part.finish_step(settlement, share),
    ):
        with pytest.raises(IllegalStep):
            again()


@pytest.mark.parametrize("member", [True], indirect=True, ids=["overlapped"])
def test_an_abandoned_pass_starts_no_reduction_in_the_next_generation(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to its last backward when the member trains in another generation."""
    member.part.begin(1)
    passes, sum_ = member.iteration.passes, member.part.sum
    before = member.part.collectives.operations
    run = partial(passes.unit, (0,), sum_, before, None, is_last=True, is_probe=False)
    member.communicators.down(())
    member.communicators.meet(2, 0, 1, member.communicators.endpoint, b"")
    member.communicators.up(Axes())
    assert member.part.collectives.operations is not before
    started = list[str]()
    for method in ("allreduce", "reduce_scatter"):
        monkeypatch.setattr(
            dist.ProcessGroup, method, lambda *args, method=method: started.append(method)
        )
    with pytest.raises(RuntimeError, match="the generation ended meanwhile"):
        run()
    assert not started


@pytest.mark.parametrize("member", [True], indirect=True, ids=["overlapped"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_bucket_that_outlives_its_passes_writes_into_no_later_local_sum(
    member: Member, is_kept: bool
) -> None:
    """The last backward has launched all buckets, and then the passes are lost."""
    part, passes = member.part, member.iteration.passes
    gradients = part.engine.gradients
    gradients.has_backup = is_kept
    part.begin(1)
    assert passes.run([0, 1]) is None
    launched, local = list(gradients.flat), [own.clone() for own in gradients.flat]
    part.lose_passes()
    assert part.kept == ()
    assert passes.run([0, 1]) is None
    for late in launched:
        late.fill_(float("nan"))
    assert all(own.equal(first) for own, first in zip(gradients.flat, local, strict=True))


def test_gradients_that_could_not_be_zeroed_are_in_no_later_local_sum(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The join fails then, and the member claims what its progress says: no micro-batches."""
    part, passes = member.part, member.iteration.passes
    engine, share = part.engine, MemberAssignment(kept=(), todo=(0, 1), reassigned=())
    member.advance_to("passing")

    def out_of_memory() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "clear", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            part.take(0, share, 2, begun=True)
    assert part.kept == ()
    part.take(0, share, 3, begun=True)
    assert not any(own.any() for own in engine.gradients.flat)
    assert passes.run([0, 1]) is None
    assert part.kept == (0, 1)

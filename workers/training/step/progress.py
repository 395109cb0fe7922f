"""How far a member is in the current iteration: plain data, and the table of its steps.

Pure: the data change only here, by TABLE, when something has happened. What follows for tensors and
other members is in own_part.py and iteration.py, which tell what happened. `make docs` draws
TABLE into README.md and docs/reference/training-step.md.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from msgspec import Struct, field

from ..recovery.state_sources import NO_STATE

Phase = Literal["assigned", "passing", "reducing", "reduced", "ready", "stepping"]
"""`assigned`: the member has micro-batches, and no member has begun the iteration that it knows of.
`passing`: its local sum of gradients grows, by whole micro-batches. `reducing`: the sums of all
members are added up; the local sum is in the backup. `reduced`: it has the sum of all members,
which only it knows. `ready`: it has entered the step barrier with it, and does not know whether all
members have. `stepping`: it changes the state. Nothing interrupts that, and a process in which it
raises an error ends: its state is of no iteration."""
PHASES: tuple[Phase, ...] = ("assigned", "passing", "reducing", "reduced", "ready", "stepping")


class IterationState(Struct):
    """The progress of one member. `step_version` is NO_STATE until the first settlement."""

    phase: Phase = "assigned"
    step_version: int = NO_STATE
    """The iterations in its state: the number of the current one."""
    done: list[int] = field(default_factory=list)
    """The micro-batches in its local sum."""
    owned: tuple[int, ...] = ()
    """Those that it was assigned."""
    assigned_in: int = 0
    """The generation in which it was."""
    trained_in: int = 0
    """The generation in which it last trained."""
    redone: int = 0
    """How often the members have begun this iteration anew after an overflow of exact sums."""
    barrier: tuple[float, ...] = ()
    """The values of the step barrier at its last step in the current generation."""

    @property
    def is_begun(self) -> bool:
        return self.phase != "assigned"

    @property
    def todo(self) -> list[int]:
        """The micro-batches that it must still run."""
        done = frozenset(self.done)
        return [item for item in self.owned if item not in done]


# --- what happens ---
class Began(Struct, frozen=True):
    """The iteration begins, or goes on, in this generation."""

    generation: int


class UnitPassed(Struct, frozen=True):
    """These micro-batches are whole in the local sum, on all members of the replica."""

    items: tuple[int, ...]


class SumDiscarded(Struct, frozen=True):
    """The local sum does not count: a probe, a test, or a wrong member of the replica."""


class ReductionBegan(Struct, frozen=True):
    """All micro-batches of this member are done."""


class Reduced(Struct, frozen=True):
    """The sum of all members arrived, before this member began to abort anything."""


class BarrierEntered(Struct, frozen=True):
    """It is about to tell all members that it has the sum."""


class Overflowed(Struct, frozen=True):
    """All members have entered the barrier; an exact sum of one of them was out of range."""


class Differed(Struct, frozen=True):
    """All members have entered the barrier; replicas differ in a gradient, and try once more."""


class StepBegan(Struct, frozen=True):
    """The optimizer is about to step, or to skip its step."""


class StepTaken(Struct, frozen=True):
    """The optimizer has stepped, or skipped its step. `barrier`: with the barrier's values."""

    barrier: tuple[float, ...] = ()


class Assigned(Struct, frozen=True):
    """The micro-batches of the next iteration, among the members of this generation."""

    owned: tuple[int, ...]
    generation: int


class Interrupted(Struct, frozen=True):
    """A wait for other members ended without their results: a member is gone, an order to stop
    came, or the wait was abandoned. `is_lost`: the local sum went with it."""

    is_lost: bool = False


class Undone(Struct, frozen=True):
    """The members that settled do not step: the local sum is restored, or is lost."""

    is_lost: bool


class Settled(Struct, frozen=True):
    """A settlement says what this member keeps and runs. `has_sum`: it has a local sum."""

    step_version: int
    kept: tuple[int, ...]
    todo: tuple[int, ...]
    generation: int
    is_begun: bool
    redone: int
    has_sum: bool


class StateReplaced(Struct, frozen=True):
    """It has another state, of `step_version` iterations, without gradients."""

    step_version: int


class ModelReplaced(Struct, frozen=True):
    """Another model has the same state. `is_lost`: it did not get the local sum."""

    is_lost: bool


Happening = (
    Began
    | UnitPassed
    | SumDiscarded
    | ReductionBegan
    | Reduced
    | BarrierEntered
    | Overflowed
    | Differed
    | StepBegan
    | StepTaken
    | Assigned
    | Interrupted
    | Undone
    | Settled
    | StateReplaced
    | ModelReplaced
)


# --- conditions ---
Condition = Callable[[IterationState, Any], bool]


def always(state: IterationState, happening: Any) -> bool:
    return True


def all_is_done(state: IterationState, happening: ReductionBegan) -> bool:
    return not state.todo


def the_sum_is_kept(state: IterationState, happening: Interrupted | Undone | ModelReplaced) -> bool:
    return not happening.is_lost


def the_sum_is_lost(state: IterationState, happening: Interrupted | Undone | ModelReplaced) -> bool:
    return happening.is_lost


def it_keeps_its_sum(state: IterationState, happening: Settled) -> bool:
    """What the settlement keeps is what the member has, of the same iteration."""
    return (
        happening.step_version == state.step_version
        and tuple(sorted(state.done)) == happening.kept
        and happening.has_sum
    )


def it_goes_on_with_its_sum(state: IterationState, happening: Settled) -> bool:
    return happening.is_begun and it_keeps_its_sum(state, happening)


def it_begins_with_its_sum(state: IterationState, happening: Settled) -> bool:
    """No member has begun, so its sum has no micro-batch."""
    return not happening.is_begun and not happening.kept and it_keeps_its_sum(state, happening)


def it_goes_on_without_a_sum(state: IterationState, happening: Settled) -> bool:
    return happening.is_begun and not happening.kept and not it_keeps_its_sum(state, happening)


def it_begins_without_a_sum(state: IterationState, happening: Settled) -> bool:
    return not happening.is_begun and not happening.kept and not it_keeps_its_sum(state, happening)


# --- what is done with the data ---
Action = Callable[[IterationState, Any], None]


def nothing(state: IterationState, happening: Any) -> None:
    return


def train_in_this_generation(state: IterationState, happening: Began) -> None:
    if state.trained_in != happening.generation:
        state.trained_in, state.barrier = happening.generation, ()


def count_micro_batches(state: IterationState, happening: UnitPassed) -> None:
    state.done.extend(happening.items)


def forget_micro_batches(state: IterationState, happening: Any) -> None:
    state.done = []


def count_attempt(state: IterationState, happening: Overflowed) -> None:
    state.redone += 1
    state.done = []


def count_iteration(state: IterationState, happening: StepTaken) -> None:
    state.barrier = happening.barrier or state.barrier
    state.step_version += 1
    state.redone, state.done, state.owned = 0, [], ()


def assign(state: IterationState, happening: Assigned) -> None:
    state.owned, state.assigned_in = happening.owned, happening.generation


def resume(state: IterationState, happening: Settled) -> None:
    state.step_version, state.redone = happening.step_version, happening.redone
    state.owned = tuple(sorted((*happening.kept, *happening.todo)))
    state.assigned_in = happening.generation


def resume_without_a_sum(state: IterationState, happening: Settled) -> None:
    state.done = []
    resume(state, happening)


def take_over_state(state: IterationState, happening: StateReplaced) -> None:
    state.step_version = happening.step_version
    state.done, state.owned, state.barrier, state.redone = [], (), (), 0


# --- the table ---
class Row(NamedTuple):
    """If `happened` happens in `phase` and `on` is true, `then` changes the data, and `to` is the
    next phase. `clears`: the local gradients no longer count, and are zeroed."""

    phase: Phase
    happened: type[Struct]
    on: Condition
    to: Phase
    then: Action
    clears: bool = False


TABLE: tuple[Row, ...] = (
    Row("assigned", Began, always, "passing", train_in_this_generation),
    Row("assigned", Assigned, always, "assigned", assign),
    Row("assigned", SumDiscarded, always, "assigned", forget_micro_batches, clears=True),
    Row("assigned", Interrupted, the_sum_is_kept, "assigned", nothing),
    Row("assigned", Settled, it_goes_on_with_its_sum, "passing", resume),
    Row("assigned", Settled, it_begins_with_its_sum, "assigned", resume),
    Row("assigned", Settled, it_goes_on_without_a_sum, "passing", resume_without_a_sum, True),
    Row("assigned", Settled, it_begins_without_a_sum, "assigned", resume_without_a_sum, True),
    Row("assigned", StateReplaced, always, "assigned", take_over_state, clears=True),
    Row("assigned", ModelReplaced, the_sum_is_kept, "assigned", nothing),
    Row("assigned", ModelReplaced, the_sum_is_lost, "assigned", forget_micro_batches, True),
    Row("passing", Began, always, "passing", train_in_this_generation),
    Row("passing", UnitPassed, always, "passing", count_micro_batches),
    Row("passing", SumDiscarded, always, "passing", forget_micro_batches, clears=True),
    Row("passing", Interrupted, the_sum_is_kept, "passing", nothing),
    Row("passing", Interrupted, the_sum_is_lost, "passing", forget_micro_batches, clears=True),
    Row("passing", ReductionBegan, all_is_done, "reducing", nothing),
    Row("passing", Settled, it_goes_on_with_its_sum, "passing", resume),
    Row("passing", Settled, it_begins_with_its_sum, "assigned", resume),
    Row("passing", Settled, it_goes_on_without_a_sum, "passing", resume_without_a_sum, True),
    Row("passing", Settled, it_begins_without_a_sum, "assigned", resume_without_a_sum, True),
    Row("passing", StateReplaced, always, "assigned", take_over_state, clears=True),
    Row("passing", ModelReplaced, the_sum_is_kept, "passing", nothing),
    Row("passing", ModelReplaced, the_sum_is_lost, "passing", forget_micro_batches, clears=True),
    Row("reducing", Reduced, always, "reduced", nothing),
    Row("reducing", Interrupted, the_sum_is_kept, "passing", nothing),
    Row("reducing", Interrupted, the_sum_is_lost, "passing", forget_micro_batches, clears=True),
    Row("reduced", StepBegan, always, "stepping", nothing),
    Row("reduced", BarrierEntered, always, "ready", nothing),
    Row("ready", StepBegan, always, "stepping", nothing),
    Row("ready", Overflowed, always, "passing", count_attempt, clears=True),
    Row("ready", Differed, always, "passing", forget_micro_batches, clears=True),
    Row("ready", Interrupted, the_sum_is_kept, "ready", nothing),
    Row("ready", Undone, the_sum_is_kept, "passing", nothing),
    Row("ready", Undone, the_sum_is_lost, "passing", forget_micro_batches, clears=True),
    Row("stepping", StepTaken, always, "assigned", count_iteration, clears=True),
)


class IllegalStep(AssertionError):
    """TABLE has no row for what happened: a bug. Nothing has changed."""


def row_of(state: IterationState, happening: Happening) -> Row:
    """The row that applies. Raises IllegalStep."""
    for row in TABLE:
        if (
            row.phase == state.phase
            and row.happened is type(happening)
            and row.on(state, happening)
        ):
            return row
    raise IllegalStep(f"{happening} in phase {state.phase}: {state}")


def advance(state: IterationState, happening: Happening) -> Row:
    """Change the data as TABLE says. Raises IllegalStep, and changes nothing then."""
    row = row_of(state, happening)
    row.then(state, happening)
    state.phase = row.to
    return row

"""Checks plans of a simulated cluster against every possible vector of slots."""

from __future__ import annotations

import itertools
import math

from msgspec import Struct
from spare_by_force import may_idle, spare_by_force
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.planner.problem_of_state import planning_snapshot, shapes
from unicron.control_plane.state.cluster import ClusterState, allocatable_slots
from unicron.control_plane.state.task import Task
from unicron.control_plane.throughput import table as throughput
from unicron.control_plane.throughput import training_layouts, transition_cost
from unicron.events.records.decisions import PlanChosen

NUM_TASKS_MAX = 4
NUM_SLOTS_MAX = 8
CLOSE_RATIO = 1e-9
RATE_FLOPS = 1e9
"""The unit of rates where alpha (fairness) is not 0."""


class Option(Struct, frozen=True):
    """One task on one number of slots: `gain` is its objective value, `earned` is that value before
    transition costs. With alpha, `gain` uses the utility and `earned` the marginal utility."""

    slots: int
    gain: float
    earned: float
    moves: bool
    """A task without a fault would change its number of slots."""


def is_small(body: PlanChosen) -> bool:
    """True if all vectors can be tried."""
    return len(body.allocations) <= NUM_TASKS_MAX and body.num_slots <= NUM_SLOTS_MAX


def wrong_plan(state: ClusterState, body: PlanChosen) -> str:
    """What is wrong with a small plan, before it is folded into `state`; empty: nothing."""
    for given in body.allocations:
        slots = state.tasks[given.task].spec.slots
        if given.slots and not (
            slots.min <= given.slots <= slots.max
            and given.slots % slots.multiple_of == 0
            and given.slots in (slots.sizes or (given.slots,))
        ):
            return f"task {given.task} may not have {given.slots} slots"
    if taken := _taken(state, body):
        return taken
    over = [
        team
        for team, quota in state.policy.quotas.items()
        if sum(x.slots for x in body.allocations if state.tasks[x.task].spec.team == team) > quota
    ]
    if over:
        return f"team {over[0]} has more than its quota"
    if len({state.tasks[x.task].spec.priority for x in body.allocations}) > 1:
        return ""  # sums over several priorities are not compared here
    rows = _options(state, body)
    floors = _floors(state, body)
    vectors = [
        vector
        for vector in itertools.product(*rows)
        if _fits(state, body, vector)
        and all(
            _may_have(option, floor, row, state.policy.alpha)
            for option, floor, row in zip(vector, floors, rows, strict=True)
        )
    ]
    fewest = min(map(_num_moves, vectors))
    most = max(state.policy.moves_max, fewest) if state.policy.moves_max is not None else len(rows)
    best, chosen = -math.inf, math.nan
    for vector in vectors:
        if _num_moves(vector) > most:
            continue
        total = math.fsum(option.gain for option in vector)
        best = max(best, total)
        if all(option.slots == x.slots for option, x in zip(vector, body.allocations, strict=True)):
            chosen = total
    if math.isnan(chosen):
        return "the plan does not fit"
    if chosen < best - CLOSE_RATIO * max(abs(best), abs(chosen), 1.0):
        return f"its objective {chosen:g} is not the optimum {best:g}"
    return _wrong_spare(state, body)


def _taken(state: ClusterState, body: PlanChosen) -> str:
    """Which task whose own processes fail gets slots of other tasks; empty: none does."""
    given = {seat.slot for task in state.tasks.values() for seat in task.target}
    usable = set(allocatable_slots(state))
    for one in body.allocations:
        task = state.tasks[one.task]
        mine = {seat.slot for seat in task.target}
        if task.failures is None or all(
            slot not in usable and slot not in task.blamed_slots for slot in task.failures.slots
        ):
            continue  # that the slots where it failed are out explains the failures
        if one.slots > len(usable & mine) + len(usable - given):
            return f"task {one.task} fails, and takes slots from others"
    return ""


def _wrong_spare(state: ClusterState, body: PlanChosen) -> str:
    """What is wrong with the hot spare: a node's slots stay idle exactly if that is worth more."""
    asked, told = planning_snapshot(state).problem, body.hot_spare
    if not asked.spare_slots or not body.allocations:
        return "" if told is None else "the plan has a hot spare, but none is configured"
    if told is None or told.num_slots != asked.spare_slots:
        return "the plan lacks the hot spare"
    num_idle = body.num_slots - sum(x.slots for x in body.allocations)
    if told.verdict == "idle anyway":
        return "" if num_idle >= told.num_slots else f"only {num_idle} slots are idle"
    cost, saves, close = spare_by_force(asked)
    if abs(told.cost_flop - cost) > close or abs(told.saves_flop - saves) > close:
        return (
            f"a spare costs {float(cost):g} and saves {float(saves):g}, the plan has "
            f"{told.cost_flop:g} and {told.saves_flop:g}"
        )
    if told.verdict == "kept":
        return "" if saves > cost - close else "the spare costs more than it saves"
    pays = saves > cost + close and may_idle(asked)
    return "a spare would save more than it costs" if pays else ""


def _num_given(body: PlanChosen) -> int:
    """Slots that the plan can give: all but those of a hot spare that is kept."""
    spare = body.hot_spare
    return body.num_slots - (spare.num_slots if spare and spare.verdict == "kept" else 0)


def _fits(state: ClusterState, body: PlanChosen, vector: tuple[Option, ...]) -> bool:
    """True if the vector fits into the slots and into each team's quota."""
    return sum(option.slots for option in vector) <= _num_given(body) and all(
        sum(
            option.slots
            for option, x in zip(vector, body.allocations, strict=True)
            if state.tasks[x.task].spec.team == team
        )
        <= quota
        for team, quota in state.policy.quotas.items()
    )


def _floors(state: ClusterState, body: PlanChosen) -> list[int]:
    """The minimum slots of each task, granted in the order of the floors as long as they fit."""
    tasks = [state.tasks[x.task] for x in body.allocations]
    of_team: dict[str, int] = {}
    found: dict[int, int] = {}
    for task in sorted(tasks, key=lambda one: (-one.spec.priority, -one.weight, one.id)):
        team, rates = task.spec.team, _rates(state, task.id)
        room = min(
            _num_given(body) - sum(found.values()),
            state.policy.quotas.get(team, body.num_slots) - of_team.get(team, 0),
        )
        levels = [task.spec.slots.floor] if task.spec.slots.floor else []
        levels += [1] if state.policy.floor or state.policy.alpha >= 1 else []
        wanted = [
            min((x for x, rate in rates.items() if rate > 0 and x >= level), default=0)
            for level in levels
        ]
        found[task.id] = next((x for x in wanted if 0 < x <= room), 0)
        of_team[team] = of_team.get(team, 0) + found[task.id]
    return [found[task.id] for task in tasks]


def _may_have(option: Option, floor: int, row: list[Option], alpha: float) -> bool:
    """True if the option meets the floor. From alpha 1 on, a task whose floor did not fit waits."""
    starves = alpha >= 1 and not floor and any(one.earned for one in row)
    return option.slots >= floor and not (starves and option.slots)


def _num_moves(vector: tuple[Option, ...]) -> int:
    return sum(option.moves for option in vector)


def _options(state: ClusterState, body: PlanChosen) -> list[list[Option]]:
    wishes = {wish.task: wish for wish in planning_snapshot(state).problem.demands}
    rows: list[list[Option]] = []
    for given in body.allocations:
        task = state.tasks[given.task]
        rates = _rates(state, given.task)
        hurt = wishes[given.task].faulted
        now = given.slots_before
        old = task.weight * _marginal(rates.get(now, 0.0), state.policy.alpha)
        row: list[Option] = []
        for slots in sorted({0, *rates}):
            times = task.weight * state.mtbf_gpu_s / max(body.num_slots, 1)
            rate = rates.get(slots, 0.0)
            earned = times * _marginal(rate, state.policy.alpha)
            made = times * _utility(rate, state.policy.alpha)
            used = (
                slots
                if slots == now
                else min(  # slots beyond `used` stay idle
                    (size for size, other in rates.items() if other == rate), default=0
                )
            )
            moves = now > 0 and not hurt and slots != now
            lost_s = _stood_s(state, task, now, slots, used) if hurt or slots != now else 0.0
            if moves and now <= _num_given(body):
                lost_s += state.policy.gain_min * state.mtbf_gpu_s / max(body.num_slots, 1)
            row.append(Option(slots, made - old * lost_s, earned, moves))
        rows.append(row)
    return rows


def _utility(rate: float, alpha: float) -> float:
    """U(T) for T in GFLOP/s; 0 for a rate of 0."""
    rate /= RATE_FLOPS if alpha else 1.0
    return 0.0 if not rate else math.log(rate) if alpha == 1 else rate ** (1 - alpha) / (1 - alpha)


def _marginal(rate: float, alpha: float) -> float:
    """T U'(T)."""
    return (rate / (RATE_FLOPS if alpha else 1.0)) ** (1 - alpha) if rate else 0.0


def _stood_s(state: ClusterState, task: Task, now: int, slots: int, used: int) -> float:
    """D_transition from the downtimes of the task's changes; of `slots`, `used` train."""

    def usual_s(kind: str) -> float:
        known = sorted(task.downtime_s.get(kind, []))
        if len(known) < 3:
            return math.nan
        return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2

    train = task.spec.training
    before, after = (
        training_layouts.layout_within(train, num) if train is not None else None
        for num in (now, used)
    )
    reshapes = (
        before is not None
        and after is not None
        and ((before.tp, before.pp, before.chunks) != (after.tp, after.pp, after.chunks))
    )
    kind = (
        "reshape" if reshapes else "same" if slots == now else "grow" if slots > now else "shrink"
    )
    found = usual_s(kind) if slots else usual_s("stop") + usual_s("start")
    prior_s = state.policy.reshape_s if reshapes else state.policy.transition_s
    return prior_s if math.isnan(found) else found


def _rates(state: ClusterState, number: int) -> dict[int, float]:
    """T(t, x) by size that the task may have. Idle slots cost nothing, so the rate never falls with
    the size."""
    table = state.tasks[number].throughput
    assert table is not None
    pairs = sorted(zip(table.sizes, table.rates_flops, strict=True))
    most = planning_snapshot(state).most.get(number, math.inf)
    return {
        size: max(rate for other, rate in pairs if other <= size)
        for size, _ in pairs
        if size <= most
    }


def wrong_price(state: ClusterState, number: int, weight_from: float) -> str:
    """What is wrong with `weight_from`: a new plan must give slots just above it, none below."""
    assert state.plan is not None
    told, num_slots = state.tasks[number].weight, state.plan.num_slots
    most = planning_snapshot(state).most
    for times, runs in ((1.0001, True), (0.9999, False)):
        weight = weight_from * times
        wishes: list[TaskDemand] = []
        for given in state.plan.allocations:
            task = state.tasks[given.task]
            assert task.throughput is not None
            found = [
                one
                for one in throughput.candidates(task.throughput, given.slots)
                if one[0] <= most.get(task.id, one[0])
            ]
            own = weight if given.task == number else task.weight
            wishes.append(
                TaskDemand(
                    task=task.id,
                    name=task.spec.name,
                    now=given.slots,
                    faulted=False,
                    transition=transition_cost.transition(state, task),
                    sizes=tuple(size for size, _ in found),
                    shapes=shapes(task, found),
                    wafs=tuple(own * rate for _, rate in found),
                    team=task.spec.team,
                    priority=task.spec.priority,
                )
            )
        policy = state.policy
        choice = planner.choose_plan(
            PlanProblem(
                demands=tuple(wishes),
                num_slots=num_slots,
                mtbf_gpu_s=state.mtbf_gpu_s,
                gain_min=policy.gain_min,
                moves_max=policy.moves_max,
                quotas=tuple(sorted(policy.quotas.items())),
            )
        )
        slots = next(x.slots for x in choice.allocations if x.task == number)
        if bool(slots) != runs:
            return (
                f"task {number} of weight {told:g} gets {slots} slots at {weight:g}, "
                f"and weight_from is {weight_from:g}"
            )
    return ""

"""Plans under limits: the most moves, quotas of teams, priorities, floors.

A dynamic programme over slots and moves. docs/decisions/limits-of-plans.md has the rules.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from .problem import PlanLimits, PlanProblem, TaskDemand, waf_of
from .solver.candidates import IMPOSSIBLE, Candidates, SlotsAndGain
from .solver.core import Ints


def best(rows: Candidates, capacity: int, limits: PlanLimits) -> SlotsAndGain | None:
    """The best plan that fits and satisfies the limits; None if no plan fits. If every plan exceeds
    `moves_max`, it is the best plan with the fewest moves. The choice on a tie is deterministic."""
    found = within_limits(rows, capacity, limits)
    if found is None and limits.moves_max is not None:
        few = within_limits(
            _moves_as_losses(rows, limits), capacity, replace(limits, moves_max=None, priorities=())
        )
        if few is not None:
            found = within_limits(rows, capacity, replace(limits, moves_max=-few[1]))
    return found


def within_limits(rows: Candidates, capacity: int, limits: PlanLimits) -> SlotsAndGain | None:
    """As `best`, but None if every plan exceeds `moves_max`."""
    slots = _Search(rows, capacity, limits).slots()
    return None if slots is None else (slots, rows.sums(rows.vector(slots))[0])


def _moves_as_losses(rows: Candidates, limits: PlanLimits) -> Candidates:
    """The rows with other gains: -1 for a move of a healthy task, else 0."""
    row_of = rows.row_of
    healthy, now = np.array(limits.healthy)[row_of], np.array(limits.now)[row_of]
    return Candidates(
        sizes=rows.sizes,
        starts=rows.starts,
        gains=-(healthy & (rows.sizes != now)).astype(np.int64),
    )


class _Option(Struct, frozen=True):
    size: int
    moves: int
    gains: tuple[int, ...]
    """By priority."""


class _Layer(Struct, frozen=True):
    """The step of one unit (a task or a team): the option that is best in each state."""

    options: list[_Option]
    choices: NDArray[np.unsignedinteger[Any]]
    """[moves, slots]: the option's index, in the smallest integer type; 0 if unreachable."""


class _Search:
    """One search within the limits. Sizes are in units of their greatest common divisor."""

    def __init__(self, rows: Candidates, capacity: int, limits: PlanLimits) -> None:
        self._rows, self._limits = rows, limits
        self._num_moves = min(limits.moves_max or 0, sum(limits.healthy))
        self._unit = max(int(np.gcd.reduce(rows.sizes)), 1) if len(rows.sizes) else 1
        self._capacity = min(capacity, int(rows.sizes[rows.starts[1:] - 1].sum())) // self._unit
        self._priorities = sorted(set(limits.priorities), reverse=True) or [0]

    def slots(self) -> tuple[int, ...] | None:
        """The sizes by row; None if no plan fits."""
        team_of = {row: (team, quota) for team, quota in self._limits.teams for row in team}
        units: list[tuple[tuple[int, ...], int | None]] = []
        for row in range(self._rows.num):
            team, quota = team_of.get(row, ((row,), None))
            if row == team[0]:
                units.append((team, quota))
        layers: list[tuple[_Layer, list[_Layer]]] = []
        values = self._empty(self._capacity)
        for team, quota in reversed(units):
            inner: list[_Layer] = []
            if quota is None:
                options = self._options(team[0])
            else:
                inner_values = self._empty(min(quota // self._unit, self._capacity))
                for row in reversed(team):
                    inner_values, layer = _add(inner_values, self._options(row))
                    inner.append(layer)
                options = _useful(inner_values)
            values, layer = _add(values, options)
            layers.append((layer, inner[::-1]))
        if values[0, -1, -1] <= IMPOSSIBLE // 2:
            return None
        return self._follow(units, layers[::-1])

    def _follow(
        self,
        units: Sequence[tuple[tuple[int, ...], int | None]],
        layers: Sequence[tuple[_Layer, list[_Layer]]],
    ) -> tuple[int, ...]:
        found = [0] * self._rows.num
        moves, left = self._num_moves, self._capacity
        for (team, quota), (layer, inner) in zip(units, layers, strict=True):
            option = layer.options[int(layer.choices[moves, left])]
            if quota is None:
                found[team[0]] = option.size * self._unit
            at = option.moves, option.size
            for row, one in zip(team, inner, strict=False):
                own = one.options[int(one.choices[at])]
                found[row] = own.size * self._unit
                at = at[0] - own.moves, at[1] - own.size
            moves, left = moves - option.moves, left - option.size
        return tuple(found)

    def _empty(self, capacity: int) -> Ints:
        return np.zeros((len(self._priorities), self._num_moves + 1, capacity + 1), dtype=np.int64)

    def _options(self, row: int) -> list[_Option]:
        limits, part = self._limits, self._rows.part(row, row + 1)
        priority = self._priorities.index(limits.priorities[row]) if limits.priorities else 0
        counted = limits.moves_max is not None and limits.healthy[row]
        return [
            _Option(
                size // self._unit,
                int(counted and size != limits.now[row]),
                tuple(gain if at == priority else 0 for at in range(len(self._priorities))),
            )
            for size, gain in zip(part.sizes.tolist(), part.gains.tolist(), strict=True)
        ]


def _add(values: Ints, options: list[_Option]) -> tuple[Ints, _Layer]:
    """Add one unit before the others. Each state takes the best option, on a tie the last."""
    found = np.full_like(values, IMPOSSIBLE)
    choices = np.zeros(values.shape[1:], dtype=np.min_scalar_type(max(len(options) - 1, 0)))
    _, num_moves, num_slots = values.shape
    for number, option in enumerate(options):
        if option.moves >= num_moves or option.size >= num_slots:
            continue
        gains = np.array(option.gains, dtype=np.int64)[:, None, None]
        offered = values[:, : num_moves - option.moves, : num_slots - option.size] + gains
        known = found[:, option.moves :, option.size :]
        better = _at_least(offered, known)
        np.copyto(known, offered, where=better)
        np.copyto(choices[option.moves :, option.size :], choices.dtype.type(number), where=better)
    return found, _Layer(options, choices)


def _at_least(new: Ints, old: Ints) -> NDArray[np.bool_]:
    """By state: True if the new values are not lower. The first priority is compared first."""
    found: NDArray[np.bool_] = new[-1] >= old[-1]
    for priority in range(len(new) - 2, -1, -1):
        found = (new[priority] > old[priority]) | ((new[priority] == old[priority]) & found)
    return found


def _useful(values: Ints) -> list[_Option]:
    """The team's results by slots and moves. Results that fewer slots also give are left out."""
    new = np.ones(values.shape[1:], dtype=np.bool_)
    new[:, 1:] = (values[:, :, 1:] != values[:, :, :-1]).any(axis=0)
    new &= values[0] > IMPOSSIBLE // 2
    return [
        _Option(size, moves, tuple(values[:, moves, size].tolist()))
        for size, moves in sorted((size, moves) for moves, size in np.argwhere(new).tolist())
    ]


# --- Floors: the fewest slots that a plan gives a task ---
#
# If not all floors fit, they are granted in order, each if it still fits: by priority, then by
# weight (higher first), then by task id. A task whose floor is not granted has none in this plan.


def has_floors(problem: PlanProblem) -> bool:
    """True if any task has a floor: by its job, by the policy, or because alpha is 1 or more."""
    all_ask = problem.floor or problem.alpha >= 1
    return any((all_ask or one.floor) and floors_of(problem, one) for one in problem.demands)


def floors_of(problem: PlanProblem, demand: TaskDemand) -> tuple[int, ...]:
    """The floors that the task may be granted, in order; usually none or one. The first is the one
    that its job requests. If this does not fit, the task's smallest size with a WAF above 0 is
    tried, provided that the policy requests it or alpha is 1 or more (then 0 slots have the utility
    minus infinity). A task without any WAF has no floor."""
    least = problem.floor or problem.alpha >= 1
    levels = (*([demand.floor] if demand.floor else []), *([0] if least else []))
    found = (
        next(
            (
                size
                for size, waf in zip(demand.sizes, demand.wafs, strict=True)
                if waf > 0 and size >= level
            ),
            0,
        )
        for level in levels
    )
    return tuple(dict.fromkeys(floor for floor in found if floor))


def without_floors(problem: PlanProblem) -> PlanProblem:
    """The problem without the floors of jobs and policy. The floors of alpha stay."""
    return replace(
        problem,
        floor=False,
        demands=tuple(
            replace(demand, floor=0) if demand.floor else demand for demand in problem.demands
        ),
    )


def kinds_of_limits(problem: PlanProblem) -> list[str]:
    """The kinds of limits in the problem: floor, moves_max, quota, priority."""
    limits = problem.limits
    kinds = {"floor": has_floors(replace(problem, alpha=0.0))}  # alpha alone does not count
    if limits is not None:
        kinds |= {
            "moves_max": limits.moves_max is not None,
            "quota": bool(limits.teams),
            "priority": bool(limits.priorities),
        }
    return [kind for kind, is_there in kinds.items() if is_there]


def without_limits(problem: PlanProblem, kinds: Sequence[str], team: str = "") -> PlanProblem:
    """The problem without these kinds of limits. With `team`, only the quota of this team goes."""
    if "moves_max" in kinds:
        problem = replace(problem, moves_max=None)
    if "quota" in kinds:
        problem = replace(problem, quotas=tuple(x for x in problem.quotas if team and x[0] != team))
    if "floor" in kinds:
        problem = without_floors(problem)
    if "priority" in kinds:
        problem = replace(
            problem, demands=tuple(replace(demand, priority=0) for demand in problem.demands)
        )
    return problem


def granted_floors(problem: PlanProblem) -> tuple[int, ...]:
    """By demand: its granted floor, or 0. All granted floors together fit the slots and quotas."""
    demands, found = problem.demands, [0] * len(problem.demands)
    left, quota_left = problem.num_slots, dict(problem.quotas)
    for i in sorted(
        range(len(demands)),
        key=lambda i: (-demands[i].priority, -demands[i].weight, demands[i].task),
    ):
        for floor in floors_of(problem, demands[i]):
            team = demands[i].team
            if floor <= left and floor <= quota_left.get(team, floor):
                found[i] = floor
                left -= floor
                if team in quota_left:
                    quota_left[team] -= floor
                break
    return tuple(found)


def allowed(problem: PlanProblem, rows: Candidates) -> NDArray[np.bool_]:
    """By candidate: True if floors allow it. From alpha 1 on, no granted floor means no slots."""
    least, row_of = np.array(granted_floors(problem), dtype=np.int64), rows.row_of
    found: NDArray[np.bool_] = rows.sizes >= least[row_of]
    if problem.alpha >= 1:
        can_earn = np.array(
            [bool(floors_of(problem, one)) for one in problem.demands], dtype=np.bool_
        )
        found &= (rows.sizes == 0) | (least > 0)[row_of] | ~can_earn[row_of]
    return found


def unserved_tasks(problem: PlanProblem, slots: Sequence[int]) -> tuple[int, ...]:
    """Tasks that have a WAF of 0 in this plan, although some size has a WAF above 0."""
    return tuple(
        demand.task
        for demand, x in zip(problem.demands, slots, strict=True)
        if not waf_of(demand, x) and any(demand.wafs)
    )


def below_floor(problem: PlanProblem, slots: Sequence[int]) -> dict[int, int]:
    """By task with fewer slots than its requested floor: its smallest floor above its slots."""
    found: dict[int, int] = {}
    for demand, x in zip(problem.demands, slots, strict=True):
        floors = floors_of(problem, demand)
        if floors and x < floors[0]:
            found[demand.task] = next(floor for floor in floors[::-1] if floor > x)
    return found


def blocked_by_quota(problem: PlanProblem, tasks: Iterable[int]) -> tuple[int, ...]:
    """The tasks among `tasks` that would get a floor if their own team had no quota."""
    found: list[int] = []
    row_of = {demand.task: row for row, demand in enumerate(problem.demands)}
    quotas, teams = dict(problem.quotas), dict[str, tuple[int, ...]]()
    for task in tasks:
        team = problem.demands[row_of[task]].team
        if team not in quotas:
            continue
        if team not in teams:
            teams[team] = granted_floors(
                replace(problem, quotas=tuple(x for x in problem.quotas if x[0] != team))
            )
        if teams[team][row_of[task]]:
            found.append(task)
    return tuple(found)

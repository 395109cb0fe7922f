"""Coverage: whether some processes of a task have its whole state between them."""

from __future__ import annotations

from collections.abc import Sequence

from ..events import places
from ..events.places import covers, num_places
from .state import Held, Rank, Task


def has_layouts(task: Task) -> bool:
    """Whether its ranks may each have a part of the model or of the optimizer alone."""
    return task.spec.training is not None and not task.spec.training.parallel.is_plain


def covered(task: Task, ranks: Sequence[Rank], step_version: int = -1) -> bool:
    """Whether these have all of it, one of them after `step_version` steps or more.

    Of one generation some may have taken a step that the others have yet to take, but can: then all
    had come to its end. So they are not told apart.
    """
    train = task.spec.training
    if train is None or train.parallel.is_plain:
        return any(rank.has_state and rank.step_version >= step_version for rank in ranks)
    found: dict[int, list[Held]] = {}
    most: dict[int, int] = {}
    for rank in ranks:
        if rank.has_state and rank.held is not None:
            found.setdefault(rank.held.generation, []).append(rank.held)
            most[rank.held.generation] = max(most.get(rank.held.generation, -1), rank.step_version)
    return any(covers(held[0].axes, train.parallel.optimizer, [one.place for one in held])
               for number, held in found.items() if most[number] >= step_version)


def take_place(task: Task, rank: Rank, step_version: int) -> None:
    """Fold: the rank has settled, and has the part of its place. Who is beside the layout keeps
    what it had."""
    if task.axes is None:
        rank.held, rank.step_version = None, step_version
    elif (place := place_of(task, rank)) < num_places(task.axes):
        rank.held = Held(generation=task.generation, axes=task.axes, place=place)
        rank.step_version = step_version


def forget_beside(task: Task) -> None:
    """Fold: the others train on: who is beside the layout has given what it had."""
    for rank in task.living_members():
        if is_beside(task, rank):
            rank.held, rank.has_state, rank.step_version = None, False, -1


def place_of(task: Task, rank: Rank) -> int:
    """Of a member of the present generation."""
    return [member.rank for member in task.members].index(rank.rank)


def is_beside(task: Task, rank: Rank) -> bool:
    """Whether the layout has no place for this member."""
    return task.axes is not None and place_of(task, rank) >= num_places(task.axes)


def speaks(task: Task, rank: Rank) -> bool:
    """Whether the member tells of micro-batches: of a replica its first alone."""
    return task.axes is None or places.speaks(task.axes, place_of(task, rank))

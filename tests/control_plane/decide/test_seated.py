"""Who has seats where is the same, kept up or found out anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from unicron.control_plane.state.seated import Seated
from unicron.events.records.types import Seat, Slot

PLACED = st.lists(st.tuples(st.integers(1, 4), st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 1)), unique=True, max_size=4)), max_size=8)


@given(PLACED)
def test_what_is_kept_up_is_what_is_found(placed: list[tuple[int, list[tuple[str, int]]]]) -> None:
    kept, targets = Seated(()), dict[int, tuple[Seat, ...]]()
    for task, slots in placed:
        targets[task] = tuple(Seat(rank, Slot(*slot)) for rank, slot in enumerate(slots))
        kept.place(task, targets[task])
    found = Seated(targets.items())
    for task, target in targets.items():
        nodes = {seat.slot.node for seat in target}
        assert set(kept.nodes(task)) == set(found.nodes(task)) == nodes
    for node in "abc":
        there = {task for task, target in targets.items()
                 if any(seat.slot.node == node for seat in target)}
        assert set(kept.tasks(node)) == set(found.tasks(node)) == there
    assert not kept.nodes(9)
    assert not kept.tasks("z")

"""The ledger: every micro-batch in exactly one place, whatever the members claim."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.events.spec.model import Axes
from unicron.workers.training.recovery.settlement import Settlement, assign_micro_batches, settle
from unicron.workers.training.recovery.state_sources import NO_STATE, SEVERAL, Claim, HeldState


@st.composite
def claims(draw: st.DrawFn) -> tuple[list[Claim], int]:
    """Any claims at all: overlapping sums, stale generations, members without state."""
    num_items = draw(st.integers(1, 16))
    items = st.lists(st.integers(0, num_items - 1), unique=True).map(lambda x: tuple(sorted(x)))
    found: list[Claim] = []
    for _ in range(draw(st.integers(1, 6))):
        version = draw(st.sampled_from([NO_STATE, 3, 4]))
        if version == NO_STATE:
            found.append(Claim())
            continue
        owned = draw(items)
        kept = tuple(item for item in owned if draw(st.booleans()))
        found.append(Claim(step_version=version, kept=kept, owned=owned,
                           begun=bool(kept) or draw(st.booleans()),
                           assigned_in=draw(st.integers(1, 4)), trained_in=draw(st.integers(1, 4))))
    return found, num_items


def _check_partition(settlement: Settlement, num_items: int) -> None:
    placed = [item for share in settlement.shares for item in (*share.kept, *share.todo)]
    assert sorted(placed) == list(range(num_items))


@given(claims())
@settings(max_examples=400, deadline=None)
def test_every_micro_batch_is_in_exactly_one_place(case: tuple[list[Claim], int]) -> None:
    told, num_items = case
    settlement = settle(told, num_items)
    _check_partition(settlement, num_items)
    for claim, share in zip(told, settlement.shares, strict=True):
        assert share.kept in ((), claim.kept), "a sum is all or nothing"
        assert set(share.dealt) <= set(share.todo)
        if share.kept:
            assert claim.step_version == settlement.step_version


@given(claims())
@settings(max_examples=200, deadline=None)
def test_sources_have_the_highest_step_version(case: tuple[list[Claim], int]) -> None:
    told, num_items = case
    settlement = settle(told, num_items)
    assert settlement.step_version == max(claim.step_version for claim in told)
    for place, (claim, share) in enumerate(zip(told, settlement.shares, strict=True)):
        if settlement.step_version == NO_STATE:
            assert share.source == NO_STATE
        else:
            assert told[share.source].step_version == settlement.step_version
            assert (share.source == place) == (claim.step_version == settlement.step_version)


@given(st.integers(1, 16), st.integers(1, 6), st.data())
@settings(max_examples=300, deadline=None)
def test_any_chain_of_faults_loses_and_doubles_nothing(num_items: int, num_members: int,
                                                       data: st.DataObject) -> None:
    """Members train a part, some die, some come new, again and again, in one iteration."""
    members = [Claim(step_version=7, assigned_in=1,
                     owned=assign_micro_batches(num_items, num_members, place),
                     trained_in=1) for place in range(num_members)]
    for generation in range(2, data.draw(st.integers(3, 6))):
        trained: list[Claim] = []
        for claim in members:
            missing = [item for item in claim.owned if item not in claim.kept]
            num_done = data.draw(st.integers(0, len(missing)))
            kept = tuple(sorted((*claim.kept, *missing[:num_done])))
            trained.append(Claim(step_version=7, kept=kept, owned=claim.owned,
                                 assigned_in=generation - 1, begun=True,
                                 trained_in=generation - 1))
        living = [claim for claim in trained if data.draw(st.booleans())] or trained[:1]
        newcomers = [Claim()] * data.draw(st.integers(0, 2))
        settlement = settle(living + newcomers, num_items)
        _check_partition(settlement, num_items)
        for claim, share in zip(living, settlement.shares, strict=False):
            assert share.kept == claim.kept, "no double claim, so nothing is dropped"
            stays = set(claim.owned) - set(claim.kept)
            assert stays == set(share.todo) - set(share.dealt), "what a living member was dealt"
        members = [Claim(step_version=7, kept=share.kept,
                         owned=tuple(sorted((*share.kept, *share.todo))), assigned_in=generation,
                         trained_in=generation - 1)
                   for share in settlement.shares]


def _begun(generation: int, *, kept: tuple[int, ...], owned: tuple[int, ...]) -> Claim:
    return Claim(step_version=5, kept=kept, owned=owned, assigned_in=generation, begun=True,
                 trained_in=generation)


def test_a_lost_ranks_micro_batches_go_round_fewest_first() -> None:
    told = [_begun(1, kept=(0, 4, 8), owned=(0, 4, 8)), _begun(1, kept=(1, 5), owned=(1, 5, 9)),
            _begun(1, kept=(3,), owned=(3, 7, 11))]
    shares = settle(told, 12).shares
    assert [share.kept for share in shares] == [(0, 4, 8), (1, 5), (3,)]
    assert [share.dealt for share in shares] == [(2, 6), (10,), ()]
    assert [share.todo for share in shares] == [(2, 6), (9, 10), (7, 11)]


def test_of_two_claims_the_later_generation_wins_and_the_other_drops_all() -> None:
    told = [_begun(1, kept=(0, 1), owned=(0, 1)), _begun(2, kept=(1, 2), owned=(1, 2))]
    shares = settle(told, 3).shares
    assert [share.kept for share in shares] == [(), (1, 2)]
    assert [share.todo for share in shares] == [(0,), ()]


def test_a_member_behind_takes_the_state_and_drops_its_sum() -> None:
    told = [Claim(step_version=4, kept=(0,), owned=(0, 2), assigned_in=1, trained_in=1, begun=True),
            _begun(1, kept=(), owned=(1, 3))]
    settlement = settle(told, 4)
    assert settlement.step_version == 5
    assert settlement.shares[0].source == 1
    assert settlement.shares[0].todo == (0, 2)


def test_a_first_start_deals_evenly_and_nothing_comes_from_the_gone() -> None:
    shares = settle([Claim(), Claim(), Claim()], 7).shares
    assert [share.todo for share in shares] == [(0, 3, 6), (1, 4), (2, 5)]
    assert all(share.dealt == () and share.source == NO_STATE for share in shares)


def test_an_iteration_that_nobody_has_begun_is_dealt_anew_with_the_newcomer() -> None:
    told = [Claim(step_version=5, owned=(0, 2), assigned_in=1, trained_in=1),
            Claim(step_version=5, owned=(1, 3), assigned_in=1, trained_in=1), Claim(), Claim()]
    shares = settle(told, 4).shares
    assert [share.todo for share in shares] == [(0,), (1,), (2,), (3,)]
    assert [share.source for share in shares] == [0, 1, 0, 1]
    assert all(share.dealt == () for share in shares)


def test_state_comes_from_the_own_node_and_the_others_feed_the_rest_evenly() -> None:
    has = Claim(step_version=5)
    nodes = ["a", "b", "c", "a", "c", "d", "e"]
    shares = settle([has, has, Claim(), Claim(), has, Claim(), Claim()], 4, nodes=nodes).shares
    assert [share.source for share in shares] == [0, 1, 4, 0, 4, 1, 0]


def _part(place: int, *, version: int = 5, kept: tuple[int, ...] = (), ready: bool = False,
          gate: tuple[float, ...] = (), trained_in: int = 3, axes: Axes | None = None) -> Claim:
    return Claim(step_version=version, kept=kept, owned=kept, begun=version == 5, ready=ready,
                 gate=gate, trained_in=trained_in, assigned_in=3,
                 held=HeldState(axes=axes or Axes(tp=2, dp=2), place=place))


def test_a_replicas_sum_counts_only_if_it_is_whole_on_all_its_members() -> None:
    whole = [_part(0, kept=(0, 2)), _part(1, kept=(0, 2))]
    apart = [_part(2, kept=(1, 3)), _part(3, kept=(1,))]
    shares = settle([*whole, *apart], 4, Axes(tp=2, dp=2)).shares
    assert [share.kept for share in shares] == [(0, 2), (0, 2), (), ()]
    assert [share.todo for share in shares] == [(), (), (1, 3), (1, 3)]
    shares = settle([whole[0], apart[1], whole[1], apart[0]], 4, Axes(tp=2, dp=2)).shares
    assert {share.kept for share in shares} == {()}, "no part of it stays in a replica"


def test_who_was_in_the_gate_steps_with_the_others_and_only_with_them() -> None:
    stepped = _part(0, version=6, gate=(2.5, 0.0))
    for ready, steps in ((_part(1, ready=True), True), (_part(1), False),
                         (_part(1, ready=True, trained_in=2), False)):
        settlement = settle([stepped, ready, _part(2, version=6), Claim()], 4, Axes(tp=2, dp=1))
        assert settlement.shares[1].steps == steps
        assert settlement.gate == ((2.5, 0.0) if steps else ())
        assert settlement.step_version == (6 if steps else NO_STATE)
        assert settlement.lost_version == (NO_STATE if steps else 6)
    taken = settle([_part(0, version=6), _part(1, ready=True)], 4, Axes(tp=2, dp=1))
    assert taken.step_version == NO_STATE, "it has that state from elsewhere, and no word of a gate"
    without = settle([_part(0, ready=True), _part(1, ready=True)], 4, Axes(tp=2, dp=1))
    assert without.step_version == 5
    assert not any(share.steps for share in without.shares), "nobody has stepped"


def test_a_mirrored_shard_counts_on_the_next_of_its_data_parallel_ranks() -> None:
    def shard(place: int, *, mirrored: bool) -> Claim:
        return Claim(step_version=5, held=HeldState(axes=Axes(dp=3), place=place,
                                               optimizer="mirrored" if mirrored else "sharded"))

    def found(*places: int, mirrored: bool) -> int:
        return settle([shard(place, mirrored=mirrored) for place in places], 4).step_version

    assert found(0, 1, 2, mirrored=False) == 5
    assert found(0, 2, mirrored=False) == NO_STATE
    assert found(0, 2, mirrored=True) == 5, "2 has the shard of 1, and 0 that of 2"
    assert found(1, mirrored=True) == NO_STATE


def test_in_another_layout_state_comes_from_many_and_no_sum_counts() -> None:
    told = [_part(place, kept=(place % 2,), axes=Axes(tp=2, dp=2)) for place in (0, 1, 2)]
    settlement = settle(told, 5, Axes(dp=3))
    assert settlement.step_version == 5
    assert settlement.holders == (0, 1, 2)
    assert [share.source for share in settlement.shares] == [SEVERAL] * 3
    assert [share.todo for share in settlement.shares] == [(0, 3), (1, 4), (2,)]


def test_of_two_layouts_that_are_whole_the_wanted_goes_on_else_the_one_that_most_hold() -> None:
    whole = Claim(step_version=5, held=HeldState(axes=Axes(dp=1)))
    told = [whole, *(_part(place) for place in range(4))]
    assert settle(told, 4, Axes(dp=5)).holders == (0,)
    assert settle(told, 4, Axes(pp=2, dp=2)).holders == (1, 2, 3, 4)

"""A rank on paper by itself: the simulation is worth as much as it is like a real one."""

from __future__ import annotations

import asyncio

import pytest
from heart_driver import spec
from unicron.events.orders import Member, Quiesce, Reconfigure, Resume, Slot, StartRank
from unicron.events.reports import Body
from unicron.workers import virtual_time
from unicron.workers.simulated_net import PaperNet, Tempo
from unicron.workers.simulated_rank import PaperRank

TEMPO = Tempo(load_s=(1.0, 1.0))
TASK = 7
NODES = ("n1",)


class Told(list[tuple[float, Body]]):
    """What ranks said, and when: seconds since their start."""

    def say(self, body: Body) -> None:
        self.append((round(asyncio.get_running_loop().time(), 6), body))

    @property
    def kinds(self) -> list[tuple[float, str]]:
        return [(at_s, type(body).__name__) for at_s, body in self]


def rank(net: PaperNet, told: Told, number: int = 0) -> PaperRank:
    order = StartRank(nodes=NODES, task=TASK, rank=number, attempt=1, slot=Slot("n1", number),
                      spec=spec(), num_seats=2, host="", port=0, checkpoint="")
    return PaperRank(net, order, "n1", 100 + number, told.say, lambda code: None)


@pytest.mark.parametrize(("stops", "ready_s"), [
    ([], 1.0), ([(0.0, 5.0)], 6.0), ([(0.25, 5.0)], 6.0),
    ([(0.0, 5.0), (2.0, 1.0)], 6.0), ([(0.0, 5.0), (2.0, 8.0)], 11.0),
    ([(0.5, 1.0), (2.5, 1.0)], 2.0), ([(0.5, 1.0), (1.75, 1.0)], 3.0),
], ids=str)
def test_a_stopped_rank_stands_still_as_long_as_it_was_stopped(stops, ready_s):
    """It loads for 1 s; a stop is (when, for how long), and those that overlap count once."""
    async def load() -> Told:
        told = Told()
        one = rank(PaperNet(1, TEMPO), told)
        for at_s, stop_s in stops:
            asyncio.get_running_loop().call_later(at_s, one.stop, stop_s)
        await asyncio.sleep(30.0)
        return told

    assert virtual_time.run(load()).kinds == [(ready_s, "RankReady")]


def test_a_rank_that_is_stopped_for_no_time_is_stopped_for_good():
    async def load() -> Told:
        told = Told()
        rank(PaperNet(1, TEMPO), told).stop(0.0)
        await asyncio.sleep(100_000.0)
        return told

    assert virtual_time.run(load()) == []


async def training(net: PaperNet, told: Told) -> list[PaperRank]:
    """Two ranks that have begun the first iteration, of at least 0.1 s."""
    both = [rank(net, told, number) for number in (0, 1)]
    await asyncio.sleep(2.0)
    members = tuple(Member(rank=one.rank, attempt=1, node="n1", endpoint=one.endpoint)
                    for one in both)
    for one in both:
        one.take(Reconfigure(nodes=NODES, task=TASK, generation=1, members=members,
                             store=both[0].endpoint, dp=2, checkpoint=""))
    await asyncio.sleep(1.0)
    for one in both:
        one.take(Resume(nodes=NODES, task=TASK, generation=1, progress_from=0))
    assert [one.phase for one in both] == ["computing"] * 2
    return both


@pytest.mark.parametrize("save", [True, False])
def test_who_is_to_save_does_so_also_when_its_last_collective_fails(save):
    async def leave() -> Told:
        told = Told()
        net = PaperNet(1, TEMPO)
        first, second = await training(net, told)
        for one in (first, second):
            one.take(Quiesce(nodes=NODES, task=TASK, generation=1, mode="boundary", ranks=(0, 1),
                             save=save))
        second.die()
        told.clear()
        await asyncio.sleep(10.0)
        return told

    saved = ["CheckpointSaved"] if save else []
    assert [kind for _, kind in virtual_time.run(leave()).kinds] == [
        "CollectiveFailed", *saved, "Quiesced"]

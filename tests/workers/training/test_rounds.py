"""Rounds among members: what each learns, what it costs, and one that never comes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from unicron.workers.ipc import rank_variables
from unicron.workers.training.communicators.rounds import Rounds, pack, unpack

WAIT_S = 60.0
GLOO = """
import sys, threading
from datetime import timedelta
import torch.distributed as dist

class Counting(dist.Store):
    def __init__(self, port):
        super().__init__()
        self.ours, self.num, self.longest = dist.TCPStore("127.0.0.1", port, None, False), 0, 0

    def has_extended_api(self):
        return True

    def set(self, key, value):
        self.num, self.longest = self.num + 1, max(self.longest, len(value))
        self.ours.set(key, value)

    def wait(self, *given):
        self.num += 1
        self.ours.wait(*given)

    def get(self, key):
        self.num += 1
        return self.ours.get(key)

    def multi_get(self, keys):
        self.num += 1
        return self.ours.multi_get(keys)

for num in (3, 9):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [Counting(server.port) for _ in range(num)]
    made = [None] * num
    def build(place):
        made[place] = dist.ProcessGroupGloo(stores[place], place, num, timedelta(seconds=60))
    threads = [threading.Thread(target=build, args=(place,)) for place in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(made)
    print(*sorted({(store.num, store.longest) for store in stores}))
"""
"""Prints, of three and of nine members, the requests of each, and the length of an address."""


class Counted:
    """A client of a store; counts the requests that it makes."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=9)
        )
        self.num = 0

    def __getattr__(self, name: str) -> Any:
        self.num += 1
        return getattr(self._store, name)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def in_members(
    server: dist.TCPStore, num: int, call: Callable[[Rounds], Any], wait_s: float = WAIT_S
) -> tuple[list[Any], list[int]]:
    """What `call` returns on each of `num` members, and the requests that each made."""
    stores = [Counted(server.port) for _ in range(num)]
    rounds = [Rounds(store, place, num, "r", wait_s) for place, store in enumerate(stores)]
    with ThreadPoolExecutor(num) as pool:
        found = [*pool.map(call, rounds)]
    return found, [store.num for store in stores]


def lengths(told: Sequence[bytes]) -> list[bytes]:
    return [b"%d of %d" % (len(each), len(told)) for each in told]


def several(rounds: Rounds) -> Any:
    mine = b"x" * rounds.place
    return (
        rounds.gather(mine),
        rounds.agree(mine, lambda told: b"+".join(told)),
        rounds.scatter(mine, lengths),
        rounds.gather(b""),
    )


@pytest.mark.parametrize("num", [1, 2, 5])
def test_each_member_learns_what_the_first_answers(server: dist.TCPStore, num: int) -> None:
    told = [b"x" * place for place in range(num)]
    for place, found in enumerate(in_members(server, num, several)[0]):
        assert found == (told, b"+".join(told), b"%d of %d" % (place, num), [b""] * num)


def test_a_round_costs_a_member_the_same_however_many_there_are(server: dist.TCPStore) -> None:
    costs: list[tuple[int, set[int]]] = []
    for num in (3, 9):
        _, (first, *others) = in_members(server, num, several)
        costs.append((first, set(others)))
    few, many = costs
    assert few == many == (12, {12})


def test_a_member_that_never_comes_is_an_error(server: dist.TCPStore) -> None:
    def told(rounds: Rounds) -> str:
        if rounds.place == 1:
            return ""
        with pytest.raises(RuntimeError) as error:
            rounds.gather(b"")
        return str(error.value)

    first, _, other = in_members(server, 3, told, wait_s=0.3)[0]
    assert first
    assert other


def test_the_first_member_stays_until_the_others_have_read_its_last_answer(
    server: dist.TCPStore,
) -> None:
    left = threading.Event()

    def answered(rounds: Rounds) -> str:
        rounds.gather(b"")
        too_soon = rounds.place == 1 and left.wait(0.5)
        rounds.leave()
        if rounds.place == 0:
            left.set()
        return "too soon" if too_soon else "stayed"

    assert in_members(server, 2, answered)[0] == ["stayed", "stayed"]


def test_gloo_asks_a_store_equally_often_however_many_there_are() -> None:
    told = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", GLOO],
        env=dict(os.environ) | rank_variables.STORE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=WAIT_S,
    ).stdout.splitlines()
    assert len(told) == 2
    assert told[0] == told[1]
    assert told[0].startswith("(2, ")


@given(st.lists(st.binary(max_size=5)))
def test_values_are_packed_without_loss(values: list[bytes]) -> None:
    assert unpack(pack(values)) == values


def test_equal_values_take_the_room_of_few() -> None:
    values = [bytes([number % 32]) * 50 for number in range(4096)]
    assert len(pack(values)) < 1000

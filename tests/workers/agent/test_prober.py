"""Probes between real sockets: the shim answers, with its agent or without, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from unicron.events import node_probe
from unicron.events.log.identity import StoreKey
from unicron.events.node_probe import PROBE_S_MAX, RATE_NUM_MAX, challenge, is_proof_of
from unicron.events.records.envelope import Record
from unicron.events.records.orders import ProbeNode
from unicron.workers.agent.prober import Prober, answer_probes, ask
from unicron.workers.agent.processes.shim import Shim
from unicron.workers.host.probe_port import Rate

HOST = "127.0.0.1"
SECRET = node_probe.probe_secret(b"k" * 32, 7)
MARKER = ("UNICRON_PROCESS", "test:shim")


@pytest.fixture
def shim(tmp_path: Path) -> Generator[Shim]:
    made = Shim.open(tmp_path / "shim", os.environ, MARKER, tmp_path / "shim.log")
    yield made
    made.end()
    os.waitpid(made.pid, 0)


def asked(port: int, order: int = 40, secret: bytes = SECRET) -> bytes:
    return asyncio.run(ask(HOST, port, challenge(secret, 2, order)))


def test_a_node_answers_as_long_as_its_shim_lives(shim: Shim, tmp_path: Path) -> None:
    """Also without an agent: the ranks live as long as the shim."""
    port = answer_probes(shim, HOST, None, SECRET)
    assert port >= node_probe.PORT_FIRST
    assert is_proof_of(SECRET, 2, 40, asked(port))
    second = Shim.open(tmp_path / "shim", os.environ, MARKER, tmp_path / "shim.log")
    assert answer_probes(second, HOST, None, SECRET) == port, "the next agent keeps it"
    assert is_proof_of(SECRET, 2, 41, asked(port, 41))
    os.kill(shim.pid, signal.SIGSTOP)  # as on a host that is off
    try:
        begun_s = time.monotonic()
        assert asked(port, 42) == b""
        assert time.monotonic() - begun_s < PROBE_S_MAX + 0.3
    finally:
        os.kill(shim.pid, signal.SIGCONT)
    second.end()


def test_agents_of_one_host_take_different_ports(shim: Shim, tmp_path: Path) -> None:
    first = answer_probes(shim, HOST, None, SECRET)
    other = Shim.open(tmp_path / "other", os.environ, MARKER, tmp_path / "other.log")
    try:
        assert answer_probes(other, HOST, None, SECRET) != first
        assert is_proof_of(SECRET, 2, 40, asked(first))
    finally:
        other.end()
        os.waitpid(other.pid, 0)


def test_a_port_that_cannot_be_opened_is_told(
    shim: Shim, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as busy:
        busy.bind((HOST, 0))
        assert answer_probes(shim, HOST, busy.getsockname()[1], SECRET) == 0
    told = capfd.readouterr()
    assert "this node answers no probes" in told.out + told.err
    assert answer_probes(shim, HOST, 0, SECRET) == 0


def test_nothing_but_a_challenge_of_the_leader_is_answered(shim: Shim) -> None:
    port = answer_probes(shim, HOST, None, SECRET)
    other = node_probe.probe_secret(b"o" * 32, 7)
    assert asked(port, secret=other) == b""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for data in (b"", b"x", bytes(56), challenge(SECRET, 2, 40) + b"x"):
            stranger.sendto(data, (HOST, port))
            with pytest.raises(TimeoutError):
                stranger.recv(99)
    assert is_proof_of(SECRET, 2, 40, asked(port)), "and it still answers"


def test_ten_probes_a_second_are_answered(shim: Shim) -> None:
    port = answer_probes(shim, HOST, None, SECRET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(0.3)
        begun_s = time.monotonic()
        for order in range(5 * RATE_NUM_MAX):
            one.sendto(challenge(SECRET, 2, order), (HOST, port))
        num = 0
        try:
            while one.recv(99):
                num += 1
        except TimeoutError:
            pass
        seconds = int(time.monotonic() - begun_s) + 1
    assert RATE_NUM_MAX <= num <= RATE_NUM_MAX * seconds
    time.sleep(1.0)
    assert is_proof_of(SECRET, 2, 40, asked(port))


def test_a_rate_holds_in_each_second() -> None:
    rate = Rate(3)
    assert [rate.takes(100.0 + step / 10) for step in range(13)] == (
        [True] * 3 + [False] * 7 + [True] * 3
    )


def order(*nodes: tuple[str, int]) -> ProbeNode:
    return ProbeNode(
        nodes=tuple(name for name, _ in nodes),
        incarnations=tuple(number for _, number in nodes),
        node="n3",
        incarnation=7,
        host=HOST,
        port=9,
    )


def record(body: ProbeNode) -> Record:
    return Record(
        seq=40,
        epoch=2,
        at_s=1.0,
        occurred_s=1.0,
        source="heart",
        source_seq=0,
        cause=1,
        incident=0,
        body=body,
    )


def prober(node: str, incarnation: int) -> Prober:
    return Prober(node, incarnation, lambda *_: None, asyncio.TaskGroup())


def test_an_order_is_for_one_incarnation() -> None:
    body = order(("n1", 5), ("n2", 6))
    assert prober("n2", 6).is_asked(body)
    assert not prober("n2", 5).is_asked(body)
    assert not prober("n4", 6).is_asked(body)


def test_a_prober_says_why_it_has_not_probed() -> None:
    body = order(("n1", 5))

    async def probed() -> list[str]:
        own = prober("n1", 5)
        told = [await own.probe(body, record(body), {}) for _ in range(RATE_NUM_MAX + 1)]
        assert not any(one.proof for one in told)
        return [one.error for one in told]

    errors = asyncio.run(probed())
    assert errors[0] == "no challenge came with the order"
    assert errors[-1] == "more than 10 probes a second"


def test_a_node_without_a_listener_is_not_reached() -> None:
    """A refusal is no answer: it is not signed."""
    body = order(("n1", 5))
    keys = {"n3": StoreKey(0, 0, challenge(SECRET, 2, 40))}
    told = asyncio.run(prober("n1", 5).probe(body, record(body), keys))
    assert (told.node, told.target, told.order, told.epoch) == ("n1", "n3", 40, 2)
    assert (told.proof, told.error) == ("", "")

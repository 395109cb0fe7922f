"""The network by /sys/class: links that go down, flap or slow down; errors that grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from health_driver import Clock, write
from unicron.events.records.statuses import LINK_FLAPPING, OTHER_NETWORK
from unicron.workers.agent.health.finding import Finding, Reading
from unicron.workers.agent.health.limits import FLAPS_WITHIN_S, NETWORK_EVERY_S
from unicron.workers.agent.health.network import Network

# As on a node of eight H100 (mlx5, NDR); counters as ls of a mlx5 port has them.
PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand", "counters/symbol_error": "0", "counters/link_downed": "0",
        "counters/link_error_recovery": "0", "counters/port_rcv_errors": "0",
        "counters/local_link_integrity_errors": "0",
        "counters/excessive_buffer_overrun_errors": "0", "counters/port_xmit_wait": "4294967295",
        "hw_counters/rnr_nak_retry_err": "0", "hw_counters/out_of_sequence": "97"}
DOWN = {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "10 Gb/sec (4X SDR)"}


class Machine:
    """A tree like /sys/class, and its reader."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()
        self.reader = Network(root, self.clock)
        self.port = root / "infiniband/mlx5_0/ports/1"

    def look(self, files: dict[str, str] | None = None, *, folder: Path | None = None,
             after_s: float = NETWORK_EVERY_S) -> Reading:
        write(folder or self.port, files or {})
        self.clock.now_s += after_s
        return self.reader.read()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    one = Machine(tmp_path)
    write(one.port, PORT)
    return one


def one(look: Reading) -> Finding:
    (finding,) = look.findings
    return finding


def test_a_link_that_goes_down_and_comes_back(machine: Machine) -> None:
    assert one(machine.look()) == Finding("network/mlx5_0/1", "healthy")
    down = one(machine.look(DOWN))
    assert (down.health, down.why, down.status) == ("unhealthy", "mlx5_0/1: link down",
                                                    OTHER_NETWORK)
    assert one(machine.look(PORT)).health == "healthy"
    slow = one(machine.look({"rate": "200 Gb/sec (4X HDR)"}))
    assert (slow.health, slow.why) == ("degraded", "mlx5_0/1: 200 Gb/s, was 400 Gb/s")


def test_a_port_that_never_was_up_is_nobodys_business(machine: Machine) -> None:
    write(machine.port, DOWN)
    assert one(machine.look()).health == "healthy"
    assert one(machine.look()).health == "healthy"


def test_a_port_that_is_gone_is_down(machine: Machine) -> None:
    machine.look()
    for path in sorted(machine.port.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert one(machine.look()).rule == "link-down"


def test_flaps_between_two_looks_are_told_and_many_are_flapping(machine: Machine) -> None:
    machine.look({"counters/link_downed": "41"})  # of weeks before: no news
    first = machine.look({"counters/link_downed": "42"})
    assert one(first).health == "healthy"
    assert [(e.origin, e.status, e.text) for e in first.erred] == [
        ("network", LINK_FLAPPING, "mlx5_0/1: link went down")]
    again = machine.look({"counters/link_downed": "44"})
    assert again.erred[0].text == "mlx5_0/1: link went down 2 times"
    assert (one(again).health, one(again).status, one(again).why) == (
        "degraded", LINK_FLAPPING, "mlx5_0/1: link went down 3 times in 5 minutes")
    calm = machine.look(after_s=FLAPS_WITHIN_S + 1)
    assert (one(calm).health, calm.erred) == ("healthy", [])


@pytest.mark.parametrize("name", [
    "counters/local_link_integrity_errors", "counters/excessive_buffer_overrun_errors",
    "hw_counters/rnr_nak_retry_err"])
def test_a_fatal_counter_is_an_error_and_twice_in_a_minute_degraded(machine: Machine,
                                                                   name: str) -> None:
    machine.look()
    grown = machine.look({name: "2"})
    counter = name.rpartition("/")[2]
    assert (one(grown).health, [e.rule for e in grown.erred]) == ("healthy", [counter])
    assert one(machine.look({name: "3"})).rule == counter
    assert one(machine.look(after_s=61.0)).health == "healthy"


def test_symbol_errors_by_the_second_and_by_the_hour(machine: Machine) -> None:
    machine.look()
    assert one(machine.look({"counters/symbol_error": "100"})).health == "healthy"
    assert one(machine.look({"counters/symbol_error": "130"})).why == (
        "mlx5_0/1: 130 symbol errors within an hour, 130 in the last minute")
    assert one(machine.look(after_s=120.0)).health == "healthy"
    assert one(machine.look(after_s=3600.0)).health == "healthy"
    fast = one(machine.look({"counters/symbol_error": "900"}))
    assert (fast.health, fast.rule) == ("degraded", "symbol_error")


def test_counters_that_are_set_back_or_that_mean_nothing_are_no_errors(machine: Machine) -> None:
    machine.look({"counters/link_downed": "7", "hw_counters/out_of_sequence": "1"})
    look = machine.look({"counters/link_downed": "0", "hw_counters/out_of_sequence": "99999",
                         "counters/port_rcv_errors": "3"})
    assert (one(look).health, look.erred) == ("healthy", [])
    assert one(machine.look({"counters/port_rcv_errors": "10"})).rule == "port_rcv_errors"
    assert machine.look({"counters/link_downed": "garbage"}).erred == []


def test_physical_interfaces_only_and_never_unhealthy(machine: Machine) -> None:
    net = machine.root / "net"
    write(net / "eth0", {"operstate": "up", "carrier_changes": "2", "speed": "100000",
                         "device/vendor": "0x15b3"})
    write(net / "lo", {"operstate": "unknown", "carrier_changes": "0"})
    assert [f.check for f in machine.look().findings] == ["network/mlx5_0/1", "network/eth0"]
    flapped = machine.look({"carrier_changes": "4"}, folder=net / "eth0")
    assert [e.text for e in flapped.erred] == ["eth0: link went down"]
    down = machine.look({"operstate": "down", "carrier_changes": "5"}, folder=net / "eth0")
    assert (down.findings[1].health, down.findings[1].rule) == ("degraded", "link-down")
    up = machine.look({"operstate": "up", "carrier_changes": "6", "speed": "25000"},
                      folder=net / "eth0")
    assert up.erred == [], "the same fall"
    assert up.findings[1].why == "eth0: 25 Gb/s, was 100 Gb/s"

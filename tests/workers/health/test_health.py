"""Node health: when a change is reported, and the checks of disk, memory, processes and network."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest
from agent_driver import until
from health_driver import Clock, write
from unicron.events.detached_thread import BlockingCalls, Late
from unicron.events.records.reports import CheckHealth, DeviceErred, HealthChanged
from unicron.events.records.statuses import LINK_FLAPPING, OTHER_NETWORK
from unicron.events.records.types import Body
from unicron.workers.agent.health.debounce import BurstFilter, Debouncer, Thresholds
from unicron.workers.agent.health.finding import DeviceError, Finding, Reading, worst
from unicron.workers.agent.health.health_monitor import HealthMonitor, HealthSources
from unicron.workers.agent.health.limits import (
    BURST_QUIET_S,
    BURST_S_MAX,
    DISK_AGAIN_S,
    DISK_EVERY_S,
    ERRED_NUM_MAX,
    ERRED_WITHIN_S,
    FLAPS_WITHIN_S,
    NETWORK_EVERY_S,
)
from unicron.workers.agent.health.machine import BlockedProcesses, Disk, Memory
from unicron.workers.agent.health.network import Network
from unicron.workers.agent.processes.launcher import NodeConfig
from unicron.workers.host import linux

BAD: CheckHealth = "unhealthy"
# A port of a node with eight H100 (mlx5, NDR), with the counters that a mlx5 port has.
PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "counters/symbol_error": "0",
    "counters/link_downed": "0",
    "counters/link_error_recovery": "0",
    "counters/port_rcv_errors": "0",
    "counters/local_link_integrity_errors": "0",
    "counters/excessive_buffer_overrun_errors": "0",
    "counters/port_xmit_wait": "4294967295",
    "hw_counters/rnr_nak_retry_err": "0",
    "hw_counters/out_of_sequence": "97",
}
DOWN = {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "10 Gb/sec (4X SDR)"}


def changes(steady: Debouncer, *healths: CheckHealth, is_fact: bool = False) -> list[CheckHealth]:
    """The health changes that are reported for these readings in a row."""
    found = (steady.see(Finding("c", health, "why", is_fact=is_fact)) for health in healths)
    return [one.health for one in found if one is not None]


# --- when a change is reported ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("healths", "is_fact", "reported"),
    [
        (["healthy", "healthy"], False, []),  # the first healthy is not reported
        ([BAD, "healthy", BAD, "healthy", BAD], False, []),
        ([BAD, BAD, BAD, BAD], False, [BAD]),
        (["degraded", BAD, "degraded"], False, [BAD]),
        ([BAD, BAD, "healthy", "healthy", BAD, "healthy", "healthy"], False, [BAD]),
        ([BAD, BAD, "healthy", "healthy", "healthy"], False, [BAD, "healthy"]),
        ([BAD], True, [BAD]),
        ([BAD, "healthy"], True, [BAD]),  # a fact is reported at once
    ],
)
def test_a_change_that_lasts_is_reported_once(
    healths: list[CheckHealth], is_fact: bool, reported: list[CheckHealth]
) -> None:
    assert changes(Debouncer(), *healths, is_fact=is_fact) == reported


def test_new_figures_are_no_change_but_a_new_rule_is() -> None:
    steady = Debouncer()
    assert changes(steady, "degraded", "degraded") == ["degraded"]
    assert steady.see(Finding("c", "degraded", "other figures")) is None
    assert steady.see(Finding("c", "degraded", rule="r")) is None
    changed = steady.see(Finding("c", "degraded", rule="r"))
    assert changed is not None
    assert changed.rule == "r"


def test_a_value_at_its_limit_does_not_flap() -> None:
    ladder = Thresholds(100.0, 10.0)
    assert [ladder.level(v) for v in (101, 99, 101, 99, 124, 126)] == [
        "healthy",
        "degraded",
        "degraded",
        "degraded",
        "degraded",
        "healthy",
    ]
    assert [ladder.level(v) for v in (9, 11, 12, 13, 99, 126)] == [
        "unhealthy",
        "unhealthy",
        "unhealthy",
        "degraded",
        "degraded",
        "healthy",
    ]


def test_the_worst_finding_decides() -> None:
    parts = [
        Finding("", "degraded", "slow"),
        Finding("", "unhealthy", "a", rule="r"),
        Finding("", "unhealthy", "b"),
    ]
    assert worst("gpu/0", parts) == Finding("gpu/0", "unhealthy", "a; b", rule="r")
    assert worst("gpu/0", []) == Finding("gpu/0", "healthy")


# --- bursts -------------------------------------------------------------------------------------
def test_a_burst_is_reported_once_and_again_with_a_count() -> None:
    bursts, error = BurstFilter(), DeviceError("kernel", "ECC errors", "xid-48", "line", (1,), 48)
    taken = [bursts.take(error, at_s) for at_s in (0.0, 0.1, 5.0)]
    assert [one.text for one in taken if one] == ["line"]
    nvml = error._replace(origin="nvml", text="the same by NVML")
    assert bursts.take(nvml, 6.0) is None, "NVML repeats the kernel's XID"
    assert bursts.take(error._replace(devices=(2,)), 6.0) is not None, "the error is on another GPU"
    at_s = 6.0
    while at_s < BURST_S_MAX:
        at_s += BURST_QUIET_S / 2
        again = bursts.take(error, at_s)
    assert again is not None
    assert again.text == "line (and 13 equal errors before)"
    later = bursts.take(error, at_s + 2 * BURST_QUIET_S)
    assert later is not None
    assert later.text == "line", "a new burst starts without a count"


def test_a_storm_of_errors_is_bounded_and_counts_what_it_omits() -> None:
    bursts = BurstFilter()
    taken = [
        bursts.take(DeviceError("kernel", "s", f"rule-{n}", "line"), 0.001 * n) for n in range(5000)
    ]
    assert sum(one is not None for one in taken) == ERRED_NUM_MAX
    after = bursts.take(DeviceError("kernel", "s", "new", "line"), 10.0 + ERRED_WITHIN_S)
    assert after is not None
    assert after.text == f"line ({5000 - ERRED_NUM_MAX} other errors were not reported)"


# --- calls that hang ----------------------------------------------------------------------------
async def test_a_hung_call_is_late_and_no_second_one_is_begun() -> None:
    aside = BlockingCalls[int]("t")
    free, num = threading.Event(), 0

    def hangs() -> int:
        nonlocal num
        num += 1
        free.wait(60.0)
        return num

    for _ in range(3):
        with pytest.raises(Late):
            await aside.call(hangs, 0.02)
    free.set()
    assert await aside.call(hangs, 30.0) == 1
    with pytest.raises(OSError, match="gone"):
        await aside.call(_raises, 30.0)
    assert await aside.call(lambda: 7, 30.0) == 7


def _raises() -> int:
    raise OSError("gone")


class Scripted:
    """A reader whose readings the test sets. It hangs while `free` is not set."""

    name, every_s, s_max = "scripted", 0.01, 0.05

    def __init__(self) -> None:
        self.look = Reading([Finding("scripted", "healthy")])
        self.free = threading.Event()
        self.free.set()

    def read(self) -> Reading:
        self.free.wait(60.0)
        return self.look


async def test_a_reader_that_hangs_is_unknown_until_it_answers(tmp_path: Path) -> None:
    reports: list[Body] = []
    reader = Scripted()
    health = _health(tmp_path, reports, reader)
    running = asyncio.create_task(health.run())
    await asyncio.sleep(0.1)
    assert reports == []
    reader.free.clear()
    await until(lambda: reports or None)
    reader.free.set()
    await until(lambda: reports[1:] or None)
    assert [
        (one.check, one.health, one.rule) for one in reports if isinstance(one, HealthChanged)
    ] == [("scripted", "unknown", "late"), ("scripted", "healthy", "")]
    reader.look = Reading(
        [Finding("scripted", BAD, "w", (1,), "ECC errors", "r")],
        [DeviceError("network", "link flapping", "r", "t")],
    )
    await until(lambda: reports[3:] or None)
    running.cancel()
    assert sorted(reports[2:], key=lambda one: type(one).__name__) == [
        DeviceErred(
            node="n1", incarnation=7, origin="network", status="link flapping", rule="r", text="t"
        ),
        HealthChanged(
            node="n1",
            incarnation=7,
            check="scripted",
            health=BAD,
            why="w",
            devices=(1,),
            status="ECC errors",
            rule="r",
        ),
    ]


async def test_slots_that_a_check_no_longer_names_are_healthy_again(tmp_path: Path) -> None:
    reports: list[Body] = []
    reader = Scripted()
    running = asyncio.create_task(_health(tmp_path, reports, reader).run())
    for num, devices in ((1, (0, 1)), (3, (1,)), (4, ())):
        reader.look = Reading([Finding("c", BAD if devices else "healthy", devices=devices)])
        await until(lambda num=num: reports[num - 1 :] or None)
    running.cancel()
    assert [(one.health, one.devices) for one in reports if isinstance(one, HealthChanged)] == [
        (BAD, (0, 1)),
        ("healthy", (0,)),
        (BAD, (1,)),
        ("healthy", ()),
    ]


def _health(folder: Path, reports: list[Body], *readers: Scripted) -> HealthMonitor:
    (folder / "kmsg").touch()
    node = NodeConfig(
        name="n1", incarnation=7, cluster="c", host="h", num_slots=2, state_dir=folder
    )
    return HealthMonitor(node, HealthSources(readers=readers, kmsg=folder / "kmsg"), reports.append)


# --- disk ---------------------------------------------------------------------------------------
def test_this_machines_own_disk_memory_and_processes_are_readable(tmp_path: Path) -> None:
    (disk,) = Disk(tmp_path).read().findings
    assert (disk.check, list(tmp_path.iterdir())) == ("disk", [])
    (memory,) = Memory().read().findings
    assert memory.check == "memory"
    (blocked,) = BlockedProcesses(b"UNICRON_PROCESS=none").read().findings
    assert blocked == Finding("processes", "healthy")


def _room(bavail: int, *, favail: int = 900, flag: int = 0) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 1 << 30, bavail, bavail, 1000, favail, favail, flag, 255))


@pytest.mark.parametrize(
    ("room", "health", "words"),
    [
        (_room(1 << 20), "healthy", ""),
        (_room(1 << 17), "degraded", "512 MiB free"),
        (_room(1 << 13), "unhealthy", "32 MiB free"),
        (_room(1 << 20, favail=40), "degraded", "4.0% of inodes free"),
        (_room(1 << 20, flag=os.ST_RDONLY), "unhealthy", "mounted read-only"),
    ],
)
def test_disk_health_by_free_space(
    tmp_path: Path, room: os.statvfs_result, health: str, words: str
) -> None:
    (found,) = Disk(tmp_path, look_at=lambda _: room).read().findings
    assert (found.health, words in found.why) == (health, True)


def test_a_disk_whose_writes_fail_or_take_long(tmp_path: Path) -> None:
    (found,) = Disk(Path("/proc/self/fd"), look_at=lambda _: _room(1 << 20)).read().findings
    assert (found.health, found.rule) == ("unknown", "disk-write")
    slow = iter((0.0, 6.0))
    (found,) = Disk(tmp_path, clock=lambda: next(slow)).read().findings
    assert (found.health, found.why) == ("degraded", f"{tmp_path}: a small write took 6 s")


async def test_a_disk_that_has_room_again_is_told_within_seconds(tmp_path: Path) -> None:
    """All else waits for it: nothing starts on the node."""
    rooms = iter([_room(1 << 13)] * 2)
    disk = Disk(tmp_path, look_at=lambda _: next(rooms, _room(1 << 20)))
    reports: list[Body] = []
    monitor = _health(tmp_path, reports)
    waits_s: list[float] = []
    for _ in range(8):
        monitor._take(disk.read().findings, ())
        waits_s.append(disk.every_s)
    assert [one.health for one in reports if isinstance(one, HealthChanged)] == [BAD, "healthy"]
    assert sum(waits_s[:4]) == 4 * DISK_AGAIN_S, "until it is told as healthy"
    assert waits_s[4:] == [DISK_EVERY_S] * 4


def test_a_quota_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("unicron.workers.agent.health.machine.open_to_write", write)
    (found,) = Disk(tmp_path, look_at=lambda _: _room(1 << 20)).read().findings
    assert (found.health, found.rule) == ("unhealthy", "disk-full")


# --- memory -------------------------------------------------------------------------------------
MEMINFO = "MemTotal:       24684084 kB\nMemFree:        1000 kB\nMemAvailable:   {} kB"


def _memory(root: Path, available: int = 20_000_000, **more: str) -> Finding:
    write(root, {"proc/meminfo": MEMINFO.format(available), **more})
    (found,) = Memory(root).read().findings
    return found


def test_memory_of_machine_and_container_and_memory_pressure(tmp_path: Path) -> None:
    assert _memory(tmp_path).health == "healthy"
    low = _memory(tmp_path, 500_000)
    assert (low.health, low.why) == ("degraded", "2.0% of memory is available")
    stalled = "some avg10=60.00 avg60=9 avg300=1 total=9\nfull avg10=31.40 avg60=4 avg300=0 total=9"
    write(tmp_path, {"proc/pressure/memory": stalled})
    assert _memory(tmp_path).why == "all processes stalled on memory for 31 % of 10 s"
    write(
        tmp_path,
        {
            "proc/pressure/memory": stalled.replace("31.40", "0.00"),
            "proc/self/cgroup": "0::/pod/main",
        },
    )
    group = tmp_path / "sys/fs/cgroup/pod/main"
    write(group, {"memory.max": "max", "memory.current": "1000"})
    assert _memory(tmp_path).health == "healthy"
    write(group, {"memory.max": "1000", "memory.stat": "anon 1\ninactive_file 500"})
    assert _memory(tmp_path).health == "healthy", "cached memory counts as free"
    write(group, {"memory.stat": "anon 1\ninactive_file 10"})
    found = _memory(tmp_path)
    assert (found.why, found.rule) == (
        "1.0% of the container's memory is left",
        "memory-container-low",
    )


def test_memory_in_a_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "4:memory:/job\n0::/"})
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group, {"memory.limit_in_bytes": "9223372036854771712"})
    assert _memory(tmp_path).health == "healthy"
    write(
        group / "job",
        {
            "memory.limit_in_bytes": "1000",
            "memory.usage_in_bytes": "990",
            "memory.stat": "total_inactive_file 5",
        },
    )
    assert _memory(tmp_path).why == "1.5% of the container's memory is left"


# --- processes ----------------------------------------------------------------------------------
def _status(switches: int) -> str:
    return f"Name:\tpython\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t1"


def test_only_a_process_that_did_not_run_for_long_is_blocked(tmp_path: Path) -> None:
    clock, state, ppid = Clock(), "D", 1
    reader = BlockedProcesses(
        b"M=", clock, lambda: [linux.Proc(41, state, ppid, 41, 41, 5)], tmp_path
    )

    def look(after_s: float, switches: int) -> Finding:
        clock.now_s += after_s
        write(
            tmp_path,
            {
                "41/status": _status(switches),
                "41/comm": "python",
                "41/wchan": "rpc_wait_bit_killable",
            },
        )
        (found,) = reader.read().findings
        return found

    assert [look(15.0, n).health for n in (1, 2, 3, 4)] == ["healthy"] * 4, "slow but not blocked"
    assert [look(15.0, 4).health for _ in range(2)] == ["healthy", "degraded"]
    assert look(15.0, 4).why == (
        "python (pid 41) cannot be killed: in rpc_wait_bit_killable for 45 s"
    )
    assert look(1.0, 5).health == "healthy"
    ppid = 2
    assert [look(40.0, 5).health for _ in range(3)] == ["healthy"] * 3, "a kernel thread"


def test_health_checks_use_little_cpu(tmp_path: Path) -> None:
    from unicron.workers.agent.health.network import Network

    node_readers = (Network(), Disk(tmp_path), Memory(), BlockedProcesses(b"M="))
    cost_ratio = 0.0
    for reader in node_readers:
        reader.read()
        began_s = time.process_time()
        reader.read()
        cost_ratio += (time.process_time() - began_s) / reader.every_s
    assert cost_ratio < 0.005, f"{cost_ratio:.2%} of a core"


# --- network links -------------------------------------------------------------------------------
class Machine:
    """A tree like /sys/class, and a Network reader of that tree."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()
        self.reader = Network(root, self.clock)
        self.port = root / "infiniband/mlx5_0/ports/1"

    def look(
        self,
        files: dict[str, str] | None = None,
        *,
        folder: Path | None = None,
        after_s: float = NETWORK_EVERY_S,
    ) -> Reading:
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
    assert (down.health, down.why, down.status) == (
        "unhealthy",
        "mlx5_0/1: link down",
        OTHER_NETWORK,
    )
    assert one(machine.look(PORT)).health == "healthy"
    slow = one(machine.look({"rate": "200 Gb/sec (4X HDR)"}))
    assert (slow.health, slow.why) == ("degraded", "mlx5_0/1: 200 Gb/s, was 400 Gb/s")


def test_a_port_that_never_was_up_is_healthy(machine: Machine) -> None:
    write(machine.port, DOWN)
    assert one(machine.look()).health == "healthy"
    assert one(machine.look()).health == "healthy"


def test_a_port_that_is_gone_is_down(machine: Machine) -> None:
    machine.look()
    for path in sorted(machine.port.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert one(machine.look()).rule == "link-down"


def test_link_downs_between_two_polls_are_errors_and_many_are_flapping(machine: Machine) -> None:
    machine.look({"counters/link_downed": "41"})  # counted before the agent started: no error
    first = machine.look({"counters/link_downed": "42"})
    assert one(first).health == "healthy"
    assert [(e.origin, e.status, e.text) for e in first.erred] == [
        ("network", LINK_FLAPPING, "mlx5_0/1: link went down")
    ]
    again = machine.look({"counters/link_downed": "44"})
    assert again.erred[0].text == "mlx5_0/1: link went down 2 times"
    assert (one(again).health, one(again).status, one(again).why) == (
        "degraded",
        LINK_FLAPPING,
        "mlx5_0/1: link went down 3 times in 5 minutes",
    )
    calm = machine.look(after_s=FLAPS_WITHIN_S + 1)
    assert (one(calm).health, calm.erred) == ("healthy", [])


@pytest.mark.parametrize(
    "name",
    [
        "counters/local_link_integrity_errors",
        "counters/excessive_buffer_overrun_errors",
        "hw_counters/rnr_nak_retry_err",
    ],
)
def test_a_fatal_counter_is_an_error_and_twice_in_a_minute_degraded(
    machine: Machine, name: str
) -> None:
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
        "mlx5_0/1: 130 symbol errors within an hour, 130 in the last minute"
    )
    assert one(machine.look(after_s=120.0)).health == "healthy"
    assert one(machine.look(after_s=3600.0)).health == "healthy"
    fast = one(machine.look({"counters/symbol_error": "900"}))
    assert (fast.health, fast.rule) == ("degraded", "symbol_error")


def test_counters_that_are_reset_or_harmless_are_no_errors(machine: Machine) -> None:
    machine.look({"counters/link_downed": "7", "hw_counters/out_of_sequence": "1"})
    look = machine.look(
        {
            "counters/link_downed": "0",
            "hw_counters/out_of_sequence": "99999",
            "counters/port_rcv_errors": "3",
        }
    )
    assert (one(look).health, look.erred) == ("healthy", [])
    assert one(machine.look({"counters/port_rcv_errors": "10"})).rule == "port_rcv_errors"
    assert machine.look({"counters/link_downed": "garbage"}).erred == []


def test_physical_interfaces_only_and_never_unhealthy(machine: Machine) -> None:
    net = machine.root / "net"
    write(
        net / "eth0",
        {"operstate": "up", "carrier_changes": "2", "speed": "100000", "device/vendor": "0x15b3"},
    )
    write(net / "lo", {"operstate": "unknown", "carrier_changes": "0"})
    assert [f.check for f in machine.look().findings] == ["network/mlx5_0/1", "network/eth0"]
    flapped = machine.look({"carrier_changes": "4"}, folder=net / "eth0")
    assert [e.text for e in flapped.erred] == ["eth0: link went down"]
    down = machine.look({"operstate": "down", "carrier_changes": "5"}, folder=net / "eth0")
    assert (down.findings[1].health, down.findings[1].rule) == ("degraded", "link-down")
    up = machine.look(
        {"operstate": "up", "carrier_changes": "6", "speed": "25000"}, folder=net / "eth0"
    )
    assert up.erred == [], "the same link failure"
    assert up.findings[1].why == "eth0: 25 Gb/s, was 100 Gb/s"

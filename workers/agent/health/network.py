"""Checks the node's network ports in /sys/class: links, rates, errors."""

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ....events.records.reports import CheckHealth
from ....events.records.statuses import LINK_FLAPPING, OTHER_NETWORK
from . import limits
from .finding import DeviceError, Finding, Reading, worst

SYS_CLASS = Path("/sys/class")
MINUTE_S, HOUR_S = 60.0, 3600.0
# Any growth of these counters means that data or a connection was lost.
_FATAL = (
    "counters/excessive_buffer_overrun_errors",
    "counters/local_link_integrity_errors",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/req_transport_retries_exceeded",
)
_SYMBOLS = "counters/symbol_error"
_RECOVERIES = "counters/link_error_recovery"
_RECEIVED_BAD = "counters/port_rcv_errors"
_DOWNED = "counters/link_downed"
_NUMBER = re.compile(r"[0-9.]+")


class GrowthCounter:
    """The growth of a counter within a time window. The counter may be reset."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._last: int | None = None
        self._steps: deque[tuple[float, int]] = deque()

    def see(self, value: int | None, at_s: float) -> int:
        """Take a reading; return the growth since the last one."""
        grown = 0
        if value is not None:
            grown = 0 if self._last is None else value - self._last if value >= self._last else 0
            self._last = value
        if grown:
            self._steps.append((at_s, grown))
        while self._steps and at_s - self._steps[0][0] > self._within_s:
            self._steps.popleft()
        return grown

    @property
    def num(self) -> int:
        """The growth within the window."""
        return sum(grown for _, grown in self._steps)


class _Port:
    """An InfiniBand or Ethernet port: link state, best rate, flaps. A port that was never up is
    ignored: unused ports are common."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.was_up = False
        self._best = 0.0
        self.flaps = GrowthCounter(limits.FLAPS_WITHIN_S)

    def read(self, name: str) -> str:
        """The text of a file; "" if it is missing or has no value (the kernel's EINVAL)."""
        try:
            return (self.folder / name).read_text("ascii").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int | None:
        text = self.read(name)
        return int(text) if text.isdecimal() else None

    def link(self, is_up: bool, rate: str, down: CheckHealth) -> list[Finding]:
        """The findings on the state and rate of the link."""
        self.was_up |= is_up
        if not is_up:
            return [self.bad(down, "link down", OTHER_NETWORK, "link-down")] if self.was_up else []
        found = _NUMBER.match(rate)
        now = float(found[0]) if found else 0.0
        self._best = max(self._best, now)
        if 0.0 < now < self._best:
            return [
                self.bad(
                    "degraded", f"{now:g} Gb/s, was {self._best:g} Gb/s", OTHER_NETWORK, "link-slow"
                )
            ]
        return []

    def flapped(self, num: int, num_within: int) -> tuple[list[Finding], list[DeviceError]]:
        """Findings and errors for `num` new flaps and `num_within` flaps within FLAPS_WITHIN_S."""
        erred = (
            [
                DeviceError(
                    "network",
                    LINK_FLAPPING,
                    "link-went-down",
                    f"{self.name}: link went down" + (f" {num} times" if num > 1 else ""),
                )
            ]
            if num
            else []
        )
        if num_within < limits.FLAPS_NUM_MAX:
            return [], erred
        return [
            self.bad(
                "degraded",
                f"link went down {num_within} times in "
                f"{limits.FLAPS_WITHIN_S / MINUTE_S:.0f} minutes",
                LINK_FLAPPING,
                "link-flapping",
            )
        ], erred

    def bad(self, health: CheckHealth, why: str, status: str, rule: str) -> Finding:
        return Finding("", health, f"{self.name}: {why}", status=status, rule=rule)


class _Fabric(_Port):
    """A port under /sys/class/infiniband: InfiniBand, or RDMA over Ethernet."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self._fatal = {file: GrowthCounter(MINUTE_S) for file in _FATAL}
        self._symbols = GrowthCounter(MINUTE_S), GrowthCounter(HOUR_S)
        self._recoveries, self._received = GrowthCounter(MINUTE_S), GrowthCounter(MINUTE_S)

    def look(self, at_s: float) -> tuple[list[Finding], list[DeviceError]]:
        is_up = self.read("state").startswith("4:")  # 4: ACTIVE
        found = self.link(is_up, self.read("rate"), "unhealthy")
        num = self.flaps.see(self.number(_DOWNED), at_s)
        flapping, erred = self.flapped(num, self.flaps.num)
        found += flapping
        for file, counter in self._fatal.items():
            name = file.rpartition("/")[2]
            if grown := counter.see(self.number(file), at_s):
                erred.append(
                    DeviceError(
                        "network", OTHER_NETWORK, name, f"{self.name}: {name} grew by {grown}"
                    )
                )
            if counter.num > grown:  # also grew earlier in this minute
                found.append(
                    self.bad(
                        "degraded", f"{name} grows, {counter.num} in a minute", OTHER_NETWORK, name
                    )
                )
        symbols = self.number(_SYMBOLS)
        for counter in self._symbols:
            counter.see(symbols, at_s)
        minute, hour = self._symbols
        if minute.num > limits.SYMBOL_ERRORS_HZ_MAX * MINUTE_S or (
            hour.num > limits.SYMBOL_ERRORS_PER_HOUR_NUM_MAX and minute.num
        ):
            found.append(
                self.bad(
                    "degraded",
                    f"{hour.num} symbol errors within an hour, {minute.num} in the last minute",
                    OTHER_NETWORK,
                    "symbol_error",
                )
            )
        for file, counter in ((_RECOVERIES, self._recoveries), (_RECEIVED_BAD, self._received)):
            counter.see(self.number(file), at_s)
            if counter.num > limits.RECOVERIES_PER_MINUTE_NUM_MAX:
                name = file.rpartition("/")[2]
                found.append(
                    self.bad(
                        "degraded", f"{name} grew by {counter.num} in a minute", OTHER_NETWORK, name
                    )
                )
        return found, erred


class _Interface(_Port):
    """A physical interface under /sys/class/net. It is at most degraded: its use is unknown."""

    def look(self, at_s: float) -> tuple[list[Finding], list[DeviceError]]:
        is_up = self.read("operstate") in ("up", "unknown")
        speed = self.number("speed")  # in Mb/s; -1 or EINVAL if unknown
        found = self.link(is_up, f"{(speed or 0) / 1000:g}", "degraded")
        changes = self.number("carrier_changes")
        # Each loss and each return of the carrier is one change.
        downs = None if changes is None else (changes + 1) // 2
        num = self.flaps.see(downs, at_s) if self.was_up else 0
        flapping, erred = self.flapped(num, self.flaps.num)
        return found + flapping, erred


class Network:
    """Reads all ports under `sys_class`: one check per port, named `network/PORT`."""

    name = "network"
    every_s, s_max = limits.NETWORK_EVERY_S, limits.NETWORK_S_MAX

    def __init__(
        self, sys_class: Path = SYS_CLASS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sys_class = sys_class
        self._clock = clock
        self._ports: dict[str, _Fabric | _Interface] = {}

    def read(self) -> Reading:
        """Read all ports; new ports are added, a missing port counts as link down."""
        at_s = self._clock()
        for folder in sorted(self._sys_class.glob("infiniband/*/ports/*")):
            name = f"{folder.parts[-3]}/{folder.name}"
            if name not in self._ports:
                self._ports[name] = _Fabric(name, folder)
        for folder in sorted(self._sys_class.glob("net/*")):
            if folder.name not in self._ports and (folder / "device").exists():
                self._ports[folder.name] = _Interface(folder.name, folder)
        findings: list[Finding] = []
        erred: list[DeviceError] = []
        for name, port in self._ports.items():
            found, errors = port.look(at_s)
            findings.append(worst(f"{self.name}/{name}", found))
            erred += errors
        return Reading(findings, erred)

"""Outages of the control plane, leader and log's server, from the first sign to a record."""

import math
import time
from collections.abc import Iterable
from typing import Literal

from msgspec.structs import replace

from ...events.log.identity import RESERVED_NAMES
from ...events.records.envelope import Record
from ...events.records.reports import IterationsLogged, OutageEnded, TaskProgressed
from ...events.timing import SETTLE_S

LENGTH_S_MIN = 2.0
"""A shorter absence of the server is no outage."""
SILENT_S_MAX = 4.0
"""A leader looks at the server every second. After so long without an answer it says so; its calls
fail only later."""
HANDOVER_S_MAX = 1.0
"""A shorter absence of the leader is no outage: it ended in order, and another one leads."""


class Outages:
    """The present outage, or the last one until its record is in the log. While there is one, the
    leader gives no sign of life to the server: so a successor counts from the same beginning."""

    def __init__(self) -> None:
        self.alive_s: float | None = None
        """When leader and server were last known to be well."""
        self.outage: OutageEnded | None = None
        self._until_s = math.inf
        self._failing = ""
        """Why the server cannot be reached, or cannot keep what it would acknowledge."""

    def began(
        self, what: Literal["control plane", "leader", "server"], since_s: float, why: str
    ) -> None:
        """An outage has begun, or goes on. What was away first gives its name."""
        if self.outage is None or since_s < self.outage.since_s:
            self.outage = OutageEnded(what=what, since_s=since_s, length_s=0.0, why=why)
        self._until_s = math.inf
        self._failing = why if what == "server" else self._failing

    def leader_gone(self, what: Literal["control plane", "leader"], since_s: float) -> None:
        """This control plane leads now; `since_s`: the last sign of life of the leader before. If
        it has followed that leader until the server went away, only the server was away first."""
        if self.outage is None or self.alive_s != self.outage.since_s:
            self.began(what, since_s, "")

    def ended(self, now_s: float, recorded: Iterable[OutageEnded]) -> None:
        """The outage, if there is one, is over; reports that waited follow. `recorded`: those in
        the log."""
        one, self.alive_s, self._failing = self.outage, now_s, ""
        if one is None:
            return
        length_s = now_s - one.since_s
        least_s = {"server": LENGTH_S_MIN, "leader": HANDOVER_S_MAX}.get(one.what, 0.0)
        if length_s < least_s or any(known.since_s == one.since_s for known in recorded):
            self.outage, self._until_s = None, math.inf
        elif self._until_s == math.inf:
            self.outage, self._until_s = replace(one, length_s=length_s), now_s

    def seen_by_follower(self, now_s: float) -> None:
        """This control plane follows a leader that lives: the leader records the outages before
        `now_s`, and this one none of them."""
        self.outage, self.alive_s, self._failing, self._until_s = None, now_s, "", math.inf

    @property
    def due_s(self) -> float:
        """When the record of `outage` is due; inf: there is no outage, or it lasts."""
        return self._until_s + SETTLE_S

    def appended(self, records: Iterable[Record]) -> None:
        """Count those records that waited. The outage's own record ends it."""
        for record in records:
            one, body = self.outage, record.body
            if one is None or self._until_s == math.inf:
                return
            if isinstance(body, OutageEnded) and not body.lost_from:
                self.outage, self._until_s = None, math.inf
            elif (
                record.source_seq
                and record.occurred_s < self._until_s
                and record.source.partition("/")[0] not in RESERVED_NAMES
            ):
                num = (
                    body.end - body.first_iteration
                    if isinstance(body, TaskProgressed)
                    else body.num_iterations
                    if isinstance(body, IterationsLogged)
                    else 0
                )
                self.outage = replace(
                    one, num_reports=one.num_reports + 1, num_iterations=one.num_iterations + num
                )

    def in_words(self, now_s: float, *, hangs_too: bool = False) -> str:
        """Why the server lets nothing be acknowledged; "" if it does, or did until just now.
        `hangs_too`: also of one that has only not answered for some seconds, and may soon."""
        since_s, why = now_s, self._failing
        if self.outage is not None and why:
            since_s = self.outage.since_s
        elif hangs_too and self.alive_s is not None and now_s - self.alive_s > SILENT_S_MAX:
            since_s, why = self.alive_s, "the log's server does not answer"
        if now_s - since_s < LENGTH_S_MIN:
            return ""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_s))
        return (
            f"nothing is acknowledged since {since} ({now_s - since_s:.0f} s): "
            f"{why}; ranks train on, their reports wait"
        )

"""The coordinator: the asyncio service that reads the intake, runs the decider and appends."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import structlog
from msgspec import Struct

from ...events import errors
from ...events.errors import Ambiguous, Conflict, LogError, Unavailable, UsageError
from ...events.log.port import Batch, Sent
from ...events.log.redis_streams import RedisLog
from ...events.log.segments import Folder
from ...events.records.envelope import Record, Report
from ...events.records.reports import DeadlineReached, TokenChanged
from ...events.records.types import Body
from ...events.shortage import outlast
from ...events.spec.policy import Policy
from ..fold.edits import EXPIRED, LOSSES, expired_tasks, running_deadlines
from ..state.cluster import ClusterState
from .dead_letters import DeadLetters
from .intake import Intake
from .leader import LEASE_S, Leader, Spoiled
from .leases import Leases
from .limits import Limits
from .outages import LENGTH_S_MIN, SILENT_S_MAX, Outages
from .room import LOOK_S, Room
from .sealer import Sealer
from .server_places import ServerPlaces
from .tail import Tail

T = TypeVar("T")
_logger = structlog.get_logger("control_plane")
Access = Callable[[int], Awaitable[Iterable[str]]]
"""Learns from former leaders who may do what; returns the expelled nodes. 0: it does not lead."""
Check = Callable[[ClusterState], None]
"""Checks the state before a write. Raises UsageError to reject the write."""


Observe = Callable[[ClusterState, Sequence[Record], float], None]
"""Sees the records that the state has folded, none at first, and `Effort.plan_s`."""


class _Write(Struct):
    """An operator's write, from its arrival to its append."""

    reports: list[Report]
    """All have the same source and go into one append, in this order."""
    check: Check | None
    done: asyncio.Future[int]

    @property
    def source(self) -> str:
        return self.reports[0].source


class Coordinator:
    """One control plane of a log: it leads, or follows the one that leads.

    Each turn takes the new reports and operators' writes, and if the intake is empty expired
    deadlines and leases. It decides on them in order and appends the records in one write; only
    then it answers, publishes and trims. After Conflict, Ambiguous or Unavailable the log is folded
    again. Retries after Unavailable have no limit, since ranks continue without a leader.

    Whenever it ends, nothing is lost: the intake's cursor moves only with the append, an append in
    flight is atomic, and the next leader folds the log.
    """

    def __init__(
        self,
        log: RedisLog,
        *,
        clock: Callable[[], float],
        nonce: str,
        code: str,
        policy: Policy,
        jitter: random.Random | None = None,
        limits: Limits | None = None,
        access: Access | None = None,
        folder: Folder | None = None,
        observe: Observe | None = None,
        dead_letters: DeadLetters | None = None,
        room: Room | None = None,
        places: ServerPlaces | None = None,
    ) -> None:
        self._log, self._observe = log, observe
        self._room, self._places = room or Room(), places
        self.dead_letters = dead_letters or DeadLetters()
        """What the intake has rejected here."""
        self._folder = folder
        self._limits = limits or Limits()
        self._jitter = jitter or random.Random()
        self._leader = Leader(
            log,
            clock=clock,
            nonce=nonce,
            code=code,
            policy=policy,
            folder=folder,
            dead_letters=self.dead_letters,
        )
        self._leases = Leases()
        self._outages = Outages()
        self._led_until_s: float | None = None
        """The last sign of life of the leader before."""
        self._started_s = self._leader.now_s()
        self._wake = asyncio.Event()
        self._intake = Intake(log, self._limits, self._wake.set)
        self._committed = asyncio.Event()
        self._writes: list[_Write] = []
        self._timer: asyncio.TimerHandle | None = None
        self._checked_s = 0.0
        self._admitted: dict[str, int] = {}
        """Nodes that `admit` has let in: their NodeJoined may not be in the log yet."""
        self._access = access
        self._is_access_stale = True
        self._expelled = set[str]()
        self._have_users = False
        """Whether the server has the users of all nodes but those of `_expelled`."""
        self.tail = Tail(
            log, kept_num_max=self._limits.recent_records_max, idle_s=self._limits.idle_s
        )
        self._stopping = False
        self._hand_to = ""
        """The URL of the follower that leads after this turn."""
        self._lost: errors.Fenced | None = None
        self._leader_known = asyncio.Event()
        self.leading = False
        self.leader_url = ""
        """Of the control plane that this one follows; "": it leads, or nobody does."""
        self.followers: list[str] = []
        """The URLs of those that follow this one."""
        self.seq = 0
        """The last acknowledged seq."""

    # --- API of other components -----------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch of the last record that this control plane has folded."""
        return self._leader.state.epoch

    @property
    def now_s(self) -> float:
        """The time by the log's clock."""
        return self._leader.now_s()

    @property
    def away(self) -> str:
        """Why nothing is acknowledged at present, since when; "" if it is."""
        return self._outages.in_words(self._leader.now_s(), hangs_too=self.leading)

    @property
    def num_dead_letters(self) -> int:
        """What the intake has rejected here, and is kept."""
        return self.dead_letters.num

    @property
    def old_agents(self) -> set[str]:
        """Nodes whose agents are of release 0.3.0: they share one list of reports."""
        nodes = self._leader.state.nodes
        return {
            name
            for name in self._leader.old_agents
            if self.leading and name in nodes and nodes[name].health != "left"
        }

    @property
    def num_spooled(self) -> int:
        """Reports that wait on the agents, as of their heartbeats; 0 if it follows."""
        return self._leases.num_spooled(self._leader.state) if self.leading else 0

    def answer(self, request_id: str) -> int | None:
        """The seq of a write that is already in the log; None for a new one."""
        return self._leader.answers.get(f"operator/{request_id}")

    async def find_leader(self) -> str:
        """The leader's URL; "": this control plane leads. Waits for a leader; raises Unavailable
        after `call_s_max`."""
        await self._with_timeout(self._leader_known.wait(), Unavailable("no control plane leads"))
        return self.leader_url

    async def hand_over(self, epoch: int) -> str:
        """End this epoch after the turn; returns the URL of the follower that leads next, "" if the
        epoch has ended before. Raises UsageError if none follows."""
        if epoch != self.epoch:
            return ""
        if not self.followers:
            raise UsageError(
                "no other control plane follows this one", "unicron up --control-planes 2"
            )
        self._hand_to = self.followers[0]
        self._leader_known.clear()
        self._wake.set()
        return await self.find_leader()

    async def keep_tokens(self, tokens: bytes) -> None:
        """Store the tokens' hashes for the next leader. Raises LogError."""
        await self._with_timeout(
            self._log.keep_tokens(tokens, epoch=self._leader.epoch),
            Unavailable("the log cannot be reached; try again"),
        )

    async def settled(self) -> ClusterState:
        """Wait until the state matches the log exactly, or was folded along, and return it. Read
        it before the next await. Raises Unavailable when the log cannot be reached for
        `call_s_max`, or `away`."""
        if failing := self._outages.in_words(self._leader.now_s()):
            raise Unavailable(failing)
        await self._with_timeout(self._committed.wait(), Unavailable("the log cannot be reached"))
        return self._leader.state

    async def write(self, request_id: str, *bodies: Body, check: Check | None = None) -> int:
        """Append an operator's write and return its seq. The same id is written only once.

        Several bodies go into one append; the seq of the first is returned. `check` runs on the
        state directly before; if it raises, nothing is written. Raises Unavailable when too many
        writes wait, or after `call_s_max`; a retry with the same id returns the seq if it was
        written after all.
        """
        if len(self._writes) >= self._limits.writes_max or not self.leading:
            raise Unavailable("the control plane takes no more writes at the moment")
        reports = [
            Report(
                source=f"operator/{request_id}",
                source_seq=number,
                occurred_s=self._leader.now_s(),
                body=body,
            )
            for number, body in enumerate(bodies, 1)
        ]
        write = _Write(reports, check, asyncio.get_running_loop().create_future())
        self._writes.append(write)
        self._wake.set()
        return await self._with_timeout(
            asyncio.shield(write.done), Unavailable("the log cannot be reached; try again")
        )

    def why_dropped(self, report: Report) -> str:
        """Why the log would not take a report of an agent now; "": it would."""
        return self._leader.why_dropped(report)

    async def send_again(self, node: str, entry: bytes) -> None:
        """Put an entry of a node into the intake again. Raises LogError."""
        await self._with_timeout(
            self._log.send_again(node, entry), Unavailable("the log cannot be reached; try again")
        )

    async def admit(self, node: str, incarnation: int) -> None:
        """Let an agent use the log, in place of its predecessors. Raises LogError."""
        self._expelled.discard(node)
        self._admitted[node] = incarnation
        await self._with_timeout(
            self._log.admit({node: incarnation}),
            Unavailable("the log cannot be reached; try again"),
        )

    async def expel(self, node: str) -> None:
        """End a node's access until it is admitted. Raises LogError; it is tried again."""
        self._expelled.add(node)
        self._have_users = False
        await self._with_timeout(
            self._log.expel((node,)), Unavailable("the log cannot be reached; try again")
        )

    def stop(self) -> None:
        """End `run` after the current turn."""
        self._stopping = True
        self._wake.set()
        self.tail.stop()

    # --- life cycle ------------------------------------------------------------------------------
    async def run(self, url: str = "") -> None:
        """Follow, then lead until `stop`, again and again if it hands over. `url` is told to those
        that follow. Raises Fenced when a newer leader exists, CorruptLog, or LogError."""
        self._leader.url = url
        ended: LogError | None = None
        async with asyncio.TaskGroup() as group:
            try:
                while not self._stopping:
                    await self._follow()
                    if not self._stopping:
                        await self._serve(group)
            except LogError as error:
                ended = error
            finally:
                self.stop()
        if ended is not None:
            raise ended

    async def _follow(self) -> None:
        """Fold the log along until no other control plane leads, or until `stop`."""
        while not self._stopping:
            await self._retry(self._fold_along)
            await self._retry(self._check_segments)
            try:
                await self._retry(self._take_over)
                # Only once: a fenced leader that repeated it would take the log back.
                return
            except errors.Leased as error:
                # The lease may be of a process that died here, at this URL: nobody leads then.
                url = error.url if error.url != self._leader.url else ""
                if url and url != self.leader_url:
                    _logger.info("following", leader=url, seq=self.seq)
                self.leader_url = url
                self._outages.seen_by_follower(self._leader.now_s())
                if url:
                    self._leader_known.set()
                else:
                    self._leader_known.clear()
                self._publish(())
                self._committed.set()
            await asyncio.sleep(self._limits.follow_s)

    async def _check_segments(self) -> None:
        """Raises CorruptLog if the log's segments are not in the folder: it could not lead."""
        now_s = self._leader.now_s()
        if self._folder is not None and now_s - self._checked_s >= self._limits.segments_s:
            await self._log.open_segments()
            self._checked_s = now_s

    async def _fold_along(self) -> None:
        async for page in self._leader.fold_along():
            if page and page[0].seq <= self.seq:  # the log was folded anew
                self.tail.clear()
            self._is_access_stale |= any(isinstance(one.body, TokenChanged) for one in page)
            self._publish(page)
        if self._is_access_stale and self._access is not None:
            await self._access(0)
        self._is_access_stale = False

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        """Lead in one epoch, until `stop` or `hand_over`; then release the lease."""
        self._leader_known.clear()
        self.leader_url = ""
        self._lost = None

        def begin(name: str, run: Callable[[], Awaitable[None]]) -> None:
            beside.append(group.create_task(outlast(run, partial(_told, name)), name=name))

        beside: list[asyncio.Task[None]] = []
        begin("lease", self._keep_lease)
        if self._places is not None:  # before it leads: there it needs places itself
            begin("places", self._places.watch)
        try:
            await self._room.look()  # before the first decision
            await self._retry(self._recover)
            begin("heartbeats", self._watch_heartbeats)
            begin("room", self._watch_room)
            if self._folder is not None:
                sealer = Sealer(self._log, self._folder, self._leader, self._committed.is_set)
                begin("segments", sealer.run)
            await self._lead(group)
            self.leading = False
            with suppress(LogError):  # the next one tells a handover from an absence by the beat
                if self._outages.outage is None:
                    await self._with_timeout(self._log.beat("leader", self.epoch), Unavailable())
                await self._with_timeout(self._leader.release(self._hand_to), Unavailable())
        finally:
            self.leading, self.followers = False, []
            self._committed.clear()
            self._leader_known.clear()
            for task in beside:
                task.cancel()
            self._intake.end()
            if self._timer:
                self._timer.cancel()
            self._refuse_writes()
        _logger.info("led until now", next=self._hand_to, epoch=self.epoch, seq=self.seq)
        self._hand_to = ""

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                self.followers = await self._with_timeout(self._leader.renew(), Unavailable())
            except errors.Fenced as error:
                self._lost = error
                self._wake.set()
                return
            except LogError:
                continue  # the leader itself waits for the server

    def _refuse_writes(self) -> None:
        for write in self._writes:
            if not write.done.done():
                write.done.set_exception(Unavailable("this control plane leads no more; try again"))
                write.done.exception()  # the caller may be gone
        self._writes.clear()

    def _refuse(self, error: Spoiled) -> None:
        """Refuse the write that the next turn would fail on again, if it is one."""
        for write in self._writes:
            if write.source == error.source and not write.done.done():
                write.done.set_exception(
                    UsageError(f"the log cannot hold what follows from it: {error}")
                )
                write.done.exception()  # the caller may be gone

    async def _take_over(self) -> None:
        now_s = self._leader.now_s()
        for last in await self._log.beats(["leader"]):  # each only once, also while another leads
            self._led_until_s = now_s - last.age_s
        await self._leader.take_over()
        if self._led_until_s is not None:
            self._outages.leader_gone(
                "leader" if self._led_until_s > self._started_s else "control plane",
                self._led_until_s,
            )

    async def _recover(self) -> None:
        self._committed.clear()
        self.tail.clear()
        await self._leader.recover()
        if not self.leading and self._access is not None:
            self._expelled = set(await self._access(self.epoch))
        self._leases.grant(self._leader.now_s())
        self.leading = True
        self._outages.ended(self._leader.now_s(), self._leader.state.outages)
        self._leader_known.set()
        self._publish(())
        self._committed.set()
        _logger.info("leading", epoch=self.epoch, seq=self.seq)

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        disputes = 0
        while not (self._stopping or self._hand_to):
            try:
                await self._turn(group)
                disputes = 0
            except (Conflict, Ambiguous) as error:
                disputes += 1
                if disputes > self._limits.disputes_max:
                    raise
                _logger.info("folding the log again", why=str(error))
                await self._retry(self._recover)
            except Spoiled as error:
                self._refuse(error)
                await self._retry(self._recover)
            except (Unavailable, OSError, MemoryError):
                await self._retry(self._recover)

    async def _retry(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call until it succeeds, with jittered pauses. Logs a lost and a restored connection."""
        pause_s, disputes, reported = self._limits.retry_s_min, 0, False
        while True:
            try:
                async with asyncio.timeout(3 * self._limits.call_s_max):
                    await call()
                if reported:
                    _logger.info("the log is reached again")
                return
            except (Unavailable, OSError, MemoryError) as error:  # TimeoutError is an OSError
                self._committed.clear()
                if not reported:
                    _logger.warning("the log cannot be reached, ranks continue", why=str(error))
                reported = True
                self._outages.began(
                    "server",
                    self._outages.alive_s or self._leader.now_s(),
                    str(error) or "the log's server does not answer in time",
                )
            except (Conflict, Ambiguous):
                disputes += 1
                if disputes > self._limits.disputes_max:
                    raise
            await asyncio.sleep(pause_s * self._jitter.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, self._limits.retry_s_max)

    # --- one turn --------------------------------------------------------------------------------
    async def _turn(self, group: asyncio.TaskGroup) -> None:
        """Wait for events, then process all of them in one append."""
        self._prepare_wakeup(group)
        await self._wake.wait()
        self._wake.clear()
        if self._lost is not None:
            raise self._lost
        batch = self._intake.result(self._leader.position)
        has_timed = self._has_timed_events()
        if has_timed:
            # Timed events need an empty intake: a report in it may clear the deadline.
            batch = await self._intake.rest(batch, self._leader.position)
            has_timed = batch.is_whole
            if not has_timed:
                self._wake.set()
        writes = list(self._writes)
        has_changed = any(True for _ in self._room.verdicts(self._leader.state))
        if not (batch.entries or writes or has_timed or has_changed):
            return
        self._committed.clear()
        records = await self._with_timeout(
            self._leader.commit(self._of_turn(batch, writes, has_timed=has_timed)),
            Ambiguous("the append was not acknowledged in time"),
        )
        if records:
            self._publish(records)
            self._outages.appended(records)
        self._committed.set()
        for write in writes:
            self._writes.remove(write)
            seq = self._leader.answers.get(write.source)
            if write.done.done():
                continue
            if seq is None:
                write.done.set_exception(Unavailable("the request is old, its seq is forgotten"))
            else:
                write.done.set_result(seq)
        await self._intake.trim(self._leader.position, self._leader.now_s())

    def _of_turn(
        self, batch: Batch, writes: Sequence[_Write], *, has_timed: bool
    ) -> Iterator[Report | Sent]:
        """What a turn decides on, in order. Entries of the intake only for `turn_s_max`: no node
        keeps others waiting for longer."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._limits.turn_s_max
        yield from map(self._leader.report, self._room.verdicts(self._leader.state))
        for at, sent in enumerate(batch.entries, 1):
            yield sent
            is_full = self._leader.effort.turn_bytes > self._limits.turn_bytes_max
            if at < len(batch.entries) and (is_full or loop.time() > until_s):
                has_timed = False
                break
        yield from self._checked_reports(writes)
        if has_timed:
            yield from self._timed_reports(self._leader.now_s())
        yield from self._losses()
        yield from map(self._leader.report, self._intake.take_dropped())

    def _checked_reports(self, writes: Sequence[_Write]) -> Iterator[Report]:
        """The reports of operators' writes, each checked against the state before it."""
        for write in writes:
            if write.done.done():  # rejected in an earlier turn that failed
                continue
            try:
                if write.check is not None and write.source not in self._leader.answers:
                    write.check(self._leader.state)
            except UsageError as error:
                write.done.set_exception(error)
                write.done.exception()  # the caller may be gone
                continue
            yield from write.reports

    def _publish(self, records: Sequence[Record]) -> None:
        """The log has these records: wake those that follow it."""
        self.seq = self._leader.state.seq
        if self._observe is not None and (self.leading or self.leader_url):
            self._observe(self._leader.state, records, self._leader.effort.plan_s)
        self.tail.add(records)

    # --- the intake -------------------------------------------------------------------------------
    def _prepare_wakeup(self, group: asyncio.TaskGroup) -> None:
        """Start a blocking read if none is active, and a timer for the next deadline."""
        self._intake.begin(group, self._leader.position)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        due_s = min(
            [
                self._outages.due_s,
                *(d.due_s for d in running_deadlines(self._leader.state).values()),
            ]
        )
        if due_s < math.inf:
            delay_s = max(0.0, due_s - self._leader.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)

    # --- timed events -----------------------------------------------------------------------------
    def _has_timed_events(self) -> bool:
        state, now_s = self._leader.state, self._leader.now_s()
        return (
            self._outages.due_s <= now_s
            or any(d.due_s <= now_s for d in running_deadlines(state).values())
            or any(True for _ in self._leases.verdicts(state))
            or bool(expired_tasks(state, now_s))
        )

    def _timed_reports(self, now_s: float) -> Iterator[Report]:
        """An outage that is over, passed deadlines and changed leases, in the current state."""
        state = self._leader.state
        if self._outages.outage is not None and self._outages.due_s <= now_s:
            yield self._leader.report(self._outages.outage)
        due = sorted(
            (d.due_s, name) for name, d in running_deadlines(state).items() if d.due_s <= now_s
        )
        for _, name in due:
            current = running_deadlines(state).get(name)
            if current is not None and current.due_s <= now_s:
                yield self._leader.report(DeadlineReached(deadline=name))
        for body in self._leases.verdicts(state):
            yield self._leader.report(body)
        if expired_tasks(state, now_s):
            yield self._leader.report(DeadlineReached(deadline=EXPIRED))

    def _losses(self) -> Iterator[Report]:
        """The end of a turn is that of the moment in which lost nodes share a plan."""
        if LOSSES in running_deadlines(self._leader.state):
            yield self._leader.report(DeadlineReached(deadline=LOSSES))

    async def _watch_room(self) -> None:
        while True:
            await self._room.look()
            if any(True for _ in self._room.verdicts(self._leader.state)):
                self._wake.set()
            await asyncio.sleep(LOOK_S)

    async def _watch_heartbeats(self) -> None:
        self._have_users = False
        while True:
            await self._keep_users()
            policy = self._leader.state.policy
            pause_s = min(self._limits.beats_s, policy.silence_s_max / 5, policy.suspect_s_max / 4)
            before_s = self._leader.now_s()
            await asyncio.sleep(pause_s)
            await self._keep_alive(before_s, pause_s)
            try:
                beats = await self._with_timeout(
                    self._log.beats(sorted(self._leader.state.nodes)), Unavailable("no heartbeats")
                )
            except LogError:
                continue
            self._leases.observe(
                beats, self._leader.now_s(), pause_s=pause_s, state=self._leader.state
            )
            if self._committed.is_set() and self._has_timed_events():
                self._wake.set()

    async def _keep_alive(self, before_s: float, pause_s: float) -> None:
        """Check the server, and note there that this leader lives. `before_s`: when the pause began
        that was to last `pause_s`."""
        now_s, outages = self._leader.now_s(), self._outages
        if not self._committed.is_set() or now_s - (outages.alive_s or 0.0) < self._limits.beats_s:
            return
        if now_s - before_s - pause_s > LENGTH_S_MIN:  # it was stopped (SIGSTOP)
            outages.began("control plane", before_s, "it did not run")
            outages.ended(now_s, self._leader.state.outages)
        try:
            late = Unavailable("the log's server does not answer in time")
            await self._with_timeout(self._log.check_durable(), late)
            if outages.outage is None:
                await self._with_timeout(self._log.beat("leader", self.epoch), late)
            seen_s, now_s = outages.alive_s or now_s, self._leader.now_s()
            if now_s - seen_s > SILENT_S_MAX:
                outages.began("server", seen_s, "it did not answer")
                outages.ended(now_s, self._leader.state.outages)
            outages.alive_s = now_s
        except LogError as error:
            if self._committed.is_set():  # the next turn raises it
                self._intake.fail(self._leader.position, Unavailable(str(error)))

    async def _keep_users(self) -> None:
        """Admit all nodes when leadership begins, after a node was expelled, and to a server that
        has lost them: it was restarted, or is another one."""
        had_users = self._have_users
        try:
            if (had_users and await self._log.has_users()) or not self._committed.is_set():
                return
            self._have_users = True  # unless a node is expelled meanwhile
            known = {name: node.incarnation for name, node in self._leader.state.nodes.items()}
            await self._log.admit(
                {
                    name: max(incarnation, known.get(name, 0))
                    for name, incarnation in (known | self._admitted).items()
                    if name not in self._expelled
                }
            )
            await self._log.expel(self._expelled)
            await self._log.mark_admitted()
        except (Unavailable, Ambiguous):
            self._have_users = False
        except LogError as error:
            if had_users:
                _logger.error("the server no longer lets agents in", why=str(error))
            self._have_users = False

    async def _with_timeout(self, call: Awaitable[T], late: LogError) -> T:
        try:
            async with asyncio.timeout(self._limits.call_s_max):
                return await call
        except TimeoutError:
            raise late from None


def _told(loop: str, why: str) -> None:
    _logger.warning("a loop fails for now, and goes on after a pause", loop=loop, why=why)

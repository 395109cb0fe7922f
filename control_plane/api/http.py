"""The control plane's HTTP port (docs/ARCHITECTURE.md, "HTTP")."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import secrets
import socket
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct
from unicron import __version__

from ...events.decoding import from_msgpack, from_strict_json
from ...events.detached_thread import aside
from ...events.errors import LogError, Pruned, SpecError, UnicronError, UsageError
from ...events.log.identity import RESERVED_NAMES, Identities, user_name, with_credentials
from ...events.log.intake import read_report
from ...events.log.port import ReaderPort, Rejected, Sent
from ...events.log.segments import Folder
from ...events.object_storage import reason as reason_of
from ...events.records import codec, reports, types
from ...events.records.envelope import Record, Report
from ...events.records.types import Body
from ...events.spec import job
from ...events.whole_numbers import whole_number
from ..fold.fold import fold
from ..history.history import usage
from ..history.timeline import COPY_RECORDS, Timeline
from ..history.usage import Usage
from ..planner.pending import is_any_waiting
from ..service import snapshots, usage_files
from ..service.coordinator import Check, Coordinator
from ..service.dead_letters import Letter
from ..state.cluster import ClusterState, decode_state, encode_state, state_text
from ..state.node import Node
from ..state.task import Task
from . import dry_run, incident_facts, messages, moments, openapi, pages, requests, usage_answer
from .address import Address
from .connections import Connection, error_answer, problem
from .messages import ListQuery, Nothing, Page, Written
from .metrics import Metrics, gauges_of
from .reads import ReadProcess, Reads, ReadsAway
from .requests import Reason, Refusal
from .sessions import Sessions
from .sites import names, site_of
from .tokens import Token, Tokens, may
from .view import state_in_words, view
from .what_if import WhatIfs

if TYPE_CHECKING:
    from .routes import Route

BODY_BYTES_MAX = 1 << 20
BODY_S_MAX = 10.0
"""Time limit for the arrival of a request's body."""
PAGE_RECORDS_MAX = 1_000
FILE_S_MAX = 5.0
"""Time limit for a part of a file that a node's agent reads."""
CHECK_S_MAX = 40.0
"""Time limit for the check of devices by a node's agent, which has a limit for each of its own."""
LETTERS_NUM_MAX = 100
"""Dead letters whose numbers a record has."""
RETRY_S = 1
"""After so long a refused client should ask again (Retry-After)."""
FOLD_S_MAX = 30.0
"""Time limit for folding the log to a past record."""
EXTEND_S_MAX = 1.5
"""How long one request reads the log for the timeline; the rest is read behind it."""
KEY = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")

STATUSES: dict[type[UnicronError], int] = {
    SpecError: 422,
    UsageError: 400,
    Pruned: 410,
    LogError: 503,
}
"""Of errors without a status of their own; the first that fits."""
CALLER = web.RequestKey("caller", Token)
"""The token with which a request came; absent where none is needed and none was given."""

T = TypeVar("T")
K = TypeVar("K", bound="int | str")
"""The key of an item of the state."""
Q = TypeVar("Q")
B = TypeVar("B")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Operation = Callable[["HttpApi", "Call[Any, Any]"], Awaitable[Any]]
"""Handles the calls of one route: answers with what becomes the JSON body, or with a response."""


class Call(Struct, Generic[Q, B], frozen=True):
    """A request that may be made: its query and body, and the name in its path."""

    request: web.Request
    query: Q
    body: B
    of: str

    @property
    def caller(self) -> Token:
        return self.request[CALLER]


class HttpApi:
    """The HTTP calls of one control plane. Answers show only records that the log acknowledged."""

    def __init__(
        self,
        routes: Sequence[Route],
        coordinator: Coordinator,
        log: ReaderPort,
        *,
        tokens: Tokens,
        address: Address,
        identities: Identities,
        metrics: Metrics,
        ca: Callable[[], str] = str,
        reads: ReadProcess | None = None,
        folder: Folder | None = None,
        timeline: Timeline | None = None,
        file: str = "",
    ) -> None:
        """`folder`: where the log's snapshots are. `ca`: the digest of the authority of the
        certificate in use. `reads`: answers reads, so many at a time for each token; None: this
        process does, without a limit. `file`: the log is that file, of the past."""
        self._routes = routes
        self._coordinator, self._log, self._folder = coordinator, log, folder
        self._metrics = metrics
        self._tokens, self._address = tokens, address
        self._identities, self._ca = identities, ca
        self._reads = Reads(reads) if reads is not None else None
        self.sessions, self._timeline, self._file = Sessions(once=not file), timeline, file
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, address.names)}
        self._what_ifs = WhatIfs()
        self._writing = asyncio.Lock()
        """Serialises writes, so that each is checked against the earlier writes."""
        self._computing = asyncio.Lock()
        """Serialises computations, so that many requests do not slow the leader."""
        self._extending = asyncio.Lock()
        """Serialises the use of the timeline."""
        self._rest: asyncio.Task[None] | None = None
        """Reads the rest of the log for the timeline."""
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By node: serialises requests to its agent."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES_MAX)
        app.on_response_prepare.append(self._mark)
        app.on_shutdown.append(self._end)
        for route in self._routes:
            add = {"GET": app.router.add_get, "POST": app.router.add_post}[route.method]
            add(route.path, partial(self._serve, route))
        for path in ("/", "/assets/{name}"):
            app.router.add_get(path, pages.page)
        return app

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        """Make the call, for callers of the route's role or a higher one, if need be at the leader.
        Others are refused unread."""
        if route.role is not None and not may((caller := request[CALLER]).role, route.role):
            raise Refusal(
                403,
                f"this needs the role {route.role}; the token {caller.name} has the role "
                f"{caller.role}",
                "an admin: unicron token create "
                + ("--join" if route.role == "join" else f"--role {route.role}"),
            )
        if route.needs_leader and (url := await self._coordinator.find_leader()):
            raise Refusal(307, f"this control plane follows, {url} leads", f"--url {url}")
        query = requests.convert(dict(request.query), route.query, strict=False)
        body = requests.convert(await _body(request), route.body) if route.body else None
        call = Call(request, query, body, next(iter(request.match_info.values()), ""))
        if self._reads is None or not route.is_read:
            return _response(await route.handler(self, call))
        is_stream = isinstance(query, messages.LogQuery) and _is_stream(request, query)
        async with self._reads.place(call.caller.name, is_stream=is_stream):
            return await self._reads.process.answer(
                request, partial(self._last_line, request) if is_stream else None
            )

    def _last_line(self, request: web.Request) -> bytes:
        """The last line of a stream whose client may read no more; nothing if it may."""
        try:
            self._caller(request.headers["Authorization"])
        except Refusal as error:
            return _problem_line(error, events=_accepts_events(request))
        return b""

    # --- calls ---
    async def health(self, call: Call[Nothing, None]) -> messages.Health:
        """Whether this control plane leads; with a token also of what, and who it is."""
        leading = self._coordinator.leading
        if CALLER not in call.request or not may(call.caller.role, "view"):
            return {"ok": leading, "file": self._file} if self._file else {"ok": leading}
        return {
            "ok": leading,
            "cluster": self._address.cluster,
            "epoch": self._coordinator.epoch,
            "seq": self._coordinator.seq,
            "leader": leading,
            "pid": os.getpid(),
            "follows": self._coordinator.leader_url,
            "file": self._file,
        }

    async def ready(self, call: Call[messages.ReadyQuery, None]) -> web.Response:
        """Whether this control plane acknowledges; 503 if not, and to a client with a token why.
        With `follower=1` also whether it follows one that leads."""
        follows = call.query.follower and self._coordinator.leader_url
        away = self._coordinator.away or "it does not lead" * (
            not self._coordinator.leading and not follows
        )
        tells = CALLER in call.request and may(call.caller.role, "view")
        return _json({"ok": not away} | ({"why": away} if tells else {}), 503 if away else 200)

    async def openapi(self, call: Call[Nothing, None]) -> web.Response:
        return web.Response(body=openapi.document(self._routes), content_type="application/json")

    async def state(self, call: Call[messages.StateQuery, None]) -> dict[str, Any]:
        """The state. With `explain` also what each waiting task needs, computed in a thread."""
        at = call.query.at
        state = await self._state_at(at)
        now_s = None if at else self._coordinator.now_s
        if call.query.explain and is_any_waiting(state):
            data = encode_state(state)
            shown = await aside(
                lambda: view(
                    decode_state(data), explain=True, now_s=now_s, num_ended=call.query.ended
                )
            )
        else:
            shown = view(state, now_s=now_s, num_ended=call.query.ended)
        shown["cluster"] |= {
            "id": self._address.cluster_id,
            "name": self._address.cluster,
            "dead_letters": 0 if at else self._coordinator.num_dead_letters,
            "follows": "" if at else self._coordinator.leader_url,
            "followers": [] if at else self._coordinator.followers,
            "old_agents": [] if at else sorted(self._coordinator.old_agents),
            "insecure": self._address.insecure,
            "ca": self._ca(),
        }
        return shown

    async def metrics(self, call: Call[Nothing, None]) -> web.Response:
        reads = self._reads
        async with reads.place(call.caller.name) if reads is not None else nullcontext():
            body, content_type = await self._metrics.scrape(
                self._coordinator,
                self._log,
                partial(gauges_of, self._coordinator) if reads is None else reads.process.gauges,
                call.request.headers.get("Accept", ""),
            )
        return web.Response(body=body, headers={"Content-Type": content_type})

    @staticmethod
    def listed(
        key: Callable[[str], K],
        items: Callable[[ClusterState], Mapping[K, T]],
        show: Callable[[ClusterState, T], Any],
    ) -> Operation:
        """A handler that answers with a page of a part of the state."""

        async def call(api: HttpApi, call: Call[ListQuery, None]) -> Page[Any]:
            state = await api._state_at(call.query.at)
            found = items(state)
            if words := call.query.find.lower().split():
                found = {
                    name: one
                    for name, one in found.items()
                    if not isinstance(one, Task)
                    or all(
                        word in f"{one.id} {one.spec.name} {one.spec.team} "
                        f"{state_in_words(state, one)}"
                        for word in words
                    )
                }
            return _page(sorted(found), key, call.query, lambda name: show(state, found[name]))

        return call

    @staticmethod
    def one(
        key: Callable[[str], K],
        items: Callable[[ClusterState], Mapping[K, T]],
        show: Callable[[ClusterState, T], Any],
    ) -> Operation:
        """A handler that answers with the item that the path names."""

        async def call(api: HttpApi, call: Call[messages.Moment, None]) -> Any:
            state = await api._state_at(call.query.at)
            found = items(state).get(key(call.of))
            if found is None:
                raise Refusal(
                    404,
                    f"there is no {call.of[:64]!r} in the state",
                    f"GET {call.request.path.rpartition('/')[0]}",
                )
            return show(state, found)

        return call

    async def records(self, call: Call[messages.LogQuery, None]) -> web.StreamResponse:
        """Records as JSON lines; as server-sent events to a client that accepts them."""
        request, after = call.request, call.query.after
        events = _accepts_events(request)
        if (last := request.headers.get("Last-Event-ID")) is not None:
            after = number(last)
        newest = (await self._coordinator.settled()).seq
        if after > newest and self._coordinator.leading:  # a follower may be behind its client
            raise Refusal(404, f"after {after} is beyond the log", f"its last record is {newest}")
        write = _events if events else _lines
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream" if events else "application/jsonl",
                "Cache-Control": "no-store",
            }
        )
        try:
            if _is_stream(request, call.query):
                if after + 1 < self._log.first_seq:
                    raise Pruned(self._log.first_seq)
                await response.prepare(request)
                async for page in self._coordinator.tail.follow(after):
                    self._caller(request.headers["Authorization"])  # it may have ended
                    if page or events:
                        await response.write(write(page))
            else:
                page = await self._log.read(after=after, num_max=PAGE_RECORDS_MAX)
                await response.prepare(request)
                kept = deque[Record](maxlen=call.query.newest)
                while page:
                    found = [
                        one
                        for one in page
                        if not call.query.requests or isinstance(one.body, types.OperatorRequest)
                    ]
                    kept.extend(found)
                    await response.write(write(found if not call.query.newest else []))
                    page = await self._log.read(after=page[-1].seq, num_max=PAGE_RECORDS_MAX)
                await response.write(write(kept))
        except (LogError, Refusal) as error:
            if not response.prepared:
                raise
            await response.write(_problem_line(error, events=events))
        await response.write_eof()
        return response

    async def beginning(self, call: Call[Nothing, Any]) -> messages.Beginning:
        """Where the log begins: `after` which record, and the `state` then."""
        await self._log.open_segments()
        after = self._log.first_seq - 1
        async with self._computing:
            return {"after": after, "state": state_text(await self._state_after(after))}

    async def history(self, call: Call[messages.HistoryQuery, None]) -> usage_answer.History:
        """What slots were used for and lost to, by day (usage_answer.py)."""
        first = usage_answer.first_day({"since": call.query.since})
        if self._file and self._timeline is not None:
            return usage_answer.answer(self._timeline.spans.until_now(), first)
        async with self._computing:
            sealed = await self._log.open_segments()
            found, after = Usage(), self._log.first_seq - 1
            if sealed is not None:
                found = await aside(partial(usage_files.of_sealed, sealed, FOLD_S_MAX))
                after = sealed.last
            state = await self._state_after(after)
            rest: list[Record] = []
            while page := await self._log.read(after=after, num_max=PAGE_RECORDS_MAX):
                rest += page
                after = page[-1].seq
            found.add(await aside(partial(usage, rest, state)))
        return usage_answer.answer(found, first)

    async def facts(self, call: Call[messages.FactsQuery, None]) -> dict[str, Any]:
        """All that the log knows of an incident at a moment: what `unicron incident` prints."""
        of, now_s = number(call.of), self._coordinator.now_s
        shown = decode_state(encode_state(await self._state_at(call.query.at)))
        async with self._computing:
            await self._log.open_segments()
            start = await asyncio.to_thread(
                self._nearest, incident_facts.begin(of, self._log.first_seq)
            )
            reading = incident_facts.Reading(of, encode_state(start), shown)
            while num := min(reading.num_missing, PAGE_RECORDS_MAX):
                page = await self._log.read(after=reading.last, num_max=num)
                await aside(partial(reading.add, page))
            return await aside(
                partial(reading.facts, call.query.option, shown.at_s if call.query.at else now_s)
            )

    @staticmethod
    def of_timeline(make: Callable[[Timeline, Call[Any, None], int, float], object]) -> Operation:
        """A handler that answers from the timeline, which it reads until the present in a thread,
        for EXTEND_S_MAX; `_read_on` reads the rest. `make`: from the timeline, the call, the last
        record and the time. Of a past moment (`at`) it reads a timeline of its own."""

        async def call(api: HttpApi, call: Call[Any, None]) -> web.Response:
            if at := getattr(call.query, "at", ""):
                then = await api._timeline_until(at)
                return await aside(lambda: _json(make(then, call, 0, then.past.at_s)))
            last, now_s = (await api._coordinator.settled()).seq, api._coordinator.now_s
            async with api._extending:
                began_s = time.monotonic()
                if api._timeline is None:
                    await api._log.open_segments()
                    api._timeline = Timeline(await api._state_after(api._log.first_seq - 1))
                now = api._timeline
                while now.past.seq < last:
                    await api._extend(now)
                    if time.monotonic() - began_s > EXTEND_S_MAX:
                        break
                if now.past.seq < last and (api._rest is None or api._rest.done()):
                    api._rest = asyncio.create_task(api._read_on(now, last))
                return await aside(lambda: _json(make(now, call, last, now_s)))

        return call

    async def _extend(self, timeline: Timeline, num_max: int = 0) -> None:
        """Read the next records, in a thread. `num_max`: at most so many; 0: a page."""
        page = await self._log.read(
            after=timeline.past.seq, num_max=min(num_max or PAGE_RECORDS_MAX, PAGE_RECORDS_MAX)
        )
        await aside(partial(timeline.add, page))

    async def _read_on(self, timeline: Timeline, last: int) -> None:
        """Read the log until `last`, half of the time, so that the leader and requests go on."""
        with suppress(LogError):  # the next request says so
            while timeline.past.seq < last:
                async with self._extending:
                    began_s = time.monotonic()
                    await self._extend(timeline)
                await asyncio.sleep(time.monotonic() - began_s)

    async def _end(self, app: web.Application) -> None:
        if self._rest is not None:
            self._rest.cancel()

    async def _timeline_until(self, at: str) -> Timeline:
        """A timeline of the log until a past moment."""
        last, began_s = (await self._state_at(at)).seq, time.monotonic()
        async with self._computing:
            then = Timeline(await self._state_after(self._log.first_seq - 1))
            while then.past.seq < last:
                if time.monotonic() - began_s > FOLD_S_MAX:
                    raise _too_far(last)
                await self._extend(then, last - then.past.seq)
            return then

    @staticmethod
    def write(
        make: Callable[[ClusterState, B, str], Body],
        answer: type[Struct] = Written,
        ahead: Callable[[B], object] | None = None,
        checks_devices: bool = False,
    ) -> Operation:
        """A handler that writes a report for each comma-separated name in the path, in one append,
        and answers with the seq of the first, in each field of `answer`. Before the write, `ahead`
        runs in a thread, and agents check the devices of slots that return, so that neither
        delays other writes."""

        async def call(api: HttpApi, call: Call[Nothing, B]) -> Any:
            key = await _key(call.request)
            if ahead is not None:
                await aside(partial(ahead, call.body))
            names, answers = dict.fromkeys(call.of.split(",")), dict[str, str]()
            if checks_devices and api._coordinator.answer(key) is None:
                state = await api._coordinator.settled()
                answers = await api._check_devices([make(state, call.body, x) for x in names])
            async with api._writing:
                state = await api._coordinator.settled()
                seq = api._coordinator.answer(key)
                if seq is None:
                    reports = [
                        requests.without_sick(make(state, call.body, name), answers)
                        for name in names
                    ]
                    seq = await api._coordinator.write(key, *_signed(call.caller, reports))
            return dict.fromkeys(answer.__struct_fields__, seq)

        return call

    async def file(self, call: Call[messages.FileQuery, None]) -> messages.FilePart:
        """A part of a node's file that has the output of a rank, from `offset` on: its text, and
        the offsets where that begins, for what was dropped is passed over, and ends."""
        node, offset = call.of, call.query.offset
        known = (await self._coordinator.settled()).nodes.get(node)
        if known is None or known.health == "left":
            raise Refusal(404, f"node {node[:64]!r} has no agent", "unicron status nodes")
        async with self._reading[node]:
            part = await self._log.ask_file(node, call.query.file, offset=offset, wait_s=FILE_S_MAX)
        if part.error:
            raise Refusal(404, f"the agent of {node} cannot read it: {part.error}", "")
        text, num = codecs.utf_8_decode(part.data, "replace")  # a cut character is for the next
        begin = offset if part.begin < 0 else part.begin
        return {"text": text, "begin": begin, "end": begin + num}

    async def _check_devices(self, bodies: Iterable[Body]) -> dict[str, str]:
        """What is wrong with each slot that shall return, by its name; "" for nothing. A slot
        without a device is healthy. Raises Refusal if an agent does not answer."""
        state, slots = await self._coordinator.settled(), defaultdict[str, set[int]](set)
        for body in bodies:
            if isinstance(body, reports.QuarantineLifted):
                slots[body.node].update(body.slots)
        with_device = [
            name for name in slots if slots[name] and state.nodes[name].accelerator != "cpu"
        ]
        found = await asyncio.gather(
            *(self._check_node(name, sorted(slots[name])) for name in with_device)
        )
        whys = dict(zip(with_device, found, strict=True))
        return {
            f"{name}/{slot}": whys[name].get(slot, "it was not checked") if name in whys else ""
            for name in slots
            for slot in slots[name]
        }

    async def _check_node(self, node: str, slots: list[int]) -> dict[int, str]:
        what = ", ".join(f"{node}/{slot}" for slot in slots)
        try:
            async with self._reading[node]:
                part = await self._log.check_devices(node, slots, wait_s=CHECK_S_MAX)
        except LogError as error:
            raise Refusal(
                503,
                f"the device of {what} was not checked: {error}",
                "unicron status nodes; nothing was done",
            ) from None
        if part.error:
            raise Refusal(
                503,
                f"the agent of {node} did not check {what}: {part.error}",
                "an agent of an older version cannot; nothing was done",
            )
        try:
            return from_msgpack(part.data, dict[int, str])
        except msgspec.MsgspecError as error:
            raise Refusal(
                503,
                f"the agent of {node} answers about {what} what cannot be read: {error}",
                "restart the agent; nothing was done",
            ) from None

    async def plan(self, call: Call[messages.Moment, None]) -> web.Response:
        """The plan with its explanation."""
        data = encode_state(await self._state_at(call.query.at))
        async with self._computing:
            found = await aside(partial(dry_run.explain_present_plan, data))
        return _json(found, ETag=f'"{found.input}"')

    async def _state_at(self, at: str) -> ClusterState:
        """The present state, or a past one. Read it before the next await."""
        state = await self._coordinator.settled()
        if not at:
            return state
        async with self._computing:
            await self._log.open_segments()  # they may have been pruned
            return await self._state_after(
                await moments.seq_at(at, self._log.first_seq, state.seq, self._record)
            )

    async def _record(self, seq: int) -> Record:
        (record,) = await self._log.read(after=seq - 1, num_max=1)
        return record

    async def _state_after(self, seq: int) -> ClusterState:
        """The state after the record `seq`, folded in a thread from the snapshot before."""
        began_s = time.monotonic()
        state = await asyncio.to_thread(self._nearest, seq)
        while state.seq < seq:
            if time.monotonic() - began_s > FOLD_S_MAX:
                raise _too_far(seq)
            page = await self._log.read(
                after=state.seq, num_max=min(PAGE_RECORDS_MAX, seq - state.seq)
            )
            await aside(partial(_fold_all, state, page))
        return state

    def _nearest(self, seq: int) -> ClusterState:
        """A state at or before the record `seq`, from which to fold."""
        kept = self._timeline.state_before(seq) if self._timeline is not None else None
        if kept is not None and seq - kept.seq <= COPY_RECORDS:
            return kept
        return snapshots.newest(self._folder, seq)[0]

    async def simulate(self, call: Call[Nothing, messages.WhatIf]) -> messages.WhatIfAnswer:
        """Begin a simulation of the log with other choices."""
        last, begins = (await self._coordinator.settled()).seq, await self.beginning(call)
        return self._what_ifs.start(
            call.body, self._log, begins["state"] * bool(begins["after"]), last
        )

    async def simulated(self, call: Call[Nothing, None]) -> messages.WhatIfAnswer:
        return self._what_ifs.answer

    async def dry_run(self, call: Call[Nothing, dry_run.Change]) -> web.Response:
        began_s = time.perf_counter()
        tried = await self._in_thread(lambda data: dry_run.run_dry(data, call.body))
        found = msgspec.structs.replace(tried, took_s=time.perf_counter() - began_s)
        return _json(found, ETag=f'"{found.input}"')

    async def apply(self, call: Call[Nothing, messages.Apply]) -> Written:
        """Carry out a dry run, if the plan's input has not changed since."""
        key, body, check = await _key(call.request), call.body, _checked_input(call.request)
        reason, answers = requests.one_line(body.reason), dict[str, str]()

        async def carried_out() -> list[Body]:
            return await self._in_thread(
                lambda data: dry_run.operator_requests(data, body.change, reason), check
            )

        if body.change.lift and self._coordinator.answer(key) is None:
            answers = await self._check_devices(await carried_out())
        async with self._writing:
            await self._coordinator.settled()
            seq = self._coordinator.answer(key)
            if seq is None:
                bodies = [requests.without_sick(one, answers) for one in await carried_out()]
                seq = await self._coordinator.write(key, *_signed(call.caller, bodies), check=check)
        return Written(seq)

    async def _in_thread(self, call: Callable[[bytes], T], check: Check | None = None) -> T:
        """Run `call` on a copy of the state in a thread; the leader's event loop runs on."""
        async with self._computing:
            state = await self._coordinator.settled()
            if check is not None:
                check(state)
            data = encode_state(state)
            return await aside(partial(call, data))

    async def hand_over(self, call: Call[messages.HandoverQuery, None]) -> messages.Leader:
        """Let a follower lead; answers with its URL. Sent again, it has no effect."""
        return {"leader": await self._coordinator.hand_over(call.query.epoch)}

    async def join(self, call: Call[Nothing, messages.Join]) -> messages.Joined:
        body = call.body
        if not job.NAME.match(body.node) or body.node in RESERVED_NAMES:
            raise Refusal(
                400,
                f"node: {body.node!r} is not a name",
                "lower-case letters, digits, '-' and '.', at most 63; not "
                + " or ".join(RESERVED_NAMES),
            )
        for key, value in body.labels.items():
            if why := types.label_error(key, value):
                raise Refusal(400, f"labels: {why}", types.LABEL_HINT)
        state = await self._coordinator.settled()
        known = state.nodes.get(body.node)
        if known is not None and known.incarnation > body.incarnation:
            raise Refusal(
                409,
                f"a newer agent of {body.node} has joined",
                "give this one another --node, or set its clock",
            )
        await self._identify(call.caller, body, known)
        if (
            known is not None
            and known.drained
            and known.drain_reason == reports.AGENT_STOPS
            and body.incarnation > known.incarnation
        ):
            async with self._writing:
                await self._coordinator.write(
                    secrets.token_hex(16),
                    *_signed(
                        call.caller,
                        [
                            reports.NodeUndrained(
                                node=body.node, reason="its agent has started again"
                            )
                        ],
                    ),
                )
        await self._coordinator.admit(body.node, body.incarnation)
        return {
            "redis_url": self._url_of(body.node, body.incarnation),
            "cluster": self._address.cluster,
            "cluster_id": self._address.cluster_id,
            "node": body.node,
            "epoch": self._coordinator.epoch,
            "key": self._identities.key(body.node).hex(),
            "redact": state.policy.redact,
            "version": __version__,
            "agent_gone_s_max": state.policy.agent_gone_s_max,
            "has_lists": True,
            "output_bytes_max": state.policy.output_bytes_max,
            "rank_pids_max": state.policy.rank_pids_max,
            "rank_memory_bytes_max": state.policy.rank_memory_bytes_max,
        }

    async def _identify(self, caller: Token, body: messages.Join, known: Node | None) -> None:
        """Enrol the node if its agent asks for that; else raise Refusal if it is another node, or
        the agent of another node. Raises UsageError."""
        if body.identity and caller.role != "node":
            # Whoever made a token for this node alone knows that a silent one of its name is gone.
            is_live = known is not None and (
                known.health == "healthy"
                or (known.health == "unreachable" and caller.node != body.node)
            )
            async with self._writing:
                token = self._tokens.enrol(caller, body.node, body.identity, is_live=is_live)
                await self._tell(caller, "enrolled", token)
        elif caller.role == "join":
            raise Refusal(
                400,
                "a join token enrols a node, and this one sends no identity",
                "use an agent of this version",
            )
        elif caller.role == "node" and caller.name != body.node:
            raise Refusal(
                400,
                f"this is the identity of {caller.name}, not of {body.node}",
                f"--node {caller.name}, or another --state",
            )
        elif caller.role == "admin" and body.node in self._tokens.enrolled_nodes():
            raise Refusal(
                409,
                f"the name {body.node} is taken by a node that was enrolled",
                f"give this one another --node, or unicron token revoke {body.node}",
            )

    def _url_of(self, node: str, incarnation: int) -> str:
        """The log's URL for an agent."""
        address = self._address
        if address.shared_password:
            return address.redis_url
        return with_credentials(
            address.redis_url,
            user_name(address.cluster, node),
            self._identities.password(node, incarnation),
        )

    # --- sessions of browsers ---
    async def new_code(self, call: Call[Nothing, messages.NewCode]) -> messages.NewCodeMade:
        if self.sessions.find(_secret_of(call.request)) is not None:
            raise Refusal(
                403, "a session makes no codes: it ends when it ends", "with a token: unicron open"
            )
        code, of = self.sessions.code(call.caller, call.body.role)
        return {"code": code, "expires_s": of.expires_s}

    async def new_session(self, call: Call[Nothing, messages.Code]) -> messages.Session:
        secret, one = self.sessions.exchange(call.body.code)
        return {"secret": secret, "name": one.name, "role": one.role, "expires_s": one.expires_s}

    async def end_session(self, call: Call[Nothing, Nothing]) -> Nothing:
        self.sessions.end(_secret_of(call.request))
        return Nothing()

    # --- dead letters: of the leader's folder ---
    async def list_letters(self, call: Call[ListQuery, None]) -> Page[messages.LetterView]:
        letters = {letter.number: letter for letter in await self._letters()}

        def view_of(key: int) -> messages.LetterView:
            letter = letters[key]
            return {
                "number": letter.number,
                "at_s": letter.at,
                "source": letter.source,
                "why": letter.why,
                "num_bytes": letter.num_bytes,
                "whole": letter.is_whole,
            }

        return _page(sorted(letters), number, call.query, view_of)

    async def drop_letters(self, call: Call[Nothing, requests.Letters]) -> messages.LettersDropped:
        """Remove the letters, after a record says who did it. One that is not there refuses all."""
        async with self._writing:
            kept = [letter.number for letter in await self._letters()]
            numbers = kept if call.body.all else sorted(set(call.body.numbers))
            if missing := sorted(set(numbers) - set(kept)):
                raise _no_letter(missing[0])
            if numbers:
                await self._handled(call.caller, "dropped", numbers, call.body.reason)
        return {"num": len(numbers)}

    async def replay_letter(self, call: Call[Nothing, Reason]) -> messages.LetterReplayed:
        """Send a letter to the intake again, where it is checked as any report. What would be
        rejected or dropped there stays a dead letter, and the answer says why."""
        wanted = number(call.of)
        async with self._writing:
            letters = {letter.number: letter for letter in await self._letters()}
            letter = letters.get(wanted)
            if letter is None:
                raise _no_letter(wanted)
            sent = Sent(cursor="", node="", data=letter.data, num_bytes=letter.num_bytes)
            report = read_report(self._identities.key, sent)
            why = (
                f"only its first {len(letter.data):,} bytes were kept"
                if not letter.is_whole
                else report.why
                if isinstance(report, Rejected)
                else await self._why_dropped(report)
            )
            if why or isinstance(report, Rejected):
                raise Refusal(
                    409,
                    f"dead letter {wanted} stays one: {why}",
                    f"unicron log dead-letters --drop {wanted}",
                )
            node = report.source.rpartition("/")[0]
            await self._coordinator.send_again(node, letter.data)
            await self._handled(call.caller, "replayed", [wanted], call.body.reason)
        return {"number": wanted, "source": report.source, "source_seq": report.source_seq}

    async def _letters(self) -> list[Letter]:
        try:
            return await aside(self._coordinator.dead_letters.all)
        except OSError as error:
            raise _letters_fail("read", error) from None

    async def _why_dropped(self, report: Report) -> str:
        await self._coordinator.settled()
        return self._coordinator.why_dropped(report)

    async def _handled(
        self, caller: Token, act: types.LetterAct, numbers: Sequence[int], reason: str
    ) -> None:
        """Write who has dealt with these letters, then remove them."""
        body = reports.DeadLettersHandled(
            act=act,
            num=len(numbers),
            numbers=tuple(numbers[:LETTERS_NUM_MAX]),
            reason=requests.one_line(reason),
        )
        await self._coordinator.write(secrets.token_hex(16), *_signed(caller, [body]))
        try:
            await aside(partial(self._coordinator.dead_letters.remove, set(numbers)))
        except OSError as error:
            raise _letters_fail("removed", error) from None

    # --- tokens; a secret is in an answer once, and in no log ---
    async def list_tokens(self, call: Call[ListQuery, None]) -> Page[messages.TokenView]:
        tokens = {token.name: token for token in self._tokens.all()}

        def view_of(name: str) -> messages.TokenView:
            token = tokens[name]
            return {
                "name": name,
                "role": token.role,
                "created_s": token.created_s,
                "expires_s": token.expires_s,
                "expired": self._tokens.has_expired(token),
                "node": token.node,
                "uses": token.uses,
                "used": token.used,
            }

        return _page(sorted(tokens), str, call.query, view_of)

    async def create_token(self, call: Call[Nothing, messages.NewToken]) -> messages.NewSecret:
        body = call.body
        return await self._issue(
            call.caller,
            "created",
            body.reason,
            lambda: self._tokens.create(
                body.name, body.role, body.life_s, node=body.node, uses=body.uses
            ),
        )

    async def rotate_token(self, call: Call[Nothing, Reason]) -> messages.NewSecret:
        return await self._issue(
            call.caller, "rotated", call.body.reason, lambda: self._tokens.rotate(call.of)
        )

    async def _issue(
        self, caller: Token, act: types.TokenAct, reason: str, make: Callable[[], tuple[Token, str]]
    ) -> messages.NewSecret:
        reason = requests.one_line(reason)
        async with self._writing:
            await self._coordinator.settled()
            token, secret = make()
            await self._tell(caller, act, token, reason)
        return {
            "name": token.name,
            "role": token.role,
            "expires_s": token.expires_s,
            "node": token.node,
            "uses": token.uses,
            "token": secret,
        }

    async def revoke_token(self, call: Call[Nothing, Reason]) -> messages.TokenName:
        reason = requests.one_line(call.body.reason)
        async with self._writing:
            await self._coordinator.settled()
            token = self._tokens.revoke(call.of)
            try:
                await self._tell(call.caller, "revoked", token, reason)
            finally:
                if token.role == "node":
                    await self._coordinator.expel(token.name)
        return {"name": token.name}

    async def _tell(
        self, caller: Token, act: types.TokenAct, token: Token, reason: str = ""
    ) -> None:
        """Share a change of a token, and write who made it and why, before a secret is answered."""
        await self._coordinator.keep_tokens(self._tokens.encoded())
        # Not under the caller's Idempotency-Key: with one that is in the log nothing is written.
        await self._coordinator.write(
            secrets.token_hex(16),
            *_signed(
                caller,
                [
                    reports.TokenChanged(
                        act=act, name=token.name, token_role=token.role, reason=reason
                    )
                ],
            ),
        )

    # --- authorisation and errors ---
    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what can be refused by its headers, before the body is read; answer every error
        with a problem. An answer to a request whose body is not read ends the connection."""
        try:
            self._admit(request)
            return await handler(request)
        except (UsageError, LogError) as error:
            answer = error_answer(*_status_of(error))
            if answer.status == 429 or isinstance(error, ReadsAway):
                answer.headers["Retry-After"] = str(RETRY_S)
        except web.HTTPException as error:
            answer = error_answer(
                error.status,
                f"{request.method} {request.path}: {error.reason}",
                "GET /v1/openapi.json" * (error.status in (404, 405)),
            )
            answer.headers.update(
                {key: value for key, value in error.headers.items() if key == "Allow"}
            )
        if not request.content.is_eof() or answer.status in (401, 413, 415):
            answer.force_close()  # its body has not arrived
        return answer

    def _admit(self, request: web.Request) -> None:
        """Raises Refusal, by the headers alone."""
        here = site_of(request.scheme, request.headers.get("Host", "localhost"))
        if here is None or not names(here, self._names):
            # In a browser, a page of another name that now stands for our address (DNS rebinding).
            raise Refusal(
                421,
                "the Host header names another host",
                "use this host's address, or start the control plane with --advertise NAME",
            )
        origin = request.headers.get("Origin")
        if origin is not None and site_of(*origin.lower().partition("://")[::2]) != here:
            raise Refusal(403, "the Origin header names another site", "unicron open")
        if "Content-Encoding" in request.headers:
            raise Refusal(415, "the body has a Content-Encoding", "send it as plain JSON")
        given = request.headers.get("Authorization")
        if given is not None:
            request[CALLER] = caller = self._caller(given)
            if isinstance(request.protocol, Connection):
                request.protocol.authorised(caller.name)
        elif not self._is_open(request.path):
            raise _unknown_token()
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise _too_large()

    def _is_open(self, path: str) -> bool:
        """Whether it needs no token."""
        return pages.PATH.match(path) is not None or any(
            route.path == path for route in self._routes if route.role is None
        )

    def _caller(self, authorization: str) -> Token:
        """Whose token it is. Raises Refusal."""
        scheme, _, secret = authorization.partition(" ")
        token = self._tokens.find(secret) if scheme.lower() == "bearer" else None
        if token is None and (session := self.sessions.find(secret)) is not None:
            if self._tokens.has_expired(session) or not self._tokens.has(session):
                raise Refusal(401, "the session has ended", "unicron open")
            return session
        if token is None:
            if node := self._tokens.revoked_node(secret):
                raise Refusal(
                    410,
                    f"the identity of {node} was revoked",
                    f"an admin: unicron token create --join --node {node}",
                )
            raise _unknown_token()
        if self._tokens.has_expired(token):
            raise Refusal(
                401,
                f"the token {token.name} has expired",
                f"an admin: unicron token rotate {token.name}",
            )
        return token

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """A follower's answers tell whom it follows, and up to which record."""
        if url := self._coordinator.leader_url:
            response.headers["Unicron-Follows"] = url
            response.headers["Unicron-Seq"] = str(self._coordinator.seq)
        if response.status == 307:
            response.headers["Location"] = f"{url}{request.path_qs}"
        elif response.status == 503 and not self._coordinator.leading:
            response.headers["Retry-After"] = str(RETRY_S)


def _signed(caller: Token, bodies: Sequence[Body]) -> list[Body]:
    """The requests, with who made them."""
    return [
        msgspec.structs.replace(body, who=caller.name, role=caller.role)
        if isinstance(body, types.OperatorRequest)
        else body
        for body in bodies
    ]


def _secret_of(request: web.Request) -> str:
    """What the caller has shown."""
    return request.headers["Authorization"].partition(" ")[2]


def _unknown_token() -> Refusal:
    return Refusal(
        401,
        "the token is missing, wrong or revoked",
        "Authorization: Bearer TOKEN, from the state folder's token file",
    )


def _no_letter(wanted: int) -> Refusal:
    return Refusal(404, f"there is no dead letter {wanted}", "unicron log dead-letters")


def _letters_fail(what: str, error: OSError) -> Refusal:
    return Refusal(
        503,
        f"the dead letters cannot be {what}: {reason_of(error)}",
        "make room in the control plane's state folder",
    )


def _fold_all(state: ClusterState, records: Sequence[Record]) -> None:
    for record in records:
        fold(state, record)


def _status_of(error: UnicronError) -> tuple[int, str, str]:
    """Status, detail and hint of an error."""
    status: int = getattr(error, "status", 0) or next(
        status for kind, status in STATUSES.items() if isinstance(error, kind)
    )
    return (
        status,
        str(error),
        error.hint or ("training goes on; try again in a moment" if status == 503 else ""),
    )


def _response(answer: Any) -> web.StreamResponse:
    return answer if isinstance(answer, web.StreamResponse) else _json(answer)


def _accepts_events(request: web.Request) -> bool:
    return "text/event-stream" in request.headers.get("Accept", "")


def _is_stream(request: web.Request, query: messages.LogQuery) -> bool:
    """Whether the answer goes on with new records."""
    return query.follow or _accepts_events(request)


def _problem_line(error: UnicronError, *, events: bool) -> bytes:
    line = problem(*_status_of(error))
    return b"event: problem\ndata: %b\n" % line if events else line


def _lines(records: Iterable[Record]) -> bytes:
    return b"".join(msgspec.json.encode(codec.to_plain(one)) + b"\n" for one in records)


def _events(records: Iterable[Record]) -> bytes:
    """Server-sent events; without a record a comment, so that the connection is seen to live."""
    return (
        b"".join(
            b"id: %d\ndata: %b\n\n" % (one.seq, msgspec.json.encode(codec.to_plain(one)))
            for one in records
        )
        or b":\n\n"
    )


def _page(
    keys: Sequence[K], key: Callable[[str], K], query: ListQuery, show: Callable[[K], T]
) -> Page[T]:
    """The items behind the cursor, which is the key of the last item before."""
    rest = keys[bisect_right(keys, key(query.cursor)) :] if query.cursor else keys
    shown = rest[: query.limit]
    return Page([show(one) for one in shown], str(shown[-1]) if len(rest) > len(shown) else "")


def _json(data: Any, status: int = 200, **headers: str) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def _too_far(seq: int) -> Refusal:
    return Refusal(
        503,
        f"seq {seq} is not reached within {FOLD_S_MAX:g} s",
        "unicron export FILE, then unicron replay FILE --until SEQ",
    )


def _too_large() -> Refusal:
    return Refusal(413, f"the body is larger than {BODY_BYTES_MAX:,} bytes", "send a smaller one")


def number(text: str) -> int:
    """The number of a task or an incident. Raises Refusal."""
    if (value := whole_number(text)) is None:
        raise Refusal(400, f"{text[:40]!r} is not a number", "for example 41")
    return value


def _checked_input(request: web.Request) -> Check:
    """The check that If-Match asks for: the plan's input is as in that ETag."""
    given = request.headers.get("If-Match", "")
    if not given:
        raise Refusal(428, "If-Match is missing", "the ETag of POST /v1/plan/dry-run")
    if given[:1] + given[-1:] != '""':
        raise Refusal(400, f"If-Match: {given[:40]} is not an ETag", "as it is, with its quotes")
    return requests.input_unchanged(number(given[1:-1]))


async def _key(request: web.Request) -> str:
    """The request's id: of its Idempotency-Key, path and body, so that another request with the
    same key is not taken for it; a random one if the client sends no key."""
    key = request.headers.get("Idempotency-Key", secrets.token_hex(16))
    if not KEY.match(key):
        raise Refusal(400, "Idempotency-Key is 1 to 128 of A-Z a-z 0-9 . _ : -", "send a uuid")
    of = sha256(f"{request.path} ".encode() + await request.read())
    return f"{key}.{of.hexdigest()[:8]}"


async def _body(request: web.Request) -> Any:
    """The JSON body, which is strict."""
    if request.body_exists and request.content_type != "application/json":
        raise Refusal(
            415, f"the body is {request.content_type[:64]}", "Content-Type: application/json"
        )
    try:
        async with asyncio.timeout(BODY_S_MAX):
            raw = await request.read()
    except TimeoutError:
        raise Refusal(
            408, f"the body did not arrive within {BODY_S_MAX:g} s", "send it again"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise Refusal(400, f"the body is not valid HTTP: {error}", "send one JSON object") from None
    try:
        return from_strict_json(raw or b"{}")
    except msgspec.MsgspecError as error:
        raise Refusal(400, f"the body is not JSON: {error}", "send one JSON object") from None

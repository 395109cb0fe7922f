"""The control plane's HTTP port (docs/ARCHITECTURE.md, "HTTP")."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct
from unicron import __version__

from ...events.errors import LogError, Pruned, SpecError, UsageError
from ...events.log.identity import RESERVED_NAMES, Identities, user_name, with_credentials
from ...events.log.port import ReaderPort
from ...events.log.segments import Folder
from ...events.records import codec, reports, types
from ...events.records.envelope import Record
from ...events.records.types import Body
from ...events.spec import job
from ..fold.fold import fold
from ..history.history import usage
from ..history.usage import Usage
from ..planner.pending import is_any_waiting
from ..service import snapshots, usage_files
from ..service.coordinator import Check, Coordinator
from ..service.server_certificate import ServerCertificate
from ..service.threads import aside
from ..state.cluster import ClusterState, decode_state, encode_state, state_text
from ..state.node import Node
from . import dry_run, moments, requests, usage_answer
from .connections import Connection, error_answer, error_line
from .requests import Refusal
from .tokens import Role, Token, Tokens, may
from .view import view

BODY_BYTES_MAX = 1 << 20
BODY_S_MAX = 10.0
"""Time limit for the arrival of a request's body."""
PAGE_RECORDS_MAX = 1_000
FILE_S_MAX = 5.0
"""Time limit for a part of a file that a node's agent reads."""
FOLD_S_MAX = 30.0
"""Time limit for folding the log to a past record."""
ADDRESS = re.compile(r"^([\d.]+|\[[^\]]*:[^\]]*\])(:\d*)?$")
KEY = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")

CALLER = web.RequestKey("caller", Token)
"""The token with which a request came; absent where none is needed and none was given."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Request = Callable[[ClusterState, Any, str], Body]
"""Makes a report from the state, the body and the name in the path. Raises Refusal."""


class Address(Struct, frozen=True, kw_only=True):
    """The log that an agent is told when it joins.

    `shared_password`: agents use the credentials of `redis_url`, instead of their own. `names`: of
    this control plane; a Host header may also be localhost, this host's name, or any address.
    """

    redis_url: str
    cluster: str
    shared_password: bool = False
    insecure: bool = False
    """Something crosses the network unencrypted."""
    names: tuple[str, ...] = ()


class _Join(Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    host: str
    incarnation: int
    labels: dict[str, str] = {}
    identity: str = ""


class _NewToken(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    role: Literal["view", "operate", "admin", "join"]
    life_s: float = 0.0
    node: str = ""
    uses: int = 0
    reason: str = ""


class _Apply(Struct, frozen=True, forbid_unknown_fields=True):
    change: dry_run.Change
    check: int
    reason: str = ""


class HttpApi:
    """The HTTP calls of one control plane. Answers show only records that the log acknowledged."""

    def __init__(self, coordinator: Coordinator, log: ReaderPort, *, tokens: Tokens,
                 address: Address, identities: Identities,
                 certificate: ServerCertificate | None = None,
                 folder: Folder | None = None) -> None:
        """`folder`: where the log's snapshots are."""
        self._coordinator, self._log, self._folder = coordinator, log, folder
        self._tokens, self._address = tokens, address
        self._identities, self._certificate = identities, certificate
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, address.names)}
        self._writing = asyncio.Lock()
        """Serialises writes, so that each is checked against the earlier writes."""
        self._computing = asyncio.Lock()
        """Serialises computations, so that many requests do not slow the leader."""
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By node: serialises requests to its agent."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES_MAX)
        app.on_response_prepare.append(self._mark)
        for route in ROUTES:
            add = {"GET": app.router.add_get, "POST": app.router.add_post}[route.method]
            add(route.path, self._allow(route, route.handler(self)))
        return app

    # --- calls ---
    async def health(self, request: web.Request) -> web.Response:
        """Whether this control plane leads; to a client with a token also of what, and who it is.
        """
        leading = self._coordinator.leading
        if CALLER not in request or not may(request[CALLER].role, "view"):
            return _json({"ok": leading})
        return _json({"ok": leading, "cluster": self._address.cluster,
                      "epoch": self._coordinator.epoch, "seq": self._coordinator.seq,
                      "leader": leading, "pid": os.getpid(),
                      "follows": self._coordinator.leader_url})

    async def ready(self, request: web.Request) -> web.Response:
        """Whether this control plane acknowledges; 503 if not, and to a client with a token why.
        With `follower=1` also whether it follows one that leads."""
        follows = _number(request, "follower") and self._coordinator.leader_url
        away = self._coordinator.away or "it does not lead" * (
            not self._coordinator.leading and not follows)
        tells = CALLER in request and may(request[CALLER].role, "view")
        return _json({"ok": not away} | ({"why": away} if tells else {}), 503 if away else 200)

    async def state(self, request: web.Request) -> web.Response:
        """The state. With `explain=1` also what each waiting task needs, computed in a thread; with
        `at=SEQ` or `at=TIME` that of a past moment."""
        state = await self._coordinator.settled()
        if at := request.query.get("at"):
            async with self._computing:
                await self._log.open_segments()  # they may have been pruned
                seq = await moments.seq_at(at, self._log.first_seq, state.seq, self._record)
                shown = view(await self._state_after(seq))
        elif _number(request, "explain") and is_any_waiting(state):
            data = encode_state(state)
            now_s = self._coordinator.now_s
            shown = await aside(lambda: view(decode_state(data), explain=True, now_s=now_s))
        else:
            shown = view(state, now_s=self._coordinator.now_s)
        shown["cluster"] |= {"follows": "" if at else self._coordinator.leader_url,
                             "followers": [] if at else self._coordinator.followers,
                             "insecure": self._address.insecure,
                             "ca": self._certificate.ca if self._certificate else ""}
        return _json(shown)

    async def records(self, request: web.Request) -> web.StreamResponse:
        after = _number(request, "after")
        follow = _number(request, "follow")
        if follow not in (0, 1):
            raise Refusal(400, "follow is 0 or 1", "/v1/log?after=0&follow=1")
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        try:
            if follow:
                await self._coordinator.settled()
                if after + 1 < self._log.first_seq:
                    raise Pruned(self._log.first_seq)
                await response.prepare(request)
                async for page in self._coordinator.follow(after):
                    if not self._tokens.is_valid(request[CALLER]):
                        break
                    await response.write(_lines(page))
            else:
                page = await self._log.read(after=after, num_max=PAGE_RECORDS_MAX)
                await response.prepare(request)
                while page:
                    await response.write(_lines(page))
                    page = await self._log.read(after=page[-1].seq, num_max=PAGE_RECORDS_MAX)
        except LogError as error:
            if not response.prepared:
                raise
            await response.write(error_line(str(error), _hint(error)))
        await response.write_eof()
        return response

    async def beginning(self, request: web.Request) -> web.Response:
        """Where the log begins: `after` which record, and the `state` then."""
        await self._log.open_segments()
        after = self._log.first_seq - 1
        async with self._computing:
            return _json({"after": after, "state": state_text(await self._state_after(after))})

    async def history(self, request: web.Request) -> web.Response:
        """What slots were used for and lost to, by day (usage_answer.py)."""
        first = usage_answer.first_day(request.query)
        async with self._computing:
            found, after = Usage(), 0
            if (sealed := await self._log.open_segments()) is not None:
                found = await aside(partial(usage_files.of_sealed, sealed, FOLD_S_MAX))
                after = sealed.last
            state = await self._state_after(after)
            rest: list[Record] = []
            while page := await self._log.read(after=after, num_max=PAGE_RECORDS_MAX):
                rest += page
                after = page[-1].seq
            found.add(await aside(partial(usage, rest, state)))
        return _json(usage_answer.answer(found, first))

    def write(self, make: Request, *names: str,
              ahead: Callable[[Any], None] | None = None) -> Handler:
        """A handler that writes a report for each comma-separated name in the path, in one append,
        and answers with the seq of the first, under each of `names`. Before the write, `ahead` runs
        in a thread, so that it does not delay other writes."""
        async def call(request: web.Request) -> web.StreamResponse:
            key, body = _key(request), await _body(request)
            if ahead is not None:
                await aside(partial(ahead, body))
            async with self._writing:
                state = await self._coordinator.settled()
                seq = self._coordinator.answer(key)
                if seq is None:
                    of = dict.fromkeys(request.match_info.get("of", "").split(","))
                    reports = [make(state, body, name) for name in of]
                    seq = await self._coordinator.write(key, *_signed(request[CALLER], reports))
            return _json(dict.fromkeys(names or ("seq",), seq))
        return call

    async def file(self, request: web.Request) -> web.Response:
        """A part of a node's file that has the output of a rank, from `offset` on: its text, and
        the offset behind it."""
        node, offset = request.match_info["of"], _number(request, "offset")
        known = (await self._coordinator.settled()).nodes.get(node)
        if known is None or known.health == "left":
            raise Refusal(404, f"node {node[:64]!r} has no agent", "unicron status nodes")
        async with self._reading[node]:
            part = await self._log.ask_file(node, request.query.get("file", ""), offset=offset,
                                            wait_s=FILE_S_MAX)
        if part.error:
            raise Refusal(404, f"the agent of {node} cannot read it: {part.error}", "")
        text, num = codecs.utf_8_decode(part.data, "replace")  # a cut character is for the next
        return _json({"text": text, "end": offset + num})

    async def plan(self, request: web.Request) -> web.Response:
        """The present plan, or with `seq` the plan in force after that record."""
        seq = _number(request, "seq")
        if not seq:
            return _json(await self._in_thread(dry_run.explain_present_plan))
        last = (await self._coordinator.settled()).seq
        if seq > last:
            raise Refusal(404, f"seq: {seq} is not in the log", f"the log ends at seq {last}")
        async with self._computing:
            state = await self._state_after(seq)
            return _json(await aside(lambda: dry_run.explain_present_plan(encode_state(state))))

    async def _record(self, seq: int) -> Record:
        (record,) = await self._log.read(after=seq - 1, num_max=1)
        return record

    async def _state_after(self, seq: int) -> ClusterState:
        """The state after the record `seq`, folded in a thread from the snapshot before."""
        began_s = time.monotonic()
        state, _ = await asyncio.to_thread(snapshots.newest, self._folder, seq)
        while state.seq < seq:
            if time.monotonic() - began_s > FOLD_S_MAX:
                raise Refusal(503, f"seq {seq} is not reached within {FOLD_S_MAX:g} s",
                              "unicron export FILE, then unicron replay FILE --until SEQ")
            page = await self._log.read(after=state.seq,
                                        num_max=min(PAGE_RECORDS_MAX, seq - state.seq))
            await aside(partial(_fold_all, state, page))
        return state

    async def dry_run(self, request: web.Request) -> web.Response:
        change = requests.convert(await _body(request), dry_run.Change)
        began_s = time.perf_counter()
        tried = await self._in_thread(lambda data: dry_run.run_dry(data, change))
        took_s = time.perf_counter() - began_s
        return _json({**msgspec.structs.asdict(tried), "took_s": took_s})

    async def apply(self, request: web.Request) -> web.Response:
        """Carry out a dry run, if the plan's input has not changed since."""
        key, body = _key(request), requests.convert(await _body(request), _Apply)
        reason = requests.one_line(body.reason)
        async with self._writing:
            await self._coordinator.settled()
            seq = self._coordinator.answer(key)
            if seq is None:
                check = requests.input_unchanged(body.check)
                bodies = await self._in_thread(
                    lambda data: dry_run.operator_requests(data, body.change, reason), check)
                seq = await self._coordinator.write(key, *_signed(request[CALLER], bodies),
                                                    check=check)
        return _json({"seq": seq})

    async def _in_thread(self, call: Callable[[bytes], T], check: Check | None = None) -> T:
        """Run `call` on a copy of the state in a thread; the leader's event loop runs on."""
        async with self._computing:
            state = await self._coordinator.settled()
            if check is not None:
                check(state)
            data = encode_state(state)
            return await aside(partial(call, data))

    async def hand_over(self, request: web.Request) -> web.Response:
        """Let a follower lead; answers with its URL. Sent again, it has no effect."""
        return _json({"leader": await self._coordinator.hand_over(_number(request, "epoch"))})

    async def join(self, request: web.Request) -> web.Response:
        body = requests.convert(await _body(request), _Join)
        if not job.NAME.match(body.node) or body.node in RESERVED_NAMES:
            raise Refusal(400, f"node: {body.node!r} is not a name",
                          "lower-case letters, digits, '-' and '.', at most 63; not "
                          + " or ".join(RESERVED_NAMES))
        for key, value in body.labels.items():
            if why := types.label_error(key, value):
                raise Refusal(400, f"labels: {why}", types.LABEL_HINT)
        state = await self._coordinator.settled()
        known = state.nodes.get(body.node)
        if known is not None and known.incarnation > body.incarnation:
            raise Refusal(409, f"a newer agent of {body.node} has joined",
                          "give this one another --node, or set its clock")
        await self._identify(request, body, known)
        if (known is not None and known.drained and known.drain_reason == reports.AGENT_STOPS
                and body.incarnation > known.incarnation):
            async with self._writing:
                await self._coordinator.write(secrets.token_hex(16), *_signed(request[CALLER], [
                    reports.NodeUndrained(node=body.node, reason="its agent has started again")]))
        await self._coordinator.admit(body.node, body.incarnation)
        return _json({"redis_url": self._url_of(body.node, body.incarnation),
                      "cluster": self._address.cluster, "node": body.node,
                      "epoch": self._coordinator.epoch,
                      "key": self._identities.key(body.node).hex(),
                      "redact": state.policy.redact, "version": __version__,
                      "agent_gone_s_max": state.policy.agent_gone_s_max})

    async def _identify(self, request: web.Request, body: _Join, known: Node | None) -> None:
        """Enrol the node if its agent asks for that; else raise Refusal if it is another node, or
        the agent of another node. Raises UsageError."""
        caller = request[CALLER]
        if body.identity and caller.role != "node":
            # Whoever made a token for this node alone knows that a silent one of its name is gone.
            is_live = known is not None and (known.health == "healthy" or (
                known.health == "unreachable" and caller.node != body.node))
            async with self._writing:
                token = self._tokens.enrol(caller, body.node, body.identity, is_live=is_live)
                await self._tell(request, "enrolled", token)
        elif caller.role == "join":
            raise Refusal(400, "a join token enrols a node, and this one sends no identity",
                          "use an agent of this version")
        elif caller.role == "node" and caller.name != body.node:
            raise Refusal(400, f"this is the identity of {caller.name}, not of {body.node}",
                          f"--node {caller.name}, or another --state")
        elif caller.role == "admin" and body.node in self._tokens.enrolled_nodes():
            raise Refusal(409, f"the name {body.node} is taken by a node that was enrolled",
                          f"give this one another --node, or unicron token revoke {body.node}")

    def _url_of(self, node: str, incarnation: int) -> str:
        """The log's URL for an agent."""
        address = self._address
        if address.shared_password:
            return address.redis_url
        return with_credentials(address.redis_url, user_name(address.cluster, node),
                                self._identities.password(node, incarnation))

    # --- tokens; a secret is in an answer once, and in no log ---
    async def list_tokens(self, request: web.Request) -> web.Response:
        return _json({"tokens": [
            {"name": one.name, "role": one.role, "created_s": one.created_s,
             "expires_s": one.expires_s, "expired": self._tokens.has_expired(one),
             "node": one.node, "uses": one.uses, "used": one.used}
            for one in self._tokens.all()]})

    async def create_token(self, request: web.Request) -> web.Response:
        body = requests.convert(await _body(request), _NewToken)
        return await self._issue(request, "created", body.reason, lambda: self._tokens.create(
            body.name, body.role, body.life_s, node=body.node, uses=body.uses))

    async def rotate_token(self, request: web.Request) -> web.Response:
        body = requests.convert(await _body(request), requests.Reason)
        return await self._issue(request, "rotated", body.reason,
                                 lambda: self._tokens.rotate(request.match_info["of"]))

    async def _issue(self, request: web.Request, act: types.TokenAct, reason: str,
                     make: Callable[[], tuple[Token, str]]) -> web.Response:
        reason = requests.one_line(reason)
        async with self._writing:
            await self._coordinator.settled()
            token, secret = make()
            await self._tell(request, act, token, reason)
        return _json({"name": token.name, "role": token.role, "expires_s": token.expires_s,
                      "node": token.node, "uses": token.uses, "token": secret})

    async def revoke_token(self, request: web.Request) -> web.Response:
        reason = requests.one_line(
            requests.convert(await _body(request), requests.Reason).reason)
        async with self._writing:
            await self._coordinator.settled()
            token = self._tokens.revoke(request.match_info["of"])
            try:
                await self._tell(request, "revoked", token, reason)
            finally:
                if token.role == "node":
                    await self._coordinator.expel(token.name)
        return _json({"name": token.name})

    async def _tell(self, request: web.Request, act: types.TokenAct, token: Token, reason: str = ""
                    ) -> None:
        """Share a change of a token, and write who made it and why, before a secret is answered.
        """
        await self._coordinator.keep_tokens(self._tokens.encoded())
        # Not under the caller's Idempotency-Key: with one that is in the log nothing is written.
        await self._coordinator.write(secrets.token_hex(16), *_signed(request[CALLER], [
            reports.TokenChanged(act=act, name=token.name, token_role=token.role, reason=reason)]))

    # --- authorisation and errors ---
    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what can be refused by its headers, before the body is read; answer every error
        with one line of JSON. An answer to a request whose body is not read ends the connection."""
        try:
            self._admit(request)
            return await handler(request)
        except Refusal as error:
            return _refusal(request, error.status, str(error), error.hint)
        except SpecError as error:
            return error_answer(422, str(error), error.hint)
        except UsageError as error:
            return error_answer(400, str(error), error.hint)
        except Pruned as error:
            return error_answer(410, str(error), error.hint)
        except LogError as error:
            return error_answer(503, str(error), _hint(error))
        except web.HTTPException as error:
            hint = "docs/ARCHITECTURE.md, HTTP" if error.status in (404, 405) else ""
            return _refusal(request, error.status,
                            f"{request.method} {request.path}: {error.reason}", hint)

    def _admit(self, request: web.Request) -> None:
        """Raises Refusal, by the headers alone."""
        host = request.headers.get("Host", "localhost")
        if host.partition(":")[0].lower() not in self._names and not ADDRESS.match(host):
            # In a browser, a page of another name that now stands for our address (DNS rebinding).
            raise Refusal(421, "the Host header names another host", "use this host's address, or "
                          "start the control plane with --advertise NAME")
        if "Content-Encoding" in request.headers:
            raise Refusal(415, "the body has a Content-Encoding", "send it as plain JSON")
        given = request.headers.get("Authorization")
        if given is not None:
            request[CALLER] = self._caller(given)
            if isinstance(request.protocol, Connection):
                request.protocol.authorised()
        elif request.path not in OPEN_TO_ALL:
            raise _unknown_token()
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise _too_large()

    def _caller(self, authorization: str) -> Token:
        """Whose token it is. Raises Refusal."""
        scheme, _, secret = authorization.partition(" ")
        token = self._tokens.find(secret) if scheme.lower() == "bearer" else None
        if token is None:
            if node := self._tokens.revoked_node(secret):
                raise Refusal(410, f"the identity of {node} was revoked",
                              f"an admin: unicron token create --join --node {node}")
            raise _unknown_token()
        if self._tokens.has_expired(token):
            raise Refusal(401, f"the token {token.name} has expired",
                          f"an admin: unicron token rotate {token.name}")
        return token

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """A follower's answers tell whom it follows, and up to which record."""
        if url := self._coordinator.leader_url:
            response.headers["Unicron-Follows"] = url
            response.headers["Unicron-Seq"] = str(self._coordinator.seq)
        if response.status == 307:
            response.headers["Location"] = f"{url}{request.path_qs}"
        elif response.status == 503 and not self._coordinator.leading:
            response.headers["Retry-After"] = "1"

    def _allow(self, route: Route, handler: Handler) -> Handler:
        """The handler, for callers of the route's role or a higher one, if need be at the leader.
        Others are refused unread."""
        if (role := route.role) is None:
            return handler

        async def call(request: web.Request) -> web.StreamResponse:
            caller = request[CALLER]
            if not may(caller.role, role):
                raise Refusal(
                    403, f"this needs the role {role}; the token {caller.name} has the role "
                    f"{caller.role}", "an admin: unicron token create "
                    + ("--join" if role == "join" else f"--role {role}"))
            if route.path in OF_THE_LEADER and (url := await self._coordinator.find_leader()):
                raise Refusal(307, f"this control plane follows, {url} leads", f"--url {url}")
            return await handler(request)
        return call


class Route(Struct, frozen=True):
    """One call: who may make it, and what handles it."""

    method: Literal["GET", "POST"]
    path: str
    role: Role | None
    """The lowest role that may call; None: no token is needed."""
    handler: Callable[[HttpApi], Handler]


ROUTES = (
    Route("GET", "/v1/health", None, lambda api: api.health),
    Route("GET", "/livez", None, lambda api: api.health),
    Route("GET", "/readyz", None, lambda api: api.ready),
    Route("GET", "/v1/state", "view", lambda api: api.state),
    Route("GET", "/v1/log", "view", lambda api: api.records),
    Route("GET", "/v1/log/beginning", "view", lambda api: api.beginning),
    Route("GET", "/v1/history", "view", lambda api: api.history),
    Route("GET", "/v1/plan", "view", lambda api: api.plan),
    Route("POST", "/v1/plan/dry-run", "view", lambda api: api.dry_run),
    Route("POST", "/v1/plan/apply", "operate", lambda api: api.apply),
    Route("POST", "/v1/tasks", "operate", lambda api: api.write(
        requests.submit, "seq", "task", ahead=requests.search_layouts)),
    # what a rank has printed is not redacted
    Route("GET", "/v1/nodes/{of}/file", "operate", lambda api: api.file),
    Route("POST", "/v1/tasks/{of}/cancel", "operate", lambda api: api.write(requests.cancel)),
    Route("POST", "/v1/tasks/{of}/weight", "operate", lambda api: api.write(requests.set_weight)),
    Route("POST", "/v1/nodes/{of}/drain", "operate", lambda api: api.write(requests.drain)),
    Route("POST", "/v1/nodes/{of}/undrain", "operate", lambda api: api.write(requests.undrain)),
    Route("POST", "/v1/nodes/{of}/lift", "operate",
          lambda api: api.write(requests.lift_quarantine)),
    Route("POST", "/v1/incidents/{of}/ack", "operate",
          lambda api: api.write(requests.acknowledge)),
    Route("POST", "/v1/freeze", "operate", lambda api: api.write(requests.freeze)),
    Route("POST", "/v1/unfreeze", "operate", lambda api: api.write(requests.unfreeze)),
    Route("POST", "/v1/handover", "operate", lambda api: api.hand_over),
    # a fault ends healthy processes
    Route("POST", "/v1/inject", "admin", lambda api: api.write(requests.inject)),
    Route("POST", "/v1/join", "join", lambda api: api.join),
    Route("GET", "/v1/tokens", "admin", lambda api: api.list_tokens),
    Route("POST", "/v1/tokens", "admin", lambda api: api.create_token),
    Route("POST", "/v1/tokens/{of}/rotate", "admin", lambda api: api.rotate_token),
    Route("POST", "/v1/tokens/{of}/revoke", "admin", lambda api: api.revoke_token),
)
OF_THE_LEADER = {route.path for route in ROUTES if route.method == "POST"
                 and route.path != "/v1/plan/dry-run"} | {"/v1/nodes/{of}/file"}
"""Calls that a follower cannot answer."""
OPEN_TO_ALL = {route.path for route in ROUTES if route.role is None}


def _signed(caller: Token, bodies: Sequence[Body]) -> list[Body]:
    """The requests, with who made them."""
    return [msgspec.structs.replace(body, who=caller.name, role=caller.role)
            if isinstance(body, types.OperatorRequest) else body for body in bodies]


def _unknown_token() -> Refusal:
    return Refusal(401, "the token is missing, wrong or revoked",
                   "Authorization: Bearer TOKEN, from the state folder's token file")


def _fold_all(state: ClusterState, records: Sequence[Record]) -> None:
    for record in records:
        fold(state, record)


def _hint(error: LogError) -> str:
    return error.hint or "training goes on; try again in a moment"


def _lines(records: Any) -> bytes:
    encode = msgspec.json.encode
    return b"".join(encode(codec.to_plain(record)) + b"\n" for record in records)


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status,
                        content_type="application/json")


def _refusal(request: web.Request, status: int, message: str, hint: str) -> web.Response:
    """An error; the connection ends if the request has a body that has not arrived."""
    answer = error_answer(status, message, hint)
    if not request.content.is_eof() or status in (401, 413, 415):
        answer.force_close()
    return answer


def _too_large() -> Refusal:
    return Refusal(413, f"the body is larger than {BODY_BYTES_MAX:,} bytes", "send a smaller one")


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not text.isdecimal() or len(text) > 18:
        raise Refusal(400, f"{name}: {text[:40]!r} is not a number from 0 on",
                      f"{request.path}?{name}=0")
    return int(text)


def _key(request: web.Request) -> str:
    """The request's id; a random one if the client sends none."""
    key = request.headers.get("Idempotency-Key") or secrets.token_hex(16)
    if not KEY.match(key):
        raise Refusal(400, "Idempotency-Key is 1 to 128 of A-Z a-z 0-9 . _ : -", "send a uuid")
    return key


async def _body(request: web.Request) -> Any:
    """The JSON body, strict: no duplicate keys, no NaN, no lone surrogate (`"\\ud800"` is JSON, but
    can be written neither to the log nor to an answer)."""
    try:
        async with asyncio.timeout(BODY_S_MAX):
            raw = await request.read()
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_S_MAX:g} s",
                      "send it again") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise Refusal(400, f"the body is not valid HTTP: {error}", "send one JSON object") from None
    try:
        found = json.loads(raw or b"{}", object_pairs_hook=_unique_keys, parse_constant=_not_finite)
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}", "send one JSON object") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def _not_finite(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")

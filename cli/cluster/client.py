"""HTTP client of the control plane (docs/guides/api.md), standard library only.

`Client(url, token)`, or `connect()`, which finds them as the commands do. Answers are plain data,
as in the OpenAPI document.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode

from ...events import network_address, tls, unix_socket
from ...events.decoding import from_json
from ...events.errors import Leased, UnicronError, UsageError
from ...events.log import embedded_server
from ...events.private_files import read_private
from ...events.secret_environment import TOKEN, URL, checked_token
from ...events.whole_numbers import whole_number
from . import answers, processes
from .answers import Interrupted, NotAControlPlane
from .state_dir import StateDir, default, opened, read_json, shown

if TYPE_CHECKING:
    from ...control_plane.api.messages import NodeView, TaskView, View

GOES_ON = "training goes on"
REPLY_S_MAX = 10.0
PROBE_S_MAX = 1.0
FIND_S_MAX, FIND_EVERY_S = 15.0, 0.1
"""How long a request is tried again while another control plane takes over."""
BUSY_S_MAX = 60.0
"""How long a read is tried again while others of its token are in progress."""
BUSY = "the control plane answers as many reads of this token at a time as it may"
Urls = Sequence[str] | None
DRY_RUN_S_MAX = 120.0
"""A dry run of the largest job on 100,000 slots takes ten seconds; with limits, it takes longer."""


class Refused(UsageError):
    """The control plane rejected the request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.status = status


class Unreachable(UnicronError):
    """No server answers at the control plane's address, or no cluster runs on the state folder."""

    exit_code = 3


class Unable(UnicronError):
    """The control plane cannot answer for now (5xx). `passes`: until another one leads."""

    passes = False


class Busy(Unable):
    """The token has as many reads in progress as it may (429); after `again_s` it may ask again."""

    again_s = 1.0


class Client:
    """Client of a control plane and those in `others`, of which one leads. Every call raises
    Unreachable, Refused or Unable.

    A request goes to the one that leads, to which a follower points; while none does, reads go to
    a follower, and writes are tried again for FIND_S_MAX, with the same key.
    `socket`: the path of its unix socket, used instead of the address in `url`. `ca`: the
    authorities (PEM) that it trusts at https://; "": the system's. `away`: says what is away if
    nobody answers. `insecure`: the token may cross a network unencrypted. Raises UsageError for a
    URL that would need that, also where a follower points to one."""

    ca = ""

    def __init__(
        self,
        url: str,
        token: str,
        hint: str = "unicron up",
        socket: str = "",
        away: Callable[[], str] = str,
        *,
        insecure: bool = False,
    ) -> None:
        parts = network_address.url_parts(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise UsageError(
                f"{url!r} is not a control plane's address",
                "for example --url http://127.0.0.1:8420",
            )
        self.url, self.socket = parts.geturl(), socket
        self.is_secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = parts.port or (443 if self.is_secure else 80)
        if not (self.is_secure or socket or network_address.is_loopback(self.host)):
            tls.check_plain(url, insecure=insecure)
        self.insecure = insecure
        self.token, self._hint, self._away = checked_token(token), hint, away
        self.others: Sequence[Client] = ()
        self.leader: Client | None = None
        """The one that leads, as far as is known."""

    def addresses(self, state: StateDir) -> list[tuple[str, str]]:
        """URL and socket of each control plane, as they are now."""
        if self.socket:
            return [(str(file["url"]), str(file["socket"])) for file in running_here(state)]
        return [(one.url, "") for one in (self, *self.others)]

    def get(self, path: str, limit_s: float = REPLY_S_MAX, **query: object) -> Any:
        """The JSON response of a GET."""
        with self._open("GET", path, query=query, limit_s=limit_s) as answer:
            return answers.read(answer, self.url, "GET", path)

    # --- reads; `at`: a past moment, a seq or a time, "": now ---
    def state(self, at: str = "", *, explain: bool = False) -> View:
        """The state of the cluster; `explain`: also what each waiting task needs."""
        found: View = self.get("/v1/state", DRY_RUN_S_MAX, at=at, explain=int(explain))
        return found

    def task(self, task: int, at: str = "") -> TaskView:
        """One task."""
        found: TaskView = self.get(f"/v1/tasks/{task}", DRY_RUN_S_MAX, at=at)
        return found

    def tasks(self, at: str = "") -> Iterator[TaskView]:
        """All tasks, a page at a time."""
        return self.items("tasks", at)

    def nodes(self, at: str = "") -> Iterator[NodeView]:
        """All nodes, a page at a time."""
        return self.items("nodes", at)

    def plan(self, at: str = "") -> dict[str, Any]:
        """The plan with its explanation."""
        found: dict[str, Any] = self.get("/v1/plan", DRY_RUN_S_MAX, at=at)
        return found

    def dry_run(self, change: Mapping[str, object]) -> dict[str, Any]:
        """What a change would lead to; `input` is for `apply`."""
        found: dict[str, Any] = self.post("/v1/plan/dry-run", change, DRY_RUN_S_MAX)
        return found

    # --- requests; each returns the seq of its record, behind which is what was decided ---
    def submit(self, job: Mapping[str, object]) -> int:
        """Submit a job spec; the seq is the number of the task."""
        return self._write("/v1/tasks", job)

    def cancel(self, task: int, reason: str = "") -> int:
        """Cancel a task."""
        return self._write(f"/v1/tasks/{task}/cancel", {"reason": reason})

    def set_weight(self, task: int, weight: float, reason: str = "") -> int:
        """Set a task's weight."""
        return self._write(f"/v1/tasks/{task}/weight", {"weight": weight, "reason": reason})

    def drain(self, *nodes: str, reason: str = "") -> int:
        """Move the tasks away from nodes."""
        return self._write(f"/v1/nodes/{quote(','.join(nodes))}/drain", {"reason": reason})

    def undrain(self, *nodes: str, reason: str = "") -> int:
        """Allow tasks on drained nodes again."""
        return self._write(f"/v1/nodes/{quote(','.join(nodes))}/undrain", {"reason": reason})

    def apply(self, change: Mapping[str, object], check: int, reason: str = "") -> int:
        """Carry out a dry run. Raises Refused (412) if the plan's input is not `check` any more."""
        return self._write(
            "/v1/plan/apply",
            {"change": change, "reason": reason},
            DRY_RUN_S_MAX,
            **{"If-Match": f'"{check}"'},
        )

    def _write(self, path: str, body: object, limit_s: float = REPLY_S_MAX, **headers: str) -> int:
        return int(self.post(path, body, limit_s, **headers)["seq"])

    # --- any call ---
    def items(self, part: str, at: str = "") -> Iterator[Any]:
        """The items of a list (`tasks`, `nodes`, `incidents`, `tokens`), of all its pages."""
        cursor = ""
        while True:
            page = self.get(f"/v1/{part}", limit=1_000, cursor=cursor, at=at)
            yield from page["items"]
            if not (cursor := page["next"]):
                return

    def post(self, path: str, body: object, limit_s: float = REPLY_S_MAX, **headers: str) -> Any:
        """The JSON response of a POST. If the connection breaks, it is sent again with its key."""
        headers["Idempotency-Key"] = secrets.token_hex(16)
        for last in (False, True):
            try:
                with self._open(
                    "POST", path, body=body, headers=headers, limit_s=limit_s
                ) as answer:
                    return answers.read(answer, self.url, "POST", path)
            except (Interrupted, Unreachable):
                if last:
                    raise
        raise AssertionError

    def records(self, after: int, *, follow: bool) -> Iterator[dict[str, Any]]:
        """Records after `after` as plain data; with `follow` until the connection is closed. Raises
        Interrupted too, and Refused once the token has expired."""
        query = {"after": after, "follow": int(follow)}
        with self._open(
            "GET", "/v1/log", query=query, limit_s=None if follow else REPLY_S_MAX
        ) as answer:
            for line in answers.lines(answer, self.url):
                if "seq" not in (record := answers.read_record(line, self.url)):
                    raise _refused(record, self._hint)
                yield record

    def _open(
        self, method: str, path: str, *, limit_s: float | None = REPLY_S_MAX, **request: Any
    ) -> answers.Response:
        """Send it to the control plane that leads."""
        deadline_s, late = time.monotonic() + FIND_S_MAX, UnicronError()
        busy_s, said_busy = time.monotonic() + BUSY_S_MAX, False
        while True:
            at = self.leader or self._find()
            try:
                answer = (at or self)._open_here(method, path, limit_s=limit_s, **request)
                self.leader = at
                return answer
            except Leased as error:
                self.leader = self._pointed_to(error.url)
                late = Unable(str(error), self._hint)
            except Busy as error:
                if (left_s := busy_s - time.monotonic()) <= 0:
                    raise
                if not said_busy:
                    said_busy = True
                    with suppress(OSError):
                        sys.stderr.write(f"{BUSY}: waiting for {BUSY_S_MAX:g} s at most\n")
                time.sleep(min(error.again_s, left_s))
                continue
            except Unable as error:
                if not error.passes:
                    raise
                self.leader, late = None, error
            except Unreachable as error:
                if at is None or (at is self and not self.others):
                    raise
                self.leader, late = None, error
            if time.monotonic() > deadline_s:
                raise late
            time.sleep(FIND_EVERY_S)

    def _find(self) -> Client | None:
        """The one that leads; else one that answers, if there is one."""
        found = None if self.others else self
        for one in (self, *self.others) if self.others else ():
            with suppress(Interrupted, Refused, Unable, Unreachable):
                answer = one._open_here("GET", "/v1/health", limit_s=PROBE_S_MAX)
                health = answers.read(answer, one.url, "GET", "/v1/health")
                if isinstance(health, dict) and health.get("ok"):  # pyright: ignore[reportUnknownMemberType]
                    return one
                found = found or one
        return found

    def _pointed_to(self, url: str) -> Client | None:
        """The control plane to which a follower points; None if no token may be sent there."""
        known = next((one for one in (self, *self.others) if one.url == url), None)
        if known or not tls.may_follow(url, self.url, by_socket=bool(self.socket)):
            return known
        found = Client(url, self.token, self._hint, insecure=self.insecure)
        found.ca = self.ca
        return found

    def _open_here(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: object = None,
        headers: dict[str, str] | None = None,
        limit_s: float | None = REPLY_S_MAX,
    ) -> answers.Response:
        link = self._link(min(limit_s or REPLY_S_MAX, REPLY_S_MAX))
        response_class: Any = partial(answers.Response, limit_s=limit_s)
        link.response_class = response_class
        sent = {
            "Authorization": f"Bearer {self.token}",
            "Connection": "close",
            **(headers or {}),
            **({"Content-Type": "application/json"} if body is not None else {}),
        }
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # a body may be refused unread
                link.request(method, target, None if body is None else json.dumps(body), sent)
            answer = cast(answers.Response, link.getresponse())
        except (OSError, http.client.HTTPException) as error:
            link.close()
            if refusal := tls.refusal(error, self.url):
                raise refusal from None
            if not (self.is_secure or self.socket) and tls.is_likely(error, self.host, self.port):
                raise UsageError(
                    f"{self.url}: what answers there speaks TLS",
                    f"--url https://{self.url.rpartition('//')[2]}",
                ) from None
            away, why = self._away(), answers.reason(error)
            raise Unreachable(
                f"{away}{': ' * bool(away)}no control plane answers at {self.url} ({why})",
                self._hint,
            ) from None
        if answer.status == 307:
            link.close()
            if (follows := answer.headers["Unicron-Follows"]) is None:
                raise NotAControlPlane(self.url, f"{method} {path}: it points nowhere (307)")
            raise Leased(str(follows))
        if answer.status >= 400:
            raise _refused(_problem(answer), self._hint, again_s=_retry_after_s(answer))
        return answer

    def _link(self, limit_s: float) -> http.client.HTTPConnection:
        if self.socket:
            return _SocketConnection(self.socket, timeout=limit_s)
        if self.is_secure:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=limit_s, context=tls.client_context(self.ca)
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=limit_s)


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(unix_socket.address(self._path))


def running_here(state: StateDir) -> list[dict[str, Any]]:
    """What the control planes on the state folder have written there: url, socket, token. In a copy
    of a folder it is of the other folder's cluster, and left out."""
    files = [(path, read_json(path) or {}) for path in state.control_planes()]
    return [file for path, file in files if file.get("url") and _is_of(path.parent, file)]


def _is_of(folder: Path, file: Mapping[str, Any]) -> bool:
    """Whether the socket that the file names is in this folder; another host's cannot be seen."""
    path, host = str(file.get("socket", "")), platform.node()
    if not path or file.get("host", host) != host:
        return True
    return Path(path).parent.resolve() == folder.resolve()


def connect(state: StateDir | None = None, urls: Urls = None) -> Client:
    """A client of the control planes of --url or $UNICRON_URL, else of those of the state folder by
    their sockets, or by their URLs if the folder is that of another host, which shares it.

    The token is that of the state folder. $UNICRON_TOKEN goes to --url and $UNICRON_URL alone: the
    folder may be another person's, and name any address.
    """
    state = state or opened(default())
    files = running_here(state)
    given = named = urls or [url for url in os.environ.get(URL, "").split(",") if url]
    host, ca = platform.node(), ""
    if far := [] if named else [file for file in files if file.get("host", host) != host]:
        given, ca = [str(file["url"]) for file in far], str(far[0].get("ca", ""))
    token = str(files[0].get("token", "")) if files else ""
    if named:
        token = os.environ.get(TOKEN) or token
    insecure = bool(os.environ.get(tls.INSECURE))
    if given:
        hint = "check --url or $UNICRON_URL, and that unicron up runs there"
        first, *first.others = (Client(url, token, hint, insecure=insecure) for url in given)
        for one in (first, *first.others):
            if one.is_secure:
                with suppress(Unreachable):
                    one.ca = authority(one.host, one.port, state, ca)
            elif os.environ.get(tls.CA):
                raise UsageError(
                    f"{one.url}: --ca and $UNICRON_CA are for https://", "--url https://..."
                )
        return first
    start = how_to_start(state)
    if not files:
        away = _away(state)
        raise Unreachable(
            f"{away}: no control plane runs on {state.path}"
            if away.endswith(GOES_ON)
            else f"no cluster runs on {state.path}",
            start,
        )
    if state.is_held():
        start = "unicron up restarts it: try again in a few seconds"
    # The socket is in a folder that only its owner can enter. The port may be a stranger's by now.
    first, *first.others = (
        Client(
            str(file["url"]),
            token,
            start,
            str(file.get("socket", "")),
            partial(_away, state),
            insecure=insecure,
        )
        for file in files
    )
    return first


def how_to_start(state: StateDir) -> str:
    """What starts a cluster on this folder, as a hint. One that was copied here, or is of another
    host, may be somebody else's: a cluster on it would run the tasks of its log."""
    last, host = read_json(state.log) or {}, platform.node()
    folder = Path(str(last.get("folder", state.path)))
    is_copy = folder.resolve() != state.path.resolve() or (
        bool(state.control_planes()) and not running_here(state)
    )
    if is_copy or last.get("host", host) != host:
        return (
            f"unicron replay {shlex.quote(shown(state.path))} shows its log; it was written on "
            f"{last.get('host', host)} in {folder if folder != state.path else 'another folder'}: "
            "start a cluster only on a folder of your own"
        )
    start = "unicron up" + ("" if state.path == default() else f" {state.option}")
    if shutil.which("sbatch"):
        start += "; a cluster in a job of Slurm answers when that runs: squeue --me"
    return start


def _away(state: StateDir) -> str:
    """What of the cluster on this folder is away, and whether training goes on."""
    gone = "the control plane" + (
        " and the log's server are" if embedded_server.has_ended(state.server) else " is"
    )
    trains = any(
        name.startswith("agent-") and processes.find(state, name) is not None
        for name in processes.names(state)
    )
    return f"{gone} away, {GOES_ON if trains else 'and no agent runs on this folder'}"


def authority(host: str, port: int, state: StateDir, ca: str = "") -> str:
    """What $UNICRON_CA names, else `ca`, else what an agent of the state folder has trusted; as
    PEM, "" for the system's authorities. Raises UsageError, Unreachable."""
    wanted = os.environ.get(tls.CA, ca)
    if state.ca.exists():
        read_private(state.ca)  # nobody else may choose whom we trust
        kept = tls.authority(str(state.ca), host, port)
        if not wanted or tls.digest(kept) == wanted.lower():
            return kept
    try:
        return tls.authority(wanted, host, port) if wanted else ""
    except OSError as error:
        where = network_address.endpoint(host, port)
        raise Unreachable(
            f"nothing answers at {where} ({answers.reason(error)})", "check it"
        ) from None


def _problem(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """The problem details of an answer; made up if it is not one of a control plane."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        found: Any = from_json(answer.read(1 << 20))
        if isinstance(found, dict) and "detail" in found:
            return {"hint": "", **found, "status": answer.status}
    return {
        "status": answer.status,
        "hint": "",
        "detail": f"the control plane answered {answer.status} {answer.reason}",
    }


def _retry_after_s(answer: http.client.HTTPResponse) -> float | None:
    """The Retry-After of an answer: seconds, 0 for another form; None: it has none."""
    text = answer.headers["Retry-After"]
    return None if text is None else min(float(whole_number(text) or 0), BUSY_S_MAX)


def _refused(
    problem: dict[str, Any], hint: str, *, again_s: float | None = None
) -> Refused | Unable:
    """The error of an answer. `again_s`: of its Retry-After."""
    status, message, advice = int(problem["status"]), str(problem["detail"]), str(problem["hint"])
    if status == 401 and "expired" not in message:
        advice = "set UNICRON_TOKEN, or name the cluster's folder with --state"
    if status >= 500:
        unable = Unable(message, advice or hint)
        unable.passes = again_s is not None
        return unable
    if status == 429:
        busy = Busy(message, advice or hint)
        busy.again_s = again_s or busy.again_s
        return busy
    return Refused(status, " ".join(message.split()), advice or hint)

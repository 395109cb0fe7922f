"""The calls of the HTTP API, in one table: the router and the OpenAPI document are made from it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from msgspec import Struct

from ...events.records.types import Body
from ...events.spec.job import JobSpec
from ..state.cluster import ClusterState
from ..state.incident import Incident
from . import messages as m
from . import requests
from .dry_run import Change, DryRunResult
from .http import HttpApi, Operation, number
from .messages import Nothing, Page, Written
from .requests import Reason
from .timeline_answer import curves, incidents, window
from .tokens import Role
from .usage_answer import History
from .view import node_view, task_view

T = TypeVar("T")
K = TypeVar("K", bound="int | str")


class Route(Struct, frozen=True):
    """One call: who may make it, what handles it, its body (None: without one) and its answer."""

    method: Literal["GET", "POST"]
    path: str
    role: Role | None
    """The lowest role that may call; None: no token is needed."""
    handler: Operation
    body: Any
    answer: Any
    summary: str
    query: type[Struct] = Nothing
    headers: tuple[str, ...] = ()
    """Those that the call reads, of openapi.HEADERS."""
    answered_as: tuple[str, ...] = ("application/json",)
    leader: bool | None = None
    """Whether only the leader answers; None: it does if the call is a POST."""
    here: bool = False
    """Answered by the control plane's own process, although it writes nothing."""

    @property
    def needs_leader(self) -> bool:
        return self.method == "POST" if self.leader is None else self.leader

    @property
    def is_read(self) -> bool:
        """Whether it is answered from the log alone: beside the leader, and so many at a time."""
        return self.role is not None and not (self.needs_leader or self.here)


def _writes(
    path: str,
    make: Callable[[ClusterState, Any, str], Body],
    body: Any,
    summary: str,
    role: Role = "operate",
    **more: Any,
) -> Route:
    """A call that writes reports for the names in the path."""
    return Route(
        "POST",
        path,
        role,
        HttpApi.write(make, **more),
        body,
        more.get("answer", Written),
        summary,
        headers=("Idempotency-Key",),
    )


def _parts(
    path: str,
    name: str,
    answer: Any,
    key: Callable[[str], K],
    items: Callable[[ClusterState], Mapping[K, T]],
    show: Callable[[ClusterState, T], Any],
) -> tuple[Route, Route]:
    """The calls that read a part of the state, in pages and one by one."""
    return (
        Route(
            "GET",
            path,
            "view",
            HttpApi.listed(key, items, show),
            None,
            Page[answer],
            f"The {path.rpartition('/')[2]}, in pages",
            query=m.ListQuery,
        ),
        Route(
            "GET",
            f"{path}/{{{name}}}",
            "view",
            HttpApi.one(key, items, show),
            None,
            answer,
            f"One {name}",
            query=m.Moment,
        ),
    )


ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/v1/health",
        None,
        HttpApi.health,
        None,
        m.Health,
        "Whether this control plane leads",
    ),
    Route("GET", "/livez", None, HttpApi.health, None, m.Health, "200 while the process answers"),
    Route(
        "GET",
        "/readyz",
        None,
        HttpApi.ready,
        None,
        m.Ready,
        "200 if it leads and acknowledges, else 503",
        query=m.ReadyQuery,
    ),
    Route(
        "GET", "/v1/openapi.json", "view", HttpApi.openapi, None, Any, "This document", here=True
    ),
    Route(
        "GET",
        "/v1/state",
        "view",
        HttpApi.state,
        None,
        m.View,
        "The state of the cluster",
        query=m.StateQuery,
    ),
    *_parts("/v1/tasks", "task", m.TaskView, number, lambda state: state.tasks, task_view),
    *_parts("/v1/nodes", "node", m.NodeView, str, lambda state: state.nodes, node_view),
    *_parts(
        "/v1/incidents",
        "incident",
        Incident,
        number,
        lambda state: state.incidents,
        lambda _, one: one,
    ),
    Route(
        "GET",
        "/metrics",
        "view",
        HttpApi.metrics,
        None,
        str,
        "Metrics for Prometheus",
        answered_as=("text/plain", "application/openmetrics-text"),
        here=True,
    ),
    Route(
        "GET",
        "/v1/log",
        "view",
        HttpApi.records,
        None,
        m.LogRecord,
        "Records: each is a line, or the data of a server-sent event",
        query=m.LogQuery,
        headers=("Last-Event-ID",),
        answered_as=("application/jsonl", "text/event-stream"),
    ),
    Route(
        "GET",
        "/v1/log/beginning",
        "view",
        HttpApi.beginning,
        None,
        m.Beginning,
        "Where the log begins, and the state then",
    ),
    Route(
        "GET",
        "/v1/history",
        "view",
        HttpApi.history,
        None,
        History,
        "What slots were used for and lost to, by day",
        query=m.HistoryQuery,
    ),
    Route(
        "GET",
        "/v1/timeline",
        "view",
        HttpApi.of_timeline(lambda of, call, last, now_s: window(of, call.query, last, now_s)),
        None,
        m.TimelineAnswer,
        "What slots did over time, by task, and the incidents",
        query=m.TimelineQuery,
    ),
    Route(
        "GET",
        "/v1/tasks/{task}/curves",
        "view",
        HttpApi.of_timeline(lambda of, call, last, now_s: curves(of, call.of, last, now_s)),
        None,
        m.Curves,
        "A task's loss, iteration time, layouts, outputs and incidents, by id or name",
        query=m.Moment,
    ),
    Route(
        "GET",
        "/v1/timeline/incidents",
        "view",
        HttpApi.of_timeline(
            lambda of, call, last, now_s: incidents(of, call.query.since, last, now_s)
        ),
        None,
        m.AllIncidents,
        "All incidents, losses of nodes and outages of the log",
        query=m.IncidentsQuery,
    ),
    Route(
        "GET",
        "/v1/incidents/{incident}/facts",
        "view",
        HttpApi.facts,
        None,
        m.IncidentFacts,
        "What broke, what was decided and why, what it cost, what is left to do",
        query=m.FactsQuery,
    ),
    Route(
        "GET",
        "/v1/plan",
        "view",
        HttpApi.plan,
        None,
        DryRunResult,
        "The plan with its explanation",
        query=m.Moment,
    ),
    Route(
        "POST",
        "/v1/plan/dry-run",
        "view",
        HttpApi.dry_run,
        Change,
        DryRunResult,
        "What a change would lead to",
        leader=False,
    ),
    Route(
        "POST",
        "/v1/what-if",
        "operate",
        HttpApi.simulate,
        m.WhatIf,
        m.WhatIfAnswer,
        "Simulate the log with other choices",
        leader=False,
    ),
    Route(
        "GET",
        "/v1/what-if",
        "view",
        HttpApi.simulated,
        None,
        m.WhatIfAnswer,
        "The simulation, and how far it is",
    ),
    Route(
        "POST",
        "/v1/plan/apply",
        "operate",
        HttpApi.apply,
        m.Apply,
        Written,
        "Carry out a dry run, if the plan's input is as then",
        headers=("If-Match", "Idempotency-Key"),
    ),
    _writes(
        "/v1/tasks",
        requests.submit,
        JobSpec,
        "Submit a task",
        answer=m.Submitted,
        ahead=requests.search_layouts,
    ),
    # what a rank has printed is not redacted
    Route(
        "GET",
        "/v1/nodes/{node}/file",
        "operate",
        HttpApi.file,
        None,
        m.FilePart,
        "A part of a rank's output, read by the agent of its node",
        query=m.FileQuery,
        leader=True,
    ),
    _writes("/v1/tasks/{task}/cancel", requests.cancel, Reason, "Cancel a task"),
    _writes("/v1/tasks/{task}/weight", requests.set_weight, requests.Weight, "Set a weight"),
    _writes(
        "/v1/tasks/{task}/checkpoint",
        requests.set_output,
        requests.Destination,
        "Save checkpoints to another folder",
    ),
    _writes("/v1/nodes/{nodes}/drain", requests.drain, requests.Drain, "Drain nodes"),
    _writes("/v1/nodes/{nodes}/undrain", requests.undrain, Reason, "Allow tasks on nodes again"),
    _writes(
        "/v1/nodes/{nodes}/lift",
        requests.lift,
        Reason,
        "Lift quarantines, and give slots back",
        checks_devices=True,
    ),
    _writes(
        "/v1/incidents/{incident}/ack",
        requests.acknowledge,
        Reason,
        "Say that a person knows of an incident",
    ),
    _writes("/v1/freeze", requests.freeze, Reason, "Pause healing"),
    _writes("/v1/unfreeze", requests.unfreeze, Reason, "Resume healing"),
    Route(
        "POST",
        "/v1/handover",
        "operate",
        HttpApi.hand_over,
        None,
        m.Leader,
        "End an epoch: a follower leads",
        query=m.HandoverQuery,
    ),
    # a fault ends healthy processes
    _writes("/v1/inject", requests.inject, requests.Fault, "A fault on purpose", "admin"),
    Route("POST", "/v1/join", "join", HttpApi.join, m.Join, m.Joined, "An agent joins"),
    Route(
        "POST",
        "/v1/sessions/codes",
        "view",
        HttpApi.new_code,
        m.NewCode,
        m.NewCodeMade,
        "A one-time code for a browser",
    ),
    Route(
        "POST",
        "/v1/sessions",
        None,
        HttpApi.new_session,
        m.Code,
        m.Session,
        "A session for a code",
        leader=False,
    ),
    Route(
        "POST",
        "/v1/sessions/end",
        "view",
        HttpApi.end_session,
        Nothing,
        Nothing,
        "The session ends",
        leader=False,
        here=True,
    ),
    Route(
        "GET",
        "/v1/dead-letters",
        "view",
        HttpApi.list_letters,
        None,
        Page[m.LetterView],
        "What the intake has rejected, the oldest first, in pages",
        query=m.ListQuery,
        leader=True,
    ),
    Route(
        "POST",
        "/v1/dead-letters/drop",
        "operate",
        HttpApi.drop_letters,
        requests.Letters,
        m.LettersDropped,
        "Remove dead letters for ever",
    ),
    Route(
        "POST",
        "/v1/dead-letters/{letter}/replay",
        "operate",
        HttpApi.replay_letter,
        Reason,
        m.LetterReplayed,
        "Send a dead letter to the intake again",
    ),
    Route(
        "GET",
        "/v1/tokens",
        "admin",
        HttpApi.list_tokens,
        None,
        Page[m.TokenView],
        "The tokens, in pages",
        query=m.ListQuery,
        leader=True,
    ),
    Route(
        "POST",
        "/v1/tokens",
        "admin",
        HttpApi.create_token,
        m.NewToken,
        m.NewSecret,
        "Create a token",
    ),
    Route(
        "POST",
        "/v1/tokens/{name}/rotate",
        "admin",
        HttpApi.rotate_token,
        Reason,
        m.NewSecret,
        "A new secret; the old one ends",
    ),
    Route(
        "POST",
        "/v1/tokens/{name}/revoke",
        "admin",
        HttpApi.revoke_token,
        Reason,
        m.TokenName,
        "End a token",
    ),
)

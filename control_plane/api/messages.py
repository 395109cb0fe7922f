"""Queries, bodies and answers of the HTTP API; the OpenAPI document is made from them.

What is answered as plain data has a TypedDict here; a test compares the two. Bodies of operators'
requests are in requests.py. Times are in seconds since 1970.
"""

from typing import Annotated, Any, Generic, Literal, NotRequired, TypedDict, TypeVar

from msgspec import Meta, Struct, field

from ...events.records.decisions import PlanChosen, ThroughputSet
from ...events.records.envelope import KINDS
from ...events.records.orders import Reconfigure
from ...events.records.reports import OutageEnded
from ...events.records.types import Labels
from ..history.history import Output
from ..history.timeline import Span
from ..state.incident import Incident
from ..state.node import Check, Quarantine
from ..state.task import FailedSave, LossSeries, RefusedStart
from ..throughput.transition_cost import Transition
from .dry_run import Change
from .needs import Need

T = TypeVar("T")
Plain = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"
ENCODED: list[type] = []
"""The structs of `encoded`."""


def encoded(*kinds: type) -> Meta:
    """Marks plain data that one of these structs was encoded to."""
    ENCODED.extend(kinds)
    refs = [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]
    return Meta(extra_json_schema=refs[0] if len(refs) == 1 else {"anyOf": refs})


# --- queries and bodies ---
Seq = Annotated[int, Meta(ge=0, lt=10**18)]


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


class Moment(Nothing, frozen=True):
    at: Annotated[str, Meta(description="A past moment: SEQ, or a time as RFC 3339")] = ""


TASKS_NUM_MAX = 1_000_000_000


class StateQuery(Moment, frozen=True):
    explain: Annotated[bool, Meta(description="Also what each waiting task needs")] = False
    ended: Annotated[Seq, Meta(description="Of ended tasks the newest")] = TASKS_NUM_MAX


class ListQuery(Moment, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100
    find: Annotated[
        str, Meta(description="Of tasks: words of id, name, team and state", max_length=100)
    ] = ""
    cursor: Annotated[str, Meta(description="`next` of the page before", max_length=64)] = ""


class LogQuery(Nothing, frozen=True):
    after: Seq = 0
    follow: Annotated[bool, Meta(description="Go on with new records, as events always")] = False
    requests: Annotated[bool, Meta(description="Only those of operators; not as events")] = False
    newest: Annotated[int, Meta(ge=0, le=10_000, description="So many; 0: all. Not as events")] = 0


class HistoryQuery(Nothing, frozen=True):
    since: Annotated[str, Meta(description="The first day: a time as RFC 3339")] = "1970-01-01"


class FactsQuery(Moment, frozen=True):
    option: Annotated[
        str, Meta(description="What commands in texts have behind them", max_length=4_096)
    ] = ""


class IncidentsQuery(Nothing, frozen=True):
    since: Annotated[
        float, Meta(ge=0, le=1e11, description="Those that lasted beyond it, s since 1970")
    ] = 0.0


class TimelineQuery(Nothing, frozen=True):
    """`from` and `to`: seconds since 1970; 0: as far as the log goes. `task` 0: those with most
    slot time."""

    from_s: Annotated[float, Meta(ge=0, le=1e11)] = field(name="from", default=0.0)
    to_s: Annotated[float, Meta(ge=0, le=1e11)] = field(name="to", default=0.0)
    buckets: Annotated[int, Meta(ge=1, le=2_000, description="Shorter spans are averaged")] = 400
    rows: Annotated[int, Meta(ge=1, le=1_000)] = 30
    task: Seq = 0
    node: Annotated[str, Meta(description="Incidents of this node alone", max_length=64)] = ""


class ReadyQuery(Nothing, frozen=True):
    follower: Annotated[bool, Meta(description="Also if it follows one that leads")] = False


class FileQuery(Nothing, frozen=True):
    file: Annotated[str, Meta(description="`log_path` of a rank")] = ""
    offset: Seq = 0


class HandoverQuery(Nothing, frozen=True):
    epoch: Annotated[Seq, Meta(description="The epoch to end")] = 0


class Apply(Nothing, frozen=True):
    change: Change
    reason: str = ""


class NewToken(Nothing, frozen=True):
    """`life_s` 0: for ever. `node` or `uses`: of a token with the role `join`."""

    name: str
    role: Literal["view", "operate", "admin", "join"]
    life_s: float = 0.0
    node: str = ""
    uses: int = 0
    reason: str = ""


class NewCode(Nothing, frozen=True):
    role: Annotated[Literal["view", "operate"], Meta(description="At most the token's")] = "operate"


class Code(Nothing, frozen=True):
    code: str


class Join(Nothing, frozen=True):
    """An agent's request; with `identity`, a secret of its own, it is enrolled."""

    node: str
    host: str
    incarnation: int
    labels: dict[str, str] = {}
    identity: str = ""


# --- answers ---
class Problem(Struct, frozen=True, kw_only=True):
    """An error (RFC 9457), also the last line of a stream that breaks off. `detail`: one line.
    `hint`: what to type or to check next; may be empty."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    hint: str


class Written(Struct, frozen=True):
    """`seq` of the request's record. What was decided is behind it, with it as `cause`."""

    seq: int


class Submitted(Written, frozen=True):
    task: int


class Page(Struct, Generic[T], frozen=True):
    """`next`: the cursor of the next page; empty: this is the last one."""

    items: list[T]
    next: str = ""


# `leader`, `follows`: a URL, or empty. `file`: that `unicron view` shows, or empty. Times of
# tokens: 0: never.
Health = TypedDict(
    "Health",
    {
        "ok": bool,
        "cluster": NotRequired[str],
        "epoch": NotRequired[int],
        "seq": NotRequired[int],
        "leader": NotRequired[bool],
        "pid": NotRequired[int],
        "follows": NotRequired[str],
        "file": NotRequired[str],
    },
)
Ready = TypedDict("Ready", {"ok": bool, "why": NotRequired[str]})
Leader = TypedDict("Leader", {"leader": str})
Beginning = TypedDict("Beginning", {"after": int, "state": str})
FilePart = TypedDict(
    "FilePart",
    {
        "text": str,
        "begin": Annotated[int, Meta(description="Behind the offset if bytes there were dropped")],
        "end": int,
    },
)
TokenName = TypedDict("TokenName", {"name": str})
LetterView = TypedDict(
    "LetterView",
    {
        "number": Annotated[int, Meta(description="Its name in requests")],
        "at_s": Annotated[float, Meta(description="When it was rejected")],
        "source": Annotated[str, Meta(description="Whose it says it is; this may be false")],
        "why": Annotated[str, Meta(description="Why it is no report")],
        "num_bytes": Annotated[int, Meta(description="Of the entry as it came")],
        "whole": Annotated[bool, Meta(description="Whether all of it was kept, for a replay")],
    },
)
LettersDropped = TypedDict("LettersDropped", {"num": Annotated[int, Meta(description="So many")]})
LetterReplayed = TypedDict(
    "LetterReplayed",
    {
        "number": Annotated[int, Meta(description="Which letter it was")],
        "source": Annotated[str, Meta(description="Of the report in it")],
        "source_seq": Annotated[int, Meta(description="Of the report in it")],
    },
)
TokenView = TypedDict(
    "TokenView",
    {
        "name": str,
        "role": str,
        "created_s": float,
        "expires_s": float,
        "expired": bool,
        "node": str,
        "uses": int,
        "used": int,
    },
)
NewSecret = TypedDict(
    "NewSecret",
    {"name": str, "role": str, "expires_s": float, "node": str, "uses": int, "token": str},
)
NewCodeMade = TypedDict("NewCodeMade", {"code": str, "expires_s": float})
Session = TypedDict("Session", {"secret": str, "name": str, "role": str, "expires_s": float})
Joined = TypedDict(
    "Joined",
    {
        "redis_url": str,
        "cluster": str,
        "cluster_id": Annotated[str, Meta(description="Another for each cluster of this name")],
        "node": str,
        "epoch": int,
        "key": str,
        "redact": tuple[str, ...],
        "version": str,
        "agent_gone_s_max": float,
        "has_lists": Annotated[bool, Meta(description="Whether each node has a list of its own")],
        "output_bytes_max": Annotated[int, Meta(description="Of the policy")],
        "rank_pids_max": Annotated[int, Meta(description="Of one rank; 0: no limit")],
        "rank_memory_bytes_max": Annotated[int, Meta(description="Of one rank; 0: no limit")],
    },
)
# `first_*`: where the log begins. `read_*`: how far it was read: below `last_seq`, ask again.
Mark = TypedDict(
    "Mark",
    {
        "id": int,
        "at_s": float,
        "until_s": float | None,
        "task": int,
        "node": str,
        "severity": str,
        "outcome": str,
        "why": str,
        "iteration": int | None,
        "num": int,
    },
)
Row = TypedDict("Row", {"task": int, "name": str, "spans": list[Span]})
TimelineAnswer = TypedDict(
    "TimelineAnswer",
    {
        "first_seq": int,
        "first_s": float,
        "read_seq": int,
        "read_s": float,
        "last_seq": int,
        "from_s": float,
        "to_s": float,
        "num_tasks": int,
        "rows": list[Row],
        "free": list[Span],
        "incidents": list[Mark],
    },
)
LossMark = TypedDict(
    "LossMark", {"iteration": int, "what": Annotated[str, Meta(description="What begins there")]}
)
Generation = TypedDict("Generation", {"at_s": float, "iteration": int, "layout": str})
LogRecord = TypedDict(
    "LogRecord",
    {
        "seq": int,
        "epoch": int,
        "at_s": float,
        "kind": str,
        "v": int,
        "source": str,
        "source_seq": int,
        "occurred_s": float,
        "cause": int,
        "incident": int,
        "ignorable": NotRequired[bool],
        "body": Annotated[Plain, encoded(*KINDS.values())],
    },
)

# --- the view of the state (view.py) ---
Earned = TypedDict("Earned", {"at_s": float, "length_s": float, "flop": float})
ClusterView = TypedDict(
    "ClusterView",
    {
        "id": Annotated[str, Meta(description="Another for each cluster of this name")],
        "name": Annotated[str, Meta(description="That of --cluster")],
        "seq": int,
        "epoch": int,
        "at_s": float,
        "hash": str,
        "heart": int,
        "input": int,
        "num_slots": int,
        "num_tasks": int,
        "reports_lost": int,
        "old_agents": Annotated[
            list[str],
            Meta(
                description="Nodes whose agents are of release 0.3.0, and share one list of reports"
            ),
        ],
        "dead_letters": Annotated[
            int, Meta(description="What the leader's intake has rejected, and an operator may see")
        ],
        "num_open_orders": int,
        "computed_by": int,
        "healing": str,
        "no_room": Annotated[
            str,
            Meta(description="Why no process is started for want of room; or empty"),
        ],
        "allow_inject": bool,
        "mtbf_gpu_s": float,
        "num_faults": int,
        "observed_slot_s": float,
        "earned": list[Earned],
        "follows": str,
        "followers": list[str],
        "insecure": bool,
        "ca": str,
    },
)
SlotView = TypedDict(
    "SlotView",
    {
        "index": int,
        "out": bool,
        "out_why": str,
        "suspected_why": Annotated[
            str, Meta(description="Why the slot is suspected; it stays in use. Empty: it is not.")
        ],
        "degraded": bool,
        "task": int,
        "rank": int | None,
        "pid": int,
    },
)
NodeView = TypedDict(
    "NodeView",
    {
        "id": str,
        "host": str,
        "pid": int,
        "contact": Literal["heard", "unreachable", "lost", "left"],
        "health": Literal["healthy", "degraded", "unhealthy", "unreachable", "lost", "left"],
        "since_s": float,
        "drained": bool,
        "drain_reason": str,
        "reached_by": Annotated[
            list[str],
            Meta(description="Nodes whose agents reach its machine, while it is unreachable"),
        ],
        "down": bool,
        "replaced_s": float | None,
        "quarantine": Annotated[Plain, encoded(Quarantine)] | None,
        "sick_why": str,
        "recovers": Plain | None,
        "checks": list[Annotated[Plain, encoded(Check)]],
        "incarnation": int,
        "accelerator": str,
        "num_slots": int,
        "labels": Annotated[Plain, encoded(Labels)],
        "unlimited": Annotated[
            list[str], Meta(description="What the policy limits of a rank, and its agent cannot")
        ],
        "slots": list[SlotView],
        "degraded": Plain | None,
    },
)
TaskSlots = TypedDict(
    "TaskSlots",
    {
        "now": int,
        "target": int,
        "min": int,
        "max": int,
        "multiple_of": int,
        "sizes": list[int],
        "limit": Annotated[int, Meta(description="With more slots, its ranks fail; 0: none known")],
    },
)
RanksWork = TypedDict(
    "RanksWork",
    {
        "ranks": Annotated[list[int], Meta(description="Those that do the same")],
        "what": Annotated[str, Meta(description="As in RankWorked; empty: they do not say")],
        "unit": Annotated[str, Meta(description="What `done` counts: B for bytes, or a noun")],
        "done": Annotated[int, Meta(description="How much of it is done, of all ranks")],
        "total": Annotated[int, Meta(description="Of how much; 0: unknown")],
        "moved_bytes": Annotated[
            int, Meta(description="Read and written since the task waits for them")
        ],
        "moved_s": Annotated[float, Meta(description="When one of them last moved anything")],
        "computes": Annotated[bool, Meta(description="They move nothing, and compute")],
        "ends_s": Annotated[
            float | None, Meta(description="When it is done at its pace so far; null: unknown")
        ],
        "limit": Annotated[str, Meta(description="The policy field of the time without progress")],
        "limit_s": Annotated[float, Meta(description="Its value")],
    },
)
RankView = TypedDict(
    "RankView",
    {
        "rank": int,
        "attempt": int,
        "node": str,
        "slot": int,
        "pid": int,
        "log_path": str,
        "state": str,
        "ordered_s": float,
        "has_state": bool,
        "part": str,
    },
)
SlowRank = TypedDict(
    "SlowRank",
    {
        "rank": int,
        "node": str,
        "slot": int,
        "confirmed": bool,
        "ratio": float,
        "holds_up": float,
        "since_s": float,
    },
)
MemoryCopy = TypedDict(
    "MemoryCopy",
    {
        "generation": int,
        "step_version": int,
        "nodes": list[str],
        "num_shares": int,
        "copy_bytes": int,
    },
)
SuspectView = TypedDict(
    "SuspectView",
    {
        "rank": int,
        "node": str,
        "slot": int,
        "why": Annotated[str, Meta(description="What is tried, and why.")],
    },
)
Failing = TypedDict(
    "Failing",
    {
        "why": Annotated[str, Meta(description="The newest failure.")],
        "since_s": Annotated[float, Meta(description="When the first failure was observed.")],
        "num": Annotated[int, Meta(description="The most failures of one rank without progress.")],
        "num_max": Annotated[int, Meta(description="The failures at which another slot is tried.")],
        "until_s": Annotated[
            float | None,
            Meta(description="Until when it is started again, if the failure may pass by itself."),
        ],
        "starts_s": Annotated[
            float | None, Meta(description="When its last pause before a restart ends.")
        ],
        "suspects": Annotated[
            list[SuspectView], Meta(description="The slots that its ranks have left as a trial.")
        ],
    },
)
NotPublished = TypedDict(
    "NotPublished",
    {
        "path": Annotated[str, Meta(description="In the output of the task")],
        "iteration": int,
        "loss": Annotated[str, Meta(description="What made its state NaN or infinite")],
    },
)
TaskView = TypedDict(
    "TaskView",
    {
        "id": int,
        "name": str,
        "tier": Literal["train", "command"],
        "state": Literal[
            "waiting",
            "starting",
            "running",
            "degraded",
            "healing",
            "saving",
            "finishing",
            "finished",
            "failed",
            "cancelled",
        ],
        "phase": str,
        "since_s": float,
        "submitted_s": float,
        "progressed_s": float,
        "weight": float,
        "priority": int,
        "team": str,
        "slots": TaskSlots,
        "layout": str,
        "layout_in_words": str,
        "beside": int,
        "replica_ranks": int,
        "generation": int,
        "iteration": int,
        "iterations": int,
        "logged_batch": int,
        "model_batch": int,
        "loss": float | None,
        "not_finite": Annotated[
            Annotated[Plain, encoded(LossSeries)] | None,
            Meta(description="The losses up to now, if they are not finite"),
        ],
        "loss_iterations": Annotated[int, Meta(description="As the policy has it")],
        "step_s": float,
        "rate_flops": float,
        "waf": float,
        "transition": Annotated[Plain, encoded(Transition)],
        "throughput": Annotated[Plain, encoded(ThroughputSet)] | None,
        "optimizer": str,
        "lost_rank": Annotated[
            str,
            Meta(
                description="What the loss of one rank costs; empty if each replica has all state"
            ),
        ],
        "modelled_layout": str,
        "micro_batches": int,
        "forward_calls": int,
        "healed": int,
        "iterations_lost": int | None,
        "failing": Annotated[
            Failing | None,
            Meta(description="Failures of its own processes that it has not passed yet."),
        ],
        "slow": list[SlowRank],
        "slowdown": float,
        "slower_alike": float,
        "stands": str,
        "stands_since_s": float,
        "hang_after_s": float | None,
        "incident": int,
        "why": str,
        "needs": str,
        "cost_waf": float,
        "weight_from": float,
        "adopted": bool,
        "start_s_max": float,
        "declined": str,
        "from_memory": bool,
        "withheld": str,
        "output": str,
        "checkpoint": str,
        "checkpoint_iteration": int,
        "damaged": Annotated[
            str, Meta(description="Why the newest published checkpoints were not read")
        ],
        "not_published": Annotated[
            NotPublished | None, Meta(description="A later checkpoint whose state is not finite")
        ],
        "unsaved": int,
        "unpublished": int,
        "refused_starts": Annotated[
            list[Annotated[Plain, encoded(RefusedStart)]],
            Meta(description="Ranks that a node cannot start because its machine lacks something"),
        ],
        "failed_saves": Annotated[
            list[Annotated[Plain, encoded(FailedSave)]],
            Meta(description="What cannot be saved now, the final state at the end"),
        ],
        "copies": list[MemoryCopy],
        "copies_bytes": int,
        "copies_max": int,
        "no_copies": str,
        "copies_fit": bool,
        "copy_every": int,
        "kept_sum": bool,
        "works": Annotated[
            list[RanksWork], Meta(description="What its ranks do while it waits for them")
        ],
        "reproducible": str,
        "rounding_why": str,
        "ranks": list[RankView],
    },
)
Deadline = TypedDict("Deadline", {"id": str, "due_s": float, "length_s": float})
View = TypedDict(
    "View",
    {
        "cluster": ClusterView,
        "nodes": list[NodeView],
        "tasks": list[TaskView],
        "incidents": list[Annotated[Plain, encoded(Incident)]],
        "outages": list[Annotated[Plain, encoded(OutageEnded)]],
        "plan": Annotated[Plain, encoded(PlanChosen)] | None,
        "deadlines": list[Deadline],
        "needs": list[Annotated[Plain, encoded(Need)]],
    },
)

# --- the facts of an incident (incident_facts.py); `after_s`: seconds since it was detected ---
# What a rank did before it was ended (StacksKept).
KeptStacks = TypedDict(
    "KeptStacks",
    {
        "rank": int,
        "attempt": int,
        "node": str,
        "host": Annotated[str, Meta(description="Of the node, which has the file")],
        "path": Annotated[str, Meta(description="The file with all threads; empty: none")],
        "stack": Annotated[
            str, Meta(description="The innermost frames of its main thread, a line each")
        ],
        "mark": Annotated[str, Meta(description="What it did by its progress page")],
        "why": Annotated[str, Meta(description="Why there are no stacks, or not all")],
        "nccl_ras": Annotated[str, Meta(description="Errors and warnings of NCCL's RAS service")],
    },
)
Event = TypedDict(
    "Event",
    {
        "seq": int,
        "after_s": float,
        "who": str,
        "kind": str,
        "task": int,
        "rank": int | None,
        "name": str,
        "other": bool,
        "what": str,
        "alike": str,
        "later": NotRequired[bool],
    },
)
Cost = TypedDict(
    "Cost",
    {
        "pause_s": float | None,
        "iterations_lost": int | None,
        "slot_s": float,
        "kept": int,
        "dealt": int,
        "ckpt_read": bool,
        "origin": str,
        "origin_node": str,
        "origin_path": str,
        "origin_step_version": int,
        "origin_bytes": int,
        "peer_bytes": int,
        "near_bytes": int,
        "received_bytes": int,
    },
)
Phase = TypedDict("Phase", {"name": str, "from_s": float, "length_s": float, "bound": str})
Beaten = TypedDict("Beaten", {"what": str, "waf": float, "by": str, "slots": dict[str, int]})
PlanFacts = TypedDict(
    "PlanFacts",
    {
        "seq": int,
        "trigger": str,
        "num_slots": int,
        "waf": float,
        "ideal_waf": float,
        "why": str,
        "bound": str,
        "origins": list[str],
        "slots": dict[str, list[int]],
        "beaten": list[Beaten],
    },
)
Decided = TypedDict("Decided", {"seq": int, "severity": str, "why": str, "rule": str})
Effect = TypedDict(
    "Effect",
    {
        "task": str,
        "hurt": bool,
        "slots_before": int,
        "slots": int,
        "pause_s": float | None,
        "iterations_lost": int | None,
        "slot_s": float | None,
    },
)
IncidentFacts = TypedDict(
    "IncidentFacts",
    {
        "id": int,
        "task": int,
        "name": str,
        "node": str,
        "ranks": list[int],
        "status": str,
        "severity": str,
        "outcome": str,
        "num_times": Annotated[int, Meta(description="How often its fault occurred")],
        "until_iteration": Annotated[
            int,
            Meta(description="Of one that recovers: it closes at that iteration. 0: it does not"),
        ],
        "detected_s": float,
        "closed_s": float | None,
        "seq": int,
        "acknowledged": str,
        "over": bool,
        "cost": Cost,
        "layouts": list[str],
        "lost": str,
        "optimizer": str,
        "copies_gone": list[Event],
        "no_copies": str,
        "phases": list[Phase],
        "part_of": str,
        "on_purpose": list[Plain],
        "began": dict[str, str | float],
        "evidence": list[Event],
        "evidence_is_cut": bool,
        "decisions": list[Decided],
        "plans": list[PlanFacts],
        "waits": list[dict[str, str]],
        "computed_by": int,
        "effects": list[Effect],
        "dumps": list[Plain],
        "stacks": Annotated[
            list[KeptStacks], Meta(description="What ranks did before they were ended")
        ],
        "timeline": list[Event],
        "left": list[str],
        "verify": str,
    },
)

# --- the past of a task, and all incidents (timeline_answer.py) ---
# `median_s` of the `num` iterations with so many members as now, or slots of a command.
Pace = TypedDict("Pace", {"slots": int, "num": int, "median_s": float})
IncidentRow = TypedDict(
    "IncidentRow",
    {
        "id": int,
        "task": int,
        "severity": str,
        "status": str,
        "ranks": list[int],
        "outcome": str,
        "detected_s": float,
        "pause_s": float | None,
        "iterations_lost": int | None,
        "slot_s": float,
        "iteration": int | None,
    },
)
# `task` 0: none of that name so far. `read_seq` below `last_seq`: ask again. `view`: of a task that
# has left the state. `losses`, `step_s`: by `iterations`. `copied_s` 0: never.
Read = TypedDict("Read", {"first_seq": int, "read_seq": int, "last_seq": int})
Curves = TypedDict(
    "Curves",
    {
        "first_seq": int,
        "read_seq": int,
        "last_seq": int,
        "task": int,
        "name": str,
        "view": TaskView | None,
        "iterations": list[int],
        "losses": list[float | None],
        "loss_marks": Annotated[
            list[LossMark], Meta(description="Series that are not finite, and spikes")
        ],
        "step_s": list[float | None],
        "layouts": list[Generation],
        "skipped": int,
        "copied_s": float,
        "pace": Pace | None,
        "ended": bool,
        "outputs": list[Annotated[Plain, encoded(Output)]],
        "incidents": list[IncidentRow],
    },
)
LostNodes = TypedDict(
    "LostNodes",
    {
        "id": int,
        "what": str,
        "nodes": list[str],
        "since_s": float,
        "back_s": float,
        "incidents": list[int],
        "in_words": str,
    },
)
LoggedOutage = TypedDict(
    "LoggedOutage", {"id": int, "outage": Annotated[Plain, encoded(OutageEnded)]}
)
IncidentInFull = TypedDict(
    "IncidentInFull",
    {
        "id": int,
        "task": int,
        "name": str,
        "node": str,
        "severity": str,
        "status": str,
        "ranks": list[int],
        "why": str,
        "evidence": list[int],
        "iteration": int | None,
        "fault_s": float,
        "detected_s": float,
        "decided_s": float,
        "ordered_s": float | None,
        "rebuilt_s": float | None,
        "resumed_s": float | None,
        "stepped_s": float | None,
        "closed_s": float | None,
        "closed_seq": int,
        "first_seq": int,
        "outcome": str,
        "acknowledged_by": str,
        "acknowledged_why": str,
        "layouts": list[str],
        "order": Annotated[Plain, encoded(Reconfigure)] | None,
        "alive": list[tuple[int, int]] | None,
        "optimizer": str,
        "num_slots": int,
        "counted_s": float,
        "pause_s": float | None,
        "iterations_lost": int | None,
        "slot_s": float,
        "kept": int,
        "dealt": int,
        "ckpt_read": bool,
        "origin": str,
        "origin_node": str,
        "origin_path": str,
        "origin_step_version": int,
        "origin_bytes": int,
        "peer_bytes": int,
        "near_bytes": int,
        "received_bytes": int,
    },
)
AllIncidents = TypedDict(
    "AllIncidents",
    {
        "first_seq": int,
        "read_seq": int,
        "last_seq": int,
        "incidents": list[IncidentInFull],
        "node_losses": list[LostNodes],
        "outages": list[LoggedOutage],
    },
)

# --- what-if (what_if.py): of the JSON of `unicron simulate --from-log` what the page shows ---
Loss = TypedDict(
    "Loss", {"at_s": float, "what": str, "lost_waf_flop": float, "full_after_s": float | None}
)
Played = TypedDict(
    "Played",
    {
        "choice": str,
        "policy": str,
        "weights": dict[str, float],
        "fields": dict[str, bool | float | str],
        "accumulated_waf_flop": float,
        "difference_flop": float,
        "downtime_task_s": dict[str, float],
        "lost_slot_s": dict[str, float],
        "incidents": list[Loss],
    },
)
WhatIfResult = TypedDict(
    "WhatIfResult",
    {
        "began_s": float,
        "horizon_s": float,
        "recorded": Played,
        "choices": list[Played],
        "evidence": list[str],
    },
)


class WhatIf(Nothing, frozen=True):
    """Weights by task name, fields of the policy file, and policies to compare."""

    weights: dict[str, float] = {}
    fields: dict[str, bool | float | str] = {}
    policies: Annotated[list[str], Meta(max_length=8)] = []


class WhatIfAnswer(Struct, kw_only=True):
    """`why`: of a failed one. Of a running one `read_seq` of `last_seq` records were read."""

    state: Literal["none", "reading", "simulating", "done", "failed"]
    limit_s: float
    began_s: float = 0.0
    took_s: float = 0.0
    read_seq: int = 0
    last_seq: int = 0
    why: str = ""
    result: WhatIfResult | None = None

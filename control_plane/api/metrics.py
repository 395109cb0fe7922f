"""GET /metrics for Prometheus: the state now, and what happened since this process began."""

import asyncio
from collections import Counter as Sums
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import fsum
from typing import Any, get_args

import prometheus_client as prometheus
import structlog
from msgspec import Struct
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from unicron import __version__

from ...events.detached_thread import aside
from ...events.errors import LogError
from ...events.log.identity import RESERVED_NAMES
from ...events.log.port import ReaderPort
from ...events.records.decisions import IncidentClosed, IncidentOpened, PlanChosen
from ...events.records.envelope import Record
from ...events.records.reports import IterationsLogged, OutageEnded, TaskProgressed
from ...events.records.types import SaveKind, Severity
from ..history.usage import CAUSES, SAME_SLOTS, STEPPING, uses, uses_of_no_task
from ..service.coordinator import Coordinator
from ..state.cluster import ClusterState, decode_state, encode_state, live_tasks
from ..state.task import Task
from .needs import ENDED, What, is_unhealed
from .view import view

ANSWER_S_MAX = 3.0
"""Without the log's server for so long, the last values are answered."""
STAMPS_NUM_MAX = 4_096
"""Reports whose times are kept as those of a later incident's evidence."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
GAUGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "build_info": ("The version that runs.", "version", (__version__,)),
    "leader": ("1 if this control plane leads, 0 if it follows.", "", ()),
    "leader_epoch": ("The epoch of the last record.", "", ()),
    "healing_active": ("1 if faults are healed; 0 if healing is frozen or observing.", "", ()),
    "log_reachable": ("1 if the log's server acknowledges.", "", ()),
    "log_records": ("The number of the last record.", "", ()),
    "log_lag_records": ("Records in the log that this process has not folded.", "", ()),
    "log_unsealed_records": ("Records that the loss of the log's server would cost.", "", ()),
    "spooled_reports": ("Reports that wait on the agents; 0 if this process follows.", "", ()),
    "dead_letters": ("Entries of the intake that it rejected, and that are kept.", "", ()),
    "reports_lost": ("Reports that agents have dropped since the log began.", "", ()),
    "nodes": (
        "Nodes by state.",
        "state",
        ("healthy", "degraded", "unhealthy", "drained", "quarantined", "unreachable", "lost"),
    ),
    "slots": ("Slots by state.", "state", ("busy", "free", "disabled", "unreachable")),
    "tasks": (
        "Tasks by state; ended ones for a time.",
        "state",
        ("waiting", "starting", "running", "degraded", "healing", "saving", "finishing", *ENDED),
    ),
    "incidents_open": (
        "Open incidents, but those whose task trains again after the first time.",
        "severity",
        SEVERITIES,
    ),
    "incidents_recovering": (
        "Incidents whose task trains again, and whose fault may come back.",
        "severity",
        SEVERITIES,
    ),
    "needs_person": ("What needs a person, as `unicron status` tells it.", "what", get_args(What)),
    "failed_saves": (
        "Tasks that cannot save or publish, by what it is.",
        "what",
        (*get_args(SaveKind), "publication"),
    ),
    "waf_flops_per_second": (
        "Weighted FLOP/s: achieved now, of the plan, and of the best plan on all slots.",
        "kind",
        ("achieved", "planned", "ideal"),
    ),
    "slot_mtbf_seconds": ("Mean time between faults of one slot, as plans use it.", "", ()),
}
"""Name without `unicron_`, help, label, and all values of the label."""
BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1800)
PLAN_BUCKETS_S = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)


class Gauges(Struct, frozen=True, kw_only=True):
    """The gauges that follow from the state."""

    now_s: float
    """When, by the log's clock."""
    seq: int
    """The state's last record."""
    values: dict[str, dict[str, float]]
    """By name, then by the value of the label."""


class Metrics(Collector):
    """The metrics of one control plane, whether it leads or follows. Every family is shown from the
    start. Counters begin at 0 with the process and count what it folds from the log from then on;
    of several control planes take the largest."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus.CollectorRegistry()
        self._values: dict[str, Mapping[str, float]] = {}
        self._state = ClusterState()
        self._seq = 0
        self._at_s = 0.0
        self._uses: dict[int, Mapping[str, float]] = {}
        """What the slots of each task do; 0: those of none."""
        self._sums: dict[str, float] = {}
        self._stamps: dict[int, tuple[float, float]] = {}
        """By seq of a report: when it was in the log, and when it occurred."""
        self._down: dict[int, float] = {}
        """Incidents whose task does not step, and when they were opened."""
        self._logger = structlog.get_logger("metrics")
        self._records = self._counter("records", "Records of the log.")
        self._incidents = self._counter("incidents", "Opened incidents.", "severity", SEVERITIES)
        self._lost_s = self._counter(
            "lost_slot_seconds", "Slot time without progress.", "cause", CAUSES
        )
        self._iterations_lost = self._counter("iterations_lost", "Iterations done again.")
        whats = ("control plane", "leader", "server")
        self._outages = (
            self._counter("outages", "Outages that ended.", "what", whats),
            self._counter("outage_seconds", "Length of outages.", "what", whats),
        )
        self.notifications = self._counter(
            "notifications", "Messages to the webhook.", "result", ("sent", "failed")
        )
        self.reports_rejected = self._counter("reports_rejected", "What the intake rejected.")
        self.connections_ended = self._counter(
            "connections_ended", "Connections to the log's server that a node had too many of."
        )
        of = self._histogram
        self._detection_s = of("detection", "From a fault to its first report in the log.")
        self._decision_s = of("decision", "From the first report of a fault to its incident.")
        self._rebuild_s = of("rebuild", "From an incident that stopped its task to the next step.")
        self._pause_s = of("pause", "Time that a task did not step, of closed incidents.")
        self._step_s = of("step", "Iterations of training tasks.")
        self._delay_s = of("report_delay", "From an agent's report to its record in the log.")
        self._plan_s = of("plan", "Computing a decision with a plan.", PLAN_BUCKETS_S)
        prometheus.ProcessCollector(namespace="unicron", registry=self._registry)
        self._registry.register(self)

    def _counter(
        self, name: str, text: str, label: str = "", values: Sequence[str] = ()
    ) -> prometheus.Counter:
        made = prometheus.Counter(
            f"unicron_{name}",
            f"{text[:-1]}, since this process began.",
            [label] * bool(label),
            registry=self._registry,
        )
        for value in values:
            made.labels(value)
        return made

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = BUCKETS_S
    ) -> prometheus.Histogram:
        return prometheus.Histogram(
            f"unicron_{name}_seconds", text, buckets=buckets, registry=self._registry
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges, for the registry."""
        for name, (text, label, values) in GAUGES.items():
            family = GaugeMetricFamily(f"unicron_{name}", text, labels=[label] if label else None)
            known = self._values.get(name, {})
            for value in values or ("",):
                family.add_metric([value] if label else [], known.get(value, 0.0))
            yield family

    # --- a scrape ---
    async def scrape(
        self,
        coordinator: Coordinator,
        log: ReaderPort,
        gauges: Callable[[], Awaitable[Gauges]],
        accept: str,
    ) -> tuple[bytes, str]:
        """The metrics and their content type, for an Accept header."""
        reachable = not coordinator.away
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                last_seq = await log.last_seq()
        except (LogError, TimeoutError):
            reachable = False
        else:
            with suppress(LogError, TimeoutError):  # the last values stay
                async with asyncio.timeout(ANSWER_S_MAX):
                    now = await gauges()
                self._integrate(now.now_s)
                self._values |= now.values | {
                    "log_records": {"": last_seq},
                    "log_lag_records": {"": max(last_seq - now.seq, 0)},
                    "log_unsealed_records": {"": max(last_seq - log.sealed_seq, 0)},
                }
        self._values |= {
            "build_info": {__version__: 1},
            "log_reachable": {"": reachable},
            "leader": {"": coordinator.leading},
            "leader_epoch": {"": coordinator.epoch},
            "spooled_reports": {"": coordinator.num_spooled},
            "dead_letters": {"": coordinator.num_dead_letters},
        }
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    # --- records ---
    def observe(self, state: ClusterState, records: Sequence[Record], plan_s: float) -> None:
        """Count records that `state` has just folded; the first call of a process, or after the log
        was folded anew, has none. `plan_s`: how long their last decision with a plan took. An
        error is logged: no metric may end the leader."""
        try:
            self._observe(state, records, plan_s)
        except Exception:
            self._logger.exception("records are not counted")

    def _observe(self, state: ClusterState, records: Sequence[Record], plan_s: float) -> None:
        is_other = state is not self._state
        if is_other:
            self._state, self._at_s = state, max(self._at_s, state.at_s)
            self._uses, self._sums = {}, {}
            self._seq = self._seq or state.seq
        self._integrate(state.at_s)
        touched = set[int]()
        for record in records:
            touched.add(getattr(record.body, "task", 0))
            if record.seq > self._seq:
                self._count(record, plan_s)
        self._seq = state.seq
        for key, opened_s in list(self._down.items()):
            one = state.incidents.get(key)
            if one is None or one.outcome or one.down_since_s < 0:
                if one is not None and one.down_since_s < 0:
                    self._rebuild_s.observe(max(state.at_s - opened_s, 0.0))
                del self._down[key]
        if is_other or not all(isinstance(record.body, SAME_SLOTS) for record in records):
            self._set(0, uses_of_no_task(state, live_tasks(state)))
            touched = {*state.tasks, *self._uses}
        for key in touched - {0}:
            task = state.tasks.get(key)
            self._set(key, self._uses_of(task) if task is not None else {})

    def _uses_of(self, task: Task) -> dict[str, float]:
        """What its slots do now; count those that stopped before the log told of it."""
        state, found = self._state, uses(self._state, task)
        one = state.incidents.get(task.incident)
        if one is not None and not one.outcome and one.down_since_s >= 0:
            self._down.setdefault(one.id, one.opened_s)
            if not any(map(found.get, STEPPING)):
                num = sum(self._uses.get(task.id, {}).get(use, 0) for use in STEPPING)
                self._lost_s.labels("detection").inc(num * max(state.at_s - one.down_since_s, 0.0))
        return found

    def _set(self, key: int, found: Mapping[str, float]) -> None:
        for sign, each in ((-1, self._uses.pop(key, {})), (1, found)):
            for use, num in each.items():
                self._sums[use] = self._sums.get(use, 0) + sign * num
        if found:
            self._uses[key] = found

    def _integrate(self, now_s: float) -> None:
        """Add the slot time from the last call until now."""
        length_s = max(now_s - self._at_s, 0.0)
        for cause in CAUSES:
            if num := self._sums.get(cause):
                self._lost_s.labels(cause).inc(num * length_s)
        self._at_s += length_s

    def _count(self, record: Record, plan_s: float) -> None:
        body, at_s = record.body, record.at_s
        self._records.inc()
        if record.source_seq and record.source.partition("/")[0] not in RESERVED_NAMES:
            self._delay_s.observe(max(at_s - record.occurred_s, 0.0))
        if record.source_seq and not isinstance(body, TaskProgressed | IterationsLogged):
            self._stamps[record.seq] = at_s, record.occurred_s
            if len(self._stamps) > STAMPS_NUM_MAX:
                del self._stamps[next(iter(self._stamps))]
        if isinstance(body, TaskProgressed):
            for step_s in body.step_s:
                self._step_s.observe(step_s)
        elif isinstance(body, IterationsLogged) and body.num_iterations:
            self._step_s.observe(body.step_s)
        elif isinstance(body, PlanChosen):
            self._plan_s.observe(plan_s)
        elif isinstance(body, IncidentOpened):
            self._opened(record, body)
        elif isinstance(body, IncidentClosed):
            self._pause_s.observe(body.pause_s)
            self._iterations_lost.inc(body.iterations_lost or 0)
        elif isinstance(body, OutageEnded):
            for counter, amount in zip(self._outages, (1.0, body.length_s), strict=True):
                counter.labels(body.what).inc(amount)

    def _opened(self, record: Record, body: IncidentOpened) -> None:
        self._incidents.labels(body.severity).inc()
        if stamps := [self._stamps[seq] for seq in body.evidence if seq in self._stamps]:
            reported_s = min(at_s for at_s, _ in stamps)
            self._detection_s.observe(max(reported_s - min(s for _, s in stamps), 0.0))
            self._decision_s.observe(max(record.at_s - reported_s, 0.0))


async def look(coordinator: Coordinator) -> tuple[float, dict[str, Any]]:
    """The time and the view, computed in a thread from a copy of the state: with thousands of nodes
    it takes half a second. Raises LogError."""
    data, now_s = encode_state(await coordinator.settled()), coordinator.now_s
    return now_s, await aside(lambda: view(decode_state(data), now_s=now_s))


async def gauges_of(coordinator: Coordinator) -> Gauges:
    """The gauges now, computed in a thread. Raises LogError."""
    now_s, shown = await look(coordinator)
    return Gauges(
        now_s=now_s,
        seq=shown["cluster"]["seq"],
        values={
            name: {label: float(value) for label, value in gauge.items()}
            for name, gauge in _of_view(shown).items()
        },
    )


def _of_view(shown: dict[str, Any]) -> dict[str, Mapping[str, float]]:
    """The gauges that follow from the view of the state."""
    cluster, plan, tasks = shown["cluster"], shown["plan"], shown["tasks"]
    nodes = [node for node in shown["nodes"] if node["contact"] != "left"]
    live = {
        task["id"]
        for task in tasks
        if task["phase"] != "ended"
        and not (task["throughput"] and task["throughput"]["origin"] == "nominal")
    }
    return {
        "healing_active": {"": cluster["healing"] == "on"},
        "reports_lost": {"": cluster["reports_lost"]},
        "nodes": Sums(_node_state(node) for node in nodes),
        "slots": Sums(
            "unreachable"
            if node["contact"] != "heard"
            else "disabled"
            if slot["out"]
            else "busy"
            if slot["task"]
            else "free"
            for node in nodes
            for slot in node["slots"]
        ),
        "tasks": Sums(task["state"] for task in tasks),
        "incidents_open": Sums(one["severity"] for one in shown["incidents"] if is_unhealed(one)),
        "incidents_recovering": Sums(
            one["severity"] for one in shown["incidents"] if one["recovering_s"]
        ),
        "failed_saves": Sums(one["what"] for task in tasks for one in task["failed_saves"]),
        "needs_person": Sums(one["what"] for one in shown["needs"]),
        "waf_flops_per_second": {
            "achieved": fsum(task["waf"] for task in tasks),
            "planned": fsum(
                one["waf"] for one in (*plan["allocations"], *plan["kept"]) if one["task"] in live
            )
            if plan
            else 0.0,
            "ideal": plan["ideal_waf"] if plan else 0.0,
        },
        "slot_mtbf_seconds": {"": cluster["mtbf_gpu_s"]},
    }


def _node_state(node: dict[str, Any]) -> str:
    if node["contact"] != "heard":
        return str(node["contact"])
    return (
        "quarantined"
        if node["quarantine"]
        else "drained"
        if node["drained"]
        else str(node["health"])
    )

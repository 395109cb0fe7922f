"""The policy: every limit and prior of the decider."""

from collections.abc import Collection, Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from ..errors import need
from ..timing import BEAT_S, LEASE_S_MIN, SUSPECT_S_MIN
from .job import NAME
from .validation import spec_error

ALPHAS = (0.0, 0.5, 1.0, 2.0)
"""The values of `alpha` that a policy may set."""
DURABILITIES = ("always", "everysec", "none")
REDACT = ("*KEY*", "*TOKEN*", "*SECRET*", "*PASSWORD*", "*CREDENTIAL*")
OUTPUT_BYTES_MAX = 256 << 20
REDACT_NUM_MAX, REDACT_CHARS_MAX = 64, 100
_WAIT = (1e-3, 1e6)
_SPAN = (1e-3, 1e15)
_NUM_MAX = 2**31 - 1
BOUNDS: dict[str, tuple[float, float]] = {
    "silence_s_max": (LEASE_S_MIN, 1e6),
    "agent_gone_s_max": _WAIT,
    "evidence_s_max": (0, 1e6),
    "start_s_max": _WAIT,
    "quiesce_s_max": _WAIT,
    "boundary_s_max": _WAIT,
    "reconfigure_s_max": _WAIT,
    "restore_s_max": _WAIT,
    "silent_s_max": _WAIT,
    "storage_s_max": _WAIT,
    "stop_s_max": _WAIT,
    "stopped_s_max": _WAIT,
    "suspect_s_max": (SUSPECT_S_MIN, 1e6),
    "hang_s_min": (0, 1e9),
    "first_iteration_s_max": _WAIT,
    "quarantine_faults": (1, _NUM_MAX),
    "quarantine_window_s": _SPAN,
    "quarantine_s": _SPAN,
    "unconfirmed_share_max": (0, 1),
    "restarts_max": (0, _NUM_MAX),
    "restart_iterations": (1, _NUM_MAX),
    "restart_pause_s_max": (0, 1e6),
    "passing_s_max": (0, 1e9),
    "loss_iterations": (1, _NUM_MAX),
    "replace_after_s": (0, 1e9),
    "mtbf_gpu_s": _SPAN,
    "mtbf_faults": (0, 1e9),
    "transition_s": (0, 1e15),
    "reshape_s": (0, 1e15),
    "moves_max": (0, _NUM_MAX),
    "quotas": (0, _NUM_MAX),
    "repair_s": _SPAN,
    "copies_bytes_max": (0, 2**53),
    "output_bytes_max": (8 << 20, 2**40),
    "rank_pids_max": (0, _NUM_MAX),
    "rank_memory_bytes_max": (0, 2**53),
    "seal_records": (1, _NUM_MAX),
    "seal_s": _SPAN,
    "ended_keep_s": (0, 1e15),
    "calibrate_iterations": (1, 10_000),
    "calibrate_min": (0, 1),
    "replicas_min": (0, 100),
}
"""Bounds of the numbers in a policy file, both ends included. Within these bounds every planned
value is finite and every record can be written. `gain_min` and `alpha` are checked separately."""


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit and prior of the decider. Times in seconds."""

    silence_s_max: float = 5.0
    """A node without a heartbeat for this long is unreachable. At least three heartbeats."""
    agent_gone_s_max: float = 60.0
    """How long the ranks of a node run on without an agent. An agent has it from its start on."""
    evidence_s_max: float = 1.0
    """How long the report of a root cause is awaited after a failed collective, before a retry in
    place; and how long paused members wait for members on unreachable nodes."""
    start_s_max: float = 180.0
    """How long a rank of `train:` may move nothing until it is ready, and how long an agent may
    take to start a process. No process of a script that heals in memory is ended for it. If none
    has adopted Unicron by then, the task counts as a plain command until one does; else `unicron
    status` tells who is not ready."""
    quiesce_s_max: float = 60.0
    """How long a rank may take to quiesce `now`, including the rest of its micro-batch. While it
    saves or still restores a state, the time in which it moves anything does not count."""
    boundary_s_max: float = 600.0
    """The same to quiesce at the end of an iteration."""
    reconfigure_s_max: float = 30.0
    """How long no member of a new generation may move anything until all are up in it: they meet,
    build communicators, and build, read, receive or send their state."""
    restore_s_max: float = 15.0
    """How long the checkpoint stores may send a member nothing before it reads the checkpoint on
    disk instead; half of `reconfigure_s_max` at most."""
    storage_s_max: float = 120.0
    """How long the storage of checkpoints may stand still for a rank that starts, recovers or
    leaves: what is read again from the beginning would not end where storage stalls now and then.
    Of no effect if the limit of the wait is longer."""
    silent_s_max: float = 1800.0
    """For how long at most CPU time alone, of a process that moves nothing, counts as progress."""
    stop_s_max: float = 10.0
    """How long a process may take to exit after SIGTERM, before SIGKILL; its exit is awaited for as
    long again."""
    stopped_s_max: float = 2.0
    """How long a training rank may be stopped (SIGSTOP) before its process is killed."""
    suspect_s_max: float = 1.2
    """Silence after which a node is suspect if members of its task report a failed collective. At
    least two heartbeats."""
    hang_s_min: float = 2.0
    """A rank counts as hung only if it stalls this long, however short its iterations are."""
    first_iteration_s_max: float = 1200.0
    """How long other ranks may wait for a rank in what has no usual time yet: its first iterations,
    and what lies between two iterations, such as a checkpoint. 5 s later it counts as hung."""
    quarantine_faults: int = 2
    """A node is quarantined after this many faults within `quarantine_window_s`, if the fault rate
    of the other nodes predicts fewer."""
    quarantine_window_s: float = 30 * 86400.0
    """Faults of a node that are older count no more."""
    quarantine_s: float = 86400.0
    """How long a quarantined node gets no tasks, unless an operator lifts the quarantine."""
    unconfirmed_share_max: float = 0.1
    """At most this share of all nodes (at least one) is disabled on unconfirmed evidence. If a
    site's check fails on all nodes, the check itself is faulty."""
    restarts_max: int = 3
    """Maximum restarts of one rank, or of a whole task, without progress between them."""
    restart_iterations: int = 10
    """Iterations of progress after which earlier restarts are not counted."""
    restart_pause_s_max: float = 60.0
    """The longest pause before a process that ended by itself without an iteration starts again.
    The pauses are 1, 4, 16, 60, 60, ... s. 0: it starts at once."""
    passing_s_max: float = 900.0
    """How long a task that cannot go on is started again for faults that may pass by themselves: of
    the network, of storage or of names. Other faults have `restarts_max`."""
    loss_iterations: int = 3
    """A loss that is NaN or infinite in so many iterations in a row needs a person; one outside its
    band in so many is a spike."""
    on_loss_not_finite: Literal["tell", "stop"] = "tell"
    """What happens after `loss_iterations` whose loss is NaN or infinite. `stop`: the task fails,
    once its last finite state is published."""
    on_loss_spike: Literal["tell", "stop"] = "tell"
    """The same for a spike: `loss_iterations` losses more than five deviations above the median of
    the last 64."""
    replace_after_s: float = 60.0
    """A task whose nodes are all unreachable for this long is moved to other nodes."""
    mtbf_gpu_s: float = 2_000.0 * 3600
    """Prior: mean time between faults of one GPU (the order of Llama 3: 419 faults in 54 days)."""
    mtbf_faults: float = 10.0
    """Weight of the prior `mtbf_gpu_s`: it counts as this many observed faults."""
    transition_s: float = 10.0
    """Prior: downtime of a task for one change, until enough changes were measured."""
    reshape_s: float = 20.0
    """The same prior for a change to a layout that splits the model differently, where members
    build and receive new parts: twice as long (measured: 2.1 times, in both directions;
    docs/decisions/limits-of-plans.md)."""
    gain_min: float = 0.005
    """A plan changes a healthy task only if it gains this share of the cluster's WAF; below 1."""
    moves_max: int | None = None
    """Maximum number of healthy tasks that one plan changes, unless no plan fits otherwise."""
    quotas: dict[str, int] = field(default_factory=dict[str, int])
    """By team (`team:` in the job spec): the maximum slots of all its tasks together."""
    floor: bool = False
    """Whether a plan gives each task at least the fewest slots at which its throughput is above 0.
    If there are too few slots for all, tasks get them in order of priority, weight and age."""
    alpha: float = 0.0
    """What plans maximise. 0: the WAF of all tasks. 0.5, 1 (proportional fairness) or 2: the sum of
    the alpha-fair utilities of their FLOP/s. A larger alpha makes the shares more equal."""
    hot_spare: bool = False
    """Keep the slots of one node idle if that gains more at the next fault than it costs."""
    repair_s: float = 355.0 * 60
    """How long a lost node is away. It bounds the gain of a hot spare. (The mean at LANL; the
    median there is 54 min: Schroeder and Gibson, 2006.)"""
    copies_bytes_max: int = 0
    """The host memory of one node that in-memory checkpoints of all tasks may take, in bytes. 0:
    each node's own limit, by default a quarter of the memory that is available at its start."""
    output_bytes_max: int = OUTPUT_BYTES_MAX
    """How much of its node's disk the output of one process may take, in bytes, but at most a
    quarter of what is free there: of more, the first 64 kB and the end stay. Those of the former
    attempts of a rank may take as much together. An agent has it from its start on."""
    seal_records: int = 10_000
    """The leader moves the log to a segment file when the server holds this many records more; the
    server's memory has twice as many at most."""
    seal_s: float = 300.0
    """It does so also for fewer records, after this time: the loss of the server's disk costs no
    more."""
    ended_keep_s: float = 7 * 86400.0
    """How long a task that has ended stays in the state, with its incidents. The log keeps it."""
    calibrate_iterations: int = 20
    """Undisturbed iterations at one size before their times count as measured throughput."""
    calibrate_min: float = 0.1
    """A throughput table is replaced only if a measured rate differs by this share from its own."""
    redact: tuple[str, ...] = REDACT
    """Patterns of names of environment variables, in any case: agents replace their values in what
    a rank prints or reports before it enters the log. An agent has the list from its start on."""
    rank_pids_max: int = 0
    """Processes and threads of one rank at once; 0: no limit. It needs cgroups of ranks that can
    limit them (docs/guides/systemd.md). An agent has it from its start on."""
    rank_memory_bytes_max: int = 0
    """Memory of one rank with all its processes; 0: no limit. What needs more, the kernel kills: a
    fault of the rank. It needs the same cgroups. An agent has it from its start on."""
    shared_folders: tuple[str, ...] = ()
    """Folders that all hosts have in common. If nodes are on several hosts, the output of a task is
    a URL, or in one of these folders."""
    durability: Literal["always", "everysec", "none"] = "always"
    """What the log's server does before a record counts. `always`: sync its append-only file;
    `everysec`: write it, a crash of its host loses seconds; `none`: a restart may lose the log."""
    replicas_min: int = 0
    """How many replicas of the log's server must have a record before it counts: on their disks,
    if the server has WAITAOF (Redis 7.2, Valkey) and `durability` is not `none`, else in memory."""
    observe: bool = False
    """Decide, price and log everything, but send no orders."""
    allow_inject: bool = False
    """Whether operators may inject faults (FaultRequested)."""


# --- Parsing: policy files, and `limits` of a simulation scenario ---

DOCS = "docs/reference/records.md, Policy: its fields, times in seconds"
_HINTS = {
    "silence_s_max": f"three heartbeats at least: an agent sends one every {BEAT_S:g} s",
    "suspect_s_max": f"two heartbeats at least: an agent sends one every {BEAT_S:g} s",
}
FLAGS_ONLY = ("observe", "allow_inject")
"""Fields that a policy file must not set. So an old file can neither disable recovery nor enable
fault injection."""


def parse(given: dict[Any, Any], usual: Policy | None = None) -> Policy:
    """`usual` with the given fields replaced. Raises SpecError with the field and a hint."""
    try:
        policy = msgspec.convert(
            msgspec.to_builtins(usual or Policy()) | given, Policy, strict=True
        )
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise spec_error(str(error), Policy, DOCS, given=given) from None
    for name in FLAGS_ONLY:
        need(
            not getattr(policy, name),
            name,
            "is not a field of a policy file",
            f"unicron up --{name.replace('_', '-')}",
        )
    for path, value, (least, most) in _numbers(policy, given):
        need(
            least <= value <= most,
            path,
            f"must be between {least} and {f'{most:g}' if isinstance(most, float) else most}",
            _HINTS.get(path, DOCS),
        )
    for team in policy.quotas:
        need(
            bool(NAME.match(team)),
            f"quotas.{team}",
            "is not a valid team name",
            "lower-case letters, digits, '-' and '.', at most 63",
        )
    need(
        len(policy.redact) <= REDACT_NUM_MAX
        and all(0 < len(pattern) <= REDACT_CHARS_MAX for pattern in policy.redact),
        "redact",
        f"must be at most {REDACT_NUM_MAX} patterns of 1 to {REDACT_CHARS_MAX} characters",
        "redact: ['*KEY*', '*TOKEN*']",
    )
    for folder in policy.shared_folders:
        need(
            folder.startswith("/"),
            "shared_folders",
            f"{folder!r} is not an absolute path",
            "for example shared_folders: [/mnt/train]",
        )
    need(
        0 <= policy.gain_min < 1,
        "gain_min",
        f"{policy.gain_min:g} is not {'below 1' if policy.gain_min >= 1 else 'from 0 on'}",
        "it is a share of the cluster's WAF: 0.05 is 5 %",
    )
    need(
        policy.alpha in ALPHAS,
        "alpha",
        f"{policy.alpha:g} is not one of {', '.join(f'{alpha:g}' for alpha in ALPHAS)}",
        "0 maximises WAF, 1 is proportional fairness, 2 is more equal",
    )
    need(
        not (policy.alpha and policy.hot_spare),
        "hot_spare",
        f"a spare is priced by WAF, and alpha {policy.alpha:g} plans by another objective",
        "leave one of them out",
    )
    return policy


def _numbers(
    policy: Policy, given: Collection[str]
) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Yield (name, value, bounds) of each given number; a quota is named `quotas.TEAM`. The others
    may be of an old log, whose policy was within the bounds of its time."""
    for name, bounds in BOUNDS.items():
        value = getattr(policy, name) if name in given else None
        if isinstance(value, dict):
            yield from ((f"{name}.{team}", num, bounds) for team, num in policy.quotas.items())
        elif value is not None:
            yield name, value, bounds

"""The policy: every limit and prior that the heart reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, field

from ..errors import need
from .job import NAME
from .validation import refused

ALPHAS = (0.0, 0.5, 1.0, 2.0)
"""That a policy may name."""
_WAIT = (1e-3, 1e6)
_SPAN = (1e-3, 1e15)
_NUM_MAX = 2**31 - 1
BOUNDS: dict[str, tuple[float, float]] = {
    "silence_s_max": _WAIT,
    "evidence_s_max": (0, 1e6),
    "start_s_max": _WAIT,
    "quiesce_s_max": _WAIT,
    "boundary_s_max": _WAIT,
    "reconfigure_s_max": _WAIT,
    "stop_s_max": _WAIT,
    "stopped_s_max": _WAIT,
    "suspect_s_max": _WAIT,
    "hang_s_min": (0, 1e9),
    "quarantine_faults": (1, _NUM_MAX),
    "quarantine_window_s": _SPAN,
    "quarantine_s": _SPAN,
    "unconfirmed_share_max": (0, 1),
    "restarts_max": (0, _NUM_MAX),
    "restart_iterations": (1, _NUM_MAX),
    "replace_after_s": (0, 1e9),
    "mtbf_gpu_s": _SPAN,
    "mtbf_faults": (0, 1e9),
    "transition_s": (0, 1e15),
    "reshape_s": (0, 1e15),
    "moves_max": (0, _NUM_MAX),
    "quotas": (0, _NUM_MAX),
    "repair_s": _SPAN,
    "calibrate_iterations": (1, 10_000),
    "calibrate_min": (0, 1),
}
"""Between what a policy file's numbers lie, both ends included: with these, all that is planned
stays finite, and every record can be written. `gain_min` and `alpha` have rules of their own."""


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit and prior that the heart reads. Times in seconds."""

    silence_s_max: float = 5.0
    """A node not heard of for this long is unreachable."""
    evidence_s_max: float = 1.0
    """How long a collective's failure waits for its root cause before a reattempt in place; and
    members that hold, for those on silent nodes."""
    start_s_max: float = 180.0
    quiesce_s_max: float = 60.0
    """How long a rank told to stop at once may take (a micro-batch is finished first)."""
    boundary_s_max: float = 600.0
    """How long a rank told to stop at an iteration's end may take."""
    reconfigure_s_max: float = 30.0
    stop_s_max: float = 10.0
    stopped_s_max: float = 2.0
    """How long a training rank may be stopped (SIGSTOP) before its process is ended."""
    suspect_s_max: float = 1.2
    """So long a silence is enough where a task's other members tell of a collective that failed."""
    hang_s_min: float = 2.0
    """A rank that stands still is no hang before this, however short its iterations are."""
    quarantine_faults: int = 2
    """So many faults of one node within `quarantine_window_s` and it is quarantined, where that is
    more than the faults of the others let one expect."""
    quarantine_window_s: float = 30 * 86400.0
    quarantine_s: float = 86400.0
    """How long a quarantined node gets no tasks, unless an operator lifts it."""
    unconfirmed_share_max: float = 0.1
    """Of all nodes, at most this share (one at least) is taken out by what no second source says:
    a site's check that fails everywhere is the check's fault."""
    restarts_max: int = 3
    """Restarts of one rank, or of a whole task, without progress in between."""
    restart_iterations: int = 10
    """Iterations after which earlier restarts are forgiven."""
    replace_after_s: float = 60.0
    """A task wholly on unreachable nodes is replaced after this."""
    mtbf_gpu_s: float = 2_000.0 * 3600
    """Prior: mean time between faults of one GPU (the order of Llama 3: 419 in 54 days)."""
    mtbf_faults: float = 10.0
    """Weight of that prior: so many faults, seen at its rate, beside those of this cluster."""
    transition_s: float = 10.0
    """Prior: for how long a task stands for one change, until it was measured often enough."""
    reshape_s: float = 20.0
    """The same of a change to a layout that splits the model in another way, so that members build
    and take new parts: twice as long (measured: 2.1 times, there and back;
    docs/decisions/limits-of-plans.md)."""
    gain_min: float = 0.005
    """A plan changes a healthy task only for this share of the cluster's WAF; below 1."""
    moves_max: int | None = None
    """So many healthy tasks may one plan change at most; more only where nothing else fits."""
    quotas: dict[str, int] = field(default_factory=dict[str, int])
    """By team (`team:` in the job spec): the slots that its tasks have at most together."""
    floor: bool = False
    """Whether a plan gives each task at least the fewest slots with which it earns anything, where
    those of all fit together; by priority, weight and age where they do not."""
    alpha: float = 0.0
    """What plans maximise: 0 the sum of what all tasks earn (WAF); 0.5, 1 (proportional fairness)
    or 2 the sum of the alpha-fair utilities of their FLOP/s, the larger the more equal."""
    hot_spare: bool = False
    """Keep the slots of one node idle where that earns more at the next fault than it costs."""
    repair_s: float = 355.0 * 60
    """How long a lost node is away: so long a hot spare may earn (LANL's mean; its median: 54 min,
    Schroeder and Gibson, 2006)."""
    calibrate_iterations: int = 20
    """Undisturbed iterations at one size before their times count as measured throughput."""
    calibrate_min: float = 0.1
    """A table is set anew only when a measured rate differs from it by this share."""
    observe: bool = False
    """Decide, price and log everything, act on nothing."""
    allow_inject: bool = False
    """Whether operators may break things on purpose (FaultRequested)."""


# --- A policy out of plain data, checked: what a policy file may say, and a scenario's `limits`.
# ---

DOCS = "docs/reference/records.md, Policy: its fields, times in seconds"
SWITCHES = ("observe", "allow_inject")
"""No fields of a file: a file is kept and forgotten, and nobody shall break or hold a cluster by
what was forgotten."""


def parse(given: dict[Any, Any], usual: Policy | None = None) -> Policy:
    """The policy that is `usual` but for what is given. Raises SpecError with the field and a hint.
    """
    try:
        policy = msgspec.convert(msgspec.to_builtins(usual or Policy()) | given, Policy,
                                 strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise refused(str(error), Policy, DOCS, given=given) from None
    for name in SWITCHES:
        need(not getattr(policy, name), name, "stands in no policy file",
             f"unicron up --{name.replace('_', '-')}")
    for path, value, (least, most) in _numbers(policy):
        need(least <= value <= most, path, f"must be between {least} and "
             f"{f'{most:g}' if isinstance(most, float) else most}", DOCS)
    for team in policy.quotas:
        need(bool(NAME.match(team)), f"quotas.{team}", "is no team's name",
             "lower-case letters, digits, '-' and '.', at most 63")
    need(0 <= policy.gain_min < 1, "gain_min",
         f"{policy.gain_min:g} is not {'below 1' if policy.gain_min >= 1 else 'from 0 on'}",
         "it is a share of what the cluster earns: 0.05 is 5 %")
    need(policy.alpha in ALPHAS, "alpha", f"{policy.alpha:g} is not one of "
         f"{', '.join(f'{alpha:g}' for alpha in ALPHAS)}",
         "0 is the most WAF, 1 proportional fairness, 2 nearer to equal")
    need(not (policy.alpha and policy.hot_spare), "hot_spare",
         f"a spare is priced by WAF alone, and alpha {policy.alpha:g} plans by another measure",
         "leave one of them out")
    return policy


def _numbers(policy: Policy) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Each number that has bounds, by its name, with them; a quota by `quotas.TEAM`."""
    for name, bounds in BOUNDS.items():
        value = getattr(policy, name)
        if isinstance(value, dict):
            yield from ((f"{name}.{team}", num, bounds) for team, num in policy.quotas.items())
        elif value is not None:
            yield name, value, bounds

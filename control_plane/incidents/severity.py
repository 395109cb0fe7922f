"""The severity of error statuses, and how each is handled (our reading of the paper's table)."""

import re

from ...events.records import statuses as s
from ...events.records.reports import RankExited
from ...events.records.types import Severity

TABLE: dict[str, Severity] = {
    # node health monitoring
    s.LOST_CONNECTION: "SEV1",
    # process supervision
    s.EXITED_ABNORMALLY: "SEV2",
    # exception propagation
    s.CONNECTION_REFUSED: "SEV3",
    s.CONNECTION_RESET: "SEV3",
    s.ILLEGAL_MEMORY_ACCESS: "SEV2",
    s.ECC_ERRORS: "SEV1",
    s.INVALID_DMA_MAPPING: "SEV1",
    s.CUDA_ERRORS: "SEV2",
    s.NVLINK_ERRORS: "SEV1",
    s.GPU_DRIVER_ERRORS: "SEV1",
    s.OTHER_NETWORK: "SEV3",
    s.OTHER_SOFTWARE: "SEV2",
    # online statistical monitoring
    s.NCCL_TIMEOUT: "SEV3",
    s.LINK_FLAPPING: "SEV3",
    s.TASK_HANG: "SEV2",
    # not in the paper's table
    s.SILENT_CORRUPTION: "SEV2",
    s.WRONG_INPUT: "SEV2",
}
OF_DEVICES = frozenset(
    (
        s.ILLEGAL_MEMORY_ACCESS,
        s.ECC_ERRORS,
        s.INVALID_DMA_MAPPING,
        s.CUDA_ERRORS,
        s.NVLINK_ERRORS,
        s.GPU_DRIVER_ERRORS,
        s.SILENT_CORRUPTION,
    )
)
"""Statuses that concern the reporting rank's own device: never indirect evidence."""
CAN_PASS = frozenset((s.CONNECTION_REFUSED, s.CONNECTION_RESET, s.OTHER_NETWORK, s.LINK_FLAPPING))
"""Statuses of faults that may pass by themselves within minutes."""
KILLS = frozenset((1, 2, 9, 15))
"""Signals that come from outside: SIGHUP, SIGINT, SIGKILL, SIGTERM."""
HANDLING: dict[Severity, tuple[str, str, str]] = {
    "SEV3": (
        "reattempt in place: the communicators are built again, every process lives",
        "restarts_max reattempts within restart_iterations iterations",
        "the processes are started again, as SEV2",
    ),
    "SEV2": (
        "restart the process on its slot; the others keep their state and go on",
        "restarts_max restarts of a rank, with fewer than restart_iterations new iterations "
        "between each two; passing_s_max for faults of network, storage and names; wrong input "
        "twice",
        "the rank is tried on another slot: if it works there, its old slot is taken out; if it "
        "fails there too, the task has failed",
    ),
    "SEV1": (
        "reconfigure: the slot that a device error names, or the lost node, is taken out, and the "
        "plan is made anew; if only the process says so, the rank is tried on another slot",
        "quarantine_faults faults of one node within quarantine_window_s",
        "the node is quarantined for quarantine_s, until unicron lift",
    ),
}
"""By severity: the first action, its budget (from the policy), and the next action."""
_NETWORK = {
    s.CONNECTION_RESET: ("connection reset", "reset by peer", "closed by peer", "broken pipe"),
    s.CONNECTION_REFUSED: ("connection refused",),
    s.NCCL_TIMEOUT: ("timed out", "timeout", "time out"),
}
SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
"""Names of Linux signals. Fixed, so that a log reads the same on every machine."""
CAUSE_CHARS_MAX = 120
"""Maximum length of a cause in a sentence; the record has the whole text."""
_BY_WORD = {**{status.lower(): status for status in TABLE}, "usageerror": s.WRONG_INPUT}


def row_of(word: str) -> str:
    """The table's row for text that a person wrote (`ECC error`); empty: there is none."""
    plain = word.strip().lower().replace("_", " ")
    if plain == "usageerror":  # Python's name, not the table's
        return ""
    return _BY_WORD.get(plain) or _BY_WORD.get(f"{plain}s", "")


def status_of(error: str) -> str:
    """The table's row for a reported error; an unknown error is OTHER_SOFTWARE."""
    return _BY_WORD.get(error.strip().lower(), s.OTHER_SOFTWARE)


def classified_status(classified: str, else_: str) -> str:
    """The classifier's status if the table has it, and `else_` is not WRONG_INPUT; else `else_`."""
    return classified if classified in TABLE and else_ != s.WRONG_INPUT else else_


def severity_of(status: str, *, process_ended: bool = False) -> Severity:
    """The severity of a status; at least SEV2 if a process ended, since it needs a restart."""
    severity = TABLE.get(status, "SEV2")
    return worst(severity, "SEV2") if process_ended else severity


def worst(*severities: Severity) -> Severity:
    """The most severe of them: SEV1, which is also the first by name."""
    return min(severities)


def network_status(error: str) -> str:
    """The table's network row for a failed collective without a root cause, from the messages of
    gloo, torch's store and NCCL. The name of an exception ("RuntimeError") is ignored."""
    said = error.lower()
    for status, words in _NETWORK.items():
        if any(word in said for word in words):
            return status
    return s.OTHER_NETWORK


_LOGGED = re.compile(r"\W?\d{4}-\d\d-\d\d|\[?(?:info|debug)\b|{", re.IGNORECASE)
"""How a line of a log begins: what a program logs is not why it ends."""


def exit_in_words(body: RankExited) -> str:
    """How a process ended, with its cause: `exit code 1: KeyError: 'rate'`, `signal 9 (SIGKILL):
    killed from outside`, `exit code 0 before it had finished`."""
    if body.signal is not None:
        how = f"signal {body.signal}"
        if body.cause and body.signal in SIGNALS:  # older agents report no cause
            how += f" ({SIGNALS[body.signal]})"
    elif body.exit_code == 0:
        how = "exit code 0 before it had finished"
    else:
        how = f"exit code {body.exit_code}"
    cause = " ".join(body.cause.split())
    if body.exit_code and cause in ("", how):  # no rule knows its words: the last line is the cause
        line = last_line(body.tail)
        cause = "" if _LOGGED.match(line) else " ".join(line.split())
    if len(cause) > CAUSE_CHARS_MAX:
        cause = cause[: CAUSE_CHARS_MAX - 3] + "..."
    if not cause or cause.startswith(how):  # the cause may begin with `how`
        return cause or how
    return f"{how}: {cause}"


def last_line(text: str) -> str:
    """The last line of a traceback: the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""

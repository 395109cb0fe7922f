"""The limits of the service."""

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """Every limit of the service; those of the decider are in the Policy."""

    batch_reports_max: int = 256
    turn_s_max: float = 0.1
    """Once a turn has decided for so long, the rest of its reports are for the next turn."""
    turn_bytes_max: int = 32 << 20
    """The same for the size of its records, which go into one append."""
    take_wait_s: float = 1.0
    """Longest duration of one blocking read of the intake; then the next one begins. For so long a
    leader that was stopped may keep one report from its successor."""
    call_s_max: float = 10.0
    """Time after which a call of the log counts as failed."""
    retry_s_min: float = 0.05
    retry_s_max: float = 2.0
    disputes_max: int = 50
    """Conflicts or lost replies in a row after which the leader gives up."""
    beats_s: float = 1.0
    """Longest interval between checks of the heartbeats, shorter if leases are short; interval of
    the leader's own."""
    trim_s: float = 1.0
    follow_s: float = 0.2
    """Interval at which a control plane that does not lead folds the log and tries to lead."""
    segments_s: float = 30.0
    """Interval at which it checks that it can read the log's segments."""
    idle_s: float = 5.0
    writes_max: int = 256
    recent_records_max: int = 4_096

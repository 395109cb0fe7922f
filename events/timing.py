"""Times on which agents, ranks, control plane and commands agree, and what follows from them."""

BEAT_S = 0.5
"""Time between two heartbeats of an agent."""
LEASE_S_MIN = 3 * BEAT_S
"""Least silence after which a policy may call a node unreachable: one heartbeat is lost, the next
one late. With less, a node that does nothing goes and comes with each late heartbeat."""
SUSPECT_S_MIN = 2 * BEAT_S
"""The same for a node that members of its task suspect: one heartbeat is late."""

LOG_RETRY_S_MAX = 2.0
"""Longest pause of an agent between two tries to reach the log."""
SETTLE_S = 2.5 * LOG_RETRY_S_MAX
"""After an outage of the log, the reports that waited on the agents are there after this long."""

STOP_GRACE_S = 5.0
"""Grace period of each rank when the agent stops."""
REAP_S_MAX = 5.0
"""Then the exit is reported even if a process survives SIGKILL; the slot stays occupied."""
FLUSH_S_MAX = 5.0
"""How long a stopping agent waits for the log to acknowledge its last reports."""
AGENT_STOP_S_MAX = STOP_GRACE_S + REAP_S_MAX + FLUSH_S_MAX
"""How long an agent that is told to stop may take: it ends its ranks before it exits."""

PAUSES_S = (1.0, 4.0, 16.0, 60.0)
"""Pauses before what failed is tried again, a rank, a final checkpoint or a publication: after the
first failure, the second and so on; the last pause is repeated."""

STACKS_S_MAX = 2.0
"""How long a process that is to be ended is kept for its stacks (StacksKept), at most."""

RENDEZVOUS_S_MAX = 25.0
"""Timeout of the rendezvous of a generation. By default, the control plane waits longer for a
member's Reconfigured (policy: reconfigure_s_max), so that a member names who is missing."""
FINISH_S_MAX = 30.0
"""Time that a replica whose members all live has after an immediate order to stop, to finish its
current work. By default, the control plane waits longer for Quiesced (policy: quiesce_s_max)."""


def pause_after_s(num_failures: int) -> float:
    """The pause after this many failures in a row, from 1 on."""
    return PAUSES_S[min(num_failures, len(PAUSES_S)) - 1]

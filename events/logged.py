"""What a command's own log told: the body of a report, frozen."""

from __future__ import annotations

from .reports import Body


class IterationsLogged(Body, frozen=True):
    """A command printed Megatron-LM's line of progress; told by the agent that reads its log.

    At most every second, the lines of one process joined. Only the rank that prints them tells.
    """

    task: int
    rank: int
    attempt: int
    iteration: int
    """Iterations finished, as printed: the command counts, also what it read from a checkpoint."""
    iterations: int
    """How many there are to be; 0: not known."""
    num_iterations: int
    """Iterations of which `step_s` is the mean; 0: not known, or it is of a process warming up."""
    step_s: float
    loss: float | None = None
    """None: not printed, or not finite."""
    global_batch: int = 0
    """In samples; 0: not printed."""
    skipped: int = 0
    """Of the iterations since the last report, those that took no step; so for `nan`."""
    nan: int = 0

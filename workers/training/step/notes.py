"""Tells the trace and the progress page of each phase of an iteration as it begins."""

from ..process.trace import Event, Marks, Trace
from .progress import IterationState


class Notes:
    """Of one member. `micro_batch` is the one in progress, -1 outside the passes."""

    def __init__(self, trace: Trace, marks: Marks, state: IterationState) -> None:
        self.trace, self.marks = trace, marks
        self.micro_batch = -1
        self.forward_calls = 0
        """How many forward passes have begun."""
        self._state = state

    def __call__(self, event: Event, bucket: int = -1) -> None:
        # The step that the gather belongs to has already been counted.
        iteration = self._state.step_version - (event == "gather")
        self.trace.note(
            event,
            self._state.trained_in,
            iteration,
            micro_batch=self.micro_batch,
            bucket=bucket,
        )
        self.marks.note(event)

    def note_pass(self, event: Event, item: int) -> None:
        """A phase of the passes of this micro-batch begins."""
        self.micro_batch = item
        self.forward_calls += event == "forward"
        self(event)

"""The driver of the decider, and a task that trains on it, as fixtures."""

from decider_fixtures import d, task

__all__ = ["d", "task"]

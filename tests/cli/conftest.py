"""Fixtures: a driver of the decider, and a training task in it."""

from decider_fixtures import d, task

__all__ = ["d", "task"]

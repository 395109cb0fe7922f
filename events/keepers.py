"""Numbers of keepers: which of a node's keepers, one after the other, is meant."""

from __future__ import annotations

KEEPERS_NUM_MAX = 1 << 10
"""Keepers, one after the other, of one incarnation of an agent."""


def first_keeper(incarnation: int) -> int:
    """The number of its first keeper: each incarnation has KEEPERS_NUM_MAX, above all before.

    An incarnation may be only one more than the last, where a clock was set back.
    """
    return incarnation * KEEPERS_NUM_MAX

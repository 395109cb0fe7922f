"""Guards of ranks for tests of what runs in them."""

from __future__ import annotations

from unicron.workers.agent.processes.rank_guard import Key, Part, RankGuard


def _fail(key: Key, why: str) -> None:
    raise AssertionError(f"{key}: {why}")


def unguarded(key: Key, part: Part) -> RankGuard:
    """A guard under which a violation fails the test."""
    return RankGuard(_fail, key, part)

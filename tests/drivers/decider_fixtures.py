"""Fixtures for tests of decisions; a folder's conftest.py imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from decider import Driver, at_rest


@pytest.fixture
def d(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Two nodes with two slots each; `pytest.mark.nodes(3, slots=1)` changes that.

    After the test, the log must verify and no decision may be pending.
    """
    marker = request.node.get_closest_marker("nodes")
    made = Driver(nodes=marker.args[0], **marker.kwargs) if marker else Driver()
    yield made
    at_rest(made)


@pytest.fixture
def task(d: Driver) -> int:
    """A task that trains on four slots."""
    return d.running()

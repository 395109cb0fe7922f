"""Fixtures that run agents, in the test process or in separate processes. Their ranks are real."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import agent_driver
import pytest
from agent_driver import LocalNode, PlaneStub
from memory_log import MemoryLog
from unicron.events.log import embedded_server


@pytest.fixture
def node(memory: MemoryLog, tmp_path: Path) -> AbstractAsyncContextManager[LocalNode]:
    """Async context manager that runs a leader and an agent in this process."""
    return agent_driver.local_node(memory, tmp_path)


@pytest.fixture
def plane(
    own_server: embedded_server.Server, tmp_path: Path
) -> AbstractAsyncContextManager[PlaneStub]:
    """Async context manager that runs a control plane for agents in separate processes."""
    return agent_driver.plane(own_server.url, tmp_path / "state")

"""Agents for tests, in the process of the test or in one of their own; their ranks are real."""

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
    """A leader and an agent in this process, while an async test runs."""
    return agent_driver.local_node(memory, tmp_path)


@pytest.fixture
def plane(own_server: embedded_server.Server, tmp_path: Path
          ) -> AbstractAsyncContextManager[PlaneStub]:
    """A control plane that agents in processes of their own can join, while an async test runs."""
    return agent_driver.plane(own_server.url, tmp_path / "state")

"""Fixtures for every test: a private log server, a uniquely named log on it, an object store."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import rank_places
import structlog
import tiers
from hypothesis import Phase, is_hypothesis_test, settings
from memory_log import MemoryLog
from unicron.events.log import append_only_file, embedded_server
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog
from unicron.events.log.segments import Folder
from unicron.workers.host import linux

_numbers = itertools.count(1)
SHARE_OF_EXAMPLES, EXAMPLES_NUM_MIN = 0.25, 20
ASYNC_TEST_S_MAX = 160.0
RANKS_NUM = {
    "tests/cluster/": 4,
    "tests/workers/training/": 4,
    "tests/matrix/": 4,
    "tests/hosts/": 4,
}
"""Folder -> how many ranks its tests start at most, if they are not marked `ranks(N)`."""
settings.register_profile("bounded", deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", deadline=None, print_blob=True)
# `make mutants` counts failures; to search for the smallest example of each takes longer.
settings.register_profile(
    "mutants",
    settings.get_profile("bounded"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)


_stops: list[int] = []


def _stop(number: int, frame: FrameType | None) -> None:
    _stops.append(number)
    raise KeyboardInterrupt


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """End the run also if the test took the interrupt for its own, as a command does that it runs
    in this process."""
    try:
        return (yield)
    finally:
        if _stops:
            raise KeyboardInterrupt


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM acts as Ctrl-C, so that fixtures stop the processes that the tests started. A shell
    starts what is in its background with Ctrl-C ignored, and all processes would inherit that."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Not where this file is read: a test that imports it would change the profile of the run.
    if not config.getoption("hypothesis_profile"):
        settings.load_profile("bounded")
    # The test machine may be short of memory or have errors in its kernel log. Tests must not
    # depend on that: only tests of health checks turn health monitoring on.
    os.environ["UNICRON_HEALTH"] = "off"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of real.txt, and try each property with a quarter of its examples, always
    the same ones.

    `--hypothesis-profile thorough` tries all examples that the test states, drawn at random.
    """
    names = tiers.listed()
    there, functions = set[str](), set[str]()
    for item in items:
        possible = tiers.names_of(item.nodeid)
        functions.update(possible[1:])
        if found := [name for name in possible if name in names]:
            there.update(found)
            item.add_marker("real")
    lost = [name for name in names if name not in there and name.partition("[")[0] in functions]
    if lost and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"{tiers.REAL}: there is no test {lost[0]}")
    if settings.get_current_profile_name() == "thorough":
        return
    for test in {getattr(item, "function", None) for item in items}:
        if is_hypothesis_test(test):
            asked = test._hypothesis_internal_use_settings
            num = max(EXAMPLES_NUM_MIN, round(SHARE_OF_EXAMPLES * asked.max_examples))
            test._hypothesis_internal_use_settings = settings(
                asked, max_examples=min(asked.max_examples, num), derandomize=True, database=None
            )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Wait until the other lanes leave room for the ranks of this test."""
    mark = item.get_closest_marker("ranks")
    default = next((num for place, num in RANKS_NUM.items() if item.nodeid.startswith(place)), 0)
    with rank_places.taken(mark.args[0] if mark else default):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in its own event loop, inside its fixtures that are context managers."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            values = {
                name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters
            }
            for name, value in values.items():
                if isinstance(value, AbstractAsyncContextManager):
                    values[name] = await stack.enter_async_context(value)
            await test(**values)

    asyncio.run(asyncio.wait_for(run(), ASYNC_TEST_S_MAX))
    return True


class Cluster:
    """A cluster's log on the test's server; open it with `async with cluster() as log`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"test-{os.getpid()}-{next(_numbers)}"
        self.identities = Identities(bytes(SECRET_BYTES), self.name)

    @asynccontextmanager
    async def __call__(
        self, url: str = "", folder: Folder | None = None
    ) -> AsyncGenerator[RedisLog]:
        log = RedisLog(url or self.url, self.name, self.identities.key, folder=folder)
        try:
            yield log
        finally:
            await log.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded_server.Server]:
    """A private server for the whole session."""
    directory: Path = tmp_path_factory.mktemp("server")
    running = embedded_server.start(directory)
    yield running
    running.stop(grace_s=1.0)
    assert append_only_file.check(directory) == "", "what Unicron writes, is known there"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[embedded_server.Server]:
    """A server that the test may kill."""
    running = embedded_server.start(tmp_path / "server")
    yield running
    if (now := embedded_server.adopt(tmp_path / "server")) is not None:
        now.stop(grace_s=1.0)


@pytest.fixture
def redis_log(server: embedded_server.Server) -> Cluster:
    """A fresh cluster on the session's server."""
    return Cluster(server.url)


@pytest.fixture
def silence() -> Iterator[None]:
    """Suppress log messages in simulation tests: thousands of leaders would each log a line."""
    from simulated.seeds import quiet

    quiet()
    yield
    structlog.reset_defaults()


@pytest.fixture
def memory() -> MemoryLog:
    return MemoryLog(time.monotonic)


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Check that no process of the test's agent outlives the test."""
    yield
    assert linux.kill_marked(f"UNICRON_PROCESS={tmp_path}".encode()) == []


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with the objects of `bucket://`, for this process and those that it starts."""
    import object_store

    folder = tmp_path / "bucket"
    folder.mkdir()
    monkeypatch.setenv(object_store.BUCKET, str(folder))
    door = object_store.Door()
    monkeypatch.setenv(object_store.DOOR, str(door.port))
    object_store.Bucket.clear_instance_cache()
    yield folder
    door.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts a file system of a type and size in memory, and returns its folder."""
    made: list[Path] = []

    def mount(kind: str, size: str) -> Path:
        folder = tmp_path / f"disk-{len(made)}"
        folder.mkdir()
        words = ["mount", "-t", kind, "-o", f"size={size}", kind, str(folder)]
        try:
            subprocess.run(words, check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no file system can be mounted here")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)

"""Fixtures that drive real ranks, and the undisturbed twins that tests compare them with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from rank_driver import Driver, small_spec
from rank_twin import Twin


@pytest.fixture
def closed() -> Iterator[Callable[[Driver], Driver]]:
    """Returns the driver that it is given, and closes it at the end of the test."""
    with ExitStack() as stack:
        yield lambda driver: stack.enter_context(closing(driver))


@pytest.fixture
def drive(
    tmp_path: Path, nursery: Nursery, closed: Callable[[Driver], Driver]
) -> Callable[..., Driver]:
    """Factory of drivers whose ranks are forked: `drive(dropout=0.1, iterations=20)`."""

    def make(**changes: Any) -> Driver:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        output = changes.pop("output", folder / "out")
        return closed(Driver(small_spec(output, **changes), folder, nursery))

    return make


@pytest.fixture
def alone() -> Iterator[Any]:
    """The process groups of a world of one process, which computes with one thread: a rank's
    default, on which the bits depend."""
    import torch
    import torch.distributed as dist
    from unicron.events.spec.model import Axes
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.dependencies import private_megatron
    from unicron.workers.training.model import cpu_device

    torch.set_num_threads(1)
    cpu_device.prepare_device()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield process_groups.build(Axes(), 60)
    private_megatron.clear_globals()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Forks ranks from a zygote, in a tenth of the time that an exec takes."""
    made = Nursery(tmp_path_factory.mktemp("nursery") / "zygote.log")
    yield made
    made.close()


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Callable[..., Twin]:
    """`twin(dropout, **changes)`: the undisturbed run of `small_spec`, trained once per variant."""
    made: dict[str, Twin] = {}

    def of(dropout: float = 0.0, **changes: Any) -> Twin:
        key = json.dumps({**changes, "dropout": dropout}, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("twin")
            spec = small_spec(folder / "out", dropout=dropout, **changes)
            made[key] = Twin(spec, folder, nursery)
        return made[key]

    return of

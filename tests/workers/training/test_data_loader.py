"""A DataLoader as the data of a custom loop: its own order, its workers, and a killed rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import fork
from loop_driver import changed_example, drive_loop
from nursery import Nursery
from rank_driver import Driver
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from unicron.events.errors import UsageError
from unicron.events.spec.model import Axes
from unicron.workers.training.adopt.data_loader import LoaderBatches

ITERATIONS, MICRO_BATCHES, STRUCK = 8, 6, 6
"""48 batches: more than an epoch of the example, of 37. The second one begins in iteration 6."""
WORKERS: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
SAMPLES, ROWS, SEED, BAD = 23, 2, 1234, 20
READ_S_MAX = 30.0


class Drawn(Dataset[Any]):
    """Sample i: i, a random number, when it was read and by which process."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        drawn = torch.randint(2**40, ()).item()
        return torch.tensor([index, drawn, time.monotonic(), os.getpid()], dtype=torch.float64)


class Bad(Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 2 * BAD:
            raise KeyError("no such text")
        return torch.tensor([index])


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Long(Sequence[list[int]]):
    """A batch sampler of more batches than fit in memory."""

    def __len__(self) -> int:
        return 10**15

    def __getitem__(self, number: Any) -> Any:
        return [number % SAMPLES, 0]


def loader(kind: str, **options: Any) -> DataLoader[Any]:
    data = Drawn()
    made = torch.Generator().manual_seed(5)
    if kind == "DistributedSampler":
        options["sampler"] = DistributedSampler(data, num_replicas=1, rank=0, seed=5)
    elif kind == "RandomSampler":
        options["sampler"] = RandomSampler(data, generator=made)
    else:
        options |= {"shuffle": True, "generator": made}
    return DataLoader(data, batch_size=ROWS, **options)


def batches(kind: str, **options: Any) -> LoaderBatches:
    return LoaderBatches(loader(kind, **options), MICRO_BATCHES, ITERATIONS, SEED)


def indices(batch: Any) -> list[float]:
    return [float(row[0]) for row in batch]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("shuffle", {}),
        ("shuffle", WORKERS),
        ("shuffle", {"num_workers": 1}),
        ("RandomSampler", WORKERS),
        ("DistributedSampler", WORKERS),
    ],
)
def test_the_order_is_that_of_a_loop_over_its_epochs(kind: str, options: dict[str, Any]) -> None:
    stock, expected = loader(kind, **options), []
    for epoch in range(5):
        if isinstance(stock.sampler, DistributedSampler):
            stock.sampler.set_epoch(epoch)
        expected += [indices(batch) for batch in stock]
    num = ITERATIONS * MICRO_BATCHES
    assert len(expected) > num
    sample = batches(kind, **options)
    assert [indices(sample(*divmod(number, MICRO_BATCHES))) for number in range(num)] == (
        expected[:num]
    )


@pytest.mark.parametrize("options", [{}, WORKERS], ids=str)
@pytest.mark.parametrize("kind", ["shuffle", "DistributedSampler"])
def test_a_batch_is_equal_whoever_asks_for_it_and_how_often(
    kind: str, options: dict[str, Any]
) -> None:
    """After faults: another share, some micro-batches again, back over the begin of an epoch. The
    random draws of the dataset belong to the batch."""
    alone, shared = (batches(kind, **options) for _ in range(2))
    expected = {
        (iteration, item): alone(iteration, item)[:, :2]
        for iteration in range(ITERATIONS)
        for item in range(MICRO_BATCHES)
    }
    asked = [
        *of(range(4), [0, 2, 4]),
        (4, 0),
        (4, 2),
        *of([4], [1, 2, 3]),
        *of([5, 6], [0, 1, 2, 3, 4, 5]),
        *of([7, 0, 1, 2], [1, 4]),
    ]
    before = torch.get_rng_state()
    for at in asked:
        assert shared(*at)[:, :2].tolist() == expected[at].tolist(), at
    assert torch.equal(torch.get_rng_state(), before)


def of(iterations: Sequence[int], share: Sequence[int]) -> list[tuple[int, int]]:
    return [(iteration, item) for iteration in iterations for item in share]


def test_the_workers_read_what_comes_next_in_this_process() -> None:
    sample = batches("shuffle", **WORKERS)
    for at in of([0, 1], [1, 3, 5]):
        assert os.getpid() not in sample(*at)[:, 3].tolist()
    last_s = time.monotonic() + READ_S_MAX
    for at in of([2, 3], [1, 3, 5]):
        asked_s = time.monotonic()
        while not sample(*at)[:, 2].max() < asked_s:  # else: it was read after it was asked for
            assert time.monotonic() < last_s, f"{at} is not read ahead"
            at = (at[0] + 1, at[1])
            time.sleep(0.1)
            asked_s = time.monotonic()


@pytest.mark.parametrize("options", [{}, WORKERS], ids=str)
def test_a_batch_sampler_that_is_a_sequence_is_not_listed(options: dict[str, Any]) -> None:
    sample = LoaderBatches(DataLoader(Drawn(), batch_sampler=Long(), **options), 10**9, 10**6, SEED)
    assert indices(sample(10**5, 17)) == [(10**14 + 17) % SAMPLES, 0.0]


@pytest.mark.parametrize("options", [{}, WORKERS], ids=str)
def test_a_batch_that_cannot_be_read_is_an_error_only_where_it_is_asked_for(
    options: dict[str, Any],
) -> None:
    sample = LoaderBatches(
        DataLoader(Bad(), batch_size=ROWS, **options), MICRO_BATCHES, ITERATIONS, SEED
    )
    iteration, item = divmod(BAD, MICRO_BATCHES)
    for at in [*of(range(iteration), [item, 4]), (iteration, 1), (iteration, 4)]:
        assert indices(sample(*at))[0] == ROWS * (at[0] * MICRO_BATCHES + at[1])
    with pytest.raises(KeyError, match="no such text"):
        sample(iteration, item)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            lambda: DataLoader(Streamed(), batch_size=2),
            "has an IterableDataset: its batches have no",
        ),
        (
            lambda: DataLoader(Drawn(), batch_size=None),
            "has no batch_size: its batches have no number",
        ),
        (lambda: DataLoader(Drawn(), batch_size=99, drop_last=True), "has no batch"),
        (
            lambda: DataLoader(
                Drawn(), sampler=DistributedSampler(Drawn(), num_replicas=2, rank=0)
            ),
            "deals to 2 replicas",
        ),
    ],
)
def test_a_loader_whose_batches_have_no_number_is_refused(made: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        LoaderBatches(made(), MICRO_BATCHES, ITERATIONS, SEED)


# --- the example ---
DISTRIBUTED = [
    (
        "RandomSampler(Runs(), generator=torch.Generator().manual_seed(7))",
        "DistributedSampler(Runs(), num_replicas=1, rank=0, seed=7)",
    ),
    ("RandomSampler\n", "DistributedSampler\n"),
]


def losses(text: str) -> dict[int, float]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["iteration"]: line["loss"] for line in lines}


def words(num_workers: int) -> list[str]:
    return [
        "--iterations",
        str(ITERATIONS),
        "--micro-batches",
        str(MICRO_BATCHES),
        "--workers",
        str(num_workers),
    ]


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return changed_example(tmp_path, request.param)


@pytest.fixture
def driver(tmp_path: Path, nursery: Nursery, script: Path) -> Iterator[Driver]:
    made = drive_loop(
        tmp_path,
        nursery,
        ["--workers", "2"],
        iterations=ITERATIONS,
        micro_batches=MICRO_BATCHES,
        script=script,
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    "script",
    [[], pytest.param(DISTRIBUTED, marks=pytest.mark.thorough)],
    indirect=True,
    ids=["random", "distributed"],
)
def test_a_killed_rank_changes_no_loss(script: Path, nursery: Nursery, driver: Driver) -> None:
    ((code, output),) = fork(nursery, script, words(0), 1)
    assert code == 0, output
    alone = losses(output)
    assert list(alone) == list(range(ITERATIONS)), output

    driver.start(0, 1, 2)
    driver.hold(1, "backward", STRUCK)
    driver.form([0, 1, 2], axes=Axes(dp=3))
    driver.held(1, STRUCK)
    driver.kill(1)
    driver.quiesce([0, 2], "now")
    driver.form([0, 2], axes=Axes(dp=2))
    driver.finish([0, 2])
    found = driver.losses()
    assert list(found) == list(alone)
    assert [*found.values()] == pytest.approx([*alone.values()], rel=1e-5)


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            "int('17x')",
            "`sample` raised ValueError: invalid literal for int() with base 10: '17x' in ",
        ),
        ("self.files[index]", "`sample` raised AttributeError: 'Runs' object has no attribute "),
        ("(start,)[1]", "`sample` raised IndexError: tuple index out of range in "),
    ],
)
def test_an_error_of_a_dataset_in_a_worker_is_one_line(
    tmp_path: Path, nursery: Nursery, raised: str, line: str
) -> None:
    start = "        start = torch.randint(VOCABULARY, ())\n"
    script = changed_example(
        tmp_path, [(start, f"{start}        if index == 33:\n            {raised}\n")]
    )
    ((code, output),) = fork(nursery, script, words(2), 1)
    assert code == 2, output
    assert any(one.startswith(line) for one in output.splitlines()), output

"""A torch DataLoader as the data of a custom loop: its batches by their number.

A DataLoader gives its batches in one order. After a fault a process needs batches of others, and
some again. Here its sampler still decides the order, epoch after epoch, as in a loop over the
DataLoader in one process. But its workers read the batches by number: those of the micro-batches
that this process is expected to run next.
"""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ....events.errors import UsageError
from ..dependencies import private_torch
from ..model.random_draws import seed_of

OF_THE_DATA = (
    StopIteration,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    NameError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)
"""What a script raises because of the data, in any process. An OSError, for example, may pass."""
_ORDERS_NUM_MAX = 2
"""The epochs whose order is kept: an iteration may have micro-batches of two."""


class _Wanted(NamedTuple):
    """What the workers get: the number of a batch and its samples. None: nothing is expected."""

    number: int | None
    indices: Sequence[Any] = ()


class _Failed(NamedTuple):
    """What a batch is if it could not be read. torch would raise a bare ExceptionWrapper."""

    error: Any


class LoaderBatches:
    """`sample` of `adopt`: micro-batch m of iteration i is batch `i * micro_batches + m` of the
    DataLoader, counted over its epochs.

    The generators of torch, Python and numpy are seeded for each batch of the dataset and for each
    epoch of the sampler, so a random augmentation is equal in every process. The workers are forked
    here, before there are connections to other ranks that they would keep open. Raises UsageError
    if the DataLoader has no random access.
    """

    def __init__(
        self, loader: DataLoader[Any], micro_batches: int, iterations: int, seed: int
    ) -> None:
        self._micro_batches, self._iterations = micro_batches, iterations
        self._order = _Order(loader, seed)
        self._is_pinned = bool(loader.pin_memory) and torch.cuda.is_available()
        self._sent: deque[int | None] = deque()
        """The numbers that the workers have got, in the order of their results."""
        self._expected: Iterator[int] = iter(())
        self._at = -1
        self._share: list[int] = []
        """This process's micro-batches of iteration `_at`, so far."""
        self._last_share: list[int] = []
        with _seeded(seed):
            self._results: Iterator[Any] = iter(
                DataLoader(
                    _Reader(loader, seed),
                    batch_size=None,
                    sampler=iter(self._wanted, None),
                    collate_fn=_unchanged,
                    num_workers=loader.num_workers,
                    timeout=loader.timeout,
                    worker_init_fn=loader.worker_init_fn,
                    prefetch_factor=loader.prefetch_factor,
                    multiprocessing_context=loader.multiprocessing_context,
                )
            )

    def __call__(self, iteration: int, micro_batch: int) -> Any:
        """The batch. Raises what the dataset raises for it, and RuntimeError if a worker died."""
        number = iteration * self._micro_batches + micro_batch
        if iteration != self._at:
            self._at, self._share, self._last_share = iteration, [], self._share
        self._share.append(micro_batch)
        if number not in self._sent:
            self._expected = self._from(iteration, micro_batch)
        while True:
            result = next(self._results)
            if self._sent.popleft() == number:
                break  # others were expected before a fault, and are not needed
        if isinstance(result, _Failed):
            result.error.reraise()
        return private_torch.pinned(result) if self._is_pinned else result

    def _from(self, iteration: int, micro_batch: int) -> Iterator[int]:
        """This batch, then those that this process needs if it keeps its share of an iteration."""
        yield iteration * self._micro_batches + micro_batch
        share = sorted(set(self._last_share))
        if micro_batch not in share:
            return
        for at in range(iteration, self._iterations):
            yield from (
                at * self._micro_batches + item
                for item in share
                if at > iteration or item > micro_batch
            )

    def _wanted(self) -> _Wanted:
        number = next(self._expected, None)
        self._sent.append(number)
        return _Wanted(number, () if number is None else self._order.indices(number))


class _Order:
    """The order of a DataLoader: what its batch sampler yields, epoch after epoch. One that is a
    Sequence is indexed instead: a long order need not be in memory."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        sampler: Any = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset) or sampler is None:
            what = "has an IterableDataset" if sampler is not None else "has no batch_size"
            raise UsageError(
                f"adopt: the DataLoader of sample {what}: its batches have no number",
                "give a dataset with __getitem__ and a batch_size, or a function "
                "sample(iteration, micro_batch)",
            )
        self._batches, self._seed = sampler, seed
        inner: Any = getattr(sampler, "sampler", None)
        for one in (sampler, inner):
            if isinstance(one, DistributedSampler) and one.num_replicas != 1:
                raise UsageError(
                    f"adopt: the DistributedSampler of sample deals to {one.num_replicas} replicas",
                    "give it num_replicas=1, rank=0: Unicron deals the micro-batches",
                )
        self._set_epochs = [one.set_epoch for one in (sampler, inner) if hasattr(one, "set_epoch")]
        found = [getattr(one, "generator", None) for one in (loader, sampler, inner)]
        self._generators: list[torch.Generator] = [
            one for one in dict.fromkeys(found) if one is not None
        ]
        self._first = [one.get_state() for one in self._generators]
        self._draws_once = loader.persistent_workers
        self._loader_generator = loader.generator
        self._length = len(sampler)
        if not self._length:
            raise UsageError(
                "adopt: the DataLoader of sample has no batch",
                "give it at least one; drop_last drops a shorter one",
            )
        self._orders: dict[int, Sequence[Any]] = {}
        self._next_epoch = 0

    def indices(self, number: int) -> Any:
        epoch, place = divmod(number, self._length)
        if epoch not in self._orders:
            if epoch < self._next_epoch:  # the task has gone back
                self._next_epoch = 0
                for generator, state in zip(self._generators, self._first, strict=True):
                    generator.set_state(state)
            if not self._generators:
                self._next_epoch = epoch
            while self._next_epoch <= epoch:
                self._orders[self._next_epoch] = self._drawn(self._next_epoch)
                self._next_epoch += 1
            for old in list(self._orders)[:-_ORDERS_NUM_MAX]:
                del self._orders[old]
        return self._orders[epoch][place]

    def _drawn(self, epoch: int) -> Sequence[Any]:
        self._orders.pop(epoch, None)
        for set_epoch in self._set_epochs:
            set_epoch(epoch)
        with _seeded(seed_of(self._seed, 7, epoch)):
            if self._loader_generator is not None and not (epoch and self._draws_once):
                # An iterator of the DataLoader draws a seed for its workers first.
                torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
            order = self._batches if isinstance(self._batches, Sequence) else list(self._batches)
        if len(order) != self._length:
            raise UsageError(
                f"the sampler of the DataLoader has {len(order)} batches in epoch "
                f"{epoch}, and its length is {self._length}",
                "correct its __len__, or yield as many in each epoch",
            )
        return order


class _Reader(Dataset[Any]):
    """Reads one batch, in a worker if there are any."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._dataset, self._seed = loader.dataset, seed
        self._collate: Callable[[Any], Any] = loader.collate_fn

    def __getitem__(self, wanted: _Wanted) -> Any:
        number, indices = wanted
        if number is None:
            return None
        try:
            with _seeded(seed_of(self._seed, 8, number)):
                dataset: Any = self._dataset
                many = getattr(dataset, "__getitems__", None)
                return self._collate(many(indices) if many else [dataset[i] for i in indices])
        except (*OF_THE_DATA, OSError):  # raised where the batch is asked for, if it is
            return _Failed(private_torch.kept_exception("in the DataLoader of `sample`"))


def _unchanged(result: Any) -> Any:
    return result


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Within this context the generators of torch (on the CPU), Python and numpy are seeded."""
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpy.random.set_state(kept[2])

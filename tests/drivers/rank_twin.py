"""The reference run of a small task, and the tolerance for comparisons with it: none if the task's
sums are exact."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from nursery import PATCH, Nursery
from reference import NUM_ORDERS, Difference, compare, tolerance
from unicron.events.spec.job import JobSpec

TWIN_S = 300.0
TWINS = """
import json, os, sys
from pathlib import Path
from unicron.events.spec.job import parse
from unicron.workers.host import linux
sys.path.insert(0, drivers)
from reference import orders, train_undisturbed
spec = parse(json.loads(spec))
parent, failed = os.getpid(), 0
for number, order in enumerate(orders((spec.train or spec.loop).num_micro_batches, num_orders)):
    if number >= 3:
        failed |= os.wait()[1]
    if os.fork():
        continue
    linux.die_with(parent)
    if spec.train:
        train_undisturbed(spec.train, Path(folder) / str(number), order=order)
    else:
        from loop_twin import train_stock
        train_stock(spec, Path(folder) / str(number), order)
    sys.exit()
for _ in range(min(num_orders, 3)):
    failed |= os.wait()[1]
sys.exit(bool(failed))
"""
"""Trains `spec` into `folder` in `num_orders` summation orders, three at once; not a rank."""


class Reference:
    """The final state of an undisturbed run, for comparisons. `noise`: the gaps that summing in
    another order makes; with exact sums none is allowed."""

    names = ("loss_rel", "param_rel")

    def __init__(self, path: Path, *, is_exact: bool) -> None:
        self.path, self.is_exact = path, is_exact
        self.noise = [0.0 for _ in self.names]

    def difference(self, path: Path) -> Difference:
        return compare(path, self.path)

    def is_equal(self, path: Path) -> bool:
        """True if losses and parameters equal the reference run's, within the noise."""
        found = self.difference(path)
        print(f"difference: {found}")
        return self.allows(found)

    def allows(self, found: Difference) -> bool:
        if self.is_exact:
            return not (found.loss_rel or found.param_rel or found.optimizer_rel)
        return all(
            getattr(found, name) <= tolerance([noise])
            for name, noise in zip(self.names, self.noise, strict=True)
        )


class Twin(Reference):
    """The reference run in one process, and the noise of summing in another order.

    A task with exact sums has none. Its reference run is trained in two orders whatever
    `num_orders` is, and these must be equal.
    """

    def __init__(
        self,
        spec: JobSpec,
        folder: Path,
        nursery: Nursery,
        limit_s: float = TWIN_S,
        num_orders: int = NUM_ORDERS,
    ) -> None:
        super().__init__(
            folder / "0" / "final",
            is_exact=(spec.train is not None and spec.train.reproducible != "rounding"),
        )
        num_orders = 2 if self.is_exact else num_orders
        asked = (
            f"spec, folder = {msgspec.json.encode(spec)!r}, {str(folder)!r}\n"
            f"drivers, num_orders = {str(Path(__file__).parent)!r}, {num_orders}{TWINS}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log"
        with log.open("wb") as output, open(os.devnull, "rb") as nothing:
            trains = nursery.fork(
                {**os.environ, "OMP_NUM_THREADS": "1", "UNICRON_RANK": "twin", PATCH: asked},
                output.fileno(),
                nothing.fileno(),
            )
        try:
            assert trains.wait(limit_s) == 0, log.read_text()
        finally:
            trains.kill()
        noises = [
            self.difference(folder / str(number) / "final") for number in range(1, num_orders)
        ]
        assert not self.is_exact or all(map(self.allows, noises)), noises
        self.noise = [max(getattr(noise, name) for noise in noises) for name in self.names]
        print(f"noise of reordering: {dict(zip(self.names, self.noise, strict=True))}")

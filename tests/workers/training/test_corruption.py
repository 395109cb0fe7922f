"""Digests of the state, and silent data corruption: a flipped bit is found and healed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import reference
import torch
from rank_driver import Drive, Driver
from unicron.events.records import reports as r
from unicron.events.spec.model import Axes
from unicron.workers.training.step.checks import Checks

CHECKED: dict[str, Any] = {
    "iterations": 7,
    "reproducible": "bitwise",
    "digest_every": 2,
    "model": {"num_layers": 2, "hidden": 32, "num_heads": 4, "sequence": 32},
}
DUE = [2, 4, 6, 7]
"""The iterations with a digest: every second one, and the end."""
STRUCK = 4
FLIPS = """
import torch
from unicron.workers.training.model import exact_sum
from unicron.workers.training.step import iteration, passes as running
class Flip:
    left = {times}
def flip(tensor):
    if Flip.left:
        Flip.left -= 1
        kinds = {{4: torch.int32, 8: torch.int64}}
        tensor.reshape(-1)[:1].view(kinds[tensor.element_size()]).bitwise_xor_(1 << 20)
def shard(trainee, text):
    return next(tensor for shard, tensor in trainee.shards.items() if text in shard.key)
right_run, right_pass, right_add = (
    iteration.Iteration._run, running.PassRunner.run, exact_sum.ExactSum.add)
{body}
"""
BEFORE_ITS_PASSES = """
def passes(self, todo, **options):
    if self.part.state.step_version == {at} and not options:
        flip({what})
    return right_pass(self, todo, **options)
running.PassRunner.run = passes
"""
AFTER_ITS_PASSES = """
def passes(self, todo, **options):
    found = right_pass(self, todo, **options)
    if self.part.state.step_version == {at} and not options:
        flip({what})
    return found
running.PassRunner.run = passes
"""
IN_ITS_PASSES = """
def run(self):
    Flip.on = self.step_version == {at}
    return right_run(self)
def add(self, index, gradient):
    if Flip.on and index == 3:
        flip(gradient)
    right_add(self, index, gradient)
iteration.Iteration._run, exact_sum.ExactSum.add = run, add
"""
PARAMETER, MOMENT = (
    f"shard(self.part.engine.trainee, {text!r})"
    for text in ("model.decoder.layers.", "optimizer.exp_avg_sq.decoder.layers.")
)
SUM = "self.part.engine.exact._views[3]"


class Case(NamedTuple):
    """A bit of rank 1 flips: when, in iteration `at`, where, and how often. `why`: what its report
    says; "": nothing is wrong in the end."""

    body: str
    what: str
    why: str
    at: int = STRUCK
    times: int = 1

    @property
    def patch(self) -> str:
        return FLIPS.format(times=self.times, body=self.body.format(at=self.at, what=self.what))


CHANGED, OTHER = "changed in memory, without a step", "differ from other replicas'"
CASES = {
    "parameter": Case(BEFORE_ITS_PASSES, PARAMETER, CHANGED),
    "moment": Case(AFTER_ITS_PASSES, MOMENT, CHANGED),
    "moment, long before": Case(AFTER_ITS_PASSES, MOMENT, OTHER, at=STRUCK - 1),
    "sum of gradients": Case(AFTER_ITS_PASSES, SUM, "the sum of its gradients changed"),
    "gradient, always": Case(IN_ITS_PASSES, "", "another gradient of a micro-batch", times=99),
    "gradient, once": Case(IN_ITS_PASSES, "", ""),
}


def digests(driver: Driver) -> dict[int, str]:
    return {
        at: digest for told in driver.told(r.TaskProgressed) for at, digest in told.digests.items()
    }


def result(driver: Driver) -> tuple[dict[int, str], dict[str, Any]]:
    return digests(driver), reference.read(driver.final_checkpoint())


def start(driver: Driver, axes: Axes, patch: str = "") -> list[int]:
    ranks = list(range(axes.dp * axes.pp * axes.tp))
    driver.patch = patch
    driver.launch(1, axes=axes)
    driver.patch = ""
    driver.launch(*(rank for rank in ranks if rank != 1), axes=axes)
    for rank in ranks:
        driver.processes[rank].ready = driver.wait(r.RankReady, rank, limit_s=90)
    driver.form(ranks, axes=axes)
    return ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Any) -> Any:
    from rank_driver import small_spec

    folder = tmp_path_factory.mktemp("undisturbed")
    driver = Driver(small_spec(folder / "out", **CHECKED), folder, nursery)
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    found = result(driver)
    driver.close()
    return found


def is_equal(one: Any, other: Any) -> bool:
    assert one[0] == other[0], "digests"
    return (
        all(
            torch.equal(value, other[1][name])
            for name, value in one[1].items()
            if isinstance(value, torch.Tensor)
        )
        and one[1].keys() == other[1].keys()
    )


def healed(driver: Driver, axes: Axes, case: Case) -> Any:
    ranks = start(driver, axes, case.patch)
    if case.why:
        error = driver.wait(r.RankErrored, 1)
        assert case.why in error.text
        driver.processes[1].popen.wait(20)
        others = [rank for rank in ranks if rank != 1]
        driver.left_by_themselves(others)
        driver.start(1, attempt=2, axes=axes)
        reports = driver.form(ranks, axes=axes)
        assert reports[1].origin == "peer"
    for rank in ranks:  # `finish` would see the report of the one that ended
        driver.wait(r.RankFinished, rank)
        assert driver.processes[rank].popen.wait(20) == 0
    return result(driver)


QUICK = ("parameter", "gradient, always")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES],
)
def test_a_flipped_bit_is_found_and_healed(drive: Drive, undisturbed: Any, name: str) -> None:
    assert list(undisturbed[0]) == DUE
    driver = drive(**CHECKED)
    assert is_equal(healed(driver, Axes(dp=3), CASES[name]), undisturbed)
    if name.startswith("gradient"):
        assert "the iteration is done again" in (driver.folder / "0-1.log").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["parameter", "sum of gradients"])
def test_of_two_replicas_the_one_that_differs_from_itself_is_wrong(
    drive: Drive, undisturbed: Any, name: str
) -> None:
    assert is_equal(healed(drive(**CHECKED), Axes(dp=2), CASES[name]), undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("parameter", "whole"), ("moment", "mirrored"), ("gradient, once", "whole")],
)
def test_a_flipped_bit_in_a_pipeline(
    drive: Drive, undisturbed: Any, name: str, optimizer: str
) -> None:
    """Rank 1 has a stage of one of the two replicas."""
    parallel = {"pipeline": [2], "optimizer": optimizer}
    assert is_equal(
        healed(drive(**CHECKED, parallel=parallel), Axes(pp=2, dp=2), CASES[name]), undisturbed
    )


@pytest.mark.thorough
def test_without_evidence_no_rank_ends(drive: Drive, undisturbed: Any) -> None:
    """Two replicas differ since before the record: either may be wrong."""
    case = CASES["moment, long before"]._replace(why="")
    driver = drive(**CHECKED)
    healed(driver, Axes(dp=2), case)
    assert "nothing tells which is wrong" in (driver.folder / "0-1.log").read_text()
    assert not driver.told(r.RankErrored)


def test_digests_depend_neither_on_layout_nor_on_sharding(drive: Drive, undisturbed: Any) -> None:
    driver = drive(**CHECKED, parallel={"optimizer": "sharded", "pipeline": [2]})
    ranks = start(driver, Axes(pp=2, dp=2))
    driver.finish(ranks)
    assert digests(driver) == undisturbed[0]


def verdict(
    *slots: tuple[int, int, int, int], checks: Checks | None = None
) -> tuple[list[int], bool]:
    wrong, repeats = (checks or Checks(None)).judge(  # type: ignore[arg-type]
        [0, *(value for slot in slots for value in slot)], Axes(dp=len(slots)), has_probes=True
    )
    return sorted(wrong), repeats


def test_verdicts() -> None:
    """By member: whether its state and its sum changed, its state, its probe."""
    well = (0, 0, 5, 7)
    assert verdict(well, well, well) == ([], False)
    assert verdict(well, (1, 0, 6, 8), well) == ([1], False)
    assert verdict(well, (0, 1, 5, 7)) == ([1], False)
    assert verdict(well, well, (0, 0, 6, 7)) == ([2], False)
    assert verdict(well, (0, 0, 6, 7)) == ([], False), "either may be wrong"
    assert verdict(well, (0, 0, 5, 0)) == ([], False), "it has no probe"
    for first, second, wrong in (
        ([7, 8, 7], [7, 9, 7], [1]),
        ([7, 8, 7], [7, 7, 7], []),
        ([7, 8, 7], [7, 7, 8], []),
        ([7, 8], [7, 9], [1]),
        ([7, 8], [7, 8], []),
        ([7, 8], [6, 9], []),
    ):
        checks = Checks(None)  # type: ignore[arg-type]
        assert verdict(*((0, 0, 5, probe) for probe in first), checks=checks) == ([], True)
        assert verdict(*((0, 0, 5, probe) for probe in second), checks=checks) == (wrong, False)

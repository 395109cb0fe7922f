"""Custom loops in layouts: after a fault they continue in another layout with an equal result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import LocalKeeper, named, whole_steps
from loop_driver import changed_example, drive_loop
from nursery import Nursery
from rank_driver import WAIT_S, Driver
from reference import compare
from struck import PP2DP2, TP2DP2, Case, strike
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.spec.model import Axes

ITERATIONS, MICRO_BATCHES, STRUCK, COPIED = 6, 6, 2, 3
EVALUATED = 5
"""The number of iterations after which the example evaluates."""
RELATIVE_MAX = 1e-5
Loops = Callable[..., Driver]


def loop(folder: Path, nursery: Nursery, *words: str, **options: Any) -> Driver:
    """A driver whose ranks run the example."""
    return drive_loop(
        folder,
        nursery,
        ["--losses", str(folder / "losses"), *words],
        iterations=ITERATIONS,
        micro_batches=MICRO_BATCHES,
        **options,
    )


@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Loops) -> Loops:
    """Factory of drivers: `loops("--sharded", pipeline=[2])`. Call it once in a test."""

    def make(*words: str, **options: Any) -> Driver:
        return closed(loop(tmp_path, nursery, *words, **options))

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Driver]:
    """A driver whose only rank trains without a fault."""
    driver = loop(tmp_path_factory.mktemp("undisturbed"), nursery, **ANY)
    try:
        driver.start(0)
        driver.form([0], axes=Axes())
        saved(driver, [0])
        yield driver
    finally:
        driver.close()


def saved(driver: Driver, ranks: list[int]) -> Path:
    """Finish; return the final checkpoint."""
    driver.finish(ranks)
    return driver.final_checkpoint()


def validations(folder: Path) -> dict[int, float]:
    """Validation loss by iteration. Checks that each evaluation is written once."""
    lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    found = [(line["iteration"], line["validation"]) for line in lines if "validation" in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def finish(driver: Driver, ranks: list[int], undisturbed: Driver) -> None:
    gap = compare(saved(driver, ranks), saved(undisturbed, []))
    print(gap)
    assert gap.num_losses == ITERATIONS
    assert gap.loss_rel < RELATIVE_MAX
    assert gap.param_rel < RELATIVE_MAX
    assert validations(driver.folder) == pytest.approx(
        validations(undisturbed.folder), rel=RELATIVE_MAX
    )


ANY = {"tensor": [1, 2], "pipeline": [1, 2, 4]}


@pytest.mark.parametrize(
    "axes",
    [
        TP2DP2,
        pytest.param(PP2DP2, marks=pytest.mark.thorough),
        pytest.param(Axes(tp=2, pp=2), marks=pytest.mark.thorough),
    ],
    ids=lambda axes: f"tp{axes.tp}pp{axes.pp}dp{axes.dp}",
)
def test_an_undisturbed_loop_equals_one_rank(loops: Loops, undisturbed: Driver, axes: Axes) -> None:
    driver = loops(**ANY)
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks)
    driver.form(ranks, axes=axes)
    finish(driver, ranks, undisturbed)


BUILT = (
    "many = axes.chunks > 1",
    'print("built", axes.tp, axes.pp, flush=True)\n    many = axes.chunks > 1',
)
TIED = ("post_process=last", "share_embeddings_and_output_weights=True, post_process=last")


@pytest.mark.parametrize(
    ("parallel", "axes", "built"),
    [
        ({"tensor": [2]}, Axes(tp=2), [[(2, 1)], [(2, 1)]]),
        # The last stage has a tied embedding, which the first stage draws.
        ({"pipeline": [2]}, Axes(pp=2), [[(1, 2)], [(1, 2), (1, 2)]]),
        ({"tensor": [1, 2]}, Axes(), [[(1, 1), (2, 1), (2, 1)]]),
    ],
    ids=["tp2", "pp2", "one rank"],
)
def test_a_rank_of_the_largest_layout_builds_its_own_part_only(
    tmp_path: Path,
    nursery: Nursery,
    parallel: dict[str, Any],
    axes: Axes,
    built: list[list[tuple[int, int]]],
) -> None:
    script = changed_example(tmp_path, [BUILT, TIED])
    with closing(
        drive_loop(tmp_path, nursery, (), iterations=1, micro_batches=2, script=script, **parallel)
    ) as driver:
        ranks = list(range(axes.tp * axes.pp))
        driver.start(*ranks)
        driver.form(ranks, axes=axes)
        driver.finish(ranks)
    for rank, layouts in enumerate(built):
        log = (tmp_path / f"{rank}-1.log").read_text()
        assert [
            tuple(map(int, line.split()[1:]))
            for line in log.splitlines()
            if line.startswith("built")
        ] == layouts


@pytest.mark.thorough
def test_chunks_equal_one_rank(tmp_path: Path, nursery: Nursery) -> None:
    interleaved = {"pipeline": [1, 2], "chunks": 2}
    made: list[Driver] = []
    for axes in (Axes(), Axes(pp=2, chunks=2)):
        folder = tmp_path / f"pp{axes.pp}"
        folder.mkdir()
        with closing(loop(folder, nursery, **interleaved)) as driver:
            ranks = list(range(axes.pp))
            driver.start(*ranks)
            driver.form(ranks, axes=axes)
            saved(driver, ranks)
            made.append(driver)
    finish(made[1], [], made[0])


CASES = {
    "tp2dp2_to_tp2": Case(TP2DP2, 3, "backward", (0, 1), Axes(tp=2)),
    "tp2dp2_to_dp3": Case(TP2DP2, 0, "reduce", (1, 2, 3), Axes(dp=3)),
    "tp2dp2_to_pp2": Case(TP2DP2, 2, "step", (0, 1, 3), Axes(pp=2)),
    "pp2dp2_to_pp2": Case(PP2DP2, 3, "backward", (0, 2), Axes(pp=2)),
    "pp2dp2_to_dp3": Case(PP2DP2, 0, "stage", (1, 2, 3), Axes(dp=3)),
    "pp2dp2_at_the_gate": Case(PP2DP2, 2, "gate", (0, 1, 3), Axes(pp=2)),
    "pp2dp2_in_the_first": Case(PP2DP2, 3, "forward", (0, 1, 2), Axes(tp=2), iteration=0),
    "dp4_to_tp2_beside": Case(Axes(dp=4), 1, "reduce", (0, 2, 3), Axes(tp=2)),
}


QUICK = ("tp2dp2_to_dp3", "pp2dp2_in_the_first")
"""What `make test` runs: test_replicas.py has the other cases with tasks without a custom loop."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name in CASES],
)
def test_training_continues_after_a_lost_rank(loops: Loops, undisturbed: Driver, name: str) -> None:
    case = CASES[name]
    driver = loops(**ANY)
    reports = strike(driver, case)
    assert {one.step_version for one in reports.values()} <= {case.iteration, case.iteration + 1}
    finish(driver, list(case.members), undisturbed)


@pytest.mark.thorough
def test_shards_of_a_loop_move_to_another_layout(loops: Loops, undisturbed: Driver) -> None:
    ranks = [0, 1, 2, 3]
    driver = loops("--sharded", **ANY, optimizer="sharded")
    driver.start(*ranks)
    hold = driver.hold(1, "backward", STRUCK)
    driver.form(ranks, axes=TP2DP2)
    driver.held(1, STRUCK)
    driver.quiesce(ranks, "now", hold)
    reports = driver.form(ranks, axes=Axes(pp=2, dp=2))
    assert {one.step_version for one in reports.values()} == {STRUCK}
    finish(driver, ranks, undisturbed)


DIES_EVALUATING = """
import os, signal, time
from pathlib import Path
from unicron.workers.training.adopt import adoption

def evaluating(*given, evaluate=adoption.evaluate, rank=os.environ["UNICRON_RANK"]):
    if rank != "1":
        Path({folder!r}, "evaluating-" + rank).touch()
        return evaluate(*given)
    last_s = time.monotonic() + 30
    while len(list(Path({folder!r}).glob("evaluating-*"))) < {others} and time.monotonic() < last_s:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

adoption.evaluate = evaluating
"""
"""Rank 1 dies in its evaluation, after `others` other ranks have entered theirs."""


def dies_evaluating(driver: Driver, others: int) -> None:
    driver.patch = DIES_EVALUATING.format(folder=str(driver.folder), others=others) + driver.patch


@pytest.mark.parametrize(
    ("before", "left", "after"),
    [
        (Axes(dp=3), [0, 2], Axes(dp=2)),
        pytest.param(TP2DP2, [2, 3], Axes(tp=2), marks=pytest.mark.thorough),
    ],
    ids=["dp3", "tp2dp2"],
)
def test_an_evaluation_in_which_a_rank_dies_is_repeated(
    loops: Loops, undisturbed: Driver, before: Axes, left: list[int], after: Axes
) -> None:
    driver = loops(**ANY)
    ranks = list(range(before.tp * before.dp))
    dies_evaluating(driver, len(ranks) - 1)
    driver.start(*ranks)
    driver.form(ranks, axes=before)
    driver.processes.pop(1).popen.wait(WAIT_S)
    driver.quiesce([rank for rank in ranks if rank != 1], "now")
    reports = driver.form(left, axes=after)
    assert {one.step_version for one in reports.values()} == {EVALUATED}
    finish(driver, left, undisturbed)


DIES_IN_ITS_TURN = """
import os, signal, time
from pathlib import Path
from unicron.workers.training.adopt import adoption

calls = []

def evaluating(*given, evaluate=adoption.evaluate, rank=int(os.environ["UNICRON_RANK"])):
    calls.append(rank)
    turn = len(calls)
    if turn > 2 or rank != turn:
        Path({folder!r}, f"evaluating-{{turn}}-{{rank}}").touch()
        return evaluate(*given)
    last_s = time.monotonic() + 30
    while len(list(Path({folder!r}).glob(f"evaluating-{{turn}}-*"))) < 4 - turn:
        assert time.monotonic() < last_s
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

adoption.evaluate = evaluating
"""
"""Rank 1 dies in the first evaluation, rank 2 when it is repeated."""


def test_an_evaluation_in_which_two_ranks_die_is_repeated_twice(
    loops: Loops, undisturbed: Driver
) -> None:
    driver = loops(**ANY)
    driver.patch = DIES_IN_ITS_TURN.format(folder=str(driver.folder)) + driver.patch
    driver.start(0, 1, 2, 3)
    driver.form([0, 1, 2, 3], axes=Axes(dp=4))
    driver.processes.pop(1).popen.wait(WAIT_S)
    driver.quiesce([0, 2, 3], "now")
    driver.form([0, 2, 3], axes=Axes(dp=3))
    driver.processes.pop(2).popen.wait(WAIT_S)
    driver.quiesce([0, 3], "now")
    reports = driver.form([0, 3], axes=Axes(dp=2))
    assert {one.step_version for one in reports.values()} == {EVALUATED}
    finish(driver, [0, 3], undisturbed)


def test_an_evaluation_is_not_repeated_on_older_weights(loops: Loops, undisturbed: Driver) -> None:
    """The dead rank's shard of the optimizer is left in a copy only, of an earlier iteration."""
    driver = loops("--sharded", **ANY, optimizer="sharded", copy_every=COPIED)
    driver.keepers = [LocalKeeper("n1")]
    dies_evaluating(driver, 2)
    driver.start(0, 1, 2)
    driver.form([0, 1, 2], axes=Axes(dp=3))
    driver.processes.pop(1).popen.wait(WAIT_S)
    driver.until(lambda: COPIED in whole_steps(driver.keepers), "all have stored their shares")
    copies = (named(driver.keepers, driver.wait(MemoryCheckpointStored, 0)),)
    left = driver.quiesce([0, 2], "now")
    assert {one.step_version for one in left.values()} == {EVALUATED}
    reports = driver.form([0, 2], axes=Axes(dp=2), copies=copies)
    assert {one.step_version for one in reports.values()} == {COPIED}
    finish(driver, [0, 2], undisturbed)
    for rank in (0, 2):
        text = driver.processes[rank].log.read_text()
        assert (
            text.count(
                "evaluation skipped: a member failed during it, and the task is back at "
                f"iteration {COPIED}"
            )
            == 1
        )


@pytest.mark.thorough
def test_a_task_that_goes_back_from_its_end_evaluates_no_more(
    loops: Loops, undisturbed: Driver
) -> None:
    """Rank 1 dies as all save the final state, which is set back to a copy. The others do not come
    back to the script, whose evaluations the new rank would wait in alone."""
    driver = loops("--sharded", **ANY, optimizer="sharded", copy_every=COPIED)
    driver.keepers = [LocalKeeper("n1")]
    driver.start(0, 1, 2)
    hold = driver.hold(1, "save", ITERATIONS)
    driver.form([0, 1, 2], axes=Axes(dp=3))
    driver.held(1, ITERATIONS)
    driver.until(lambda: COPIED in whole_steps(driver.keepers), "all have stored their shares")
    copies = (named(driver.keepers, driver.wait(MemoryCheckpointStored, 0)),)
    driver.kill(1)
    hold.unlink()
    driver.quiesce([0, 2], "now")
    driver.start(1, attempt=2)
    reports = driver.form([0, 1, 2], axes=Axes(dp=3), copies=copies)
    assert {one.step_version for one in reports.values()} == {COPIED}
    gap = compare(saved(driver, [0, 1, 2]), saved(undisturbed, []))
    assert gap.loss_rel < RELATIVE_MAX
    assert gap.param_rel < RELATIVE_MAX


def test_a_rank_that_did_not_reach_an_evaluation_repeats_it_with_the_others(
    loops: Loops, undisturbed: Driver
) -> None:
    driver = loops(**ANY)
    dies_evaluating(driver, 1)
    driver.start(0, 1, 2)
    hold = driver.hold(0, "reduced", EVALUATED - 1)
    driver.form([0, 1, 2], axes=Axes(dp=3))
    driver.processes.pop(1).popen.wait(WAIT_S)
    left = driver.quiesce([0, 2], "now", hold)
    assert [left[rank].step_version for rank in (0, 2)] == [EVALUATED - 1, EVALUATED]
    reports = driver.form([0, 2], axes=Axes(dp=2))
    assert {one.step_version for one in reports.values()} == {EVALUATED}
    finish(driver, [0, 2], undisturbed)

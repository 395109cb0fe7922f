"""What must hold of every cell, read from what the ranks told and from their traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rank_twin import Twin
from unicron.events.reports import CheckpointSaved, TaskProgressed
from unicron.workers.training.reference import read

from .cells import ITERATIONS, STRUCK
from .scenes import Play


def complaints(play: Play, twin: Twin) -> Iterator[str]:
    """Every way in which the run was not the undisturbed one; none when it was."""
    yield from _agreement(play)
    yield from _work(play)
    if play.point.skips:
        yield from _skip(play)
    if "checkpoint_every" in play.point.train:
        yield from _saves(play)
    driver = play.driver
    if sorted(driver.losses()) != list(range(ITERATIONS)):
        yield f"iterations lost: losses of {sorted(driver.losses())}"
    if {told.micro_batches for told in driver.told(TaskProgressed)} != {_num(play)}:
        yield "the batch changed"
    saved = driver.told(CheckpointSaved)[-1]
    if not saved.final:
        yield "no final checkpoint"
    elif not twin.allows(found := twin.difference(final(play))):
        yield f"{found}, noise {twin.noise}"


def final(play: Play) -> Path:
    """Where the final checkpoint lies."""
    train = play.driver.spec.train
    assert train is not None
    return Path(train.output) / play.driver.told(CheckpointSaved)[-1].path


def _num(play: Play) -> int:
    train = play.driver.spec.train
    assert train is not None
    return train.num_micro_batches


def _agreement(play: Play) -> Iterator[str]:
    """Before they went on: one step version, the whole batch in shares, nothing done twice."""
    settled = play.settled
    versions = {told.step_version for told in settled.values()}
    newest = max((claim.step_version for claim in play.claims.values()), default=0)
    if versions != {max(newest, 0)}:
        yield f"settled on steps {versions}, and had {newest}"
    shares = sorted(item for told in settled.values() for item in (*told.kept, *told.todo))
    if shares != list(range(_num(play))):
        yield f"their shares are {shares}"
    for rank, claim in play.claims.items():
        if claim.step_version == newest and settled[rank].kept != claim.micro_batches:
            yield f"rank {rank} held {claim.micro_batches} and kept {settled[rank].kept}"


def _work(play: Play) -> Iterator[str]:
    """Forward calls. What was stepped with the victims, they did a part of; else none counts."""
    (struck,) = {told.step_version for told in play.settled.values()}
    calls = {rank: [(line["iteration"], line["micro_batch"]) for line in play.driver.trace(rank)
                    if line["event"] == "forward"] for rank in (*play.members, *play.victims)}
    for iteration in range(ITERATIONS):
        who = calls if iteration < struck else play.survivors
        done = sorted(item for rank in who for at, item in calls[rank] if at == iteration)
        if done != list(range(_num(play))):
            yield f"iteration {iteration} was made of {done}"
    for rank in play.survivors:
        told = play.finished[rank].forward_calls
        if told != len(calls[rank]):
            yield f"rank {rank} counts {told} forward calls, its trace {len(calls[rank])}"


def _skip(play: Play) -> Iterator[str]:
    """The struck iteration took no step, the last one did."""
    stepped = {line["iteration"] for rank in play.survivors for line in play.driver.trace(rank)
               if line["event"] == "step"}
    if STRUCK in stepped or ITERATIONS - 1 not in stepped:
        yield f"steps were taken in {sorted(stepped)}"


def _saves(play: Play) -> Iterator[str]:
    """Nothing is told of the checkpoint that was struck; the next one that is due is whole."""
    told = {(one.generation, one.step_version): one for one in play.driver.told(CheckpointSaved)}
    now = play.driver.generation
    if set(told) != {(now, 2 * STRUCK), (now, ITERATIONS)}:
        yield f"checkpoints told: {sorted(told)}"
        return
    output = final(play).parent.parent
    for one in told.values():
        step_version = read(output / one.path)["numbers.step_version"]
        if step_version != one.step_version:
            yield f"{one.path} is of step {step_version}"
    if halves := [path.name for path in output.glob("gen-*/*.*")]:
        yield f"half a checkpoint was left: {halves}"

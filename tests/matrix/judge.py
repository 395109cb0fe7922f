"""The conditions that every cell must meet, read from the ranks' reports and traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from matrix.cells import ITERATIONS, STRUCK
from matrix.scenes import Play
from rank_twin import Reference
from reference import read
from unicron.events.records.reports import CheckpointSaved, TaskProgressed
from unicron.events.spec.parallelism import coordinates, replica, shape


def complaints(play: Play, twin: Reference) -> Iterator[str]:
    """Every difference between the run and an undisturbed one."""
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
    """The path of the final checkpoint."""
    return Path(play.driver.work.output) / play.driver.told(CheckpointSaved)[-1].path


def _num(play: Play) -> int:
    return play.driver.work.num_micro_batches


def _agreement(play: Play) -> Iterator[str]:
    """Before the task went on: one step version, and each micro-batch in exactly one share."""
    settled = play.settled
    versions = {told.step_version for told in settled.values()}
    newest = max((claim.step_version for claim in play.claims.values()), default=0)
    wanted = play.copied or {max(newest, 0) + _all_can_step(play, newest)}
    if len(versions) != 1 or not versions <= wanted:
        yield f"settled on steps {versions}, and had {wanted}"
    replicas = [
        [settled[play.members[place]] for place in replica(play.axes, dp)]
        for dp in range(play.axes.dp)
    ]
    for members in replicas:
        if len({(told.kept_micro_batches, told.remaining_micro_batches) for told in members}) != 1:
            yield f"of one replica, and not to do the same: {members}"
    shares = sorted(
        item
        for first, *_ in replicas
        for item in (*first.kept_micro_batches, *first.remaining_micro_batches)
    )
    if shares != list(range(_num(play))):
        yield f"their shares are {shares}"
    for rank, told in settled.items():
        kept = _whole_sum(play, rank, newest) if not play.copied else ()
        if kept is not None and told.kept_micro_batches != kept:
            yield (f"rank {rank} and its replica held {kept} and kept {told.kept_micro_batches}")


def _whole_sum(play: Play, rank: int, newest: int) -> tuple[int, ...] | None:
    """The micro-batches that all of the rank's replica have in their sums; () if a part lacks.

    None: unknown, since the rank had not yet taken the step that others had taken.
    """
    if rank not in play.claims or play.claims[rank].step_version != newest:
        return None
    if _all_can_step(play, newest):
        return ()
    if rank not in play.struck or shape(play.struck_in) != shape(play.axes):
        return ()
    dp = coordinates(play.axes, play.members.index(rank)).dp
    sums = set[tuple[int, ...]]()
    for place in replica(play.axes, dp):
        other, at = play.members[place], coordinates(play.axes, place)
        if other not in play.struck or other not in play.claims:
            return ()
        was = coordinates(play.struck_in, play.struck.index(other))
        claim = play.claims[other]
        sums.add(
            claim.micro_batches
            if (was.tp, was.pp) == (at.tp, at.pp) and claim.step_version == newest
            else ()
        )
    return sums.pop() if len(sums) == 1 else ()


def _all_can_step(play: Play, newest: int) -> bool:
    """Whether no survivor has stepped beyond `newest`, but all members that train on have the
    reduced sum for it, of every part of the model: they then step without the lost ranks."""
    if play.variant.optimizer != "whole" or not play.variant.has_gate or play.variant.is_exact:
        return False
    there = [
        rank
        for rank in play.members
        if rank in play.struck and rank in play.claims and play.claims[rank].step_version == newest
    ]
    entered = {
        rank: {
            line["generation"]
            for line in play.driver.trace(rank)
            if (line["event"], line["iteration"]) == ("gate", newest)
            and line["generation"] < play.driver.generation
        }
        for rank in there
    }
    struck = max((max(each, default=0) for each in entered.values()), default=0)
    parts = {coordinates(play.struck_in, play.struck.index(rank))[:2] for rank in there}
    return (
        all(struck in each for each in entered.values())
        and len(parts) == play.struck_in.tp * play.struck_in.pp
    )


def _work(play: Play) -> Iterator[str]:
    """Forward passes: each step used every micro-batch once, by all ranks of one replica.

    Of the interrupted iteration, only passes after the fault and the kept micro-batches count.
    """
    (struck,) = {told.step_version for told in play.settled.values()}
    now = play.driver.generation
    traces = {
        rank: [line for line in play.driver.trace(rank) if line["event"] == "forward"]
        for rank in {process.rank for process in play.driver.started}
    }
    kept = {item for told in play.settled.values() for item in told.kept_micro_batches}
    for iteration in range(ITERATIONS):
        passes = Counter(
            (line["micro_batch"], line["generation"])
            for lines in traces.values()
            for line in lines
            if line["iteration"] == iteration and (iteration < struck or line["generation"] == now)
        )
        done = sorted([item for item, _ in passes] + (list(kept) if iteration == struck else []))
        if done != list(range(_num(play))):
            yield f"iteration {iteration} was made of {done}"
        for (item, generation), num in passes.items():
            axes = play.layouts[generation]
            if num != axes.tp * axes.pp * axes.chunks:
                yield f"micro-batch {item} of iteration {iteration}: {num} forward passes"
    for rank in play.survivors:
        told = play.finished[rank].forward_calls
        if told != len(traces[rank]):
            yield f"rank {rank} counts {told} forward calls, its trace {len(traces[rank])}"


def _skip(play: Play) -> Iterator[str]:
    """The struck iteration took no step, and the last one did."""
    stepped = {
        line["iteration"]
        for rank in play.survivors
        for line in play.driver.trace(rank)
        if line["event"] == "step"
    }
    if STRUCK in stepped or ITERATIONS - 1 not in stepped:
        yield f"steps were taken in {sorted(stepped)}"


def _saves(play: Play) -> Iterator[str]:
    """The struck checkpoint is not reported, and the next one that is due is complete."""
    told = {(one.generation, one.step_version): one for one in play.driver.told(CheckpointSaved)}
    now = play.driver.generation
    (settled,) = {one.step_version for one in play.settled.values()}
    due = [at for at in (STRUCK, 2 * STRUCK, ITERATIONS) if at > settled]
    if set(told) != {(now, at) for at in due}:
        yield f"checkpoints told: {sorted(told)}"
        return
    output = final(play).parent.parent
    for one in told.values():
        step_version = read(output / one.path)["numbers.step_version"]
        if step_version != one.step_version:
            yield f"{one.path} is of step {step_version}"
    if halves := [path.name for path in output.glob("gen-*/*.*")]:
        yield f"half a checkpoint was left: {halves}"

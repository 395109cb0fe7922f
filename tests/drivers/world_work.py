"""The work of the members of a test's world (worlds.py). Loads Megatron, as a rank does."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace
from unicron.events.spec.job import Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel, num_positions
from unicron.workers.training import rank
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    import host_reads
    import loop_twin
    import reference
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from unicron.workers.training import state_recovery
    from unicron.workers.training.communicators import messages, process_groups
    from unicron.workers.training.communicators.communicators import Communicators
    from unicron.workers.training.communicators.operations import Operations
    from unicron.workers.training.dependencies import private_megatron
    from unicron.workers.training.model import (
        megatron_passes,
        megatron_step,
        text_data,
        training_state,
    )
    from unicron.workers.training.model import trainee as model
    from unicron.workers.training.recovery import settlement, state_shards
    from unicron.workers.training.recovery.regions import cut

rank.ignore_warnings()
LIMIT_S = 60.0
SKIPPED = -1.0
"""Stands for the norm of a gradient that is not finite."""


class Done(NamedTuple):
    """What megatron_passes.run has run, and the sums over it."""

    num_done: int
    loss_sum: float
    num_tokens: float


class Stopped(NamedTuple):
    """A stopped run of micro-batches (`first`, gradients `partial`) and the rest (`total`), beside
    undisturbed runs of the same micro-batches (`alone`) and of all (`whole`)."""

    first: Done
    partial: list[Any]
    total: list[Any]
    alone: tuple[Done, list[Any]]
    whole: tuple[Done, list[Any]]
    passes: list[tuple[str, int]]


def members_by_role(place: int, axes: Axes | None) -> tuple[dict[str, list[int]], int]:
    """By role, the members of its group; and the number of distinct groups."""
    found = process_groups.by_role(process_groups.build(axes, LIMIT_S))
    met: dict[str, list[int]] = {}
    for role, group in found.items():
        seen = [torch.zeros(1) for _ in range(group.size())]
        dist.all_gather(seen, torch.tensor([float(place)]), group=group)
        met[role] = [int(one.item()) for one in seen]
    return met, len({id(group) for group in found.values()})


def message(place: int, build_s: float, sent_after_s: float) -> float:
    """What member 0 receives of member 1 in a group that was built with the timeout `build_s`."""
    process_groups.GROUP_S_MAX = build_s
    group = process_groups.build(Axes(pp=2), LIMIT_S).pp
    messages.wait_up_to(LIMIT_S)
    if place:
        time.sleep(sent_after_s)
    value = torch.tensor(float(place))
    (dist.isend if place else dist.irecv)(value, 1 - place, group=group).wait()
    return value.item()


def roles_of_one_group(place: int, axes: Axes) -> set[tuple[str, ...]]:
    shared: dict[int, list[str]] = {}
    for role, group in process_groups.by_role(process_groups.build(axes, LIMIT_S)).items():
        shared.setdefault(id(group), []).append(role)
    return {tuple(roles) for roles in shared.values()}


def built(place: int, train: Train, axes: Axes) -> dict[str, Any]:
    """The state at a position of the layout, as arrays by global name."""
    trainee = model.build(
        train, torch.device("cpu"), process_groups.build(axes, LIMIT_S), axes, place
    )
    return {
        name: tensor.detach().float().numpy()
        for name, tensor in training_state.tensors(trainee).items()
    }


def differing_parts(place: int, train: Train, layouts: list[Axes]) -> list[str]:
    """Each part of each layout, built without peers: the shards that differ from the whole model of
    the reference run, and the positions whose count of the whole model is wrong."""
    device = torch.device("cpu")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    whole = model.build(replace(train, parallel=Parallel()), device)
    held = {shard.key: (shard, tensor) for shard, tensor in state_shards.list_shards(whole).items()}
    size = model.Size(
        sum(param.numel() for _, param in whole.named_parameters()),
        sum(tensor.nbytes for _, tensor in held.values()),
    )
    private_megatron.clear_globals()
    dist.destroy_process_group()
    communicators = Communicators("127.0.0.1", device)
    wrong: list[str] = []
    for axes in layouts:
        for at in range(num_positions(axes)):
            with communicators.without_peers(axes, at) as roots:
                made = state_recovery.with_shards(
                    model.build(train, device, communicators.groups, axes, at)
                )
                counted = (
                    model.whole_size(train, communicators.alone()),
                    state_shards.whole_size(made.shards, train.model.num_layers),
                )
                roots += made.roots
            for shard, tensor in made.shards.items():
                other, there = held[shard.key]
                if not cut(there, other.region, shard.region).equal(tensor):
                    wrong.append(f"{axes} {at} {shard}")
            # The second count leaves out the modules that only another stage has.
            if counted[0] != size or (axes.pp == 1 and counted[1] != size):
                wrong.append(f"{axes} {at}: {counted}, not {size}")
    return wrong


def trained(
    place: int,
    train: Train,
    axes: Axes,
    num_iterations: int,
    *,
    on_groups: Callable[[Any], None] = lambda groups: None,
    on_iteration: Callable[[int], None] = lambda iteration: None,
    on_note: Callable[[str], None] = lambda event: None,
) -> tuple[list[float], list[float], dict[str, Any], list[tuple[str, int]]]:
    """Train without faults: losses, norms, the final state at this position, the passes."""
    found = process_groups.build(axes, LIMIT_S)
    assert dist.get_world_size() == num_positions(axes)
    on_groups(found)
    trainee = model.build(train, torch.device("cpu"), found, axes, place)
    words = text_data.load(train.data, train.model.sequence)
    losses: list[float] = []
    norms: list[float] = []
    noted: list[tuple[str, int]] = []

    def note(event: str, item: int) -> None:
        noted.append((event, item))
        on_note(event)

    for iteration in range(num_iterations):
        on_iteration(iteration)
        trainee.clear()
        done = megatron_passes.run(
            trainee,
            Operations(found),
            iteration,
            settlement.assign_micro_batches(train.num_micro_batches, axes.dp, trainee.at.dp),
            lambda item, iteration=iteration: words.sample(
                train.seed,
                iteration,
                item,
                rows=train.batch.micro,
                sequence=train.model.sequence,
            ),
            note,
        )
        told = torch.zeros(2, dtype=torch.float64)
        done.losses.write(told)
        dist.all_reduce(told)
        finalize_model_grads(trainee.ddps, None, pg_collection=found)
        barrier = torch.tensor(
            [megatron_step.norm_square(trainee), megatron_step.has_inf(trainee)],
            dtype=torch.float64,
        )
        dist.all_reduce(barrier)
        divisor = trainee.divisor(told[1].item())
        scale = trainee.optimizer.get_loss_scale().item()
        stepped = megatron_step.step(
            trainee,
            told[1].item(),
            lambda event: None,
            norm_square=barrier[0].item(),
            found_inf=barrier[1].item() > 0,
        )
        if not trainee.is_gathered:
            megatron_step.gather(trainee)
        losses.append(told[0].item() / divisor)
        norms.append(
            math.sqrt(barrier[0].item()) / divisor / scale if stepped is not None else SKIPPED
        )
    end = {
        name: tensor.detach().float().numpy()
        for name, tensor in training_state.tensors(trainee).items()
    }
    return losses, norms, end, noted


def stock_reads(
    place: int, script: str, argv: list[str], axes: Axes, num_iterations: int
) -> list[host_reads.Places]:
    """The host reads of each iteration of a loop script's model in Megatron's own loop."""
    functions = loop_twin.given_by([script, *argv])
    reads, found = host_reads.Reads(), list[host_reads.Places]()
    with reads.here():
        for _ in host_reads.stock_iterations(
            functions, process_groups.build(axes, LIMIT_S), axes, place, num_iterations
        ):
            found.append(reads.take())
    return found


def stopped(place: int, train: Train, axes: Axes, num_items: int, num_groups: int) -> Stopped:
    """Run micro-batches, stopped before a group; then the rest. And all of them at once."""
    found = process_groups.build(axes, LIMIT_S)
    trainee = model.build(train, torch.device("cpu"), found, axes, place)
    words = text_data.load(train.data, train.model.sequence)
    noted: list[tuple[str, int]] = []
    num_asked = 0

    def must_stop() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > num_groups

    def run(items: list[int], must_stop: Callable[[], bool] | None) -> Done:
        done = megatron_passes.run(
            trainee,
            Operations(found),
            0,
            items,
            lambda item: words.sample(
                train.seed, 0, item, rows=train.batch.micro, sequence=train.model.sequence
            ),
            lambda event, item: noted.append((event, item)),
            must_stop=must_stop,
        )
        sums = torch.zeros(2, dtype=torch.float64)
        done.losses.write(sums)
        return Done(done.num_done, *sums.tolist())

    def sums() -> list[Any]:
        return [gradient.clone().numpy() for gradient in trainee.gradients]

    def run_from_zero(items: list[int]) -> tuple[Done, list[Any]]:
        trainee.clear()
        return run(items, None), sums()

    items = list(range(num_items))
    trainee.clear()
    first = run(items, must_stop)
    passes = [(event, item) for event, item in noted if event != "stage"]
    partial = sums()
    run(items[first.num_done :], lambda: False)
    total = sums()
    return Stopped(
        first, partial, total, run_from_zero(items[: first.num_done]), run_from_zero(items), passes
    )


def twin(
    place: int, train: Train, num_iterations: int
) -> tuple[list[float], list[float], dict[str, Any]]:
    """The same in one process, as a plain Megatron loop; the norms are those for clipping."""
    dist.destroy_process_group()
    norms: list[float] = []
    right = model.build

    def build(*args: Any) -> model.TrainingModel:
        trainee = right(*args)
        step = trainee.optimizer.step

        def told() -> Any:
            answer = step()
            norms.append(answer[1] if answer[0] else SKIPPED)
            return answer

        trainee.optimizer.step = told
        return trainee

    model.build = build
    with tempfile.TemporaryDirectory() as folder:
        reference.train_undisturbed(train, Path(folder), num_iterations=num_iterations)
        end = reference.read(Path(folder) / "final")
    return (
        end["numbers.losses"],
        norms,
        {
            name: value.float().numpy()
            for name, value in end.items()
            if isinstance(value, torch.Tensor)
        },
    )

"""Losses that are not finite are told, what they spoil is not published; spikes are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import command_logs
import pytest
from decider import Driver, finish, kinds, only, spec, task_of, the
from unicron.cli.screens import cluster
from unicron.cli.screens import task as task_screen
from unicron.control_plane.api import timeline_answer
from unicron.control_plane.api.needs import FAILED_S_MAX, Need, needs
from unicron.control_plane.api.view import view
from unicron.control_plane.fold.losses import (
    DEVIATIONS_NUM,
    SPIKE_NUM_MAX,
    STOP_NUM_TIMES,
    WINDOW_NUM,
)
from unicron.control_plane.history.history import history
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec.policy import Policy

K = Policy().loss_iterations


def policy(d: Driver, **changes: Any) -> None:
    d.tell(f"leader/{d.state.nonce}", r.PolicySet(policy=Policy(**changes)))


def tell(d: Driver, task: int, num: int, losses: Iterable[float] = ()) -> list[Record]:
    """Report the next `num` iterations; without losses: none of these is finite."""
    it, first = task_of(d, task), d.steps[task]
    d.steps[task] += num
    return d.tell(
        d.source(it.members[0].node),
        r.TaskProgressed(
            task=task,
            generation=it.generation,
            first_iteration=first,
            losses=tuple(losses),
            step_s=(0.2,) * num,
            rate_flops=1e9,
            micro_batches=12,
        ),
    )


def begin(d: Driver, task: int, *, is_saving: bool = False) -> list[Record]:
    """The next iteration begins a series, as a rank reports it."""
    it = task_of(d, task)
    return d.tell(
        d.source(it.members[0].node),
        r.LossNotFinite(
            task=task,
            generation=it.generation,
            iteration=d.steps[task],
            text="nan",
            is_saving=is_saving,
        ),
    )


def save(d: Driver, task: int, loss: str, *, final: bool = False) -> list[Record]:
    it, step = task_of(d, task), d.steps[task]
    return d.tell(
        d.source(it.members[0].node),
        r.CheckpointSaved(
            task=task,
            generation=it.generation,
            step_version=step,
            path=f"gen-{it.generation}/iter-{step}",
            ckpt_bytes=9,
            final=final,
            loss=loss,
        ),
    )


def of_loss(d: Driver, after_s: float = 0.0) -> list[Need]:
    return [need for need in needs(view(d.state), d.now_s + after_s) if need.what == "loss"]


def screen(d: Driver, task: int) -> str:
    """`unicron status TASK`, on one line."""
    shown = view(d.state)
    (row,) = (each for each in shown["tasks"] if each["id"] == task)
    past = timeline_answer.past_of(history(d.log), task, d.now_s)
    lines = task_screen.task_status(shown, row, past, now_s=d.now_s)
    return " ".join(" ".join(lines).split())


@pytest.fixture
def task(d: Driver) -> int:
    """Its throughput is declared, so iterations measure none."""
    return d.running(spec(throughput={1: 1e12, 4: 3e12}))


def test_a_series_is_told_after_some_iterations_until_the_loss_is_finite(
    d: Driver, task: int
) -> None:
    tell(d, task, 4, (2.0,) * 4)
    assert kinds(begin(d, task)) == []
    tell(d, task, K - 1)
    assert of_loss(d) == []
    tell(d, task, 1)
    (need,) = of_loss(d)
    assert need.why == (
        f"alpha: loss nan since iteration 5, {K} iterations; no checkpoint is published"
    )
    assert need.do == "`unicron logs alpha` names the micro-batches"
    assert "loss nan since iteration 5" in screen(d, task)
    assert " nan " in " ".join(cluster.status(view(d.state), cluster="c", now_s=d.now_s))
    assert task_of(d, task).iteration == 5 + K
    tell(d, task, 1, (1.5,))
    assert of_loss(d) == []
    assert task_of(d, task).not_finite is None
    assert "loss 1.5000" in screen(d, task)


def test_a_record_for_each_iteration_of_older_ranks_is_the_same_series(
    d: Driver, task: int
) -> None:
    for _ in range(K):
        begin(d, task)
        d.steps[task] += 1
    series = task_of(d, task).not_finite
    assert series is not None
    assert (series.first, series.num) == (1, K)
    assert len(of_loss(d)) == 1


def test_a_repeated_report_makes_a_series_no_longer(d: Driver, task: int) -> None:
    begin(d, task)
    tell(d, task, 2)
    d.steps[task] -= 2
    tell(d, task, 2)
    series = task_of(d, task).not_finite
    assert series is not None
    assert (series.first, series.num) == (1, 2)


def test_a_text_of_a_rank_is_shown_only_if_it_is_a_loss(d: Driver, task: int) -> None:
    it = task_of(d, task)
    text = "\x1b[31m" * 9
    d.tell(
        d.source("n1"),
        r.LossNotFinite(task=task, generation=it.generation, iteration=1, text=text),
    )
    assert it.not_finite is not None
    assert it.not_finite.text == "not finite"


def test_a_state_that_is_not_finite_is_saved_and_not_published(d: Driver, task: int) -> None:
    d.obey(save(d, task, ""))
    latest = task_of(d, task).checkpoint_path
    assert latest == "gen-1/iter-1"
    begin(d, task)
    tell(d, task, K)
    assert kinds(save(d, task, "nan")) == []
    assert task_of(d, task).checkpoint_path == latest
    held = "latest stays at iteration 1 (gen-1/iter-1), gen-1/iter-4 is not published (loss nan)"
    assert held in screen(d, task)
    assert held in of_loss(d)[0].why
    tell(d, task, 1, (2.0,))
    d.obey(save(d, task, ""))
    assert task_of(d, task).checkpoint_path == "gen-1/iter-5"
    assert task_of(d, task).unpublished is None


def test_an_older_finite_state_is_published_after_a_later_one_that_is_not(
    d: Driver, task: int
) -> None:
    """The save in the background, of the state with which the series began, may end late."""
    begin(d, task, is_saving=True)
    tell(d, task, K)
    save(d, task, "nan", final=True)
    d.steps[task] -= K
    d.obey(save(d, task, ""))
    it = task_of(d, task)
    assert it.checkpoint_path == "gen-1/iter-1"
    assert it.unpublished is not None


def test_a_task_that_ends_so_says_which_state_is_published(d: Driver, task: int) -> None:
    d.obey(save(d, task, ""))
    begin(d, task)
    tell(d, task, 49)
    save(d, task, "nan", final=True)
    ended = the(decisions.TaskEnded, finish(d, task, save=False))
    assert ended.outcome == "finished"
    assert ended.why == (
        "50 iterations, loss nan since iteration 1; latest stays at gen-1/iter-1, not gen-1/iter-50"
    )
    (need,) = of_loss(d)
    assert need.why.startswith("alpha has finished with: loss nan since iteration 1, 49 iterations")
    assert need.do.startswith(f"`unicron logs {task}`")
    assert of_loss(d, FAILED_S_MAX) == []
    d.submit(spec())
    assert of_loss(d) == [], "a later task has its name"


def test_a_preempted_task_leaves_with_its_last_finite_state(d: Driver, task: int) -> None:
    d.obey(save(d, task, ""))
    begin(d, task)
    tell(d, task, K)
    left = d.obey(d.tell("operator/drain1", r.NodeDrained(node="n1"))) + d.tell(
        "operator/drain2", r.NodeDrained(node="n2")
    )
    quiesce = only(o.Quiesce, left)[-1]
    assert quiesce.body.save
    save(d, task, "nan")
    done = [x for rank in quiesce.body.ranks for x in d.quiesced(task, rank)]
    assert {"StopRank"} == set(kinds(done))
    assert task_of(d, task).checkpoint_path == "gen-1/iter-1"


def test_the_policy_stops_a_task_once_its_last_finite_state_is_published(
    d: Driver, task: int
) -> None:
    policy(d, on_loss_not_finite="stop")
    begin(d, task, is_saving=True)
    assert kinds(tell(d, task, K)) == []
    last = d.steps[task]
    d.steps[task] = 1
    d.obey(save(d, task, ""))
    d.steps[task] = last
    ended = the(decisions.TaskEnded, d.obey(tell(d, task, 1)))
    assert ended.outcome == "failed"
    assert ended.why == (
        f"loss nan since iteration 1, for {K + 1} iterations (on_loss_not_finite: stop); "
        "latest is gen-1/iter-1"
    )
    assert of_loss(d) == [], "it is told as failed"


@pytest.mark.parametrize("is_saving", [False, True])
def test_the_policy_stops_a_task_whose_state_is_not_saved(
    d: Driver, task: int, *, is_saving: bool
) -> None:
    policy(d, on_loss_not_finite="stop")
    begin(d, task, is_saving=is_saving)
    last = (STOP_NUM_TIMES if is_saving else 1) * K
    assert kinds(tell(d, task, last - 1)) == []
    assert "no checkpoint is published" in the(decisions.TaskEnded, d.obey(tell(d, task, 1))).why


def test_by_default_nothing_is_stopped(d: Driver, task: int) -> None:
    begin(d, task)
    assert kinds(tell(d, task, 40)) == []
    assert task_of(d, task).phase == "training"


@pytest.mark.nodes(3)
def test_a_command_is_judged_by_what_it_prints(d: Driver) -> None:
    task = command_logs.begin(d)
    command_logs.printed(d, task, 10, 0)
    command_logs.printed(d, task, 20, loss=None, loss_text="nan")
    assert of_loss(d) == [], "one of ten may have been"
    command_logs.printed(d, task, 30, loss=None, loss_text="nan")
    (need,) = of_loss(d)
    assert need.why == "gpt: loss nan since iteration 20, 11 iterations; look at its checkpoints"
    assert need.do == "`unicron logs gpt`"
    assert "loss nan since iteration 20, as it prints" in screen(d, task)
    command_logs.printed(d, task, 40, loss=None)
    assert len(of_loss(d)) == 1, "a line without a loss"
    command_logs.printed(d, task, 50, loss=2.0)
    assert of_loss(d) == []
    marks = timeline_answer.past_of(history(d.log), task, d.now_s)["loss_marks"]
    assert marks == [{"iteration": 20, "what": "loss nan"}]


# --- spikes ---
def noisy(num: int, seed: int = 1) -> list[float]:
    """A loss that falls slowly, with noise."""
    draw = random.Random(seed)
    return [3.0 - 0.005 * at + draw.gauss(0.0, 0.05) for at in range(num)]


def test_a_spike_is_one_record_and_a_mark(d: Driver, task: int) -> None:
    assert kinds(tell(d, task, 200, noisy(200))) == []
    assert kinds(tell(d, task, 2, (5.0, 5.5))) == []
    spiked = the(decisions.LossSpiked, tell(d, task, 1, (5.2,)))
    assert (spiked.iteration, spiked.num, spiked.loss) == (201, 3, 5.5)
    assert (spiked.loss - spiked.median) / spiked.deviation > DEVIATIONS_NUM
    assert kinds(tell(d, task, 3, (5.0, 5.0, 2.0))) == []
    assert task_of(d, task).phase == "training"
    assert timeline_answer.past_of(history(d.log), task, d.now_s)["loss_marks"] == [
        {"iteration": 201, "what": "spike 5.5"}
    ]
    assert "at iteration 201: spike 5.5" in screen(d, task)


def test_a_spike_within_one_report_is_recorded(d: Driver, task: int) -> None:
    losses = [*noisy(64), 6.0, 6.0, 6.0, *noisy(10, seed=2)]
    assert the(decisions.LossSpiked, tell(d, task, len(losses), losses)).iteration == 65


def falling(draw: random.Random) -> list[float]:
    """As at the beginning of training."""
    return [10.0 / (1 + at) ** 0.3 + draw.gauss(0.0, 0.02) for at in range(400)]


NO_SPIKE: dict[str, Callable[[random.Random], list[float]]] = {
    "constant": lambda draw: [2.0] * 100,
    "noise": lambda draw: [draw.gauss(3.0, 0.1) for _ in range(2000)],
    "falling": falling,
    "rising": lambda draw: [1.0 + 0.01 * at + draw.gauss(0.0, 0.02) for at in range(400)],
    "two losses": lambda draw: [*falling(draw), 9.0, 9.0, *[1.7] * 9, 9.0, 9.0, 1.7],
    "falls at once": lambda draw: [*falling(draw), *[1e-9] * 9],
    "too large to add": lambda draw: [draw.choice((-1e308, 1e308)) for _ in range(200)],
}


@pytest.mark.parametrize("kind", NO_SPIKE)
@pytest.mark.parametrize("seed", range(5))
def test_noise_and_trends_are_no_spike(d: Driver, task: int, kind: str, seed: int) -> None:
    losses = NO_SPIKE[kind](random.Random(seed))
    assert kinds(tell(d, task, len(losses), losses)) == []


def test_a_loss_that_stays_is_the_new_normal(d: Driver, task: int) -> None:
    tell(d, task, 100, noisy(100))
    assert kinds(tell(d, task, K, (9.0,) * K)) == ["LossSpiked"]
    tell(d, task, SPIKE_NUM_MAX, (9.0,) * SPIKE_NUM_MAX)
    tell(d, task, WINDOW_NUM, (9.0,) * WINDOW_NUM)
    it = task_of(d, task)
    assert it.spike is None
    assert set(it.losses) == {9.0}


def test_repeated_iterations_are_not_compared_again(d: Driver, task: int) -> None:
    losses = noisy(100)
    tell(d, task, 100, losses)
    before = list(task_of(d, task).losses)
    d.steps[task] -= 50
    tell(d, task, 50, (9.0,) * 50)
    assert task_of(d, task).losses == before


def test_the_policy_stops_a_task_at_a_spike(d: Driver, task: int) -> None:
    policy(d, on_loss_spike="stop", loss_iterations=1)
    tell(d, task, 100, noisy(100))
    ended = the(decisions.TaskEnded, d.obey(tell(d, task, 1, (9.0,))))
    assert ended.outcome == "failed"
    assert ended.why.startswith("loss 9 in the 1 iterations from 101 on, ")
    assert "(on_loss_spike: stop)" in ended.why

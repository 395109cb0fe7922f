"""The fold of losses: series that are not finite, and finite spikes above a task's own band."""

from collections.abc import Iterable
from statistics import median

from msgspec.structs import replace

from ...events.records.decisions import LossSpiked
from ...events.records.envelope import Record
from ..state.cluster import ClusterState
from ..state.task import LossSeries, LossSpike, Task

NOT_FINITE = ("nan", "inf", "-inf")
"""The texts of losses that are not finite."""
STOP_NUM_TIMES = 100
"""A task is stopped after so many times `loss_iterations`, although its last finite state is not
published."""
WINDOW_NUM, WINDOW_NUM_MIN = 64, 32
"""How many losses make a task's band, at most and at least."""
DEVIATIONS_NUM = 5.0
"""A loss above the median by more than so many standard deviations is outside the band."""
MAD_RATIO = 1.4826
"""A standard deviation by the median of absolute deviations, for a normal distribution (Rousseeuw
and Croux, 1993): a few outliers do not change it."""
SHARE_MIN = 1e-3
"""The least deviation, as a share of the median: losses that hardly change have a band too."""
SPIKE_NUM_MAX = 32
"""After so many iterations a spike is the new normal, and the band begins anew."""


# --- losses that are not finite ---
def not_finite(
    state: ClusterState, task: Task, first: int, end: int, text: str, *, is_saving: bool = False
) -> None:
    """The losses of iterations `first` to `end` are not finite: they begin or continue a series. At
    `loss_iterations` of them the task ends, if the policy says so and its last finite state, if it
    is being saved, is published; without that after STOP_NUM_TIMES times as many."""
    task.loss = None
    series = task.not_finite
    if series is None or first < series.first:
        text = text if text in NOT_FINITE else "not finite"
        since_s = series.since_s if series is not None else state.at_s
        series = LossSeries(first=first, num=0, text=text, since_s=since_s, is_saving=is_saving)
    task.not_finite = series = replace(series, num=max(series.num, end - series.first))
    num_min = state.policy.loss_iterations
    if state.policy.on_loss_not_finite == "stop" and series.num >= num_min:
        awaits = series.is_saving and task.saved_iteration < series.first
        if not awaits or series.num >= STOP_NUM_TIMES * num_min:
            since = f"loss {series.text} since iteration {series.first}"
            _stop(task, f"{since}, for {series.num} iterations (on_loss_not_finite: stop)")


def _stop(task: Task, why: str) -> None:
    if not (task.ending or task.finished):
        published = task.checkpoint_path
        latest = f"latest is {published}" if published else "no checkpoint is published"
        task.ending, task.why = "failed", f"{why}; {latest}" if task.heals_in_memory else why


# --- finite losses ---
def finite(state: ClusterState, task: Task, first: int, losses: Iterable[float]) -> None:
    """The losses of iterations from `first` on are finite: compare the new ones with the band."""
    task.not_finite = None
    for iteration, loss in enumerate(losses, first):
        task.loss = loss
        if iteration >= task.iteration:
            _compare(task, iteration, loss, state.policy.loss_iterations)


def _compare(task: Task, iteration: int, loss: float, num_min: int) -> None:
    """Add a loss to the band, or to the spike above it. A spike of `num_min` losses or more stays
    until there is a record of it."""
    window, spike = task.losses, task.spike
    if len(window) >= WINDOW_NUM_MIN and loss > max(window):
        middle = median(window)
        deviation = MAD_RATIO * median(abs(each - middle) for each in window)
        deviation = max(deviation, SHARE_MIN * abs(middle))
        if loss > middle + DEVIATIONS_NUM * deviation:
            if spike is None:
                spike = LossSpike(
                    first=iteration, num=0, loss=loss, median=middle, deviation=deviation
                )
            task.spike = replace(spike, num=spike.num + 1, loss=max(loss, spike.loss))
            if task.spike.num >= SPIKE_NUM_MAX:
                task.losses, task.spike = [], None
            return
    task.losses = [*window, loss][-WINDOW_NUM:]
    if spike is not None and (spike.seq or spike.num < num_min):
        task.spike = None


def loss_spiked(state: ClusterState, record: Record, task: Task, body: LossSpiked) -> None:
    if task.spike is None:
        return
    task.spike = replace(task.spike, seq=record.seq)
    if state.policy.on_loss_spike == "stop":
        _stop(task, f"{spike_in_words(body)} (on_loss_spike: stop)")


def spike_in_words(body: LossSpiked) -> str:
    """A spike in words."""
    far = (body.loss - body.median) / body.deviation if body.deviation else 0.0
    return (
        f"loss {body.loss:.4g} in the {body.num} iterations from {body.iteration} on, "
        f"{far:.3g} deviations above its median of {body.median:.4g}"
    )

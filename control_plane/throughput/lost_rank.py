"""What the loss of one rank costs a task that recovers in memory, in words."""

from ...events.spec.job import Loop, Train
from ...events.spec.model import Axes
from ...events.words import number_of, scaled


def lost_rank_costs(
    train: Train | Loop,
    axes: Axes,
    *,
    mirrored_params: float = 0,
    mirrored_bytes: float = 0,
    is_copied: bool = True,
) -> str:
    """The iterations that a lost rank costs in this layout, and why; empty if each replica has the
    whole state. `mirrored_params`, `mirrored_bytes`: of the shard that each rank mirrors; 0: not
    known. `is_copied`: its in-memory checkpoints have stores."""
    if axes.dp > 1 and train.parallel.optimizer == "whole":
        return ""
    if axes.dp > 1 and train.parallel.optimizer == "mirrored":
        size = (
            f": {round(mirrored_bytes / mirrored_params)} bytes a parameter of its shard, "
            f"{scaled(mirrored_bytes, 'B')} a rank"
            if mirrored_params
            else ""
        )
        return f"nothing; kept on a peer{size}"
    why = "there is no second replica" if axes.dp == 1 else "each rank has a shard of its own"
    if train.copy_every and is_copied:
        return f"up to {number_of(train.copy_every, 'iteration')}; {why}"
    since = " since the last checkpoint" if train.checkpoint_every else ""
    return f"all iterations{since}; {why}"

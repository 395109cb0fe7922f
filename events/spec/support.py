"""What heals in memory, and what does not: a table, for training tasks and loops of one's own.

`unicron doctor --support` prints it, docs/reference/support.md is written from it, and
workers/training/adopt/custom_loop.py holds a loop against it when it starts.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Grade = Literal["exact", "restart", "refused"]


class Answer(Struct, frozen=True):
    """`exact`: it heals in memory, and ends with what an undisturbed task ends with. `restart`: it
    trains, and at a fault the processes start again. `refused`: it does not start. `shown` is the
    test that shows either of the first two: without it nothing here has run it.
    """

    grade: Grade
    why: str
    shown: str = ""

    @property
    def told(self) -> str:
        return f"{self.grade}, not run here" if self.is_promise else self.grade

    @property
    def is_promise(self) -> bool:
        return self.grade != "refused" and not self.shown


class Row(Struct, frozen=True):
    """`train`: a task with `train:`. `loop`: a script that has adopted Unicron."""

    what: str
    train: Answer
    loop: Answer


def _exact(why: str, shown: str = "") -> Answer:
    return Answer("exact", why, shown)


def _restart(why: str, shown: str = "") -> Answer:
    return Answer("restart", why, shown)


def _refused(why: str) -> Answer:
    return Answer("refused", why)


NO_KEY = _refused("a job file has no key for it")
AT_ONCE = "unhealed it is done at once, not overlapped"
BY_BUILD = "`build` makes the part of each place; what is where comes from Megatron's metadata"

ROWS: tuple[Row, ...] = (
    Row("tensor parallel",
        _exact("who is left has all parts, or takes them; a change of the size splits them anew",
               "tests/workers/training/test_replicas.py"),
        _exact(BY_BUILD, "tests/workers/training/test_own_layouts.py")),
    Row("pipeline parallel",
        _exact("as tensor parallel; a schedule that was broken is redone",
               "tests/workers/training/test_replicas.py"),
        _exact("a script's `forward` goes through Megatron's schedule, of a GPTModel",
               "tests/workers/training/test_own_layouts.py")),
    Row("interleaving",
        _exact("where the number of micro-batches does not fit Megatron's schedule, ones without "
               "loss fill it up", "tests/workers/training/test_points.py"),
        _exact("as pipeline parallel", "tests/workers/training/test_own_layouts.py")),
    Row("sequence parallel", NO_KEY,
        _exact("layer norms' gradients are added up over the tensor-parallel group in the "
               "reduction, which is redone as a whole; `build` leaves it out where tp is 1")),
    Row("context parallel", NO_KEY,
        _refused("its ranks have parts of one sample, and layouts have no axis for it")),
    Row("expert parallel", NO_KEY,
        _refused("its ranks run in lockstep across replicas, and layouts have no axis for it")),
    Row("experts", NO_KEY, _restart("what a router counts of a micro-batch is in no kept sum")),
    Row("distributed optimizer, sharded",
        _exact("the loss of a shard's only holder sets the task back to its last copy",
               "tests/workers/training/test_sharded.py"),
        _exact("as `train:`", "tests/workers/training/test_own_layouts.py")),
    Row("distributed optimizer, mirrored",
        _exact("a second rank has each shard, so that no iteration is lost",
               "tests/workers/training/test_sharded.py"),
        _refused("a mirror is the optimizer built a second time, and a script builds it once")),
    Row("overlapped reduction",
        _exact("data-parallel with the whole optimizer alone: else the job file is refused",
               "tests/workers/training/test_overlap.py"),
        _exact("data-parallel with the whole optimizer alone")),
    Row("overlapped reduction, other layouts",
        _refused("the gate has to come between the last bucket and the step"),
        _restart("the gate has to come between the last bucket and the step; " + AT_ONCE)),
    Row("overlapped parameter gather", NO_KEY,
        _restart("parameters of the last step are still under way in the next forward; " + AT_ONCE,
                 "tests/workers/training/test_own_unhealed.py")),
    Row("several instances of the distributed optimizer", NO_KEY,
        _refused("its groups of groups are in no layout")),
    Row("FSDP", NO_KEY,
        _refused("parameters are sharded over replicas, so that no replica is whole")),
    Row("Transformer Engine", NO_KEY,
        _restart("its modules keep process groups and buffers of their own, and nothing here has "
                 "run it")),
    Row("FP8 or FP4", NO_KEY,
        _restart("scales and their history are in Transformer Engine's own global state")),
    Row("CUDA graphs", NO_KEY,
        _restart("a graph holds the communicators and addresses that it was captured with")),
    Row("torch.compile", NO_KEY,
        _restart("what is compiled may hold process groups of a generation that is gone")),
    Row("registered communication buffers", NO_KEY,
        _restart("memory that is registered with a communicator goes with it")),
    Row("activation recomputation", NO_KEY,
        _exact("inside one micro-batch, which is whole or redone; Megatron's needs CUDA")),
    Row("offloading to the CPU", NO_KEY,
        _restart("what is under way between host and device is on no list of the state")),
    Row("dropout, one layout of a replica",
        _exact("each micro-batch seeds it, whoever runs it", "tests/workers/training/test_rank.py"),
        _exact("each micro-batch seeds torch's generators and Megatron's tracker")),
    Row("dropout across a change of TP or PP",
        _exact("seeded for each layer, and in attention for each head, counted over all ranks"),
        _restart("Megatron seeds it by tensor-parallel rank, and each stage from its own begin: "
                 "name one layout of a replica, or set both dropouts to 0")),
    Row("gradients scaled by the number of replicas",
        _exact("never: sums are divided once, after the reduction",
               "tests/workers/training/test_variants.py"),
        _restart("the number changes, and micro-batches are dealt unevenly: set "
                 "calculate_per_token_loss; without, what is divided by is `loss` of `adopt`",
                 "tests/workers/training/test_own_unhealed.py")),
    Row("gradients summed in 16 bits", NO_KEY,
        _restart("such a sum depends on its order: set grad_reduce_in_fp32")),
    Row("an optimizer other than Adam", NO_KEY,
        _restart("its state is not known; that of torch.optim.AdamW is",
                 "tests/workers/training/test_own_unhealed.py")),
)


def markdown() -> str:
    """The table as the reference has it."""
    lines = ["| | `train:` | a loop of one's own |", "|---|---|---|"]
    for row in ROWS:
        cells = [f"**{answer.told}**: {answer.why}" for answer in (row.train, row.loop)]
        lines.append(f"| {row.what} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"

"""Table of Megatron features that recover in memory, for training tasks and custom loops.

docs/reference/support.md is generated from it, and a loop is checked against it when it starts.
"""

from typing import Literal

from msgspec import Struct

Grade = Literal["exact", "not run", "restart from memory", "restart", "refused"]
RECOVERED: tuple[Grade, ...] = ("exact", "not run")
"""The grades of features that do not prevent recovery in memory."""


class Support(Struct, frozen=True):
    """`exact`: a task with the feature recovers in memory, and its result equals that of an
    undisturbed task. `not run`: it should be so, but no test here runs it. `restart from memory`:
    it trains, and after a fault its processes start again together, from the state that each has
    stored in memory (`copy_every`). `restart`: from a checkpoint on disk. `refused`: it does not
    start. `shown` is the test that shows the grade; "": not tested here. `own_loop`: only a loop
    that trains by itself can have the feature (`keep_in_memory`); `adopt` refuses it."""

    grade: Grade
    why: str
    shown: str = ""
    own_loop: bool = False


class Row(Struct, frozen=True):
    """`train`: support in a task with `train:`. `loop`: support in a script with Unicron."""

    what: str
    train: Support
    loop: Support


def _exact(why: str, shown: str) -> Support:
    return Support("exact", why, shown)


def _not_run(why: str) -> Support:
    return Support("not run", why)


def _from_memory(why: str, shown: str = "") -> Support:
    return Support("restart from memory", why, shown)


def _own_loop(why: str, shown: str = "") -> Support:
    return Support(
        "restart from memory",
        f"{why}: `adopt` refuses it, `keep_in_memory` takes it",
        shown,
        own_loop=True,
    )


def _refused(why: str) -> Support:
    return Support("refused", why)


NO_KEY = _refused("the job file has no key for it")
NOT_OVERLAPPED = "restart-only tasks run it without overlap"
USUAL_FLAGS = "tests/workers/training/test_usual_flags.py"
FROM_MEMORY = "tests/cluster/test_restart_from_memory.py"
BY_BUILD = "`build` makes the part of each position; Megatron's metadata says which part that is"

ROWS: tuple[Row, ...] = (
    Row(
        "tensor parallel",
        _exact(
            "the remaining members have or receive all parts; a new size reshards them",
            "tests/workers/training/test_replicas.py",
        ),
        _exact(BY_BUILD, "tests/workers/training/test_own_layouts.py"),
    ),
    Row(
        "pipeline parallel",
        _exact(
            "as tensor parallel; an interrupted schedule is run again",
            "tests/workers/training/test_replicas.py",
        ),
        _exact(
            "a script's `forward` goes through Megatron's schedule, of a GPTModel",
            "tests/workers/training/test_own_layouts.py",
        ),
    ),
    Row(
        "interleaving",
        _exact(
            "if the number of micro-batches does not fit Megatron's schedule, micro-batches "
            "without loss pad it",
            "tests/workers/training/test_points.py",
        ),
        _exact("as pipeline parallel", "tests/workers/training/test_own_layouts.py"),
    ),
    Row(
        "sequence parallel",
        NO_KEY,
        _exact(
            "the reduction sums layer norms' gradients over the tensor-parallel group, and is "
            "repeated as a whole; `build` omits it if tp is 1",
            USUAL_FLAGS,
        ),
    ),
    Row(
        "context parallel",
        NO_KEY,
        _own_loop("its ranks hold parts of one sample, and layouts have no axis for it"),
    ),
    Row(
        "expert parallel",
        NO_KEY,
        _refused("its ranks run in lockstep across replicas, and layouts have no axis for it"),
    ),
    Row(
        "experts",
        NO_KEY,
        _exact(
            "a router's counts of tokens and auxiliary losses are local sums as the gradient; "
            "the step changes the biases of experts. Exact with `aux_loss`, `seq_aux_loss`, "
            "z-loss, sinkhorn, a capacity, shared experts, and biases without a loss",
            "tests/workers/training/test_experts.py",
        ),
    ),
    Row(
        "experts, other options",
        NO_KEY,
        _from_memory(
            "not tested: grouped GEMM, fusions, DeepEP, overlapped shared experts, and "
            "replayed or random routing. In several tensor-parallel sizes Megatron "
            "weights auxiliary losses differently, and sinkhorn and a capacity differ"
        ),
    ),
    Row(
        "experts balanced over replicas",
        NO_KEY,
        _refused(
            "each forward of `global_aux_loss` would wait for all replicas, and these run "
            "different numbers of micro-batches"
        ),
    ),
    Row(
        "distributed optimizer, sharded",
        _exact(
            "a job becomes mirrored (next row) if there is memory for it. With `mirror: never`, "
            "losing a shard's only holder sets the task back to its last in-memory checkpoint",
            "tests/workers/training/test_sharded.py",
        ),
        _exact("as `train:`", "tests/workers/training/test_own_layouts.py"),
    ),
    Row(
        "distributed optimizer, mirrored",
        _exact(
            "the next data-parallel rank steps each shard too, by the same reduced gradient, so no "
            "iteration is lost, for 12 bytes a parameter of the shard in 16 bits, 8 in fp32; of "
            "two lost ranks that are neighbours, as without a mirror",
            "tests/workers/training/test_sharded.py",
        ),
        _exact(
            "as `train:`; the mirror is made from what the script's optimizer was built from",
            USUAL_FLAGS,
        ),
    ),
    Row(
        "overlapped reduction",
        _exact(
            "only data-parallel with the whole optimizer: else the job file is refused",
            "tests/workers/training/test_overlap.py",
        ),
        _exact("the last backward launches each bucket, of which a copy is kept", USUAL_FLAGS),
    ),
    Row(
        "overlapped reduction, other layouts",
        _refused("a job file may ask for it only if it names no layouts"),
        _exact("as overlapped reduction; the step barrier follows the last bucket", USUAL_FLAGS),
    ),
    Row(
        "overlapped parameter gather",
        NO_KEY,
        _exact("if it breaks off, the holders of the shards send the rest", USUAL_FLAGS),
    ),
    Row(
        "parameter gather overlapped with the step",
        NO_KEY,
        _from_memory("parameters are gathered before the whole step is done; " + NOT_OVERLAPPED),
    ),
    Row(
        "several instances of the distributed optimizer",
        NO_KEY,
        _refused("layouts do not describe its groups of groups"),
    ),
    Row(
        "FSDP",
        NO_KEY,
        _own_loop("parameters are sharded over replicas, so no replica is complete", FROM_MEMORY),
    ),
    Row(
        "Transformer Engine",
        NO_KEY,
        _not_run("its layers' `_extra_state` is empty without FP8, and their groups are replaced"),
    ),
    Row(
        "FP8 or FP4",
        NO_KEY,
        _from_memory("scales and their history are in Transformer Engine's global state"),
    ),
    Row(
        "CUDA graphs",
        NO_KEY,
        _from_memory("a graph keeps the communicators and addresses of its capture"),
    ),
    Row(
        "torch.compile",
        NO_KEY,
        _from_memory("compiled code may hold process groups of an earlier generation", FROM_MEMORY),
    ),
    Row(
        "registered communication buffers",
        NO_KEY,
        _from_memory(
            "memory registered with a communicator is lost with it; also `tp_comm_overlap`"
        ),
    ),
    Row(
        "activation recomputation",
        NO_KEY,
        _exact("inside one micro-batch, which is complete or run again", USUAL_FLAGS),
    ),
    Row(
        "offloading to the CPU",
        NO_KEY,
        _from_memory("transfers between host and device are not part of the state"),
    ),
    Row(
        "dropout, one layout of a replica",
        _exact("each micro-batch seeds it, on any rank", "tests/workers/training/test_rank.py"),
        _not_run("each micro-batch seeds torch's generators and Megatron's tracker"),
    ),
    Row(
        "dropout across a change of TP or PP",
        _not_run("seeded per layer, and in attention per head, by numbers over all ranks"),
        _from_memory(
            "Megatron seeds it by tensor-parallel rank and by stage: name one layout of a "
            "replica, or set both dropouts to 0"
        ),
    ),
    Row(
        "gradients scaled by the number of replicas",
        _exact(
            "never scaled so: sums are divided once, after the reduction",
            "tests/workers/training/test_variants.py",
        ),
        _from_memory(
            "the number changes, and micro-batches are assigned unevenly: set "
            "calculate_per_token_loss; without it, `loss` of `adopt` gives the divisor",
            FROM_MEMORY,
        ),
    ),
    Row(
        "gradients summed in 16 bits",
        NO_KEY,
        _from_memory("the sum depends on its order: set grad_reduce_in_fp32"),
    ),
    Row(
        "FusedAdam of Transformer Engine or Apex",
        _not_run("its moments are as those of torch's, its steps are counted in the groups"),
        _not_run(
            "as `train:`. Apex's continued exactly on a GPU from a copy of its state "
            "(tests/gpu/state.py); no rank was killed"
        ),
    ),
    Row(
        "an optimizer other than Adam",
        NO_KEY,
        _from_memory(
            "the layout of its state is unknown; also that of a precision-aware FusedAdam",
            FROM_MEMORY,
        ),
    ),
)

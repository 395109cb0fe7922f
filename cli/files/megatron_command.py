"""Compares a job file with the arguments of its `unicron megatron` command, before it starts. Pure.

Only what the rank's own check would refuse at its start (workers/training/megatron_lm) is refused.
Arguments that are missing or unreadable here, and what the script may still change, are left to
that check: it sees what the script really uses.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple

from ...events.errors import SpecError
from ...events.spec.job import JobSpec, Loop
from ...events.spec.model import MegatronModel
from ...workers.training.megatron_lm import arguments

NAMES = {"fp8_format": "fp8", "fp4_format": "fp4"}
"""Options whose argument in Megatron-LM has another name."""
DEFAULTS = {
    "ckpt_format": "torch_dist",
    "context_parallel_size": "1",
    "expert_model_parallel_size": "1",
    "optimizer": "adam",
}
"""Values of arguments in DECLINES that decline nothing."""
OF_THE_MODEL = {
    "num_layers": "num_layers",
    "hidden_size": "hidden",
    "seq_length": "sequence",
    "num_attention_heads": "num_heads",
    "ffn_hidden_size": "ffn",
}
"""Argument -> the attribute of `loop.model` that has the same value."""
KEYS = {"ffn": "ffn_hidden", "num_groups": "num_query_groups"}
"""Attribute of `loop.model` -> its key in the job file."""
OTHER_MODELS = ("hybrid", "heterogeneous")
"""Arguments whose names begin so may change what the others say of the model."""


class Command(NamedTuple):
    """A command that runs a script of Megatron-LM by `unicron megatron`."""

    script: str
    given: Mapping[str, str]
    """Argument -> the first word of its last value; "" for an option without one."""

    def number(self, name: str) -> int:
        """The value of an argument; 0 if it is absent or no whole number."""
        try:
            return int(self.given.get(name, ""))
        except ValueError:
            return 0


def check(spec: JobSpec) -> None:
    """Raises SpecError for an argument that contradicts `loop:`, as the start would."""
    command = _command_of(spec)
    if command is None or spec.loop is None or "yaml_cfg" in command.given:
        return
    parallel = spec.loop.parallel
    for name, key, sizes in (
        ("tensor_model_parallel_size", "tensor", parallel.tensor),
        ("pipeline_model_parallel_size", "pipeline", parallel.pipeline),
    ):
        size = command.number(name)
        if size > 1 and size not in sizes:  # 1 is the default: as if it were left out
            raise SpecError(
                f"loop.parallel.{key}",
                f"is {list(sizes)}, but {option(name)} of the command is {size}",
                f"write loop: {{parallel: {{{key}: [{size}]}}}}, or leave the argument out",
            )
    if why_not(spec):  # Megatron-LM's own loop trains, which reads no spec
        return
    for path, value, words, found in _compared(command, spec.loop):
        if found != value:
            raise SpecError(
                path,
                f"is {value}, but {words} of the command "
                f"{'make' if ' and ' in words else 'is'} {found}",
                "write the same in both",
            )


def why_not(spec: JobSpec) -> str:
    """Why this command will not heal in memory, by its arguments; "" if they do not tell."""
    command = _command_of(spec)
    given: Mapping[str, str] = command.given if command is not None else {}
    return arguments.why_not(
        [
            arguments.Given(name, option(name))
            for name, value in given.items()
            if value != DEFAULTS.get(name) and value not in arguments.WITHOUT_EFFECT.get(name, ())
        ]
    )


def healing(spec: JobSpec) -> str:
    """Whether the job heals in memory, as far as its file tells."""
    if spec.training is None:
        return "restarts as a whole"
    if spec.loop is None:
        return "heals in memory"
    if why := why_not(spec):
        restarts = "from memory" if spec.loop.copy_every else "as a whole"
        return f"does not heal in place, restarts {restarts}: {why}"
    return "heals in memory unless the command finds at its start that it cannot, and says why"


def option(name: str) -> str:
    """How an argument is written on the command line."""
    return "--" + next((spelt for spelt, known in NAMES.items() if known == name), name).replace(
        "_", "-"
    )


def _command_of(spec: JobSpec) -> Command | None:
    """None for another program, and for a command that only restarts: its script runs unchanged."""
    match spec.command:
        case [program, "megatron", script, *words] if PurePath(program).name == "unicron":
            return Command(script, _given(words)) if spec.loop is not None else None
        case _:
            return None


def _given(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word, after in pairwise([*words, ""]):
        if word.startswith("--"):
            spelt, has_value, value = word.removeprefix("--").partition("=")
            name = spelt.replace("-", "_")
            found[NAMES.get(name, name)] = (
                value if has_value else "" if after.startswith("--") else after
            )
    return found


def _compared(command: Command, loop: Loop) -> Iterator[tuple[str, object, str, object]]:
    """Path in the spec, its value, the arguments that must agree, and what they say."""
    iterations, words = command.number("train_iters"), "--train-iters"
    batch, micro = command.number("global_batch_size"), command.number("micro_batch_size")
    if command.number("train_samples"):
        iterations = command.number("train_samples") // batch if batch > 0 else 0
        words = "--train-samples and --global-batch-size"
    if 0 < command.number("exit_interval") < iterations:
        iterations, words = command.number("exit_interval"), "--exit-interval"
    if iterations > 0:
        yield "loop.iterations", loop.iterations, words, iterations
    if micro > 0 and batch >= micro:
        yield (
            "loop.micro_batches",
            loop.micro_batches,
            "--global-batch-size and --micro-batch-size",
            batch // micro,
        )
    if (
        loop.model is not None
        and PurePath(command.script).name == "pretrain_gpt.py"
        and not any(name.startswith(OTHER_MODELS) for name in command.given)
    ):
        yield from _of_model(command, loop.model)


def _of_model(command: Command, model: MegatronModel) -> Iterator[tuple[str, object, str, object]]:
    same = {
        **OF_THE_MODEL,
        **({"global_batch_size": "global_batch"} if command.number("micro_batch_size") > 1 else {}),
        **({"num_query_groups": "num_groups"} if "group_query_attention" in command.given else {}),
    }
    for name, attribute in same.items():
        if command.number(name) > 0:
            yield (
                f"loop.model.{KEYS.get(attribute, attribute)}",
                getattr(model, attribute),
                option(name),
                command.number(name),
            )
    if granularity := command.given.get("recompute_granularity"):
        yield "loop.model.recompute", model.recompute, "--recompute-granularity", granularity

"""Launchers as a command: torchrun and srun, which an agent starts once for each slot."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Literal

from .validation import need

SET_BY_AGENTS = {
    "torchrun": {
        "--nnodes",
        "--nproc-per-node",
        "--node-rank",
        "--standalone",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--master-addr",
        "--master-port",
    },
    "srun": {"-n", "--ntasks", "--ntasks-per-node", "-N", "--nodes", "-w", "--nodelist"},
}
"""Launcher -> options that an agent gives, by variables or as arguments."""
TORCHRUN = ("-m", "torch.distributed.run")


def launcher_of(command: Sequence[str]) -> Literal["torchrun", "srun", ""]:
    """The launcher that the command starts."""
    program = PurePosixPath(command[0]).name if command else ""
    if program == "torchrun" or tuple(command[1:3]) == TORCHRUN:
        return "torchrun"
    return "srun" if program == "srun" else ""


def check_launcher(command: Sequence[str], *, in_memory: bool) -> None:
    """Raises SpecError if the command gives the launcher another world than that of the slots."""
    if not (launcher := launcher_of(command)):
        return
    need(
        not in_memory,
        "command",
        f"starts {launcher}, whose processes do not reach the agent",
        "name the program itself: [python, train.py]",
    )
    for word in _options(command[3 if tuple(command[1:3]) == TORCHRUN else 1 :]):
        need(
            word not in SET_BY_AGENTS[launcher],
            "command",
            f"{launcher} {word} is set by agents: "
            "they start it once for each slot, for one process",
            "leave it out, and give the number of processes as slots: {min: 8, max: 8}",
        )


def _options(words: Sequence[str]) -> Iterator[str]:
    """The options before the program. A word behind an option is its value."""
    before = ""
    for word in words:
        if word in ("-m", "--module") or not (word.startswith("-") or before.startswith("-")):
            return
        if word.startswith("--"):
            yield word.partition("=")[0].replace("_", "-")
        elif word.startswith("-"):
            yield word[:2]
        before = word if "=" not in word else ""

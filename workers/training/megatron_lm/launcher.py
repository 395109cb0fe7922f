"""Runs an unmodified pretraining script of Megatron-LM under an agent, with in-memory recovery.

`unicron megatron SCRIPT ARGS...` replaces its process by `python -m` of this module. It puts the
script's folder on sys.path, replaces functions of Megatron-LM (pretrain.py) and runs the script as
`__main__`. An error of the user before training ends the task: it would be the same at each start.
"""

import os
import runpy
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from ....events.errors import UsageError
from ...ipc.pipe_protocol import FD
from ..rank import connect_agent, tell_adopted
from . import versions

PACKAGES = {
    "PIL": "Pillow",
    "yaml": "PyYAML",
    **{
        name: name
        for name in (
            "datasets",
            "einops",
            "nltk",
            "psutil",
            "pybind11",
            "regex",
            "sentencepiece",
            "six",
            "tensorboard",
            "tiktoken",
            "tqdm",
            "transformers",
            "triton",
            "wandb",
        )
    },
}
"""Modules that scripts of Megatron-LM import -> the package of each on PyPI. For any other module a
package of its name may be a stranger's: `apex` on PyPI is not NVIDIA's."""


def main() -> None:
    """Run the script of the command line; UNICRON_FD is set."""
    tell_adopted(int(os.environ[FD]))
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.resolve().parent))  # as Python does for a script
    with usage_error_ends_task():
        if not script.is_file():
            what = "is a folder" if script.is_dir() else "no such file"
            raise UsageError(
                f"{script}: {what}", "give the path of a script in a clone of Megatron-LM"
            )
        with start_failures_named(script):
            replace_functions()
            runpy.run_path(str(script), run_name="__main__")


def replace_functions() -> None:
    """Replace `pretrain`, and what a script calls before it, in all modules of Megatron-LM that
    have them. Raises UsageError, ImportError."""
    interface = versions.interface()
    versions.complete_typing()
    with warnings.catch_warnings():  # its filters would hide warnings of Megatron-LM
        from . import pretrain  # the import of `adopt` comes before that of megatron

    replacements = pretrain.replacements(interface)
    import_module("megatron.training")
    for name, module in list(sys.modules.items()):
        for stock, healing in replacements if name.startswith("megatron.") else ():
            if vars(module).get(stock.__name__) is stock:
                vars(module)[stock.__name__] = healing


@contextmanager
def usage_error_ends_task() -> Generator[None]:
    """Report a UsageError to the agent also if it is raised before the script has adopted."""
    try:
        yield
    except UsageError:
        if not _is_connected():
            connect_agent(int(os.environ[FD]))
        raise


@contextmanager
def start_failures_named(script: Path) -> Generator[None]:
    """A missing package, or an argument that the script refuses before it calls `pretrain`, becomes
    a UsageError that says what to type."""
    try:
        yield
    except SystemExit as end:
        if _is_connected() or end.code != 2:
            raise
        raise UsageError(
            str(end.__context__ or f"{script.name} refuses its arguments"),
            f"python {script} --help lists the arguments",
        ) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if _is_connected() or not name:
            raise
        if name == "megatron":
            raise UsageError(
                f"{error}: {script.parent} is not a clone of Megatron-LM",
                "give the path of a script in the folder that has megatron/training",
            ) from error
        why = (
            "Megatron-LM imports triton also without a GPU"
            if name == "triton"
            else "It is a requirement of the script"
        )
        raise UsageError(
            f"{script.name} cannot be imported: {error}. {why}",
            f"{sys.executable} -m pip install {PACKAGES[name]}"
            if name in PACKAGES
            else f"install it for {sys.executable} as its own project says",
        ) from error


def _is_connected() -> bool:
    """Whether this process has its agent's connection: then the agent is told of any exception."""
    return sys.excepthook is not sys.__excepthook__


if __name__ == "__main__":
    main()

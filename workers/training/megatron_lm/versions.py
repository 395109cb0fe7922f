"""The interfaces of Megatron-LM's releases, as far as they differ for pretrain.py."""

import runpy
import typing
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import typing_extensions

from ....events.errors import UsageError


class Interface(NamedTuple):
    """`gloo_argument`: whether Megatron-LM builds gloo groups beside NCCL's. `script_parses`: a
    script parses its arguments before it calls `pretrain`, with a config made of them.
    `builds_config`: the model is built of that config, if it has one."""

    version: str
    gloo_argument: str = "use_gloo_process_groups"
    script_parses: bool = True
    builds_config: bool = True


INTERFACES: Mapping[tuple[int, int], Interface] = {
    (0, 16): Interface(
        "0.16", "enable_gloo_process_groups", script_parses=False, builds_config=False
    ),
    (0, 17): Interface("0.17", script_parses=False, builds_config=False),
    (0, 18): Interface("0.18", builds_config=False),
    (0, 19): Interface("0.19"),
    (0, 20): Interface("0.20"),
}


def interface() -> Interface:
    """The interface of the megatron.core that will be imported. Its version is read, not imported,
    since what it has may not fit Unicron. Raises UsageError if the version is not known."""
    spec = find_spec("megatron")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [
        file
        for folder in folders or ()
        if (file := Path(folder) / "core" / "package_info.py").is_file()
    ]
    if not files:
        raise UsageError(
            "there is no megatron.core", "give the path of a script in a clone of Megatron-LM"
        )
    package = runpy.run_path(str(files[0]))
    found = INTERFACES.get((package["MAJOR"], package["MINOR"]))
    if found is None:
        *early, last = (each.version for each in INTERFACES.values())
        known = f"{', '.join(early)} and {last}"
        raise UsageError(
            f"this is Megatron-LM {package['__version__']} ({files[0]}); in-memory recovery knows "
            f"the interfaces of {known}",
            "git checkout core_v0.16.1, or leave `heal: in-memory` and `unicron megatron` out",
        )
    return found


def complete_typing() -> None:
    """Give Python 3.11 the one name of a later one that Megatron-LM uses from 0.18 on."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]

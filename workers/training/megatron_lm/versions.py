"""The interfaces of Megatron-LM's releases, as far as they differ for pretrain.py."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ....events.errors import UsageError


class Interface(NamedTuple):
    """`gloo_argument`: the argument that says whether Megatron-LM builds gloo groups beside NCCL's.
    """

    version: str
    gloo_argument: str


INTERFACES: Mapping[tuple[int, int], Interface] = {
    (0, 16): Interface("0.16", gloo_argument="enable_gloo_process_groups"),
    (0, 17): Interface("0.17", gloo_argument="use_gloo_process_groups"),
}


def interface() -> Interface:
    """The interface of the megatron.core that will be imported: its version is read, not imported,
    since what it has may not fit Unicron. Raises UsageError if it is not known."""
    spec = find_spec("megatron")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () if (
        file := Path(folder) / "core" / "package_info.py").is_file()]
    if not files:
        raise UsageError("there is no megatron.core", "give the path of a script in a clone of "
                         "Megatron-LM")
    package = runpy.run_path(str(files[0]))
    found = INTERFACES.get((package["MAJOR"], package["MINOR"]))
    if found is None:
        known = " and ".join(each.version for each in INTERFACES.values())
        raise UsageError(
            f"this is Megatron-LM {package['__version__']} ({files[0]}); in-memory recovery knows "
            f"the interfaces of {known}",
            "git checkout core_v0.16.1, or leave `heal: in-memory` and `unicron megatron` out")
    return found

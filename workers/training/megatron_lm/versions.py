"""The interfaces of Megatron-LM's releases, as far as they differ for pretrain.py."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
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
    """The interface of the megatron.core that is imported. Raises UsageError if it is not known."""
    package = import_module("megatron.core.package_info")
    found = INTERFACES.get((package.MAJOR, package.MINOR))
    if found is None:
        known = " and ".join(each.version for each in INTERFACES.values())
        raise UsageError(
            f"this is Megatron-LM {package.__version__} ({package.__file__}); in-memory recovery "
            f"knows the interfaces of {known}",
            "git checkout core_v0.16.1, or leave `heal: in-memory` and `unicron megatron` out")
    return found

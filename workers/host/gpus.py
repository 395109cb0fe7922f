"""The NVIDIA GPUs of this host by UUID, as its driver's tool lists them."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

LIST_S_MAX = 20.0


def uuids() -> dict[int, str] | None:
    """Index, in the order of PCI addresses -> UUID; None: the machine has no driver's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        listing = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, check=False, timeout=LIST_S_MAX
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        listing = ""
    lines = re.findall(r"^GPU (\d+): .*\(UUID: (GPU-[\w-]+)\)", listing, re.MULTILINE)
    return {int(index): uuid for index, uuid in lines}


def by_uuid(devices: Sequence[str], known: Mapping[int, str]) -> tuple[str, ...]:
    """The entries of CUDA_VISIBLE_DEVICES, indices as UUIDs: an index means another GPU once one
    before it is lost. An entry that is not known stays."""
    return tuple(
        known.get(int(device), device) if device.isdecimal() else device for device in devices
    )

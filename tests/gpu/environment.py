"""The versions that the checks run with. `python -m gpu.environment` prints them as JSON.

A process of its own: the others must not have loaded torch before they fork.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = {
    "megatron-core": "megatron-core",
    "Transformer Engine": "transformer_engine",
    "Apex": "apex",
    "nvidia-ml-py": "nvidia-ml-py",
}
ABSENT = "not installed"


def read() -> dict[str, Any]:
    """The versions by name, and `devices`: the names of the GPUs that torch finds."""
    import torch

    found: dict[str, Any] = {
        "Python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or ABSENT,
    }
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found["NCCL"] = nccl() or ABSENT
    found["driver"] = _driver()
    found |= {name: _version(package) for name, package in PACKAGES.items()}
    return found | {"devices": devices}


def nccl() -> str:
    """The version of torch's NCCL; empty if it was built without."""
    import torch

    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _driver() -> str:
    try:
        return DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return ABSENT


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ABSENT


if __name__ == "__main__":
    print(json.dumps(read()))

"""Loads the scripts of docs/reference, which is not a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "docs" / "reference" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

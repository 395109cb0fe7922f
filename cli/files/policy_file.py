"""Policy files: strict YAML to a checked policy (`up --policy`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...events.errors import SpecError, UsageError
from ...events.spec import policy
from ...events.spec.policy import DOCS, Policy
from .job_file import FILE_BYTES_MAX, read_text, read_yaml


def load(path: Path) -> Policy:
    """The policy in a YAML or JSON file; an empty file means the defaults. Raises UsageError."""
    text = read_text(path, FILE_BYTES_MAX, "name a policy file, YAML", DOCS)
    try:
        given: Any = read_yaml(text, DOCS)
        if not isinstance(given, dict | None):
            raise SpecError("", "a policy is a mapping, for example silence_s_max: 5", DOCS)
        return policy.parse({**(given or {})})
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None

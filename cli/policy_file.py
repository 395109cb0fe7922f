"""A policy file: strict YAML to a checked policy (`up --policy`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..events.errors import SpecError, UsageError
from ..events.policy import ALPHAS, BOUNDS, Policy
from ..events.refused import refused
from ..events.spec import NAME
from .job_file import FILE_BYTES_MAX, read_text, read_yaml

DOCS = "docs/reference/records.md, Policy: its fields, times in seconds"
NOT_IN_FILES = ("observe", "allow_inject")


def load(path: Path) -> Policy:
    """The policy in a YAML or JSON file, an empty one the defaults.

    Raises UsageError with the field that is wrong. The switches are no fields of a file: a file is
    kept and forgotten, and nobody shall break or hold a cluster by what was forgotten.
    """
    text = read_text(path, FILE_BYTES_MAX, "name a policy file, YAML", DOCS)
    try:
        return parse(read_yaml(text, DOCS))
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def parse(data: object) -> Policy:
    """From plain data. Raises SpecError with the field and a hint."""
    if not isinstance(data, dict | None):
        raise SpecError("", "a policy is a mapping, for example silence_s_max: 5", DOCS)
    given: dict[Any, Any] = {**(data or {})}
    try:
        policy = msgspec.convert(given, Policy, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise refused(str(error), Policy, DOCS, given=given) from None
    for name in NOT_IN_FILES:
        _need(not getattr(policy, name), name, "stands in no policy file",
              f"unicron up --{name.replace('_', '-')}")
    for path, value, (least, most) in _numbers(policy):
        _need(least <= value <= most, path, f"must be between {least} and "
              f"{f'{most:g}' if isinstance(most, float) else most}")
    for team in policy.quotas:
        _need(bool(NAME.match(team)), f"quotas.{team}", "is no team's name",
              "lower-case letters, digits, '-' and '.', at most 63")
    _need(0 <= policy.gain_min < 1, "gain_min",
          f"{policy.gain_min:g} is not {'below 1' if policy.gain_min >= 1 else 'from 0 on'}",
          "it is a share of what the cluster earns: 0.05 is 5 %")
    _need(policy.alpha in ALPHAS, "alpha", f"{policy.alpha:g} is not one of "
          f"{', '.join(f'{alpha:g}' for alpha in ALPHAS)}",
          "0 is the most WAF, 1 proportional fairness, 2 nearer to equal")
    _need(not (policy.alpha and policy.hot_spare), "hot_spare",
          f"a spare is priced by WAF alone, and alpha {policy.alpha:g} plans by another measure",
          "leave one of them out")
    return policy


def _numbers(policy: Policy) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Each number that has bounds, by its name, with them; a quota by `quotas.TEAM`."""
    for name, bounds in BOUNDS.items():
        value = getattr(policy, name)
        if isinstance(value, dict):
            yield from ((f"{name}.{team}", num, bounds) for team, num in policy.quotas.items())
        elif value is not None:
            yield name, value, bounds


def _need(holds: bool, path: str, message: str, hint: str = DOCS) -> None:
    if not holds:
        raise SpecError(path, message, hint)

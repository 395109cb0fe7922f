"""A policy out of plain data, checked: what a policy file may say, and a scenario's `limits`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from .errors import need
from .policy import ALPHAS, BOUNDS, Policy
from .refused import refused
from .spec import NAME

DOCS = "docs/reference/records.md, Policy: its fields, times in seconds"
SWITCHES = ("observe", "allow_inject")
"""No fields of a file: a file is kept and forgotten, and nobody shall break or hold a cluster by
what was forgotten."""


def parse(given: dict[Any, Any], usual: Policy | None = None) -> Policy:
    """The policy that is `usual` but for what is given. Raises SpecError with the field and a hint.
    """
    try:
        policy = msgspec.convert(msgspec.to_builtins(usual or Policy()) | given, Policy,
                                 strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise refused(str(error), Policy, DOCS, given=given) from None
    for name in SWITCHES:
        need(not getattr(policy, name), name, "stands in no policy file",
             f"unicron up --{name.replace('_', '-')}")
    for path, value, (least, most) in _numbers(policy):
        need(least <= value <= most, path, f"must be between {least} and "
             f"{f'{most:g}' if isinstance(most, float) else most}", DOCS)
    for team in policy.quotas:
        need(bool(NAME.match(team)), f"quotas.{team}", "is no team's name",
             "lower-case letters, digits, '-' and '.', at most 63")
    need(0 <= policy.gain_min < 1, "gain_min",
         f"{policy.gain_min:g} is not {'below 1' if policy.gain_min >= 1 else 'from 0 on'}",
         "it is a share of what the cluster earns: 0.05 is 5 %")
    need(policy.alpha in ALPHAS, "alpha", f"{policy.alpha:g} is not one of "
         f"{', '.join(f'{alpha:g}' for alpha in ALPHAS)}",
         "0 is the most WAF, 1 proportional fairness, 2 nearer to equal")
    need(not (policy.alpha and policy.hot_spare), "hot_spare",
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

"""A policy: what decides, and what its steps take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from ..decide import Decide
from .costs import Costs


class Told(Struct, frozen=True, kw_only=True):
    """What a policy knows of a run before it begins. `params`: of the model, by task's name."""

    costs: Costs
    params: Mapping[str, float]


class Policy(Struct, frozen=True, kw_only=True):
    """`heals`: members go on in memory; else all processes of a task start again together.

    `escalates`: nodes are quarantined and tasks given up as the limits say; others know neither.
    `decides` makes the `decide` of one run. `quick`: the same decisions with less to explain them,
    where nobody keeps the log. `by_params`: it asks for each task's parameters.
    """

    what: str
    heals: bool
    escalates: bool = False
    decides: Callable[[Told], Decide]
    quick: Decide | None = None
    costs: Costs
    by_params: bool = False

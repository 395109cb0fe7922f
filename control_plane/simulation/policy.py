"""A policy: what decides, and what its steps take."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ..decide import Decide
from .costs import Costs


class Policy(Struct, frozen=True, kw_only=True):
    """`heals`: members go on in memory; else all processes of a task start again together.

    `decides` makes the `decide` of one run.
    """

    what: str
    heals: bool
    decides: Callable[[], Decide]
    costs: Costs

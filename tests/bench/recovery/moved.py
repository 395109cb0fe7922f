"""The state that moved when a generation started, from the log, and the minimum possible."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from bench.recovery import environment
from bench.recovery.job import Spec

BUILD_S_MAX = 120.0
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Axes = dict[str, Any]
Record = dict[str, Any]
Piece = Sequence[Any]
"""Key, kind (for example `float32 6x64`), offset and shape."""


class Change(NamedTuple):
    """A change of generation: the layout before and after, and the ranks' positions."""

    before: Axes
    now: Axes
    own: tuple[int | None, ...]
    """By new position: the rank's position before, or None if the rank has no valid state."""
    moved_bytes: int
    settle_s: float
    """The settlement time of the slowest member, including its share of the state transfer."""


def change(records: Sequence[Record], generation: int) -> Change:
    """What that generation's members took from other ranks or from a copy."""
    orders = {
        record["body"]["generation"]: record["body"]
        for record in records
        if record["kind"] == "Reconfigure"
    }
    resumed = [record["body"]["generation"] for record in records if record["kind"] == "Resume"]
    told = {
        record["body"]["rank"]: record["body"]
        for record in records
        if record["kind"] == "Reconfigured" and record["body"]["generation"] == generation
    }
    now = orders[generation]
    before = orders[max(one for one in resumed if one < generation)]
    was, now_is = _attempts(before), _attempts(now)
    # A killed rank may be back by then, in a new process without state.
    had = {
        rank: place for place, rank in enumerate(_seated(before)) if was[rank] == now_is.get(rank)
    }
    first = told[_seated(now)[0]]
    is_set_back = first["origin"] not in ("own", "peer")
    # After a set-back each member reads its own part of a copy.
    moved_bytes = (
        sum(body["received_bytes"] for body in told.values())
        if is_set_back
        else sum(
            one["taken_bytes"]
            for body in told.values()
            for one in body["taken"]
            if one["rank"] != body["rank"]
        )
    )
    return Change(
        _axes(before),
        _axes(now),
        tuple(None if is_set_back else had.get(rank) for rank in _seated(now)),
        moved_bytes,
        max(body["settle_s"] for body in told.values()),
    )


def _attempts(order: dict[str, Any]) -> dict[int, int]:
    """The attempt of each member, by rank."""
    return {member["rank"]: member["attempt"] for member in order["members"]}


def _seated(order: dict[str, Any]) -> list[int]:
    """The ranks that train, by position."""
    return [member["rank"] for member in order["members"][: num_places(_axes(order))]]


def _axes(order: dict[str, Any]) -> Axes:
    found = order["axes"] or {"dp": len(order["members"])}
    return {"tp": 1, "pp": 1, "chunks": 1} | found


def num_places(axes: Axes) -> int:
    return int(axes["tp"] * axes["pp"] * axes["dp"])


def in_words(axes: Axes) -> str:
    """For example TP2xDP2."""
    return "x".join(
        f"{name.upper()}{axes[name]}"
        for name in ("tp", "pp", "dp")
        if axes[name] > 1 or name == "dp"
    )


def parts_of(spec: Spec, layouts: Sequence[Axes]) -> list[list[dict[str, Any]]]:
    """By layout and position, the output of bench/recovery/parts.py."""
    done = subprocess.run(
        [str(environment.python("")), "-P", "-m", "bench.recovery.parts"],
        input=json.dumps({"spec": spec, "layouts": layouts}),
        env=environment.environment("bare"),
        capture_output=True,
        text=True,
        check=True,
        timeout=BUILD_S_MAX,
    )
    return list(json.loads(done.stdout))


def least_bytes(spec: Spec, changes: Sequence[Change]) -> list[int]:
    """For each change: the bytes that its members need and do not have themselves."""
    layouts = [axes for one in changes for axes in (one.before, one.now)]
    different = [axes for index, axes in enumerate(layouts) if axes not in layouts[:index]]
    built = parts_of(spec, different)
    found: list[int] = []
    for one in changes:
        had, wanted = built[different.index(one.before)], built[different.index(one.now)]
        found.append(
            sum(
                lacking_bytes(part["pieces"], () if place is None else had[place]["pieces"])
                for part, place in zip(wanted, one.own, strict=True)
            )
        )
    return found


def lacking_bytes(wanted: Iterable[Piece], own: Iterable[Piece]) -> int:
    """Bytes of the pieces `wanted` that no piece of `own` contains."""
    had: dict[str, list[Piece]] = {}
    for piece in own:
        had.setdefault(piece[0], []).append(piece)
    return sum(
        ITEM_BYTES[kind.partition(" ")[0]]
        * (prod(shape) - sum(_overlap(offset, shape, *other[2:]) for other in had.get(key, ())))
        for key, kind, offset, shape in wanted
    )


def _overlap(
    offset: Sequence[int],
    shape: Sequence[int],
    other_offset: Sequence[int],
    other_shape: Sequence[int],
) -> int:
    """Number of elements that two blocks of one tensor share."""
    return prod(
        max(0, min(a + n, b + m) - max(a, b))
        for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True)
    )

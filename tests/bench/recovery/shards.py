"""The case zero1_overhead: the cost of a sharded optimizer, without and with mirrors.

Three tasks that differ only in `train.parallel.optimizer` are up at once and take turns
(bench/recovery/overhead.py). The rows are their iteration times and the memory of each rank.
"""

from __future__ import annotations

from pathlib import Path

from bench.recovery.job import NUM_RANKS, spec
from bench.recovery.moved import parts_of
from bench.recovery.overhead import Say, UnicronSide, compared, in_turn
from bench.recovery.rows import Row, row

CASE = "zero1_overhead"
KEPT = ("whole", "sharded", "mirrored")
BYTES = ("param_bytes", "gradient_bytes", "optimizer_bytes")


def measure(folder: Path, num_pairs: int, say: Say) -> list[Row]:
    """Iteration times over those of the whole optimizer, without copies; bytes by kind."""
    sides = [UnicronSide(folder / kept, 0, kept, parallel=_parallel(kept)) for kept in KEPT]
    blocks = in_turn(sides, num_pairs, say)
    found: dict[tuple[str, str], Row] = {}
    for kept in KEPT[1:]:
        for one in compared(
            CASE, "whole", [(block["whole"], block[kept]) for block in blocks], num_pairs, kept
        ):
            found[one.system, one.metric] = one
    say(f"{CASE}: the bytes")
    return [*found.values(), *held()]


def held() -> list[Row]:
    """Bytes of parameters, gradients and optimizer per rank: the median and the extremes.

    `first_more_bytes`: the size of rank 0's buffer for gathered shards, a whole replica. Copies and
    checkpoints need it.
    """
    rows: list[Row] = []
    whole_bytes = 0
    for kept in KEPT:
        parts = _parts(kept)
        rows += [row(CASE, kept, name, [part[name] for part in parts], "bytes") for name in BYTES]
        all_bytes = [sum(part[name] for name in BYTES) for part in parts]
        whole_bytes = whole_bytes or all_bytes[0]
        rows += [
            row(CASE, kept, "held_bytes", all_bytes, "bytes"),
            row(CASE, kept, "held_ratio", [one / whole_bytes for one in all_bytes], "ratio"),
            row(CASE, kept, "first_more_bytes", [0 if kept == "whole" else whole_bytes], "bytes"),
        ]
    return rows


def _parts(kept: str) -> list[dict[str, int]]:
    asked = spec("bench", Path("unused"), parallel=_parallel(kept))
    return parts_of(asked, [{"tp": 1, "pp": 1, "dp": NUM_RANKS}])[0]


def _parallel(kept: str) -> dict[str, str]:
    never = {"mirror": "never"} if kept == "sharded" else {}
    return {"optimizer": kept, **never}

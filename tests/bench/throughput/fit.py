"""The fit of the throughput model's constants. The result is the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.throughput.rows import Published, predicted
from unicron.control_plane.throughput.step_time import Constants

START = (0.75, 0.7, 0.5, 0.3, 8.0, 0.8, 0.8)
"""Matrix products on A100 and H100, scores on A100 and H100, passes, NVLink, network."""
BOUNDS = ((0.2, 1.0), (0.2, 1.0), (0.1, 1.0), (0.1, 1.0), (0.5, 30.0), (0.1, 1.0), (0.1, 1.0))
NUM_ROUNDS = 24
STEP_SHARE = 0.25


class Fitted:
    """Constants by kind of GPU. The shares of the peak FLOP/s differ; the rest is common."""

    def __init__(self, values: Sequence[float]) -> None:
        gemm_a, gemm_h, scores_a, scores_h, passes, link, network = values
        self.values = tuple(values)
        self.ampere = Constants(
            gemm_share=gemm_a,
            scores_share=scores_a,
            passes=passes,
            link_share=link,
            network_share=network,
        )
        self.hopper = Constants(
            gemm_share=gemm_h,
            scores_share=scores_h,
            passes=passes,
            link_share=link,
            network_share=network,
        )

    def of(self, row: Published) -> Constants:
        return self.hopper if row.kind == "H100" else self.ampere

    def predict(self, row: Published) -> float:
        """FLOP/s of one GPU."""
        return predicted(row, self.of(row))[0]


def mape(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean absolute error of (predicted, measured), in percent of the measured value."""
    return 100 * math.fsum(abs(guess / true - 1) for guess, true in pairs) / len(pairs)


def fit(rows: Sequence[Published]) -> Fitted:
    """Minimise the mean of the MAPE over sources and kinds: large groups must not dominate.

    Coordinate descent; the steps are halved when no coordinate improves.
    """
    groups = sorted({(row.source, row.kind) for row in rows})
    of = [[row for row in rows if (row.source, row.kind) == group] for group in groups]

    def error(values: Sequence[float]) -> float:
        fitted = Fitted(values)
        return math.fsum(
            mape([(fitted.predict(row), row.rate_flops) for row in each]) for each in of
        ) / len(of)

    values, step = list(START), STEP_SHARE
    best = error(values)
    for _ in range(NUM_ROUNDS):
        moved = False
        for place, (low, high) in enumerate(BOUNDS):
            for factor in (1 + step, 1 / (1 + step)):
                tried = list(values)
                tried[place] = min(max(tried[place] * factor, low), high)
                if (found := error(tried)) < best:
                    best, values, moved = found, tried, True
        step = step if moved else step / 2
    return Fitted(values)

"""The loss scale of 16-bit training, as a spec asks for it: constant, or one that finds itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

COUNT_NUM_MAX = 2**31 - 1
LOSS_SCALE_RATIO_MAX = 3e38
"""It and its inverse are numbers in fp32."""
LOSS_SCALE_RATIO_MIN = 1e-30
Need = Callable[..., None]


class DynamicLossScale(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss scale of fp16 that finds itself: halved by overflows, doubled after quiet.

    The names are those of Megatron's `--initial-loss-scale`, `--min-loss-scale`,
    `--loss-scale-window` (iterations without overflow before it is doubled) and `--hysteresis`
    (overflows before it is halved).
    """

    initial: float = 2.0**32
    min: float = 1.0
    window: int = 1000
    hysteresis: int = 2


def check_loss_scale(precision: Literal["fp32", "bf16", "fp16"], constant: float | None,
                     dynamic: DynamicLossScale, need: Need) -> None:
    """Tell `need` what has to hold; it raises where something does not."""
    if constant is not None:
        _need_scale(constant, "train.loss_scale", need)
        need(precision != "fp32", "train.loss_scale",
              "is of no use in fp32, where no gradient is too small to be seen",
              "leave it out, or set train.precision")
    _need_scale(dynamic.initial, "train.dynamic_loss_scale.initial", need)
    _need_scale(dynamic.min, "train.dynamic_loss_scale.min", need)
    need(dynamic.min <= dynamic.initial, "train.dynamic_loss_scale.min",
          f"{dynamic.min:g} is above initial {dynamic.initial:g}")
    for name in ("window", "hysteresis"):
        path, count = f"train.dynamic_loss_scale.{name}", getattr(dynamic, name)
        need(count >= 1, path, "must be at least 1")
        need(count <= COUNT_NUM_MAX, path, f"must be at most {COUNT_NUM_MAX}")
    need(dynamic == DynamicLossScale() or (precision == "fp16" and constant is None),
          "train.dynamic_loss_scale",
          f"is not used in {precision} with a loss_scale of its own" if constant is not None
          else f"is not used in {precision}",
          "it is for train.precision: fp16 without train.loss_scale")


def _need_scale(value: float, path: str, need: Need) -> None:
    need(LOSS_SCALE_RATIO_MIN <= value <= LOSS_SCALE_RATIO_MAX, path,
          f"must be between {LOSS_SCALE_RATIO_MIN:g} and {LOSS_SCALE_RATIO_MAX:g}")

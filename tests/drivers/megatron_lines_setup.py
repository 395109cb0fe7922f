"""Megatron's lines of progress: those of its versions are read, and nothing else, however cut."""

from __future__ import annotations

CORE = (b" [2025-08-01 09:32:10] iteration        2/    5000 | consumed samples:          256 |"
        b" elapsed time per iteration (ms): 25879.2 | throughput per GPU (TFLOP/s/GPU): 116.7 |"
        b" learning rate: 1.395349E-07 | global batch size:   128 | lm loss: 1.044560E+01 |"
        b" loss scale: 1.0 | grad norm: 35.570 | number of skipped iterations:   0 |"
        b" number of nan iterations:   0 |")

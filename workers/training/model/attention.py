"""Core attention with torch's scaled dot product, for Megatron's ModuleSpec."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .random_draws import Draw


class CoreAttention(MegatronModule):  # type: ignore[misc, unused-ignore]
    """Causal attention. Dropout is drawn per (iteration, micro-batch, layer, head counted over all
    ranks), so it depends neither on the computing rank nor on tensor parallelism."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
                 attention_dropout: float | None = None, softmax_scale: float | None = None,
                 cp_comm_type: str | None = None, pg_collection: Any = None, *, draw: Draw) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.dropout: float = (
            config.attention_dropout if attention_dropout is None else attention_dropout)
        self.draw = draw
        self.tp_rank: int = pg_collection.tp.rank() if pg_collection is not None else 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                attn_mask_type: Any = None, attention_bias: Any = None,
                packed_seq_params: Any = None) -> Tensor:
        """query, key, value [sequence, batch, heads, width] -> [sequence, batch, heads * width]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if k.size(1) != q.size(1):
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        if self.training and self.dropout > 0:
            out = self._with_dropout(q, k, v)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                   scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Unfused attention, because the fused kernels accept no generator."""
        scale = self.softmax_scale or 1 / math.sqrt(q.size(-1))
        length = q.size(2)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))
        first_head = self.tp_rank * q.size(1)
        keep = torch.stack([
            torch.rand((q.size(0), length, length), device=q.device,
                       generator=self.draw.generator(self.layer_number, first_head + head, q.device)
                       ) >= self.dropout
            for head in range(q.size(1))
        ], dim=1)
        # In fp32, as in the fused kernels: 16 bits are too few for a sum of many small numbers.
        weights = scores.softmax(-1, dtype=torch.float32) * keep / (1 - self.dropout)
        return weights.to(v.dtype) @ v

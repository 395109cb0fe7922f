"""The checksum of a chunk of state, between members."""

from __future__ import annotations

import pytest
import torch
from unicron.workers.training.recovery import state_transfer
from unicron.workers.training.recovery.state_transfer import ALIGN_BYTES, ROW_NUM


@pytest.mark.parametrize("num_words", [1, 2, ROW_NUM - 1, ROW_NUM, 3 * ROW_NUM + 5])
def test_a_chunk_that_was_altered_is_recognised(num_words: int) -> None:
    size = num_words * ALIGN_BYTES
    generator = torch.Generator().manual_seed(num_words)
    chunk = torch.randint(0, 255, (size + ALIGN_BYTES,), dtype=torch.uint8, generator=generator)
    state_transfer._seal(chunk)
    assert state_transfer._is_right(chunk)
    for at in {*range(0, size + 4, max(1, size // 40)), size - 1}:
        right = int(chunk[at])
        for wrong in (right ^ 1, right ^ 128, right ^ 255):
            chunk[at] = wrong
            assert not state_transfer._is_right(chunk), f"byte {at} is {wrong}, not {right}"
        chunk[at] = right
    words = chunk[:-ALIGN_BYTES].view(torch.int64)
    for other in {1, ROW_NUM, num_words - 1} & set(range(1, num_words)):
        words[[0, other]] = words[[other, 0]]
        assert not state_transfer._is_right(chunk), f"words 0 and {other} are swapped"
        words[[0, other]] = words[[other, 0]]
    assert state_transfer._is_right(chunk)

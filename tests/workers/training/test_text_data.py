"""Training text and losses: a sample depends only on its position, and each token counts once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from reference import compare
from unicron.events.errors import UsageError
from unicron.events.spec.job import Batch, Model, Train
from unicron.workers.training.checkpoint import checkpoint
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model.megatron_step import step
from unicron.workers.training.model.random_draws import seed_of
from unicron.workers.training.model.text_data import END_CODE, Text, carries_loss, load
from unicron.workers.training.process.history import History

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
TRAIN = Train(
    model=Model(num_layers=1, hidden=32, num_heads=2, sequence=4),
    batch=Batch(global_=6, micro=2),
    iterations=10,
    output="unused",
)
TOKENS = torch.tensor([[97, 98, 0, 99, 100], [0, 0, 97, 98, 0]])
"""Five of its eight targets carry loss."""
EMPTY = torch.zeros(2, 5, dtype=torch.int64)


def test_the_default_is_pythons_own_documentation() -> None:
    words = load((), 128)
    assert len(words) > 100_000
    assert words.digest == load((), 128).digest
    assert words.digest.startswith("sha256:")


def test_a_sample_is_a_pure_function_of_its_position() -> None:
    words = Text(bytes(range(256)) * 8)
    one = words.sample(1, 5, 3, rows=4, sequence=16)
    assert one.shape == (4, 17)
    words.sample(1, 6, 0, rows=2, sequence=16)
    assert one.equal(words.sample(1, 5, 3, rows=4, sequence=16))
    others = [
        words.sample(*place, rows=4, sequence=16) for place in ((2, 5, 3), (1, 6, 3), (1, 5, 4))
    ]
    assert not any(one.equal(other) for other in others)


def test_samples_are_runs_of_the_text_up_to_its_last_byte() -> None:
    words = Text(bytes(range(20)))
    firsts: set[int] = set()
    for item in range(60):
        row = words.sample(1, 0, item, rows=1, sequence=16)[0]
        first = int(row[0].item())
        assert row.equal(torch.arange(first, first + 17))
        firsts.add(first)
    assert firsts == {0, 1, 2, 3}


def test_files_are_read_in_order_and_named_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 40)
    (tmp_path / "b").write_bytes(b"b" * 40)
    one = load((str(tmp_path / "a"), str(tmp_path / "b")), 16)
    other = load((str(tmp_path / "b"), str(tmp_path / "a")), 16)
    assert len(one) == len(other) == 81
    row = one.sample(1, 0, 0, rows=1, sequence=79)[0]
    assert row.tolist().count(END_CODE) == 1, "one end of document between two files"
    assert one.digest != other.digest


def test_the_target_after_a_document_end_carries_no_loss() -> None:
    tokens = torch.tensor([[97, 98, END_CODE, 99, 100], [END_CODE, END_CODE, 97, 98, END_CODE]])
    assert carries_loss(tokens).tolist() == [[True, True, False, True], [False, False, True, True]]


def test_topics_of_the_default_text_are_documents() -> None:
    words = load((), 64)
    inside = [
        bool((~carries_loss(words.sample(1, 0, item, rows=64, sequence=512))).any())
        for item in range(8)
    ]
    assert any(inside)


def test_a_missing_or_short_file_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as missing:
        load((str(tmp_path / "nothing"),), 16)
    assert missing.value.hint
    (tmp_path / "short").write_bytes(b"x" * 17)
    with pytest.raises(UsageError, match="one sample needs 17"):
        load((str(tmp_path / "short"),), 17 - 1)


def test_seeds_differ_by_every_part_and_its_position() -> None:
    seeds = {seed_of(*parts) for parts in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (-1,))}
    assert len(seeds) == 7
    assert all(0 <= seed < 1 << 63 for seed in seeds)


# --- losses --------------------------------------------------------------------------------------
def built(alone: Any, loss: str) -> model.TrainingModel:
    return model.build(replace(TRAIN, loss=loss), torch.device("cpu"), alone)


def test_targets_after_a_document_end_are_not_counted(alone: Any) -> None:
    trainee = built(alone, "per_token")
    assert trainee.num_tokens(TOKENS) == 5
    before = trainee.loss(TOKENS).item()
    other = TOKENS.clone()
    other[0, 3] = 0  # this target does not count; as an input, it excludes the next target too
    others = trainee.loss(other)
    assert trainee.num_tokens(other) == 4
    each = trainee.ddps[0](
        TOKENS[:, :-1].contiguous(), trainee.positions, None, labels=TOKENS[:, 1:].contiguous()
    )
    assert others.item() == pytest.approx(before - each[0, 3].item(), rel=1e-5)


def test_a_micro_batch_adds_its_sum_or_its_share_of_the_mean(alone: Any) -> None:
    summed = built(alone, "per_token").loss(TOKENS)
    mean = built(alone, "per_micro_batch").loss(TOKENS)
    assert mean.item() == pytest.approx(summed.item() / 5 / 3, rel=1e-6)
    assert built(alone, "per_token").divisor(5 + 8) == 13
    assert built(alone, "per_micro_batch").divisor(5 + 8) == 1


@pytest.mark.parametrize("loss", ["per_token", "per_micro_batch"])
def test_an_iteration_without_any_token_is_finite(alone: Any, loss: str) -> None:
    trainee = built(alone, loss)
    trainee.clear()
    trainee.draw.at(0, 0)
    nothing = trainee.loss(EMPTY)
    assert nothing.item() == 0
    trainee.optimizer.scale_loss(nothing).backward()
    assert step(trainee, float(trainee.num_tokens(EMPTY)), lambda event: None) is not None
    assert all(param.isfinite().all() for param in trainee.modules[0].parameters())


def test_a_loss_of_zero_can_be_compared(alone: Any, tmp_path: Path) -> None:
    trainee = built(alone, "per_token")
    for name, first in (("zero", 0.0), ("other", 0.5)):
        history = History()
        history.add(0, first, 0.1)
        history.add(1, 2.0, 0.1)
        checkpoint.save(str(tmp_path / name), trainee, 2, history)
    zero, other = tmp_path / "zero", tmp_path / "other"
    assert compare(zero, zero).loss_rel == 0
    assert compare(other, zero).loss_rel == math.inf
    assert compare(zero, other).loss_rel == 1

"""Training text: what a micro-batch reads depends on where it is, never on who reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unicron.events.errors import UsageError
from unicron.workers.training.model.random_draws import seed_of
from unicron.workers.training.model.text_data import END_CODE, Text, carries_loss, load


def test_the_default_is_pythons_own_documentation() -> None:
    words = load((), 128)
    assert len(words) > 100_000
    assert words.digest == load((), 128).digest
    assert words.digest.startswith("sha256:")


def test_a_sample_is_a_pure_function_of_its_place() -> None:
    words = Text(bytes(range(256)) * 8, "test")
    one = words.sample(1, 5, 3, rows=4, sequence=16)
    assert one.shape == (4, 17)
    words.sample(1, 6, 0, rows=2, sequence=16)
    assert one.equal(words.sample(1, 5, 3, rows=4, sequence=16))
    others = [words.sample(*place, rows=4, sequence=16)
              for place in ((2, 5, 3), (1, 6, 3), (1, 5, 4))]
    assert not any(one.equal(other) for other in others)


def test_samples_are_runs_of_the_text_up_to_its_last_byte() -> None:
    words = Text(bytes(range(20)), "test")
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
    assert row.tolist().count(END_CODE) == 1, "a document ends between two files"
    assert one.digest != other.digest


def test_what_follows_the_end_of_a_document_carries_no_loss() -> None:
    tokens = torch.tensor([[97, 98, END_CODE, 99, 100], [END_CODE, END_CODE, 97, 98, END_CODE]])
    assert carries_loss(tokens).tolist() == [[True, True, False, True], [False, False, True, True]]


def test_topics_of_the_default_text_are_documents() -> None:
    words = load((), 64)
    inside = [bool((~carries_loss(words.sample(1, 0, item, rows=64, sequence=512))).any())
              for item in range(8)]
    assert any(inside)


def test_a_missing_or_short_file_is_one_line_and_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as missing:
        load((str(tmp_path / "nothing"),), 16)
    assert missing.value.hint
    (tmp_path / "short").write_bytes(b"x" * 17)
    with pytest.raises(UsageError, match="one sample needs 17"):
        load((str(tmp_path / "short"),), 17 - 1)


def test_seeds_differ_by_every_part_and_its_place() -> None:
    seeds = {seed_of(*parts) for parts in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (-1,))}
    assert len(seeds) == 7
    assert all(0 <= seed < 1 << 63 for seed in seeds)

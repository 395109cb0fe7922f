"""Training text as bytes, sampled at offsets that depend only on the seed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from ....events.errors import UsageError
from ....events.regular_files import open_regular
from .random_draws import seed_of

END_CODE = 0
"""The byte that ends a document."""


class Text:
    """A byte string. `digest` identifies it: `sha256:`, the hash of the bytes, and their number."""

    def __init__(self, data: bytes) -> None:
        self.digest = f"sha256:{hashlib.sha256(data).hexdigest()}:{len(data)}"
        self._bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._bytes.numel()

    def sample(
        self, seed: int, iteration: int, micro_batch: int, *, rows: int, sequence: int
    ) -> torch.Tensor:
        """Samples: int64 [rows, sequence + 1]. A pure function of its arguments and the bytes, so a
        micro-batch is equal on every rank."""
        generator = torch.Generator()
        generator.manual_seed(seed_of(seed, 0, iteration, micro_batch))
        starts = torch.randint(0, len(self) - sequence, (rows, 1), generator=generator)
        return self._bytes[starts + torch.arange(sequence + 1)].to(torch.int64)


def carries_loss(tokens: torch.Tensor) -> torch.Tensor:
    """The targets that count: bool [rows, sequence] of a sample [rows, sequence + 1]. The first
    byte of a document does not: the previous document cannot predict it."""
    return tokens[:, :-1] != END_CODE


def load(paths: Sequence[str], sequence: int) -> Text:
    """The files in this order; without files, the documentation of the running Python. END_CODE
    separates files or topics; one within a file also ends a document. Raises UsageError if a file
    cannot be read or the text is shorter than one sample."""
    if paths:
        data = bytes([END_CODE]).join(_read(path) for path in paths)
        origin = ", ".join(paths)
    else:
        from pydoc_data.topics import topics

        data = bytes([END_CODE]).join(topics[name].encode() for name in sorted(topics))
        origin = "pydoc_data.topics"
    if len(data) <= sequence + 1:
        raise UsageError(
            f"train.data: {origin} has {len(data)} bytes, one sample needs {sequence + 1}",
            "give longer files or a smaller train.model.sequence",
        )
    return Text(data)


def _read(path: str) -> bytes:
    try:
        with open_regular(Path(path)) as file:
            return file.read()
    except OSError as error:
        raise UsageError(
            f"train.data: {path}: {error.strerror}", "every node needs the files at the same paths"
        ) from None

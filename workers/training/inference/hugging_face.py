"""Writes a model as a folder of Hugging Face's transformers: it is a GPT-2 with bytes as tokens."""

import json
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..model import architecture
from .decoder import Decoder

_PARTS = {
    "embedding.word_embeddings": "transformer.wte",
    "embedding.position_embeddings": "transformer.wpe",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer": "lm_head",
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
"""Megatron's modules, and those of GPT2LMHeadModel; without the number of the layer."""


def export(decoder: Decoder, folder: Path) -> None:
    """Write the folder, which must not exist, completely or not at all. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as made:
        partial = Path(made, folder.name)
        partial.mkdir()
        (partial / architecture.FILE).write_bytes(architecture.encode(decoder.of))
        for name, content in (
            ("tokenizer.json", _tokenizer()),
            (
                "tokenizer_config.json",
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": decoder.of.n_positions,
                },
            ),
        ):
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # Not save_file: its errors are no OSError, and only its owner may read the file.
        (partial / "model.safetensors").write_bytes(save(weights(decoder), {"format": "pt"}))
        partial.rename(folder)


def weights(decoder: Decoder) -> dict[str, Tensor]:
    """The weights by the names of GPT2LMHeadModel, whose linear layers store the transpose."""
    found: dict[str, Tensor] = {}
    for name, param in decoder.state_dict().items():
        module, _, what = name.rpartition(".")
        layer, part = "", module
        if module.startswith("decoder.layers."):
            _, _, number, part = module.split(".", 3)
            layer = f"transformer.h.{number}."
        if part == "self_attention.linear_qkv":  # all queries, all keys, all values
            param = param.unflatten(0, (decoder.of.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        found[f"{layer}{_PARTS[part]}.{what}"] = (
            param.T if layer and param.dim() == 2 else param
        ).contiguous()
    return found


def _tokenizer() -> dict[str, Any]:
    """A tokenizer of the library `tokenizers` without merges: a token is the value of a byte. Its
    ByteLevel names a byte by the letter itself, if it can be printed, else by one from 256 on, as
    `bytes_to_unicode` in GPT-2's encoder.py."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    letters = [chr(byte if byte in printed else next(others)) for byte in range(256)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "merges": [],
            "vocab": {letter: byte for byte, letter in enumerate(letters)},
        },
    }

"""What a trained model is: `config.json`, saved beside its weights. Needs no Megatron."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ....events.decoding import from_json
from ....events.spec.model import LAYERS_NUM_MAX, TOKENS_NUM_MAX

FILE = "config.json"
Size = Annotated[int, Meta(ge=1, le=TOKENS_NUM_MAX)]


class Gpt2(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="model_type",
    tag="gpt2",
):
    """The GPT of a job's `train:`, as a configuration of Hugging Face's transformers. A token is
    the value of a byte; `eos_token_id` ends a document. `torch_dtype` is that of the weights."""

    architectures: tuple[Literal["GPT2LMHeadModel"]] = ("GPT2LMHeadModel",)
    n_layer: Annotated[int, Meta(ge=1, le=LAYERS_NUM_MAX)]
    n_embd: Size
    n_head: Size
    n_inner: Size
    n_positions: Size
    vocab_size: Literal[256] = 256
    tie_word_embeddings: bool
    activation_function: Literal["gelu"] = "gelu"
    layer_norm_epsilon: float
    embd_pdrop: float
    attn_pdrop: float
    resid_pdrop: float
    bos_token_id: int
    eos_token_id: int
    torch_dtype: Literal["float32", "bfloat16", "float16"]


def encode(config: Gpt2) -> bytes:
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def decode(data: bytes) -> Gpt2:
    """Raises ValueError, also for a model that this release does not know."""
    found = from_json(data, Gpt2)
    if found.n_embd % found.n_head:
        raise ValueError(f"n_embd {found.n_embd} is not divisible by n_head {found.n_head}")
    return found

"""The GPT that Unicron trains, in plain torch. Its parameters have Megatron's names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model.architecture import Gpt2


class _Layer(nn.Module):
    def __init__(self, of: Gpt2) -> None:
        super().__init__()
        self.num_heads = of.n_head
        self.input_layernorm = nn.LayerNorm(of.n_embd, of.layer_norm_epsilon)
        self.self_attention = nn.ModuleDict(
            {
                "linear_qkv": nn.Linear(of.n_embd, 3 * of.n_embd),
                "linear_proj": nn.Linear(of.n_embd, of.n_embd),
            }
        )
        self.pre_mlp_layernorm = nn.LayerNorm(of.n_embd, of.layer_norm_epsilon)
        self.mlp = nn.ModuleDict(
            {
                "linear_fc1": nn.Linear(of.n_embd, of.n_inner),
                "linear_fc2": nn.Linear(of.n_inner, of.n_embd),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.self_attention["linear_qkv"](self.input_layernorm(x))
        # Megatron's order: query, key and value of a head are beside each other.
        query, key, value = qkv.unflatten(2, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.self_attention["linear_proj"](mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.mlp["linear_fc1"](self.pre_mlp_layernorm(x)))
        out: Tensor = x + self.mlp["linear_fc2"](inner)
        return out


class Decoder(nn.Module):
    """The model: tokens [rows, length] -> logits [rows, length, vocabulary], without dropout; a row
    has at most `of.n_positions` tokens."""

    def __init__(self, of: Gpt2) -> None:
        super().__init__()
        self.of = of
        self.embedding = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(of.vocab_size, of.n_embd),
                "position_embeddings": nn.Embedding(of.n_positions, of.n_embd),
            }
        )
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(_Layer(of) for _ in range(of.n_layer)),
                "final_layernorm": nn.LayerNorm(of.n_embd, of.layer_norm_epsilon),
            }
        )
        if not of.tie_word_embeddings:
            self.output_layer = nn.Linear(of.n_embd, of.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        words: Any = self.embedding["word_embeddings"]
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = words(tokens) + self.embedding["position_embeddings"](positions)
        for layer in self.decoder["layers"].children():
            x = layer(x)
        x = self.decoder["final_layernorm"](x)
        output: Any = words if self.of.tie_word_embeddings else self.output_layer
        return functional.linear(x, output.weight)


@torch.inference_mode()
def generate(
    decoder: Decoder, prompt: Sequence[int], num: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    """Up to `num` tokens that follow the prompt, which must not be empty; fewer if the model ends
    the document. With `temperature` 0 each is the most probable one, else it is drawn. The model
    sees the last `of.n_positions` tokens."""
    draws = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num):
        logits = decoder(torch.tensor([tokens[-decoder.of.n_positions :]]))[0, -1].float()
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=draws))
        else:
            token = int(logits.argmax())
        if token == decoder.of.eos_token_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]

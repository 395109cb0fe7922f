"""Parameters and FLOPs of a GPT: dense, with grouped queries, with experts.

They are counted as in Megatron: a multiply-add is two FLOPs, and attention scores count fully
although half of them are masked. Norms and other element-wise work do not count.
"""

from msgspec import Struct

from ...events.spec.model import MegatronModel


class Parameters(Struct, frozen=True, kw_only=True):
    """Numbers of parameters. Experts are separate, because another process group shards them."""

    shared_layer: int
    """One layer without experts."""
    expert_layer: int
    """All experts of one layer; 0 without experts."""
    embedding: int
    """One embedding matrix."""
    num_layers: int
    num_embeddings: int

    @property
    def total(self) -> int:
        return (
            self.num_layers * (self.shared_layer + self.expert_layer)
            + self.num_embeddings * self.embedding
        )


def parameters(model: MegatronModel) -> Parameters:
    """Count a GPT's weights, norms but the last, and routers; no biases, no position embeddings."""
    hidden = model.hidden
    mlp = 2 * hidden * model.ffn + (hidden * model.ffn if model.swiglu else 0)
    shared = attention_weights(model) + 4 * hidden
    if model.num_experts:
        shared, experts = shared + hidden * model.num_experts, mlp * model.num_experts
    else:
        shared, experts = shared + mlp, 0
    return Parameters(
        shared_layer=shared,
        expert_layer=experts,
        embedding=model.vocabulary * hidden,
        num_layers=model.num_layers,
        num_embeddings=1 if model.tie_embeddings else 2,
    )


def attention_weights(model: MegatronModel) -> int:
    """Weights of queries, keys, values and the projection of one layer."""
    keys = model.hidden // model.num_heads * model.num_groups
    return 2 * model.hidden * (model.hidden + keys)


def mlp_weights(model: MegatronModel) -> int:
    """Weights of the MLP, or of the router and `top_k` experts, that one token uses in a layer."""
    mlp = (3 if model.swiglu else 2) * model.hidden * model.ffn
    return model.top_k * mlp + model.hidden * model.num_experts


def layer_flops(model: MegatronModel) -> tuple[int, int]:
    """(weights, scores): forward FLOPs of one layer for one sample."""
    weights = 2 * model.sequence * (attention_weights(model) + mlp_weights(model))
    return weights, 4 * model.sequence * model.sequence * model.hidden


def head_flops(model: MegatronModel) -> int:
    """Forward FLOPs of the logits for one sample."""
    return 2 * model.sequence * model.hidden * model.vocabulary


def iteration_flops(model: MegatronModel) -> float:
    """Model FLOPs of one iteration: forward, and twice as many backward. For a dense model with ffn
    = 4 h: 72 B s l h^2 (1 + s/6h + V/12lh) (Narayanan et al., SC'21, without the recomputation in
    their formula; Korthikanti et al., 2022)."""
    weights, scores = layer_flops(model)
    forward = model.num_layers * (weights + scores) + head_flops(model)
    return float(3 * model.global_batch * forward)

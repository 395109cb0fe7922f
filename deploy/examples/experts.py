"""A training loop on megatron-core that has adopted Unicron: a small GPT with a mixture of experts.

Routers balance the experts by biases and by an auxiliary loss; each layer has a shared expert, too.
`unicron submit deploy/examples/experts.yaml` heals it in memory, the state of routers included.
`python deploy/examples/experts.py` runs the same without an agent. loop.py is without experts.
"""

import argparse
import json
from pathlib import Path

from unicron.workers.training.adopt import adopt  # before megatron  # isort: skip

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

VOCABULARY, SEQUENCE, ROWS = 64, 16, 2
LR, EXPERTS, TOP_K = 1e-3, 4, 2

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--losses", type=Path, help="a file for a line of JSON for each iteration")
asked = parser.parse_args()


def build(groups, axes, place):
    """The model at a place of the layout, all with the same weights; whatever is drawn in here is
    the same on every rank. Nothing in here may ask another rank."""
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, calculate_per_token_loss=True,
        bias_dropout_fusion=False, add_bias_linear=False, tensor_model_parallel_size=axes.tp,
        sequence_parallel=axes.tp > 1, pipeline_model_parallel_size=axes.pp,
        pipeline_dtype=torch.float32,
        num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, moe_z_loss_coeff=1e-3,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    sharing = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    module = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=EXPERTS), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, pre_process=first, post_process=last, pg_collection=groups)
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    ddp = DistributedDataParallel(config, sharing, module, pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=LR, min_lr=LR / 10, clip_grad=1.0), [ddp],
        use_gloo_process_groups=False, pg_collection=groups)
    samples = asked.iterations * asked.micro_batches * ROWS
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=LR / 10, lr_warmup_steps=samples // 10,
        lr_decay_steps=samples, lr_decay_style="cosine", start_wd=0.01, end_wd=0.01,
        wd_incr_steps=samples, wd_incr_style="constant")
    return [ddp], optimizer, scheduler


def tokens(seed):
    """Runs of numbers, each with a stride of its own."""
    draw = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(VOCABULARY, (2, ROWS, 1), generator=draw)
    return (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY


def sample(iteration, micro_batch):
    """By random access: the same batch whichever rank asks, and whenever."""
    return tokens(iteration * asked.micro_batches + micro_batch)


def forward(model, batch):
    """What a chunk of the model makes of it; of the last chunk's, which is the loss of each token,
    their sum and number."""
    batch = batch.to("cuda" if torch.cuda.is_available() else "cpu")
    positions = torch.arange(SEQUENCE, device=batch.device).expand(ROWS, -1)
    out = model(batch[:, :-1].contiguous(), positions, None, labels=batch[:, 1:].contiguous())
    return out, lambda losses: (losses.float().sum(), losses.numel())


with adopt(build=build, sample=sample, forward=forward, iterations=asked.iterations,
           micro_batches=asked.micro_batches, samples=ROWS, sequence=SEQUENCE) as job:
    for _ in job:
        iteration = job.step()
        if job.is_last:
            line = {"iteration": iteration, "loss": job.loss, "ranks": job.num_members,
                    **job.auxiliary_losses}
            print(json.dumps(line), flush=True)
            if asked.losses is not None:
                with asked.losses.open("a") as file:
                    file.write(json.dumps(line) + "\n")

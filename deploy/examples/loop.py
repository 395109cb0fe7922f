"""A training loop on megatron-core that has adopted Unicron: a small GPT, on a CPU or a GPU.

`unicron submit deploy/examples/loop.yaml` heals it in memory. `python deploy/examples/loop.py` and
`torchrun --nproc-per-node 2 deploy/examples/loop.py` run the same without an agent. With
`--experts`, as in experts.yaml, each layer has a mixture of experts; its routers are healed, too.
With `--workers`, as in data_loader.yaml, a torch DataLoader reads the data.
"""

import argparse
import json
import time
from pathlib import Path

from unicron.workers.training.adopt import adopt  # before megatron  # isort: skip

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader, Dataset, RandomSampler

VOCABULARY, SEQUENCE, ROWS, SAMPLES = 64, 16, 2, 75
LR, EVALUATE_EVERY, EVALUATED = 1e-3, 5, 4

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--sharded", action="store_true", help="Megatron's distributed optimizer")
parser.add_argument("--experts", action="store_true", help="a mixture of experts in each layer")
parser.add_argument("--workers", type=int, help="processes of a DataLoader that reads the data")
parser.add_argument("--losses", type=Path, help="a file for a line of JSON for each iteration")
asked = parser.parse_args()

MIXTURE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "add_bias_linear": False,
}
"""Routers balance the experts by biases and an auxiliary loss. Each layer has a shared one, too."""


def build(groups, axes, place):
    """The model at a place of the layout. Nothing in here may ask another rank."""
    many = axes.chunks > 1
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=axes.tp,
        pipeline_model_parallel_size=axes.pp,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=axes.chunks if many else None,
        overlap_p2p_comm=many,
        batch_p2p_comm=not many,
        sequence_parallel=asked.experts and axes.tp > 1,
        **MIXTURE if asked.experts else {},
    )
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    sharing = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=asked.sharded
    )
    ddps = []
    for chunk in range(axes.chunks):
        module = GPTModel(
            config,
            get_gpt_layer_local_spec(config.num_moe_experts),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=first and chunk == 0,
            post_process=last and chunk == axes.chunks - 1,
            pg_collection=groups,
            vp_stage=chunk if many else None,
        )
        module.to("cuda" if torch.cuda.is_available() else "cpu")
        ddps.append(DistributedDataParallel(config, sharing, module, pg_collection=groups))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=LR / 10,
            clip_grad=1.0,
            use_distributed_optimizer=asked.sharded,
        ),
        ddps,
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    samples = asked.iterations * asked.micro_batches * ROWS
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=LR / 10,
        lr_warmup_steps=samples // 10,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=samples,
        wd_incr_style="constant",
    )
    return ddps, optimizer, scheduler


def tokens(seed):
    """Runs of numbers, each with a stride of its own."""
    draw = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(VOCABULARY, (2, ROWS, 1), generator=draw)
    return (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY


def sample(iteration, micro_batch):
    """By random access: the same batch whichever rank asks, and whenever."""
    return tokens(iteration * asked.micro_batches + micro_batch)


class Runs(Dataset):
    """Runs of numbers, each with a stride of its own, from a start that is drawn anew each time."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        start = torch.randint(VOCABULARY, ())
        return (start + index * torch.arange(SEQUENCE + 1)) % VOCABULARY


def loader():
    """A shuffled DataLoader. Its batches are the micro-batches of all ranks: of SAMPLES samples,
    each epoch has SAMPLES // ROWS."""
    order = RandomSampler(Runs(), generator=torch.Generator().manual_seed(7))
    ahead = {"prefetch_factor": 2, "persistent_workers": True} if asked.workers else {}
    return DataLoader(
        Runs(), batch_size=ROWS, sampler=order, drop_last=True, num_workers=asked.workers, **ahead
    )


def forward(model, batch):
    """What a chunk of the model makes of it; of the last chunk's, which is the loss of each token,
    their sum and number."""
    batch = batch.to("cuda" if torch.cuda.is_available() else "cpu")
    positions = torch.arange(SEQUENCE, device=batch.device).expand(ROWS, -1)
    out = model(batch[:, :-1].contiguous(), positions, None, labels=batch[:, 1:].contiguous())
    return out, lambda losses: (losses.float().sum(), losses.numel())


def validate(job):
    """The mean loss of what is never trained on, and the seconds that it took the slowest rank."""
    began_s = time.monotonic()
    loss = job.mean_loss(EVALUATED, lambda number: tokens(-1 - number))
    took_s = torch.tensor(time.monotonic() - began_s, device=job.device)
    dist.all_reduce(took_s, dist.ReduceOp.MAX, group=job.own)
    return {"validation": loss, "validation_s": took_s.item()}


with adopt(
    build=build,
    sample=sample if asked.workers is None else loader(),
    forward=forward,
    iterations=asked.iterations,
    micro_batches=asked.micro_batches,
    samples=ROWS,
    sequence=SEQUENCE,
    on_rebuild=lambda groups: dist.new_group(),
) as job:
    for _ in job:
        iteration = job.step()
        line = {"iteration": iteration, "loss": job.loss, "ranks": job.num_members}
        line |= job.auxiliary_losses
        if (iteration + 1) % EVALUATE_EVERY == 0:
            line |= job.evaluate(lambda: validate(job)) or {}
        if job.is_last:
            print(json.dumps(line), flush=True)
            if asked.losses is not None:
                with asked.losses.open("a") as file:
                    file.write(json.dumps(line) + "\n")

"""A training loop on megatron-core whose data come from a torch DataLoader with workers.

`unicron submit deploy/examples/data_loader.yaml` heals it in memory. `python
deploy/examples/data_loader.py` and `torchrun --nproc-per-node 2 deploy/examples/data_loader.py` run
the same without an agent.
"""

import argparse

from unicron.workers.training.adopt import adopt  # before megatron  # isort: skip

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--distributed", action="store_true", help="a DistributedSampler")
asked = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, SEQUENCE, ROWS, SAMPLES = 64, 16, 2, 75


class Runs(Dataset):
    """Runs of numbers, each with a stride of its own, from a start that is drawn anew each time."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        start = torch.randint(VOCABULARY, ())
        return (start + index * torch.arange(SEQUENCE + 1)) % VOCABULARY


def data():
    """A shuffled DataLoader. Its batches are the micro-batches of all ranks: of SAMPLES samples,
    each epoch has SAMPLES // ROWS."""
    runs = Runs()
    order = torch.Generator().manual_seed(7)
    sampler = (DistributedSampler(runs, num_replicas=1, rank=0, seed=7) if asked.distributed
               else RandomSampler(runs, generator=order))
    ahead = {"prefetch_factor": 2, "persistent_workers": True} if asked.workers else {}
    return DataLoader(runs, batch_size=ROWS, sampler=sampler, drop_last=True,
                      num_workers=asked.workers, **ahead)


def build(groups, axes, place):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, calculate_per_token_loss=True,
        bias_dropout_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
                     max_sequence_length=SEQUENCE, pg_collection=groups).to(DEVICE)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model,
                                  pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, clip_grad=1.0), [ddp],
        use_gloo_process_groups=False, pg_collection=groups)
    samples = asked.iterations * asked.micro_batches * ROWS
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=samples // 10,
        lr_decay_steps=samples, lr_decay_style="cosine", start_wd=0.01, end_wd=0.01,
        wd_incr_steps=samples, wd_incr_style="constant")
    return [ddp], optimizer, scheduler


def forward(model, batch):
    batch = batch.to(DEVICE)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(ROWS, -1)
    out = model(batch[:, :-1].contiguous(), positions, None, labels=batch[:, 1:].contiguous())
    return out, lambda losses: (losses.float().sum(), losses.numel())


with adopt(build=build, sample=data(), forward=forward, iterations=asked.iterations,
           micro_batches=asked.micro_batches, samples=ROWS) as job:
    for _ in job:
        iteration = job.step()
        if job.is_last:
            print(iteration, job.loss, flush=True)

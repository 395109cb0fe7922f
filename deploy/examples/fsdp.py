"""A training loop of its own, in torch's FSDP, that restarts from memory: a small transformer.

`unicron submit deploy/examples/fsdp.yaml` starts it; after a fault all its processes continue from
the state that they have stored in memory. `torchrun --nproc-per-node 2 deploy/examples/fsdp.py`
runs the same without an agent.
"""

import argparse
import json
import time
from pathlib import Path

from unicron.workers.training.adopt import keep_in_memory  # before torch  # isort: skip

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, ROWS, LR = 32, 4, 8, 1e-2

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--losses", type=Path, help="a file for a line of JSON for each iteration")
asked = parser.parse_args()

dist.init_process_group()
torch.manual_seed(1)
model = torch.nn.Sequential(
    *[
        torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        for _ in range(LAYERS)
    ]
)
model.to("cuda" if torch.cuda.is_available() else "cpu")
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
torch.manual_seed(dist.get_rank())  # dropout: each rank has its own


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(found):
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


def train(iteration):
    """The rows depend on the iteration and the rank, and on nothing that a restart loses."""
    drawn = torch.Generator().manual_seed(iteration * dist.get_world_size() + dist.get_rank())
    rows = torch.randn(ROWS, 4, WIDTH, generator=drawn).to(next(model.parameters()).device)
    loss = (model(rows) - rows.roll(1, 0)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    return float(loss) / dist.get_world_size()


with keep_in_memory("FSDP") as memory:
    for iteration in range(memory.resume(state, load), asked.iterations):
        begun_s = time.perf_counter()
        loss = train(iteration)
        memory.stepped(iteration + 1, state)
        if dist.get_rank() == 0:  # a line in the form of Megatron-LM's: Unicron reads the progress
            print(
                f" iteration {iteration + 1}/{asked.iterations} | elapsed time per iteration "
                f"(ms): {1000 * (time.perf_counter() - begun_s):.1f} | loss: {loss:.6E} |",
                flush=True,
            )
        if dist.get_rank() == 0 and asked.losses is not None:
            with asked.losses.open("a") as file:
                file.write(json.dumps({"iteration": iteration, "loss": loss}) + "\n")
dist.destroy_process_group()

"""Megatron-LM's own `pretrain`, one rank: python stock_megatron.py SCRIPT ARGS...

Without RANK, WORLD_SIZE and MASTER_PORT in the environment, it is the only rank. MICRO_BATCHES is
the order in which an iteration's micro-batches are summed, for example "2 1 0".

The reference for what a script prints under Unicron. Its loops, samplers and step run unchanged. On
a machine without CUDA, what that cannot do (compile fusions, count devices) is left out.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    } | os.environ
    if import_module("torch").cuda.is_available():
        sys.path.insert(0, str(script.parent))
        # Megatron-LM would compile it for the Python of `python3-config`.
        import_module("unicron.workers.training.megatron_lm.index_builder").ensure()
    else:
        stand_in(script)
    if words := os.environ.get("MICRO_BATCHES"):
        sum_in(tuple(map(int, words.split())))
    runpy.run_path(str(script), run_name="__main__")


def stand_in(script: Path) -> None:
    """Make the loops of this script's clone run on the CPU."""
    sys.path.insert(0, str(script.parent))
    from unicron.workers.training.megatron_lm import versions
    from unicron.workers.training.rank import preload

    preload()
    versions.complete_typing()
    from unicron.workers.training.model import cpu_device

    cpu_device.prepare_device()
    torch: Any = import_module("torch")
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    with cpu_device.uncompiled():
        cpu_device.install_stand_ins()
        training: Any = import_module("megatron.training.training")
        initialize: Any = import_module("megatron.training.initialize")
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    training.set_jit_fusion_options = training.report_memory = lambda *_, **options: None
    initialize._compile_dependencies = import_module(
        "unicron.workers.training.megatron_lm.index_builder"
    ).ensure
    connect = initialize._initialize_distributed

    def connect_one(*given: Any, **options: Any) -> None:
        with one_device():
            connect(*given, **options)

    initialize._initialize_distributed = connect_one
    seed_all = initialize._set_random_seed

    def seed_tracker(*given: Any, **options: Any) -> None:
        with one_device():  # else tensor-parallel ranks would draw the same weights
            seed_all(*given, **options)

    initialize._set_random_seed = seed_tracker
    load_torch_steps()


def sum_in(order: Sequence[int]) -> None:
    """Take the micro-batches of each iteration in this order. There is one replica."""
    sampler: Any = import_module("megatron.training.datasets.data_samplers")
    one_by_one = sampler.MegatronPretrainingSampler.__iter__

    def in_order(self: Any) -> Iterator[Any]:
        rows = one_by_one(self)
        while len(taken := list(islice(rows, len(order)))) == len(order):
            yield from (taken[index] for index in order)

    sampler.MegatronPretrainingSampler.__iter__ = in_order


def load_torch_steps() -> None:
    """Let Megatron's distributed optimizer load a state into torch's AdamW, which has its steps in
    tensors: without Apex and Transformer Engine it expects them before the first step, makes one
    tensor for all parameters, and misses its value in the checkpoint."""
    torch: Any = import_module("torch")
    optimizer: Any = import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    set_state = optimizer._set_main_param_and_optimizer_states
    state_dict = optimizer.state_dict

    def with_state(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    self.optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self)

    def set_with_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        set_state(self, param, {**tensors, "step": state["step"]})

    optimizer.state_dict = with_state
    optimizer._set_main_param_and_optimizer_states = set_with_step


@contextmanager
def one_device() -> Iterator[None]:
    """Megatron-LM divides ranks by the number of devices."""
    cuda: Any = import_module("torch").cuda
    count, cuda.device_count = cuda.device_count, lambda: 1
    try:
        yield
    finally:
        cuda.device_count = count


if __name__ == "__main__":
    main()

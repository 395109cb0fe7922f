"""Counts how often the host waits for the device because it reads a tensor.

A read is `aten::_local_scalar_dense` (item, bool, float), which a TorchDispatchMode sees, or
Tensor.tolist, which no dispatch mode sees. On a CPU the same code makes the same calls. A read
right after torch.cuda.synchronize waits for nothing: Megatron calls it after each exchange between
two stages. In between may only be views, which run nothing on the device.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Operations(TorchDispatchMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._reads.count()
        elif not func.is_view:
            self._reads.is_idle = False
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            self._reads.count()
        return func(*args, **(kwargs or {}))


WRAPPERS = (
    __file__,
    "model/cpu_device.py",
    "torch/overrides.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/utils/_python_dispatch.py",
)
"""Files between a read and its caller."""
Places = dict[str, int]
"""Where tensors were read, by file and line, and how often."""


class Reads:
    """Counts the reads of the threads that are in `here`."""

    def __init__(self) -> None:
        self.is_idle = False
        """Whether the device has nothing to do."""
        self._found: Counter[str] = Counter()

    def take(self) -> Places:
        """The reads since the last call."""
        found, self._found = dict(self._found), Counter()
        return found

    def count(self) -> None:
        if self.is_idle:
            return
        reader = next(
            frame
            for frame in reversed(traceback.extract_stack())
            if not frame.filename.endswith(WRAPPERS)
        )
        self._found[f"{Path(reader.filename).name}:{reader.lineno} {reader.line}"] += 1

    @contextmanager
    def here(self) -> Generator[None]:
        before = torch.cuda.synchronize

        def synchronize(device: Any = None) -> None:
            before(device)
            self.is_idle = True

        torch.cuda.synchronize = synchronize
        try:
            with _Lists(self), _Operations(self):
                yield
        finally:
            torch.cuda.synchronize = before


def count_iterations(folder: str, rank: int) -> None:
    """In a rank: write the reads of each iteration to `folder`/<rank>, from the end of the one
    before to its own end, collectives in other threads included."""
    from unicron.workers.training.model import cpu_device

    with cpu_device.uncompiled():
        from unicron.workers.training.step.iteration import Iteration

    reads, modes, found = Reads(), ExitStack(), list[Places]()
    run, cpu_mode = Iteration.run, cpu_device.cpu_mode

    def counted_run(self: Any, *given: Any) -> Any:
        if not found:
            modes.enter_context(reads.here())
            reads.take()
        outcome = run(self, *given)
        found.append(reads.take())
        Path(folder, str(rank)).write_text(json.dumps(found))
        return outcome

    def counted_mode() -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(cpu_mode())
        stack.enter_context(reads.here())
        return stack

    Iteration.run = counted_run  # type: ignore[method-assign]
    cpu_device.cpu_mode = counted_mode


def stock_iterations(
    functions: dict[str, Any], groups: Any, axes: Any, place: int, num_iterations: int
) -> Iterator[list[torch.Tensor]]:
    """Train the script's model by Megatron's own schedule, finalize_model_grads and optimizer step,
    as Megatron-LM's train_step does. Yields the losses of each iteration, which nobody has read."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from unicron.events.spec.parallelism import coordinates
    from unicron.workers.training.dependencies import private_megatron
    from unicron.workers.training.model import cpu_device, optimizers

    cpu_device.install_stand_ins()
    private_megatron.publish_globals(groups, axes.chunks)
    with optimizers.without_collectives():
        ddps, optimizer, scheduler = functions["build"](groups, axes, place)
    num = functions["micro_batches"]
    mine = range(coordinates(axes, place).dp, num, axes.dp)
    many = len(ddps) > 1
    config = ddps[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    if ddps[0].ddp_config.overlap_grad_reduce:
        syncs = [ddp.no_sync for ddp in ddps]
        config.no_sync_func = syncs if many else syncs[0]

    def forward_step(items: Iterator[tuple[int, int]], chunk: Any) -> Any:
        out, loss_func = functions["forward"](chunk, functions["sample"](*next(items)))

        def stock_loss(output: Any) -> Any:
            loss, num_tokens = loss_func(output)
            num_tokens = torch.as_tensor(num_tokens, dtype=torch.int)
            return loss, num_tokens, loss.detach()

        return out, stock_loss

    for iteration in range(num_iterations):
        for ddp in ddps:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        each = [(iteration, item) for item in mine]
        losses = get_forward_backward_func(pp_size=axes.pp, vp_size=axes.chunks if many else None)(
            forward_step_func=forward_step,
            data_iterator=[iter(each) for _ in ddps] if many else iter(each),
            model=ddps,
            num_microbatches=len(each),
            seq_length=functions["sequence"],
            micro_batch_size=functions["samples"],
            forward_only=False,
            pg_collection=groups,
            p2p_communicator=P2PCommunicator(groups.pp, config) if axes.pp > 1 else None,
        )
        optimizer.step()
        scheduler.step(num * functions["samples"])
        yield losses

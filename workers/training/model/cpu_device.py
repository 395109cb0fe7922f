"""Stand-ins for the GPU on a machine without CUDA, so that Megatron runs there.

With CUDA, this module changes nothing.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""One of these exists where a driver is loaded."""


class CudaAsCpu(TorchFunctionMode):
    """Redirects `device="cuda"` to the CPU. Megatron writes the literal 'cuda', calls `.cuda()`,
    and tells parameters apart by names such as 'torch.cuda.FloatTensor'."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int):
            if torch.device(device).type == "cuda":
                kwargs = dict(kwargs, device=CPU)
        elif func is torch.Tensor.cuda:
            return args[0]
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_mode: CudaAsCpu | None = None


def own_device(given: str, local_rank: int, num_seen: int) -> int:
    """Which of the `num_seen` GPUs that CUDA shows is this rank's own. `given`: the value of
    CUDA_VISIBLE_DEVICES. A process that was given one GPU uses that; else its own is that of its
    local rank. Raises RuntimeError if CUDA does not show it: the GPU of another rank is not taken
    instead. CUDA shows no GPU behind one that it does not find."""
    entries = [entry for entry in given.split(",") if entry.strip()]
    if len(entries) == 1 or (not entries and num_seen == 1):
        return 0
    if local_rank < num_seen:
        return local_rank
    lost = entries[num_seen] if num_seen < len(entries) else "one"
    own = entries[local_rank] if local_rank < len(entries) else f"number {local_rank}"
    raise RuntimeError(
        f"CUDA shows {num_seen} of the {len(entries) or local_rank + 1} GPUs of this rank's task "
        f"on this node, and not its own, {own}: {lost} is not there"
    )


def prepare_device(environment: Mapping[str, str] = os.environ) -> torch.device:
    """The training device. Without CUDA, the first call prepares this thread for the CPU. Raises
    torch's error if this rank was given GPUs that CUDA cannot use: it must not train on the CPU;
    and RuntimeError as `own_device`."""
    global _mode
    given = environment.get("CUDA_VISIBLE_DEVICES", "")
    if torch.version.cuda is not None and given not in ("", "-1"):
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(own_device(given, local_rank, torch.cuda.device_count()))
        return torch.device("cuda", torch.cuda.current_device())
    if _mode is None:
        # Megatron uses the result of `current_device` only as a `device=` argument.
        torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda device=None: None
        _answer_for_streams()
        _mode = CudaAsCpu()
        _mode.__enter__()  # type: ignore[no-untyped-call]
    return CPU


class InOrder:
    """A stream or an event without CUDA: the CPU runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> InOrder:
        return InOrder()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _answer_for_streams() -> None:
    def nothing(device: Any) -> None:
        pass

    def num_bytes(device: Any = None) -> int:
        return 0

    def memory_stats(device: Any = None) -> dict[str, int]:
        return defaultdict(int)

    def properties(device: Any = None) -> SimpleNamespace:
        # The first architecture on which Megatron-LM asks for no CUDA_DEVICE_MAX_CONNECTIONS.
        return SimpleNamespace(major=10, minor=0)

    torch.cuda.__dict__.update(
        Stream=InOrder,
        Event=InOrder,
        current_stream=InOrder,
        default_stream=InOrder,
        stream=nullcontext,
        set_device=nothing,
        memory_allocated=num_bytes,
        max_memory_allocated=num_bytes,
        memory_reserved=num_bytes,
        max_memory_reserved=num_bytes,
        memory_stats=memory_stats,
        get_device_properties=properties,
    )


@contextmanager
def uncompiled() -> Generator[None]:
    """A context for the import of Megatron: without a GPU its fused kernels, which Unicron does not
    call, stay plain functions. To load the compiler takes 1.9 s of 5.5 s (measured)."""
    # Neither CUDA nor NVML is asked: both start threads, and a zygote must have none.
    if torch.version.cuda is not None and any(map(os.path.exists, GPU_DRIVERS)):
        yield
        return
    compiler, torch.compile = torch.compile, _plain
    try:
        yield
    finally:
        torch.compile = compiler


def _plain(model: Any = None, **options: Any) -> Any:
    """A torch.compile that compiles nothing. It is a decorator, with or without options."""
    return model if model is not None else _plain


def cpu_mode() -> AbstractContextManager[object]:
    """The context for a thread that did not call `prepare_device`: torch's modes are per thread."""
    return nullcontext() if _mode is None else CudaAsCpu()


# --- Stand-ins for what Megatron takes from the GPU's libraries ---
#
# Recomputation saves and restores the GPU's random generators. Sequence parallelism needs a norm of
# Transformer Engine or Apex, and a router a function of Transformer Engine.


class _Tracker:
    """Megatron's RNG tracker. It has states only while a model is built. Later, model-parallel
    ranks draw from the CPU's only generator, which is seeded for each micro-batch."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        self._states = {}

    def add(self, name: str, seed: int) -> None:
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Generator[None]:
        if name not in self._states:
            yield
            return
        current = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(current)

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        pass


def _set_state(state: Tensor, *device: Any, **options: Any) -> None:
    torch.set_rng_state(state)


_is_installed = False


def install_stand_ins() -> None:
    """Install the stand-ins if there is no CUDA. It may be called again."""
    global _is_installed
    if torch.cuda.is_available() or _is_installed:
        return
    _is_installed = True
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from ..dependencies.private_megatron import replace_generators

    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    replace_generators(_Tracker(), lambda *device, **options: torch.get_rng_state(), _set_state)
    random.CheckpointFunction.apply = _with_mode(random.CheckpointFunction.apply)
    WrappedTorchNorm.__new__ = _marked(WrappedTorchNorm.__new__)
    _stand_in_for_experts()
    _keep_outputs()


def _with_mode(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's checkpoint. The backward calls the function without torch's modes."""

    def checkpoint(function: Callable[..., Any], *given: Any) -> Any:
        def run(*inputs: Any) -> Any:
            with cpu_mode():
                return function(*inputs)

        return apply(run, *given)

    return checkpoint


def _marked(norm_of: Callable[..., Any]) -> Callable[..., Any]:
    """A norm of torch whose parameters are marked for sequence parallelism: Megatron then adds up
    their gradients over the tensor-parallel ranks."""

    def marked_norm(cls: type, config: Any, *given: Any, **options: Any) -> Any:
        own = copy.copy(config)
        own.sequence_parallel = False  # Megatron refuses it: nothing would mark the parameters
        norm = norm_of(cls, own, *given, **options)
        for param in norm.parameters():
            vars(param)["sequence_parallel"] = config.sequence_parallel
        return norm

    return marked_norm


def _stand_in_for_experts() -> None:
    """Without Transformer Engine a router multiplies with torch. The dispatcher of tokens copies
    their numbers to the host; here they are there already."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _keep_outputs() -> None:
    """An interleaved pipeline frees the data of an output while gloo may still send it."""
    from megatron.core.pipeline_parallel import schedules

    def keep(*given: Any) -> None:
        pass

    schedules.deallocate_output_tensor = keep
    schedules.custom_backward = torch.autograd.backward

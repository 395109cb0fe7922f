"""Classes with the interface of Transformer Engine's and Apex's, for scripts without a GPU.

`install` makes Megatron take FusedAdam, as it does where one of the two packages is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam, whose moments are made in the first step, and whose steps are counted in the group."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.adam_w_mode, self.capturable, self.master_weights = (
            adam_w_mode,
            capturable,
            master_weights,
        )
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.tensor([1], dtype=torch.int) if self.capturable else 1
            for param in group["params"]:
                self._step(param, group)

    def _step(self, param: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        if param.grad is None:
            return
        first, second, num = state["exp_avg"], state["exp_avg_sq"], int(group["step"])
        first.lerp_(param.grad, 1 - beta1)
        second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        root = (second / (1 - beta2**num)).sqrt_().add_(group["eps"])
        param.addcdiv_(first / (1 - beta1**num), root, value=-group["lr"])


class ApexAdam(FusedAdam):
    """As above, of Apex, whose masters have another name."""

    __module__ = "apex.optimizers.fused_adam"
    use_master = False


ApexAdam.__name__ = "FusedAdam"


class EngineLinear(RowParallelLinear):
    """A layer with the extra state of one of Transformer Engine without FP8."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert not state.numel()


def install(package: str) -> None:
    """Make Megatron take FusedAdam of this package."""
    kind: Any = ApexAdam if package == "apex" else FusedAdam
    optimizer.Adam = distrib_optimizer.Adam = kind
    optimizer.USING_PYTORCH_OPTIMIZER = False


def engine_spec() -> Any:
    """The local layer specification with EngineLinear in the attention."""
    spec: Any = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.linear_proj = EngineLinear
    return spec

"""The routers of a mixture of experts: what they add up besides gradients, reduced at the step.

A router counts the tokens of experts with biases and adds up auxiliary losses: local sums of the
micro-batches in this member's gradients. Megatron would reduce them in place and change the biases
during the reduction, where a fault would leave some of it done. Here the reduction works on copies,
and the step changes the biases.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..communicators.operations import Operations

_MEGATRONS_DTYPE = "unicron_counts_dtype"
"""An attribute of a router: the type in which Megatron would count its tokens."""
Z_LOSS = "z_loss"
_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Megatron's types of load balancing by an auxiliary loss, and their names in its log."""
_TRACKER = getattr(moe_utils, "get_moe_metrics_tracker", None)
"""Megatron's log of auxiliary losses from 0.18 on; before that it is a dict of dicts."""


class RouterSums(NamedTuple):
    """Sums of one member, or of all. `counts`: the tokens of each expert that has a bias. `losses`:
    each auxiliary loss, over layers and micro-batches; at last the number of routers."""

    counts: Tensor
    losses: Tensor


NONE = RouterSums(torch.empty(0), torch.empty(0))


class Experts:
    """The routers of this member's part of the model. In a model without any, it does nothing."""

    def __init__(self, modules: Sequence[Any], device: torch.device) -> None:
        self._routers = routers(modules)
        self._biased = [router for router in self._routers if router.enable_expert_bias]
        self._device = device
        self._module = modules[0]
        config = getattr(self._module, "config", None)
        self._names = auxiliary_losses(config)
        self.are_somewhere = bool(getattr(config, "num_moe_experts", None))
        """Whether the model has experts, also if this member's part has none."""
        self._taken: RouterSums | None = None
        self.losses: dict[str, float] = {}
        """Each auxiliary loss in the last step: the mean over layers and micro-batches."""

    def clear(self) -> None:
        self._taken = None
        for router in self._biased:
            router.local_tokens_per_expert.zero_()
        if self._routers:
            for values in _logged().values():
                values.zero_()

    def scale(self, scale: Tensor) -> None:
        """Scale the gradients of the auxiliary losses by this factor from now on."""
        if self._routers:
            MoEAuxLossAutoScaler.main_loss_backward_scale = scale

    def count(self, *, counts: bool) -> None:
        """Whether the passes from now on count. Those of a micro-batch without loss do not."""
        for router in self._routers:
            router.training = counts and self._module.training
        for router in self._biased:
            router.enable_expert_bias = counts

    def sums(self) -> RouterSums:
        """A copy of the local sums."""
        if not self.are_somewhere:
            return NONE
        logged = _logged() if self._routers else {}
        counts = [router.local_tokens_per_expert.double() for router in self._biased]
        losses = [
            logged[name].double().sum() if name in logged else self._number(0.0)
            for name in self._names
        ]
        own = RouterSums(
            torch.cat([self._number(0.0).new_empty(0), *counts]),
            torch.stack([*losses, self._number(len(self._routers))]),
        )
        if self._taken is None:
            return own
        return RouterSums(own.counts + self._taken.counts, own.losses + self._taken.losses)

    def take(self, sums: RouterSums) -> None:
        """Add these local sums, of another model of the same part, to those of this model."""
        if not self.are_somewhere:
            return
        losses = sums.losses.clone()
        losses[-1] = 0.0
        self._taken = RouterSums(sums.counts, losses)

    def reduced(self, operations: Operations) -> RouterSums:
        """The sums over all members; waits for them. The local sums stay as they are."""
        own = self.sums()
        if not self.are_somewhere:
            return own
        size = operations.group("tp").size()
        if Z_LOSS in self._names:  # the others are sums over the tensor-parallel ranks already
            own.losses[self._names.index(Z_LOSS)] /= size
        values = torch.cat(own)
        operations.all_reduce(values, "dp_cp")
        operations.all_reduce(values, "tp")
        counts, losses = values[: len(own.counts)], values[len(own.counts) :].contiguous()
        operations.all_reduce(losses, "pp")
        losses[-1] /= size * operations.group("dp_cp").size()
        return RouterSums(counts, losses)

    def step(self, sums: RouterSums, num_micro_batches: int) -> None:
        """Change the biases as Megatron does, by the sums over all members."""
        if not self.are_somewhere:
            return
        each = sums.counts.float().chunk(len(self._biased)) if self._biased else ()
        for router, counts in zip(self._biased, each, strict=True):
            offset = counts.sum() / counts.numel() - counts
            sign = torch.sign(offset).to(vars(router)[_MEGATRONS_DTYPE])
            router.expert_bias.add_(sign * router.config.moe_router_bias_update_rate)
        *losses, num_routers = sums.losses.tolist()
        self.losses = {
            name: loss / num_routers / num_micro_batches
            for name, loss in zip(self._names, losses, strict=True)
        }

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._device)


def routers(modules: Sequence[Any]) -> list[Any]:
    return [part for module in modules for part in module.modules() if isinstance(part, TopKRouter)]


def auxiliary_losses(config: Any) -> list[str]:
    """The names of the auxiliary losses in Megatron's log."""
    if not getattr(config, "num_moe_experts", None):
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, weights = [kinds], [weights]
    return [
        *(
            _LOSSES[kind]
            for kind, weight in zip(kinds, weights, strict=True)
            if kind in _LOSSES and weight > 0
        ),
        *[Z_LOSS] * (config.moe_z_loss_coeff is not None),
    ]


def prepare(ddps: Sequence[Any], *, per_token: bool) -> None:
    """Prepare a new model with routers: Megatron's schedule and reduction leave them to `Experts`.
    `per_token`: a router multiplies its auxiliary losses with the tokens of a micro-batch, because
    the loss is divided by the number of all tokens."""
    if not (found := routers(ddps)):
        return
    for router in found:
        router.calculate_per_token_loss = per_token
        if router.enable_expert_bias:
            # In a model of 16 bits Megatron has both in 16 bits, and restores the first in the
            # first forward. Sums of counts in 16 bits would depend on the order of micro-batches:
            # here they are exact. But the step of a bias has 16 bits, as Megatron's.
            vars(router)[_MEGATRONS_DTYPE] = router.local_tokens_per_expert.dtype
            for name in ("expert_bias", "local_tokens_per_expert"):
                buffer = getattr(router, name)
                buffer.data = buffer.data.float()
    for ddp in ddps:  # only the schedule and the reduction read the configuration here
        ddp.config = copy.copy(ddp.config)
        ddp.config.num_moe_experts = None
        ddp.config.moe_router_enable_expert_bias = False


def forget_groups() -> None:
    """Drop the process groups in Megatron's log of auxiliary losses, which it keeps for the whole
    process: a reference would keep dead connections open."""
    if _TRACKER is not None:
        for entry in _TRACKER().metrics.values():
            entry.reduce_group = entry.avg_group = None
        return
    for entry in moe_utils.get_moe_layer_wise_logging_tracker().values():
        entry.update(reduce_group=None, avg_group=None)


def _logged() -> dict[str, Tensor]:
    if _TRACKER is not None:
        return {name: entry.values for name, entry in _TRACKER().metrics.items()}
    return {
        name: entry["values"]
        for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()
    }

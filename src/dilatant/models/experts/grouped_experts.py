"""Mixture-of-experts layers on one rank: tokens sorted by expert, and one grouped matrix product for all experts.

The weights are those of transformers: `gate_up_proj` [experts, 2 x inner, hidden] and `down_proj` [experts, hidden,
inner]. Each rank holds either a shard of every expert's inner features (tensor parallelism, see `tensor_plan`), or
whole experts to which tokens are sent (expert parallelism, dropless).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.comm.tensor_group import ExpertGroup, TensorGroup
from dilatant.models.mixed_class import mixed

GroupedProduct = Callable[[Tensor, nn.Parameter, Sequence[int]], Tensor]
"""A product like `grouped_linear`."""

_PRODUCT = 1 << 27
"""Elements of weight gradients in bf16 that exist at once, before they are added to fp32 sums."""
_ALIGNED_BYTES = 16
"""Alignment that torch's kernel needs for rows and weights."""
WEIGHTS = ("gate_up_proj", "down_proj")
"""Of all experts of a module, in the order in which they are applied."""
_OTHERWISE = ("has_bias", "is_transposed", "has_post_expert_norm")


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply rows [rows, in], sorted by group, by the transposed matrix of their group in `weight` [groups, out, in]:
    [rows, out]. counts: rows of each group, possibly 0."""
    if has_kernel(rows, weight):
        return functional.grouped_mm(rows.contiguous(), weight.transpose(-2, -1), offs=_ends(counts, rows.device))
    parts = [functional.linear(part, one) for part, one in zip(rows.split(list(counts)), weight, strict=True)]
    return torch.cat(parts)


def add_grouped_products(totals: Tensor, gradient: Tensor, inputs: Tensor, counts: Sequence[int]) -> None:
    """Add each group's `gradient.t() @ inputs` to its matrix of `totals` [groups, out, in] in fp32, by kernels for many
    groups at once, whose products are in bf16. gradient: [rows, out]; inputs: [rows, in]; counts: rows of each group,
    possibly 0. See `has_kernel` for where this works."""
    together = max(1, _PRODUCT // totals[0].numel())
    for first in range(0, len(totals), together):
        own, before = list(counts[first : first + together]), sum(counts[:first])
        if not (rows := sum(own)):
            continue
        factors = [each.narrow(0, before, rows).contiguous() for each in (gradient, inputs)]
        products = functional.grouped_mm(factors[0].t(), factors[1], offs=_ends(own, totals.device))
        if empty := [place for place, count in enumerate(own) if not count]:  # some GPUs leave anything there
            products.index_fill_(0, to_device(torch.tensor(empty), totals.device), 0.0)
        totals[first : first + together] += products


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of the row behind each group's last one."""
    return to_device(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


def has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return True if torch multiplies all groups in one kernel: in bf16 on GPUs since compute capability 8.0."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    return (
        hasattr(functional, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and all(size * rows.element_size() % _ALIGNED_BYTES == 0 for size in weight.shape[-2:])
        and weight.data_ptr() % _ALIGNED_BYTES == 0
        and len(rows) > 0
    )


def is_fused(module: nn.Module) -> bool:
    """Return True for an experts module with exactly these two weights in this layout."""
    if not getattr(module, "has_gate", False):
        return False
    own = dict(module.named_parameters(recurse=False))
    return (
        set(own) == {*WEIGHTS}
        and all(weight.dim() == 3 for weight in own.values())
        and getattr(module, "is_concatenated", True)
        and not any(getattr(module, name, False) for name in _OTHERWISE)
    )


def fused_experts(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the experts in a block."""
    for path, module in block.named_modules():
        if is_fused(module):
            yield path, module


class GroupedExperts:
    """Mixin for the class of an experts module.

    product: multiplies rows by a weight (see `grouped_linear`). ranks: the group that holds the same tokens; None if
    there is no other rank. holders: the expert-parallel group; None if this rank has parts of all. A module
    with adapters (see `expert_lora`) has them by weight in `lora_A` and `lora_B`, scaled by `lora_scale`.
    """

    product: GroupedProduct = staticmethod(grouped_linear)
    ranks: TensorGroup | None = None
    holders: ExpertGroup | None = None
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token: [tokens, hidden].

        hidden_states: [tokens, hidden]. top_k_index: [tokens, k], experts; top_k_weights: [tokens, k], their weights.
        """
        if self.ranks is None:
            return self._mixed(hidden_states, top_k_index, top_k_weights)
        tokens = len(hidden_states)
        hidden_states, top_k_weights = self.ranks.copy(hidden_states), self.ranks.copy(top_k_weights)
        if self.holders is None:
            return self.ranks.sum(self._mixed(hidden_states, top_k_index, top_k_weights))
        # Tokens are replicated; each rank sends a slice of them to their experts.
        first, end = (tokens * place // self.ranks.size for place in (self.ranks.index, self.ranks.index + 1))
        mixed = self._mixed(hidden_states[first:end], top_k_index[first:end], top_k_weights[first:end])
        return self.ranks.sum(functional.pad(mixed, (0, 0, first, tokens - end)))

    def _mixed(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts = len(self.gate_up_proj) * (1 if self.holders is None else self.holders.size)
        counts = torch.bincount(flat, minlength=experts)
        rows = hidden[order // chosen.shape[1]]
        rows = self._run(rows, counts.tolist()) if self.holders is None else self._travel(rows, counts)
        # Restore token order, so that sums have a fixed order: index_add has none on a GPU.
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        made = rows[back].view(*chosen.shape, hidden.shape[-1])
        return (made * weights[..., None]).sum(dim=1).to(hidden.dtype)

    def _run(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Run rows, sorted by expert, through the experts held here."""
        inner = cast(Any, self)._apply_gate(self._multiply(rows, "gate_up_proj", counts))
        return self._multiply(inner, "down_proj", counts)

    def _multiply(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """Multiply rows by a weight of their experts, and by its adapter."""
        module, made = cast(Any, self), self.product(rows, getattr(self, name), counts)
        if name not in getattr(self, "lora_A", ()):
            return made
        low = self.product(rows, module.lora_A[name], counts)
        return made.add(self.product(low, module.lora_B[name], counts), alpha=module.lora_scale)

    def _travel(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the expert-parallel ranks, and return the experts' outputs. counts: rows per
        expert."""
        assert self.holders is not None
        sent = counts.view(self.holders.size, -1)
        received = self.holders.counts(sent)
        there = [counts.sum(dim=1).tolist() for counts in (sent, received)]
        arrived = self.holders.exchange(rows, *there)
        # Rows arrive sorted by sender; sort them by expert.
        numbers = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        order = numbers.repeat_interleave(received.flatten()).argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        made = self._run(arrived[order], received.sum(dim=0).tolist())[back]
        return self.holders.exchange(made, *reversed(there))


def group_experts(module: nn.Module) -> GroupedExperts:
    """Make a module that `is_fused` use grouped products, in place; keys, hooks and `isinstance` stay as they are."""
    if not isinstance(module, GroupedExperts):
        module.__class__ = mixed(cast(Any, type(module)), GroupedExperts)
    return cast(GroupedExperts, module)


def ungroup_experts(module: nn.Module) -> None:
    """Undo `group_experts`; experts with adapters stay grouped."""
    assert isinstance(module, GroupedExperts)
    if not hasattr(module, "lora_A"):
        module.__class__ = type(module).__mro__[2]
    for name in ("product", "ranks", "holders"):
        module.__dict__.pop(name, None)

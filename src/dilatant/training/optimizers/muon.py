"""Muon (Jordan et al. 2024) for the matrices of blocks, beside AdamW for all other weights.

A matrix's update is orthogonalised, so the rank that updates it owns all of it: shares of optimizer state end between
matrices (`plan.buckets`), and tensor-parallel ranks cannot divide them. It has one moment instead of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dilatant.config.train import MuonConfig
from dilatant.training.optimizers.master_weights import Delegating, WithMasters


class MuonAdamW(WithMasters, Delegating):
    """torch's Muon for groups of masters that are `orthogonal`, and its AdamW for the others."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        weights: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        muon: MuonConfig,
        **options: Any,
    ) -> None:
        matrices, others = ([one for one in groups if one["orthogonal"] == kind] for kind in (True, False))
        inner: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **muon.model_dump(exclude={"weights"}))]
        inner += [torch.optim.AdamW(others, **options)] if others else []
        super().__init__(groups, weights, masters, inner=inner)
        self._matrices = {parameter for group in matrices for parameter in group["params"]}

    def allocate(self, parameter: nn.Parameter) -> None:
        if parameter in self._matrices:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        else:
            super().allocate(parameter)

"""Muon (Jordan et al. 2024) for the matrices of blocks, beside AdamW for all other weights.

A matrix's update is orthogonalised, so the rank that updates it owns all of it: shares of optimizer state end between
matrices (`plan.buckets`), and tensor-parallel ranks cannot divide them. It has one moment instead of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dilatant.config.train import MuonConfig
from dilatant.training.optimizers.master_weights import WithMasters


class _AdamWAndMuon(torch.optim.Optimizer):
    """torch's two optimizers over one list of groups and one state. Muon updates the groups that are `orthogonal`."""

    def __init__(self, groups: list[dict[str, Any]], muon: MuonConfig, **options: Any) -> None:
        super().__init__(groups, {})
        others = [group for group in groups if not group["orthogonal"]]
        settings = muon.model_dump(exclude={"weights"})
        self._each: list[torch.optim.Optimizer] = [
            torch.optim.Muon([group for group in groups if group["orthogonal"]], **settings),
            *([torch.optim.AdamW(others, **options)] if others else ()),
        ]
        for each in self._each:
            each.state = self.state

    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for each in self._each:
            each.step()


class MuonAdamW(WithMasters, _AdamWAndMuon):
    """torch's AdamW and Muon over fp32 masters."""

    def allocate(self, parameter: nn.Parameter) -> None:
        if any(parameter is one for group in self.param_groups if group["orthogonal"] for one in group["params"]):
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        else:
            super().allocate(parameter)

"""Projectors: modules that map an encoder's width to the language model's."""

from __future__ import annotations

from torch import nn

from dilatant.config.errors import UserError


def build_projector(kind: str, width: int, hidden_size: int, where: str = "projector") -> nn.Module:
    """Build a projector from `width` to `hidden_size`: [..., width] → [..., hidden_size].

    "linear" is one layer; "mlp" is linear, GELU, linear with the language model's width inside (LLaVA-1.5's form);
    "identity" needs equal widths. Raises UserError.
    """
    if kind == "linear":
        return nn.Linear(width, hidden_size)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(width, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))
    if kind == "identity":
        if width != hidden_size:
            raise UserError(
                f"{where}: projector 'identity' needs equal widths, but the encoder gives {width} and the language "
                f"model takes {hidden_size}; use 'linear' or 'mlp'"
            )
        return nn.Identity()
    raise UserError(
        f"{where}: projector {kind!r} is not known; use 'linear', 'mlp', 'identity' or an nn.Module"
    )

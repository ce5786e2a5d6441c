"""Connectors: modules that map the language model's hidden states to a denoiser's condition."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from dilatant.models.encoders.projector import build_projector

HEAD_SIZE = 64
"""Head size of the attention between an item's rows, if the width allows it."""


class TransformerConnector(nn.Module):
    """Transformer connector, [..., width_in] to [..., width]: the rows of an item attend to each other in pre-norm
    blocks of the language model's width, then a linear layer projects (the order of MetaQueries: encoder, then
    projection).

    rows: number per item; the input holds the rows of whole items, concatenated.
    """

    def __init__(self, width_in: int, width: int, rows: int, layers: int) -> None:
        super().__init__()
        self.rows = rows
        self.blocks = nn.Sequential(*(_ConnectorBlock(width_in) for _ in range(layers)))
        self.norm = nn.LayerNorm(width_in)
        self.projection = nn.Linear(width_in, width)

    def forward(self, tokens: Tensor) -> Tensor:
        items = tokens.reshape(-1, self.rows, tokens.shape[-1])
        made = self.projection(self.norm(self.blocks(items)))
        return made.reshape(*tokens.shape[:-1], made.shape[-1])


class _ConnectorBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // math.gcd(width, HEAD_SIZE)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, items: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(items)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(queries, keys, values)
        items = items + self.out(seen.transpose(1, 2).flatten(2))
        return items + self.fc2(F.gelu(self.fc1(self.norm2(items))))


def build_connector(kind: str, width_in: int, width: int, rows: int, layers: int, where: str) -> nn.Module:
    """Build a connector from `width_in` to `width`: [..., width_in] → [..., width].

    kind: one of `build_projector`, which map each row independently, or "transformer" with `layers` blocks, in which
    the `rows` rows of an item attend to each other. Raises UserError.
    """
    if kind == "transformer":
        return TransformerConnector(width_in, width, rows, layers)
    return build_projector(kind, width_in, width, where)

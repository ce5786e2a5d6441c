"""Recomputation modes: the activations that the backward recomputes instead of keeping them."""

from typing import Literal

Recompute = Literal["none", "block", "block_keep_attention"]
"""`none`: all activations are kept. `block`: only the input of each block. `block_keep_attention`: also the output of
attention (selective recomputation)."""

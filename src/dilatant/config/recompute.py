"""What a backward computes again."""

from typing import Literal

Recompute = Literal["none", "block", "block_keep_attention"]
"""`none`: all activations are kept. `block`: of every block its input. `block_keep_attention`: that and what attention
made."""

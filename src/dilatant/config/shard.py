"""Sharding modes: what the ranks that share the optimizer state of a weight shard besides it."""

from typing import Literal, get_args

Shard = Literal["none", "gradients", "weights"]
"""`none`: only the state (ZeRO stage 1). `gradients`: also gradients (stage 2). `weights`: also gradients and weights
(stage 3)."""

SHARDS: tuple[Shard, ...] = get_args(Shard)

"""Words of the config for how stages run: what backward recomputes, what ranks shard, what is compiled and fused."""

from typing import Literal, get_args

Recompute = Literal["none", "block", "block_keep_attention", "block_offload"]
"""`none`: all activations are kept. `block`: only the input of each block. `block_keep_attention`: also the output of
attention (selective recomputation). `block_offload`: only the input of each block, in host memory."""

Shard = Literal["none", "gradients", "weights_by_step", "weights"]
"""What ranks that share the optimizer state of a weight shard besides it. `none`: nothing (ZeRO stage 1). `gradients`:
also gradients (stage 2). `weights`: also gradients and weights (stage 3), which are whole only while a block runs.
`weights_by_step`: the same, but weights stay whole from their first use in a step to its end."""

SHARDS: tuple[Shard, ...] = get_args(Shard)

Compile = Literal["auto", "blocks", "none"]
"""Use of torch.compile. `blocks`: for each block of a unit. `auto`: on GPUs, for families that were tested
there."""

Kernels = Literal["auto", "liger", "none"]
"""Library of fused norms, gated activations and rotary embeddings. `auto`: none, until Liger was tested on a GPU."""

Precision = Literal["auto", "fp32", "bf16", "fp8"]
"""What a run computes in; see `train.precision`."""

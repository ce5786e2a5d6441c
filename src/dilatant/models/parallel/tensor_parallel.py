"""Tensor parallelism: convert a stage's modules to one rank's shard of the weights and heads.

No family's forward is copied. Ranks communicate at the entry and the exit of every region (see `tensor_plan`), in the
token embedding, and in the loss, which is computed over vocabulary shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.comm.tensor_group import ExpertGroup, TensorGroup
from dilatant.models.adapters.lora import adapter_of, plain_linear
from dilatant.models.core.cross_attention import STATES
from dilatant.models.core.loss import IGNORED
from dilatant.models.core.parallel_linear import ParallelLinear
from dilatant.models.core.recompute import add_contexts
from dilatant.models.core.sequence_parallel import SequenceRanks, TokenShards
from dilatant.models.core.slicing import Placeholder
from dilatant.models.experts.grouped_experts import group_experts
from dilatant.models.mixed_class import mixed
from dilatant.models.parallel.linear_heads import count_linear_heads
from dilatant.models.parallel.parallel_dora import shard_magnitudes
from dilatant.models.parallel.tensor_regions import Experts, Region, SplitPart


class VocabularyShard:
    """Vocabulary parallelism: this rank's rows `first <= row < end` of `size`, with loss and argmax over all ranks'
    logits."""

    def __init__(self, ranks: TensorGroup, first: int, end: int, size: int) -> None:
        self.ranks = ranks
        self.first = first
        self.end = end
        self.size = size

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute `loss.cross_entropy` of all ranks' logits. logits: [positions, own rows]; targets: [positions]."""
        return _VocabularyParallelLoss.apply(logits, targets, self)

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks, on each of them: [positions, size]. Backward gives each rank its own slice of
        the gradient, which all ranks compute alike."""
        return self.ranks.sum(nn.functional.pad(logits, (self.first, self.size - self.end)))

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the likeliest row of the whole vocabulary, the first among equals: int64 [positions]."""
        values, rows = logits.max(dim=-1)
        wins = values == self.ranks.largest(values)
        none = torch.iinfo(torch.int64).min
        return -self.ranks.largest(torch.where(wins, -(rows + self.first), none))


class _VocabularyParallelLoss(torch.autograd.Function):
    """Vocabulary-parallel cross entropy; saves one number per logit for backward, as torch's does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
        largest = shard.ranks.largest(logits.amax(dim=-1).float())
        weights = torch.sub(logits.float(), largest[:, None])
        own = (targets >= shard.first) & (targets < shard.end)
        places = torch.where(own, targets - shard.first, 0)[:, None]
        picked = weights.gather(-1, places)[:, 0].masked_fill(~own, 0)
        sums = shard.ranks.sum(torch.stack([weights.exp_().sum(dim=-1), picked]))
        ctx.save_for_backward(weights, sums[0], places, own, targets != IGNORED)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(targets == IGNORED, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weights, sums, places, own, counts = ctx.saved_tensors
        scale = gradient * counts
        grad_logits = weights * (scale / sums)[:, None]
        grad_logits.scatter_add_(-1, places, -(scale * own)[:, None])
        return grad_logits.to(ctx.dtype), None, None


class _VocabularyParallel:
    """Mixin for the class of a token embedding: each rank looks up the ids in its shard, and ranks sum the results."""

    shard: VocabularyShard

    def forward(self, input: Tensor) -> Tensor:
        outside = (input < self.shard.first) | (input >= self.shard.end)
        rows = cast(Any, super()).forward((input - self.shard.first).masked_fill(outside, 0))
        return self.shard.ranks.sum(rows.masked_fill(outside[..., None], 0))


def with_weights(model: nn.Module, weights: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    """Return a copy of `model` with other parameters; the only modules that both share are placeholders."""
    memo: dict[int, Any] = {id(own): other for own, other in weights.items()}
    # Placeholders refer to modules of other stages, which must not be copied.
    memo |= {id(module): module for module in model.modules() if isinstance(module, Placeholder)}
    return copy.deepcopy(model, memo)


def shard_blocks(
    blocks: Sequence[nn.Module],
    regions: Sequence[Sequence[Region]],
    experts: Sequence[Sequence[Experts]],
    ranks: TensorGroup,
    read: Collection[int] = (),
) -> TokenShards | None:
    """Make consecutive blocks with local weights tensor parallel, in place. regions, experts: per block.

    Outside of regions each rank holds a slice of the tokens (sequence parallelism): they are sliced before the first
    block and gathered after the last one, and after the blocks `read` (see `Stage.read_blocks`). Returns None without
    blocks.
    """
    if not blocks:
        return None
    for block, of_block in zip(blocks, regions, strict=True):
        for region in of_block:
            set_local_heads(block, region, ranks.size)
    mixtures = [{one.mixture for one in of_block} for of_block in experts]
    within = [
        [r for r in of_block if r.whole or r.path.startswith(tuple(f"{path}." for path in paths))]
        for of_block, paths in zip(regions, mixtures, strict=True)
    ]
    around = [[r for r in all_of if r not in inner] for all_of, inner in zip(regions, within, strict=True)]
    shards = shard_tokens(blocks, around, ranks, read)
    for block, paths, inner in zip(blocks, mixtures, within, strict=True):
        if any(region.whole for region in inner):  # runs sample by sample
            block.register_forward_pre_hook(_input_hook(shards.join), with_kwargs=True)
            block.register_forward_hook(_output_hook(shards.split), prepend=True)
        for path in paths:  # routers run on all tokens on every rank
            mixture = block.get_submodule(path)
            mixture.register_forward_pre_hook(_input_hook(shards.join), with_kwargs=True)
            mixture.register_forward_hook(_output_hook(shards.split))
        for region in inner:
            _shard_region(block, region, ranks, None)
    return shards


def shard_tokens(
    blocks: Sequence[nn.Module], regions: Sequence[Sequence[Region]], ranks: SequenceRanks, read: Collection[int] = ()
) -> TokenShards:
    """Make blocks with local weights sequence parallel between regions. read: see `shard_blocks`."""
    shards = TokenShards(ranks)
    for block, of_block in zip(blocks, regions, strict=True):
        for region in of_block:
            _shard_region(block, region, ranks, shards)
        add_contexts(block, shards.recompute_contexts)
    gathered = {*read, len(blocks) - 1}
    for number, block in enumerate(blocks):
        if number == 0 or number - 1 in gathered:
            block.register_forward_pre_hook(_input_hook(shards.split), with_kwargs=True)
        if number in gathered:  # before the hooks by which families record hidden states
            block.register_forward_hook(_output_hook(shards.join), prepend=True)
    return shards


def shard_experts(
    blocks: Sequence[nn.Module],
    experts: Sequence[Sequence[Experts]],
    ranks: TensorGroup | None,
    holders: ExpertGroup | None,
) -> None:
    """Connect the experts of blocks with local weights to other ranks. experts: per block (see `GroupedExperts`)."""
    for block, of_block in zip(blocks, experts, strict=True):
        for one in of_block:
            grouped = group_experts(block.get_submodule(one.path))
            grouped.ranks, grouped.holders = ranks, holders


def shard_vocabulary(model: PreTrainedModel, rows: int, head_rows: int, ranks: TensorGroup) -> VocabularyShard:
    """Make the slice's embedding and head, if it has them, vocabulary parallel, in place. Returns the head's shard.
    rows, head_rows: vocabulary sizes of the whole embedding and head (Mllama's embedding has more rows)."""
    shard, of_head = (
        VocabularyShard(ranks, *SplitPart(count).interval(ranks.size, ranks.index), count)
        for count in (rows, head_rows)
    )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.num_embeddings = shard.end - shard.first
        padding = embedding.padding_idx
        if padding is not None:
            embedding.padding_idx = padding - shard.first if shard.first <= padding < shard.end else None
        embedding.__class__ = cast(Any, mixed(cast(Any, type(embedding)), _VocabularyParallel))
        cast(Any, embedding).shard = shard
    if isinstance(head, nn.Linear):
        _local(head).enter = ranks.copy
    return of_head


def _shard_region(block: nn.Module, region: Region, ranks: SequenceRanks, shards: TokenShards | None) -> None:
    """Make the linear layers of a region and their LoRA adapters tensor parallel.

    In a column-parallel layer the adapter's outputs are divided; in a row-parallel layer the output of lora_A is
    reduced like the layer's own, and lora_B runs on the rank's tokens. shards: sequence parallelism around the region;
    None if its inputs and outputs are replicated.
    """
    entering, leaving = (
        [_local(linear) for path in paths for linear in _layer_and_adapter(block, path)[:2]]
        for paths in (region.columns, region.rows)
    )
    for path in region.columns:
        shard_magnitudes(block.get_submodule(path))
        for linear in _layer_and_adapter(block, path)[2:]:
            _local(linear)
    for path in region.rows:
        shard_magnitudes(block.get_submodule(path), ranks.sum)
    entry = block.get_submodule(region.path)
    if region.exits:  # it runs its linear layers on parts of a row
        assert shards is not None
        entry.register_forward_pre_hook(_input_hook(shards.gather), with_kwargs=True)
        entry.register_forward_hook(_output_hook(shards.sum_parts))
        return
    for linear in leaving:
        linear.leave = (lambda input, product: ranks.sum(product(input))) if shards is None else shards.sum_products
    if shards is None:
        entry.register_forward_pre_hook(_input_hook(ranks.copy), with_kwargs=True)
        if region.whole:
            entry.register_forward_pre_hook(_cross_states_hook(ranks.copy), with_kwargs=True)
    elif region.path:
        _gather_at_entry(block, region, shards)
    else:
        for linear in entering:
            linear.enter = shards.gather


def _layer_and_adapter(block: nn.Module, path: str) -> tuple[nn.Module, ...]:
    """Return the linear layer at `path` and, if it has an adapter, lora_A and lora_B."""
    return plain_linear(block, path), *(adapter_of(block, path) or ())


def _gather_at_entry(block: nn.Module, region: Region, shards: TokenShards) -> None:
    """Gather all tokens where hidden states enter the region's module, overlapped with the products of its columns."""

    def enter(own: Tensor) -> Tensor:
        # Look layers up at each call, because others that share their weights may have replaced them.
        linears = [cast(ParallelLinear, plain_linear(block, path)) for path in region.columns]
        hidden, outputs = shards.gather_products(own, [partial(linear.product, bias=linear.bias) for linear in linears])
        for linear, output in zip(linears, outputs):
            linear.precomputed = hidden, output
        return hidden

    def forget(*_: Any) -> None:
        for path in region.columns:
            cast(ParallelLinear, plain_linear(block, path)).precomputed = None

    entry = block.get_submodule(region.path)
    entry.register_forward_pre_hook(_input_hook(enter), with_kwargs=True)
    entry.register_forward_hook(forget, always_call=True)  # recomputation may stop inside


def set_local_heads(block: nn.Module, region: Region, size: int) -> None:
    """Set the local numbers of heads in a block's attention that holds the weights of one of `size` ranks, in place."""
    if region.key_heads:
        count_linear_heads(block.get_submodule(region.path), size)
    if not (region.heads and region.kv_heads):
        return
    counts = {"num_key_value_heads": max(1, region.kv_heads // size)}
    counts |= dict.fromkeys(("num_heads", "num_attention_heads"), region.heads // size)
    groups = counts["num_heads"] // counts["num_key_value_heads"]
    for module in block.get_submodule(region.path).modules():
        _count_heads(cast(Any, module), {**counts, "num_key_value_groups": groups})


def _local(linear: nn.Module) -> ParallelLinear:
    """Convert a linear layer to a ParallelLinear with the sizes of its local weight."""
    assert isinstance(linear, nn.Linear)
    linear.out_features, linear.in_features = linear.weight.shape
    linear.__class__ = ParallelLinear
    return cast(ParallelLinear, linear)


def _input_hook(take: Callable[[Tensor], Tensor]) -> Any:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (take(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": take(kwargs["hidden_states"])}

    return enter


def _cross_states_hook(take: Callable[[Tensor], Tensor]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = kwargs.get(STATES)
        return args, (kwargs if rows is None else {**kwargs, STATES: take(rows)})

    return look


def _output_hook(give: Callable[[Tensor], Tensor]) -> Any:
    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return (give(output[0]), *output[1:]) if isinstance(output, tuple) else give(output)

    return leave


def _count_heads(module: Any, counts: Mapping[str, int]) -> None:
    """Set the local numbers of heads in the module and in its config, wherever the family stores them."""
    config = getattr(module, "config", None)
    if config is not None:
        config = module.config = copy.copy(config)
    for holder in (module, config):
        for name, count in counts.items():
            if isinstance(getattr(holder, name, None), int):
                setattr(holder, name, count)
    if hasattr(module, "all_head_size"):
        module.all_head_size = counts["num_heads"] * module.attention_head_size
    if hasattr(module, "embed_dim") and hasattr(module, "head_dim"):  # width of the attention output
        module.embed_dim = counts["num_heads"] * module.head_dim
    if hasattr(module, "q_dim") and hasattr(module, "kv_dim"):  # widths in the output of a fused layer
        module.q_dim = counts["num_heads"] * module.head_dim
        module.kv_dim = counts["num_key_value_heads"] * module.head_dim

"""Run a stage as the family's own forward that is entered at the stage's first block and left behind its last one.

What a family does to embeddings before its first block (a scale, a norm, positions that are added) happens in the first
stage alone, and what it does behind its last block in the last stage alone, although every stage runs the same forward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dilatant.models.core.slicing import StandIn


class PassingBlock(StandIn):
    """Stand in for the blocks of a stage that has none: hidden states leave as they came.

    Families disagree on whether a block returns hidden states or a tuple that begins with them, so one row is returned,
    [1, tokens, hidden]: its first entry is the same tokens.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states.flatten(0, -2)[None]


def run_between(
    decoder: nn.Module,
    blocks: nn.ModuleList,
    keywords: dict[str, Any],
    *,
    enters: bool,
    leaves: bool,
    passing: nn.Module | None,
    behind: nn.Module | None = None,
) -> tuple[Any, Tensor]:
    """Return the decoder's output and the hidden states that leave the stage, shaped as `inputs_embeds` are.

    enters: the first of `blocks` that runs is given `inputs_embeds` of `keywords`, whatever the decoder makes of them.
    leaves: what the last block returns is the result, whatever the decoder makes of it; with `behind`, what that module
    is given. passing: the block of a stage without blocks.
    """
    arrived = keywords["inputs_embeds"]
    waiting = [arrived] if enters else []
    left: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not waiting:  # a block before took it; families may skip blocks
            return None
        waiting.clear()
        if args:
            return (arrived, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": arrived}

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        left[:] = [output[0] if isinstance(output, tuple) else output]

    handles = []
    is_empty = passing is not None and not len(blocks)
    if is_empty:
        blocks.append(cast(nn.Module, passing))
    try:
        if enters:
            # The decoder works on zeros, which have no graph: no gradient goes around the first block.
            keywords = {**keywords, "inputs_embeds": torch.zeros_like(arrived)}
            for block in blocks:
                handles.append(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        if leaves and behind is not None:
            handles.append(behind.register_forward_pre_hook(lambda module, args: left.append(args[0])))
        elif leaves:
            handles += [block.register_forward_hook(leave) for block in blocks]
        output = decoder(**keywords)
        if waiting:  # all blocks were skipped
            output = decoder(**{**keywords, "inputs_embeds": arrived})
    finally:
        for handle in handles:
            handle.remove()
        if is_empty:
            del blocks[-1]
    hidden = left[-1] if left else output.last_hidden_state
    return output, hidden.reshape(*arrived.shape[:-1], hidden.shape[-1])

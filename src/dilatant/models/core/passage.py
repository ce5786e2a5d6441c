"""Running a stage: the family's own forward, entered at the stage's first block and left after its last one.

The family's work on embeddings before its first block (a scale, a norm, added positions) takes effect in the first
stage alone, and its work after the last block in the last stage alone, although every stage runs the same forward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dilatant.models.core.slicing import StandIn


class PassingBlock(StandIn):
    """Identity block for a stage that has no blocks.

    Families disagree on whether a block returns hidden states or a tuple that begins with them, so the block returns
    [1, tokens, hidden], whose first entry is the same tokens.
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
    """Return the decoder's output and the hidden states that leave the stage, in the shape of `inputs_embeds`.

    enters: the first of `blocks` receives `inputs_embeds` from `keywords` unchanged, whatever the decoder does to them.
    leaves: the result is the last block's output or, with `behind`, the input of that module. passing: the identity
    block of a stage without blocks.
    """
    arrived = keywords["inputs_embeds"]
    waiting = [arrived] if enters else []
    left: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not waiting:  # an earlier block took it; families may skip blocks
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
            # The decoder works on zeros without a graph: no gradient bypasses the first block.
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

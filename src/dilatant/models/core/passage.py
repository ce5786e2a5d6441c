"""Running a stage by the family's own forward: input enters at the first block, output leaves after the last block.

Every stage runs the whole forward, but operations before the first block (a scale, a norm, added positions) affect only
the first stage, and operations after the last block only the last stage.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dilatant.models.core.slicing import Placeholder


class PassingBlock(Placeholder):
    """Identity block for a stage that has no blocks.

    In some families a block returns hidden states, in others a tuple that begins with them. Therefore this block
    returns [1, tokens, hidden], of which `output[0]` is the same hidden states.
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

    enters: pass `inputs_embeds` of `keywords` directly to the first of `blocks`, bypassing the decoder's operations
    before it. leaves: return the last block's output or, with `behind`, the input of that module. passing: the identity
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
            # The decoder runs on zeros without a graph, so that no gradient bypasses the first block.
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

"""Load-balancing loss of mixture-of-experts routers, summed over samples and thus independent of the layout.

Switch Transformer's loss (arXiv 2101.03961, equations 4-6), computed per sample (sequence-wise, as in DeepSeek-V3);
computed over a batch, it would depend on the division into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.models.language.extension import Extension, LanguageForward


def has_router_loss(model: PreTrainedModel) -> bool:
    """Return True if the config enables the loss as in transformers: `output_router_logits`, `router_aux_loss_coef`."""
    config: Any = model.config
    return bool(getattr(config, "output_router_logits", False)) and router_weight(model) > 0


def router_weight(model: PreTrainedModel) -> float:
    """Return the config's `router_aux_loss_coef`; 0 if the family has none."""
    return float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)


def count_routers(model: PreTrainedModel) -> int:
    """Return the number of routers."""
    return len(_routers(model.base_model))


def _routers(decoder: Any) -> list[tuple[nn.Module, int]]:
    """Return the routers of a text model, in order, each with the index of the logits in its output."""
    recorded = decoder._can_record_outputs["router_logits"]
    recorders = recorded if isinstance(recorded, list) else [recorded]
    return [
        (module, getattr(recorder, "index", 0))
        for module in decoder.modules()
        for recorder in recorders
        if isinstance(module, cast(Any, getattr(recorder, "target_class", recorder)))
    ]


class RouterLoss(Extension):
    """The router loss of a stage's blocks. name: the loss's. experts_per_token: experts that a router chooses."""

    def __init__(self, name: str, experts_per_token: int) -> None:
        self.name = name
        self.experts_per_token = experts_per_token

    def enter(self, forward: LanguageForward) -> None:
        if forward.data is None or forward.data.predicts:
            return
        logits: list[Tensor] = []
        forward.state[self] = logits
        for router, place in _routers(forward.decoder):

            def keep(module: nn.Module, args: Any, output: Any, place: int = place) -> None:
                logits.append(output[place] if isinstance(output, tuple) else output)

            forward.closing.callback(router.register_forward_hook(keep).remove)

    def leave(self, forward: LanguageForward, hidden: Tensor) -> Tensor:
        if forward.state.get(self):
            row, data = forward.packed, forward.data
            assert data is not None
            logits = [row.unpadded(each) for each in forward.state[self]]
            add_up = None if row.share is None else row.share.sum
            losses = router_loss(logits, row.sample_of, row.lengths, self.experts_per_token, add_up)
            forward.losses[self.name] = losses / data.counts[self.name]
        return hidden


def router_loss(
    logits: Sequence[Tensor],
    sample_of: Tensor,
    lengths: Sequence[int],
    experts_a_token: int,
    add_up: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the loss of a packed row, summed over its tokens: [routers], fp32; under uniform use a token adds
    `experts_a_token`.

    logits: for each router, [tokens, experts]. sample_of: int64 [tokens], the sample of each. lengths: tokens of each
    sample. add_up: sum over context-parallel ranks, if the tokens are one rank's shard; the result is then its summand.
    """
    sample_of, sizes = (to_device(each, logits[0].device) for each in (sample_of, torch.tensor(lengths)))
    losses = []
    for each in logits:
        shares = each.float().softmax(dim=-1)
        chosen = torch.zeros_like(shares).scatter_(1, shares.topk(experts_a_token, dim=-1).indices, 1.0)
        by_sample = shares.new_zeros(len(lengths), shares.shape[1])
        use = by_sample.index_add(0, sample_of, chosen)
        use = (use if add_up is None else add_up(use)) / sizes[:, None]
        losses.append(shares.shape[1] * (use * by_sample.index_add(0, sample_of, shares)).sum())
    return torch.stack(losses)

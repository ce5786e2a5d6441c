"""The loss that keeps the experts of a mixture evenly used, as a sum over samples: so no layout changes it.

Switch Transformer's (arXiv 2101.03961, equations 4-6), of each sample by itself (sequence-wise, as in DeepSeek-V3):
over a batch it would be another in every cut into microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dilatant.models.packed_row import PackedRow


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether the config asks for it, as in transformers: `output_router_logits` and `router_aux_loss_coef`."""
    config: Any = model.config
    return bool(getattr(config, "output_router_logits", False)) and router_weight(model) > 0


def router_weight(model: PreTrainedModel) -> float:
    """The config's `router_aux_loss_coef`; 0 where the family has none."""
    return float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)


def count_routers(model: PreTrainedModel) -> int:
    """How many blocks choose experts."""
    recorded = cast(Any, model.base_model)._can_record_outputs["router_logits"]
    recorders = recorded if isinstance(recorded, list) else [recorded]
    classes: tuple[Any, ...] = tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    return sum(isinstance(module, classes) for module in model.base_model.modules())


def router_loss(logits: Sequence[Tensor], row: PackedRow, experts_a_token: int) -> Tensor:
    """What this rank's tokens add, over them and the routers: a scalar, fp32. With even use each token adds
    `experts_a_token` for each router.

    logits: of each router, [tokens, experts].
    """
    device, samples = logits[0].device, len(row.lengths)
    sample_of = row.sample_of.where(row.sample_of >= 0, samples).to(device)
    lengths = torch.tensor(row.lengths, device=device)[:, None]
    uses, shares = [], []
    for each in logits:
        share = each.float().softmax(dim=-1)
        chosen = torch.zeros_like(share).scatter_(1, share.topk(experts_a_token, dim=-1).indices, 1.0)
        none = share.new_zeros(samples + 1, share.shape[1])
        uses.append(none.index_add(0, sample_of, chosen)[:samples])
        shares.append(none.index_add(0, sample_of, share)[:samples])
    use = row.sum(torch.stack(uses)) / lengths  # by all of a sample's tokens, on whatever rank
    return logits[0].shape[1] * (use * torch.stack(shares)).sum()

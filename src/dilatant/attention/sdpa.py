"""Attention through PyTorch's scaled_dot_product_attention, for rows whose samples are plainly full or causal."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from dilatant.attention import mask as layout
from dilatant.attention.attention_plan import AttentionPlan
from dilatant.attention.scores import Scores


class _Batch(NamedTuple):
    """Samples that run in one call: row indices of their tokens, `[samples, length]` flattened, or None for the whole
    row as it lies."""

    tokens: torch.Tensor | None
    samples: int
    causal: bool


def why_not_plain(plan: AttentionPlan) -> str | None:
    """Why the mask is not one full or causal block per sample; None if it is."""
    return plan.remember("why not plain", _why_not_plain)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> tuple[torch.Tensor, None]:
    """Output `[tokens, query_heads, head_dim]`; samples of one length and kind run as one batch."""
    batches: list[_Batch] = plan.remember(
        ("batches", query.device), lambda plan: _batches(plan, query.device)
    )
    output = query.new_zeros((*query.shape[:2], value.shape[2]))
    for tokens, samples, causal in batches:
        parts = (x if tokens is None else x[tokens] for x in (query, key, value))
        q, k, v = (x.unflatten(0, (samples, -1)).transpose(1, 2) for x in parts)
        result = scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        result = result.transpose(1, 2).flatten(0, 1)
        if tokens is None:
            return result, None
        output = output.index_copy(0, tokens, result)
    return output, None


def _why_not_plain(plan: AttentionPlan) -> str | None:
    if plan.keys is not plan.mask:
        return "the keys are not the queries' own row"
    runs, window = plan.mask.runs, plan.mask.window
    samples = set()
    for start, length, word in zip(runs.start.tolist(), runs.length.tolist(), runs.field.tolist()):
        own, attended = word & layout.OWN, (word & layout.ATTEND) >> layout.ATTEND_SHIFT
        if not own and not attended:
            continue
        sample = (word & layout.SAMPLE) >> layout.SAMPLE_SHIFT
        if sample in samples:
            return f"the tokens of sample {sample} attend in more than one way (from token {start} on)"
        samples.add(sample)
        if not (own & attended) and not (word & layout.TOGETHER and own):
            return f"tokens from {start} on do not attend to their own modality"
        if word & layout.WINDOW and window is not None and window < length:
            return f"sample {sample} of {length} tokens is held to a window of {window}"
    return None


def _batches(plan: AttentionPlan, device: torch.device) -> list[_Batch]:
    runs = plan.mask.runs
    groups: dict[tuple[int, bool], list[int]] = {}
    for start, length, word in zip(runs.start.tolist(), runs.length.tolist(), runs.field.tolist()):
        if word & (layout.OWN | layout.ATTEND):
            causal = bool(word & layout.CAUSAL) and not (word & layout.TOGETHER and word & layout.OWN)
            groups.setdefault((length, causal), []).append(start)
    batches = []
    for (length, causal), starts in groups.items():
        if len(groups) == 1 and len(starts) * length == plan.mask.num_tokens:
            batches.append(_Batch(None, len(starts), causal))
        else:
            tokens = torch.tensor(starts)[:, None] + torch.arange(length)
            batches.append(_Batch(tokens.flatten().to(device), len(starts), causal))
    return batches

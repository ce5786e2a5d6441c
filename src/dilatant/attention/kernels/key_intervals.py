"""Attention of libraries that take a mask as intervals of keys: MagiAttention's kernels, and cuDNN's Flex.

Both tables come from one: the sorted, disjoint intervals of keys that each query sees, which `block_table` gives for
blocks of one token. So every mask of the package is exact in them. They are made once per plan, in time proportional to
intervals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from dilatant.attention.kernels.attention_plan import AttentionPlan, upload
from dilatant.attention.kernels.scores import Scores, seen_by_none
from dilatant.attention.masks.blocks import BlockTable, block_table

MAGI_HEADS = (64, 128)
"""Channels of a head for which MagiAttention's kernels are built and tested; others are padded with zeros."""


class Slices(NamedTuple):
    """A mask as MagiAttention takes it: a sum of parts without common pairs. Part s lets queries `queries[s, 0]` to
    `queries[s, 1]` see keys `keys[s, 0]` to `keys[s, 1]`, ends exclusive; int32 `[parts, 2]`.

    kinds: int32 `[parts]`. 0: all of them; 1: causal, so that the last query sees the last key and each query before it
    one key less; 2: the first query sees the first key, and each query behind it begins one key later; 3: both.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]
    kinds: NDArray[np.int32]


def intervals(plan: AttentionPlan) -> BlockTable:
    """Return the intervals of keys that each query sees: a table of blocks of one token."""
    table = block_table(plan.mask, 1, keys=plan.keys)
    assert table.exact, "the backend was chosen for a mask with more runs than it takes"
    return table


def endpoints(table: BlockTable) -> NDArray[np.int32]:
    """Return intervals as cuDNN's Flex takes them: int32 `[1, ends, queries]`, where a query with ends F sees keys
    `[0, F0)`, `[F1, F2)`, and so on. The ends of a query never fall; empty intervals fill up the list."""
    counts = np.diff(table.offsets)
    ends = np.zeros((1 + 2 * int(counts.max(initial=0)), table.num_rows), np.int32)  # [0, F0) stays empty
    query, place = _places(table)
    ends[2 * place + 1, query] = table.start
    ends[2 * place + 2, query] = table.start + table.length
    return np.maximum.accumulate(ends)[None]


def slices(table: BlockTable) -> Slices:
    """Return intervals as slices: those of consecutive queries, of which the starts and the ends both stay or both or
    one of them move on by one key a query, are one slice."""
    query, place = _places(table)
    order = np.argsort(place, kind="stable")
    query, start = query[order], table.start[order]
    end = start + table.length[order]
    starts, ends = np.diff(start), np.diff(end)
    follows = np.diff(query) == 1  # never from the last query of one place to the first of the next, which has fewer
    for moved in (starts, ends):
        follows &= (moved == 0) | (moved == 1)
    kind = np.where(follows, 2 * starts + ends, -1)
    # A slice ends where its kind changes, unless it began there: in a series of changes, at every other one.
    step = np.arange(kind.size)
    changed = follows & (kind != np.append(-1, kind[:-1]))
    before = np.maximum.accumulate(np.where(changed, -1, step))
    cut = np.append(True, ~follows)[before + 1] ^ ((step - before) % 2 == 1)
    first = np.flatnonzero(np.append(True, cut)[: query.size])
    last = np.append(first[1:], query.size)[: first.size] - 1
    kinds = np.where(last > first, np.append(kind, -1)[first], 0)
    return Slices(
        np.stack([query[first], query[last] + 1], axis=1).astype(np.int32),
        np.stack([start[first], end[last]], axis=1).astype(np.int32),
        kinds.astype(np.int32),
    )


def _places(table: BlockTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the query of each interval, and its number among the query's intervals."""
    counts = np.diff(table.offsets)
    query = np.repeat(np.arange(table.num_rows), counts)
    return query, np.arange(query.size) - np.repeat(table.offsets[:-1].astype(np.int64), counts)


def magi(
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> torch.Tensor:
    """Call MagiAttention's `flex_flash_attn_func`; its output is `[tokens, query_heads, value_dim]`."""
    device = query.device

    def copy(plan: AttentionPlan) -> tuple[bool, list[torch.Tensor]]:
        table = intervals(plan)
        is_once = int(np.diff(table.offsets).max(initial=0)) < 2
        return is_once, [upload(part, device) for part in slices(table)]

    is_once, (queries, keys, kinds) = plan.remember(("slices", device), copy)
    if not len(kinds):
        return seen_by_none(query, key, value)
    width = next(each for each in MAGI_HEADS if each >= max(query.shape[2], value.shape[2]))
    output, _ = function(
        *(part if part.shape[2] == width else pad(part, (0, width - part.shape[2])) for part in (query, key, value)),
        q_ranges=queries,
        k_ranges=keys,
        attn_type_map=kinds,
        sink=None if sinks is None else sinks.float()[None],
        softmax_scale=scores.scale,
        softcap=scores.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        disable_fwd_atomic_reduction=is_once,  # no query is in two slices
    )
    found: torch.Tensor = output[..., : value.shape[2]]
    return found


def cudnn_flex(
    library: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> torch.Tensor:
    """Call `flex_attn_func` of cudnn.flex_attention, after `create_mask_plan` once per plan and shape of heads. The
    host waits for the device while that plan is made."""
    device, tensors = query.device, (query, key, value)
    ends = plan.remember(("endpoints", device), lambda plan: upload(endpoints(intervals(plan)), device))
    if ends.shape[1] == 1:
        return seen_by_none(*tensors)
    row = [part.unsqueeze(0) for part in tensors]
    gradients = torch.is_grad_enabled() and any(part.requires_grad for part in tensors)
    heads = query.dtype, gradients, *(part.shape[1:] for part in tensors)
    of_library = plan.remember(
        ("cudnn plan", device, *heads), lambda _: library.create_mask_plan(ends, *row, build_backward=gradients)
    )
    output: torch.Tensor = library.flex_attn_func(
        *row,
        mask_plan=of_library,
        softmax_scale=scores.scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output.squeeze(0)

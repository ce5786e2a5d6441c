"""Learned inputs of the language model at the places where it is to say what a generator draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_DEVIATION = 0.02
"""Of queries at the start: that of most families' token embeddings."""


class Queries(nn.Module):
    """For each unit [tokens_per_item, width]: what stands at the places of an item, in order.

    counts: unit → tokens of an item. (MetaQueries, DreamLLM.)
    """

    def __init__(self, counts: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.counts = dict(counts)
        for name, count in counts.items():
            self.register_parameter(name, nn.Parameter(torch.empty(count, width)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all of them anew."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_DEVIATION)

    def table(self) -> Tensor:
        """The queries of all units, one after another: [queries, width]."""
        return torch.cat([self.get_parameter(name) for name in self.counts])

    def put(self, embeddings: Tensor, query_of: Tensor, shares_row: bool = False) -> Tensor:
        """`embeddings` [batch, tokens, width] with queries at their places. query_of: see `number_queries`, of the
        flattened batch, on the host. shares_row: other ranks have other tokens of the same row. They meet in its
        backward, so all of them must have one, also who has no place here."""
        at = torch.nonzero(query_of >= 0).squeeze(-1)
        if not len(at) and not shares_row:
            return embeddings
        device = embeddings.device
        rows = self.table()[query_of[at].to(device, non_blocking=True)].to(embeddings.dtype)
        return embeddings.flatten(0, 1).index_copy(0, at.to(device), rows).view_as(embeddings)


def number_queries(ids: NDArray[np.int64], token_ids: Mapping[str, int], counts: Mapping[str, int]) -> Tensor:
    """Of each token of a row, the row of `Queries.table` that stands there; -1 where none does: int64 [tokens].

    ids: [tokens]. token_ids: unit → the id of its places, whole items of them in every sample. counts: as of `Queries`.
    """
    query_of = np.full(len(ids), -1, np.int64)
    first = 0
    for name, count in counts.items():
        at = np.flatnonzero(ids == token_ids[name])
        query_of[at] = first + np.arange(len(at)) % count
        first += count
    return torch.from_numpy(query_of)

"""Learned queries: inputs of the language model at the tokens whose outputs condition a generator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.models.language.extension import Extension, LanguageForward

_DEVIATION = 0.02
"""Initial standard deviation of queries: that of most families' token embeddings."""


class Queries(Extension, nn.Module):
    """Learned query embeddings, per unit [tokens_per_item, width], in order within an item (as in MetaQueries,
    DreamLLM). counts: unit → tokens per item."""

    part = "queries"

    def __init__(self, counts: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.counts = dict(counts)
        for name, count in counts.items():
            self.register_parameter(name, nn.Parameter(torch.empty(count, width)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all queries."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_DEVIATION)

    def table(self) -> Tensor:
        """Concatenate the queries of all units: [queries, width]."""
        return torch.cat([self.get_parameter(name) for name in self.counts])

    def embed(self, forward: LanguageForward, embeddings: Tensor) -> Tensor:
        share = None if forward.row is None else forward.row.share
        if forward.row is None:
            assert forward.ids is not None
            ids = forward.ids.flatten().cpu().numpy()
        else:
            ids = np.concatenate([sample.input_ids for sample in forward.samples])
        query_of = number_queries(ids, forward.text.outputs, self.counts)
        query_of = query_of if share is None else share.take(query_of, -1)
        return self.put(embeddings, query_of, forward.is_part)

    def put(self, embeddings: Tensor, query_of: Tensor, is_part: bool = False) -> Tensor:
        """Return `embeddings` [batch, tokens, width] with queries inserted. query_of: `number_queries` of the flattened
        batch, on the host. is_part: True if other ranks hold other tokens of the microbatch; as they communicate in
        backward, every rank builds the graph, even without a query."""
        at = torch.nonzero(query_of >= 0).squeeze(-1)
        if not len(at) and not is_part:
            return embeddings
        query_of, at = (to_device(each, embeddings.device) for each in (query_of[at], at))
        rows = self.table()[query_of].to(embeddings.dtype)
        return embeddings.flatten(0, 1).index_copy(0, at, rows).view_as(embeddings)


def number_queries(ids: NDArray[np.int64], token_ids: Mapping[str, int], counts: Mapping[str, int]) -> Tensor:
    """Return for each token its index into `Queries.table`, or -1 if it is no query: int64 [tokens].

    ids: [tokens]. token_ids: unit → the id of its query tokens, whole items in every sample. counts: as in `Queries`.
    """
    query_of = np.full(len(ids), -1, np.int64)
    first = 0
    for name, count in counts.items():
        at = np.flatnonzero(ids == token_ids[name])
        query_of[at] = first + np.arange(len(at)) % count
        first += count
    return torch.from_numpy(query_of)

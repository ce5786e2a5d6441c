"""Learned queries: who has memory for them, and who differentiates them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig

from dilatant import Generator, MultimodalModel
from dilatant.models.core.materialize import materialize
from dilatant.models.language.queries import Queries, number_queries


class Nothing(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flatten(1).sum(1)


def test_who_has_the_tied_head_alone_has_no_memory_for_queries() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    unit = MultimodalModel({}, config, generators={"x": Generator(Nothing(), None, 8)}, device="meta")["language"]
    materialize(unit, 2, 3, seed=0)
    real = {name for name, parameter in unit.named_logical_parameters() if not parameter.is_meta}
    assert real == {"language.embedding.embed_tokens.weight", "language.head.norm.weight"}


def test_every_rank_sharing_a_row_has_a_backward_without_queries() -> None:
    """They meet there: one that had none would leave the others waiting, or meet them in another microbatch."""
    queries = Queries({"x": 2}, 4)
    embeddings = torch.randn(1, 5, 4)  # of a language model that is frozen
    nowhere = number_queries(np.arange(5), {"x": 9}, queries.counts)
    assert not queries.put(embeddings, nowhere).requires_grad
    shared = queries.put(embeddings, nowhere, is_part=True)
    assert shared.requires_grad
    assert torch.equal(shared, embeddings)
    empty = queries.put(embeddings[:, :0], nowhere[:0], is_part=True)
    assert empty.requires_grad

"""The row of the padding token is that of one shard of the vocabulary, wherever it lies; all others learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dilatant.models.parallel.tensor_parallel import shard_vocabulary

ROWS = 12


def _rank(index: int, size: int) -> Any:
    """One of several ranks whose sums are made by the test."""
    return SimpleNamespace(size=size, index=index, copy=lambda hidden: hidden, sum=lambda part: part)


@pytest.mark.parametrize("padding", [None, 0, 1, 5, 6, 11])
@pytest.mark.parametrize("size", [2, 3])
def test_every_row_but_padding_has_a_gradient_on_its_rank(padding: int | None, size: int) -> None:
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, pad_token_id=padding, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    whole = LlamaForCausalLM(config).get_input_embeddings()
    assert isinstance(whole, nn.Embedding)
    ids = torch.arange(ROWS)[None]
    rows, gradients = [], []
    for index in range(size):
        model = LlamaForCausalLM(config)
        embedding = model.get_input_embeddings()
        own = slice(ROWS * index // size, ROWS * (index + 1) // size)
        embedding.weight = nn.Parameter(whole.weight.detach()[own].clone())
        shard_vocabulary(model, ROWS, ROWS, _rank(index, size))
        rows.append(embedding(ids))
        rows[-1].sum().backward()
        gradients.append(embedding.weight.grad)
    whole(ids).sum().backward()
    assert torch.equal(sum(rows), whole(ids))
    assert torch.equal(torch.cat(gradients), whole.weight.grad)
    learns = whole.weight.grad.any(dim=1).tolist()
    assert learns == [row != padding for row in range(ROWS)]

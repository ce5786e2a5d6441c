"""Modelled activations of blocks equal what autograd keeps of them in bf16."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import AutoConfig

from dilatant.cost.analytic import block_shape
from dilatant.planning.measuring.layer_shapes import _norms

WIDTH, INNER, HEADS, KEY_VALUE_HEADS, SIZE, TOKENS = 256, 688, 8, 2, 32, 256


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("gemma3_text", "Gemma3"), ("olmo2", "Olmo2")],
)
def test_modelled_activations_are_those_that_autograd_keeps(family, name):
    config = AutoConfig.for_model(
        family, hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS, head_dim=SIZE,
        num_key_value_heads=KEY_VALUE_HEADS, num_hidden_layers=1, vocab_size=64, attn_implementation="sdpa",
    )  # fmt: skip
    module = family.removesuffix("_text")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    block = getattr(models, f"{name}DecoderLayer")(config, 0).to(torch.bfloat16).train()
    turns = tuple(torch.ones(1, TOKENS, SIZE, dtype=torch.bfloat16) for _ in range(2))
    known = {one.untyped_storage().data_ptr() for one in (*block.parameters(), *turns)}
    held = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    rows = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(rows, position_embeddings=turns)
    kept = sum(storage.nbytes() for storage in held.values()) / TOKENS / 2
    norms = _norms([block], HEADS * SIZE, KEY_VALUE_HEADS * SIZE, INNER)
    modelled = block_shape(WIDTH, INNER, HEADS, KEY_VALUE_HEADS, head_size=SIZE, norms=norms).kept
    assert modelled == pytest.approx(kept, rel=0.03)

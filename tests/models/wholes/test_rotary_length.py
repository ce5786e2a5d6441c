"""Rotary frequencies that depend on lengths are those of each sample alone, or the row is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cases.tiny_models import LANGUAGE_MODELS, VOCABULARY
from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.models.core.stage import StepData
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import run_long_samples_alone

LIMIT = 8
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}


def phi() -> MultimodalModel:
    settings = {**LANGUAGE_MODELS["phi3"], "original_max_position_embeddings": LIMIT, "max_position_embeddings": 64}
    return MultimodalModel({}, {**settings, "rope_parameters": LONG}, seed=0).eval()


def samples(*lengths: int) -> list[EncodedSample]:
    ids = [np.random.default_rng(length).integers(3, VOCABULARY, length) for length in lengths]
    labels = [np.concatenate([[-100], each[1:]]) for each in ids]
    return [EncodedSample(f"{len(i)}", i, j, sizes={"language": len(i)}) for i, j in zip(ids, labels, strict=True)]


def loss_of(model: MultimodalModel, rows: list[list[EncodedSample]]) -> float:
    """The sum over targets of packed rows."""
    together = [sample for row in rows for sample in row]
    data = StepData.of(together, model.language.losses)
    total, at = 0.0, 0
    for row in rows:
        output = model.language.run(data, tuple(range(at, at + len(row))), {})
        total, at = total + output.losses["language"].item(), at + len(row)
    return total * data.counts["language"]


@torch.no_grad()
def loss_in_transformers(model: MultimodalModel, sample: EncodedSample) -> float:
    ids = torch.as_tensor(sample.input_ids)[None]
    logits = model.language.model(input_ids=ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()


def test_rows_of_one_kind_train_as_samples_alone() -> None:
    model = phi()
    for rows in ([samples(5, LIMIT, 3)], [samples(12, 20)], [samples(12), samples(5)]):
        wanted = sum(loss_in_transformers(model, sample) for row in rows for sample in row)
        assert loss_of(model, rows) == pytest.approx(wanted, rel=1e-5)  # rounding of fp32


def test_rows_of_both_kinds_are_refused() -> None:
    with pytest.raises(UserError, match=r"language: a sample of 12 tokens .* set data.max_length to 8"):
        loss_of(phi(), [samples(12, 5)])
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    llama = {**LANGUAGE_MODELS["llama"], "max_position_embeddings": LIMIT, "rope_parameters": rope}
    model = MultimodalModel({}, llama, seed=0).eval()
    with pytest.raises(UserError, match="beyond 8 tokens"):  # frequencies stay as the longest sample left them
        loss_of(model, [samples(12)])
    assert run_long_samples_alone(model.language, LIMIT) is None
    with pytest.raises(UserError, match=r"\(dynamic NTK\) .* set data.max_length to 8"):  # before the run begins
        run_long_samples_alone(model.language, LIMIT + 1)


def test_a_length_limit_within_the_first_context_leaves_rows_packed() -> None:
    model = phi()
    assert run_long_samples_alone(model.language, LIMIT) is None
    assert model.language.packs_rows
    assert "beyond 8 tokens" in str(run_long_samples_alone(model.language, LIMIT + 1))
    assert not model.language.packs_rows

"""Stages never ask their device for numbers: on a GPU, the host would wait for all that was launched before."""

from __future__ import annotations

import copy

import pytest
import torch

from cases.cut_wholes import opened
from cases.whole_samples import sample_of
from dilatant.models.core.stage import StepData

LAYOUT = [("image", 3, 4), ("text", 2), ("image", 1, 1), ("text", 2)]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llava", torch.float32),
        pytest.param("qwen2_5_vl", torch.float32, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_no_language_stage_asks_its_device_for_numbers(family: str, dtype: torch.dtype) -> None:
    """Tensors on the meta device have no numbers: whatever would make the host wait for a GPU raises there."""
    model = opened(family)
    samples = [sample_of(model, 0, LAYOUT), sample_of(model, 1, [("text", 3)])]
    vision, language = model["vision"], model["language"]
    here = StepData.of(samples, model.graph.losses)
    seen = vision.stage(0, len(vision.layers)).run(here, (0, 1), {}).rows
    assert isinstance(seen, torch.Tensor)
    data = StepData.of(samples, model.graph.losses, device=torch.device("meta"))
    inbound = {"vision": seen.detach().to("meta", dtype).requires_grad_()}
    last = len(language.layers) - 1
    for first, end in ((0, 2), (2, last), (last, last + 1)):
        found = copy.deepcopy(language.stage(first, end)).to("meta", dtype).run(data, (0, 1), inbound)
        output = found.losses["language"] if found.rows is None else found.rows
        output.sum().backward()
        assert all(rows.grad is not None for rows in inbound.values())
        inbound = {"language": output.detach().requires_grad_()}

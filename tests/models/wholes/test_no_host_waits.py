"""Stages never make the host wait for their device, on which it would wait for all that was launched before."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cases.cut_wholes import opened
from cases.whole_samples import sample_of
from dilatant.models.core.stage import StepData

META = torch.device("meta")
LAYOUT = [("image", 3, 4), ("text", 2), ("image", 1, 1), ("text", 2)]
FAMILIES = [
    ("llava", torch.float32),
    pytest.param("qwen2_5_vl", torch.float32, marks=pytest.mark.slow),
    pytest.param("qwen3_vl_moe", torch.bfloat16, marks=pytest.mark.slow),
]


class UnpinnedCopies(TorchFunctionMode):
    """Context that finds copies from the host to the meta device that are not made by `to_device`, which pins."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_made = function in (torch.tensor, torch.as_tensor)
        is_moved = function in (Tensor.to, Tensor.cuda) and args[0].device.type == "cpu"
        if (is_made or is_moved) and result.device == META:
            caller = sys._getframe(1)
            if caller.f_code.co_name != "to_device":
                self.places.add(f"{Path(caller.f_code.co_filename).name}: {caller.f_code.co_name}")
        return result


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_no_language_stage_asks_its_device_for_numbers(family: str, dtype: torch.dtype) -> None:
    """Tensors on the meta device have no numbers: whatever would make the host wait for a GPU raises there."""
    model = opened(family)
    samples = [sample_of(model, 0, LAYOUT), sample_of(model, 1, [("text", 3)])]
    vision, language = model["vision"], model["language"]
    here = StepData.of(samples, model.graph.losses)
    seen = vision.stage(0, len(vision.layers)).run(here, (0, 1), {}).rows
    assert isinstance(seen, Tensor)
    data = StepData.of(samples, model.graph.losses, device=META)
    inbound = {"vision": seen.detach().to("meta", dtype).requires_grad_()}
    last = len(language.layers) - 1
    for first, end in ((0, 2), (2, last), (last, last + 1)):
        stage = copy.deepcopy(language.stage(first, end)).to("meta", dtype)
        with UnpinnedCopies() as copies:
            found = stage.run(data, (0, 1), inbound)
            output = found.losses["language"] if found.rows is None else found.rows
            output.sum().backward()
        assert not copies.places
        assert all(rows.grad is not None for rows in inbound.values())
        inbound = {"language": output.detach().requires_grad_()}


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_no_encoder_makes_unpinned_copies(family: str, dtype: torch.dtype) -> None:
    model = opened(family)
    data = StepData.of([sample_of(model, 0, LAYOUT)], model.graph.losses, device=META)
    vision = model["vision"]
    stage = copy.deepcopy(vision.stage(0, len(vision.layers))).to("meta", dtype)
    with UnpinnedCopies() as copies:
        rows = stage.run(data, (0,), {}).rows
        assert isinstance(rows, Tensor)
        rows.sum().backward()
    assert not copies.places

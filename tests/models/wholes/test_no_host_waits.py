"""Stages never make the host wait for their device, on which it would wait for all that was launched before."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cases.cut_wholes import opened
from cases.engine_case import CASE, NET_WIDTH, PLACES, Case, build_model, build_samples
from cases.whole_samples import sample_of
from dilatant.models.core.random_draws import draws_of
from dilatant.models.core.stage import StepData

META = torch.device("meta")
LAYOUT = [("image", 3, 4), ("text", 2), ("image", 1, 1), ("text", 2)]
FAMILIES = [
    ("llava", torch.float32),
    pytest.param("qwen2_5_vl", torch.float32, marks=pytest.mark.slow),
    pytest.param("qwen3_vl_moe", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("mllama", torch.float32, marks=pytest.mark.slow),
]
HEARD = [("text", 2), ("sound", 13), ("text", 2), ("sound", 8), ("text", 2)]


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


@pytest.mark.parametrize(("family", "dtype"), [*FAMILIES, ("qwen2_audio", torch.float32)])
def test_no_encoder_makes_unpinned_copies(family: str, dtype: torch.dtype) -> None:
    model = opened(family)
    unit, layout = ("audio", HEARD) if family == "qwen2_audio" else ("vision", LAYOUT)
    data = StepData.of([sample_of(model, 0, layout)], model.graph.losses, device=META)
    stage = copy.deepcopy(model[unit].stage(0, len(model[unit].layers))).to("meta", dtype)
    with UnpinnedCopies() as copies:
        rows = stage.run(data, (0,), {}).rows
        assert isinstance(rows, Tensor)
        rows.sum().backward()
    assert not copies.places


DRAWS = replace(
    CASE,
    attention="causal",
    generators=(("height", NET_WIDTH, "mlp", 1.0),),
    drawn=((1,),) * len(CASE.texts),
    row_multiple=16,
    frozen=(),
)


def _nets(objective: str) -> dict[str, tuple[str, str, bool]]:
    return {"height": ("sd3", objective, True)}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (replace(DRAWS, nets=_nets("flow")), torch.float32),
        (replace(DRAWS, language="mixtral", nets=_nets("flow")), torch.bfloat16),
    ],
    ids=["queries", "losses of routers"],
)
def test_no_extension_makes_unpinned_copies(case: Case, dtype: torch.dtype) -> None:
    model, samples = build_model(case, "meta"), build_samples(case)
    language = model["language"]
    language.to(dtype)
    data = StepData.of(samples, model.graph.losses, device=META)
    stage = language.stage(0, len(language.layers))
    tokens = sum(sample.sizes["vision"] for sample in samples[:2])
    inbound = {"vision": torch.zeros(tokens, language.width, dtype=dtype, device=META).requires_grad_()}
    with UnpinnedCopies() as copies:
        found = stage.run(data, (0, 1), inbound)
        sum(loss.sum() for loss in found.losses.values()).backward()
    assert not copies.places


@pytest.mark.parametrize("objective", ["flow", "velocity"])
def test_no_generator_makes_unpinned_copies(objective: str) -> None:
    pytest.importorskip("diffusers")
    case = replace(DRAWS, nets=_nets(objective))
    model, samples = build_model(case, "meta"), build_samples(case)
    unit = model["height"]
    data = StepData.of(samples, model.graph.losses, device=META, draws=draws_of(samples, 0))
    rows = torch.zeros(2 * PLACES, unit.width_in, device=META).requires_grad_()
    stage = unit.stage(0, len(unit.layers))
    with UnpinnedCopies() as copies:
        stage.run(data, (0, 1), {"language": rows}).losses["height"].backward()
    assert not copies.places

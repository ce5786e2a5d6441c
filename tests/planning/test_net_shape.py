"""The planner counts a net's work by its pictures, not by the rows that tell it what to draw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cases.models.tiny_nets import NETS
from dilatant.cost.analytic import analytic_cost
from dilatant.cost.hardware import load_hardware
from dilatant.models.generators.denoiser_source import read_source
from dilatant.models.generators.denoisers import build_diffusion, inspect_denoiser
from dilatant.models.generators.generator import Generator, GeneratorUnit
from dilatant.planning.measuring.layer_shapes import connector_shape, denoiser_layer_shape

pytest.importorskip("diffusers", reason="nothing draws without diffusers")


def _unit(model: nn.Module, width: int, rows: int) -> GeneratorUnit:
    return GeneratorUnit("image", Generator(model, 1, width, "linear", rows), "language", 8)


def products_of_a_picture(net: nn.Module, call: Any) -> int:
    """Multiply-adds of all linear and convolution layers, told by the shapes that pass through them."""
    total = 0

    def count(module: Any, _: Any, output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Linear):
            total += output.numel() * module.in_features
        else:
            per_number = module.in_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]
            total += output.numel() * per_number

    hooks = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    call()
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("family", ["sd3", pytest.param("unet", marks=pytest.mark.slow)])
def test_work_is_that_of_the_picture(family: str) -> None:
    settings, vae = NETS[family]
    shapes = {}
    for size, rows in ((4, 2), (4, 4), (8, 2)):
        seen = inspect_denoiser(read_source("x", None, {**settings, "sample_size": size}, vae), "x")
        model = build_diffusion(seen, "x", "flow", 0.1, hollow=True)
        unit = _unit(model, seen.width, rows)
        layers = [denoiser_layer_shape(unit, layer) for layer in range(1, len(unit.layers))]
        shapes[size, rows] = replace(layers[0], matmul=sum(shape.matmul for shape in layers))
        assert all(tensor.is_meta for tensor in model.parameters())  # counted without memory
        assert sum(shape.parameters for shape in layers) == sum(p.numel() for p in model.parameters())
        model.to_empty(device="cpu")
        model.draw_weights()
        picture, times = torch.randn(1, *model.shape), torch.zeros(1)
        told = torch.randn(1, rows, seen.width)
        with torch.no_grad():
            least = products_of_a_picture(model.net, partial(model.predict, picture, times, told))
        counted = shapes[size, rows].matmul * rows
        # Attention's products come on top; each layer's are rounded down to a row.
        assert least <= counted + len(layers) * rows < 1.5 * least + 4096
        assert [denoiser_layer_shape(unit, layer) for layer in range(1, len(unit.layers))] == layers
    # Twice as many rows tell of the same picture; four times as many numbers are four times the picture.
    assert 2 * shapes[4, 4].matmul < 1.6 * 2 * shapes[4, 2].matmul
    assert shapes[8, 2].matmul > 2.5 * shapes[4, 2].matmul


def test_a_connector_with_attention_costs_its_real_operations() -> None:
    generator = Generator(nn.Linear(16, 1), 1, 16, "transformer", 4, connector_layers=3)
    unit = GeneratorUnit("image", generator, "language", 8)
    shape = connector_shape(unit)
    assert shape.parameters == sum(p.numel() for p in unit.connector.parameters())
    unit.connector.to_empty(device="cpu")
    products = products_of_a_picture(unit.connector, partial(unit.connector, torch.randn(4, 8)))
    attention = 3 * 2 * 4 * 4 * 8  # of each block: every row with every row, for scores and for values
    assert 4 * shape.matmul == products + attention


def test_an_autoencoder_costs_the_forward_alone() -> None:
    settings, vae = NETS["pixart"]
    seen = inspect_denoiser(read_source("x", None, settings, vae), "x")
    shape = denoiser_layer_shape(_unit(build_diffusion(seen, "x", "flow", 0.1, hollow=True), seen.width, 2), 1)
    assert shape.forward_only > 1000
    hardware = load_hardware("H100")
    whole, without = analytic_cost(shape, hardware), analytic_cost(replace(shape, forward_only=0), hardware)
    more = 2 * shape.forward_only / hardware.flops("bfloat16")
    assert whole.forward.b - without.forward.b == pytest.approx(more, rel=1e-3)  # costs are rounded to six digits
    assert (whole.input_gradient, whole.weight_gradient) == (without.input_gradient, without.weight_gradient)

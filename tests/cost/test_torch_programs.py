"""What PyTorch's own checkpointing, and casts of weights outside of Megatron, cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilatant.cost.analytic import DILATANT, analytic_cost, block_shape
from dilatant.cost.hardware import load_hardware


def test_recomputation_of_torch_stops_before_the_last_product():
    hardware, shape = load_hardware("A100"), block_shape(4096, 16_384, 32, gated=False)
    whole, early = (
        analytic_cost(shape, hardware, runner=replace(DILATANT, stops_early=stops)) for stops in (False, True)
    )
    # A third of the block's products, 12 squares of its width, are those of the feed-forward's second half.
    saved = 2 * 4 * 4096**2 * 4096 / hardware.flops("bfloat16")
    assert whole.recompute(4096) - early.recompute(4096) == pytest.approx(saved, rel=1e-4)
    assert whole.forward == early.forward == whole.recompute
    # llm-foundry's 13B on A100, 8,192 tokens, all recomputed: 14,362 tokens a second with PyTorch 2.1, 13,531 before.
    steps = [one.forward(8192) + one.recompute(8192) + one.input_gradient(8192) + one.weight_gradient(8192)
             for one in (whole, early)]  # fmt: skip
    assert 1.03 < steps[0] / steps[1] < 1.09


def test_weights_are_cast_to_eight_bits_in_as_many_halves_as_a_program_does():
    hardware, shape = load_hardware("H100"), block_shape(4096, 14_336, 32, 8)
    none, forward, both = (
        analytic_cost(shape, hardware, runner=replace(DILATANT, products="float8", weight_casts=often))
        for often in (0, 1, 2)
    )
    cast = 6 * shape.parameters / (hardware.bandwidth * hardware.memory_efficiency)  # read twice, written twice
    assert forward.forward(1.0) - none.forward(1.0) == pytest.approx(cast, rel=1e-3)
    assert forward.input_gradient == none.input_gradient
    assert both.input_gradient(1.0) - none.input_gradient(1.0) == pytest.approx(cast, rel=1e-3)

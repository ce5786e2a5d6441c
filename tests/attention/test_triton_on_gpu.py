"""The Triton kernels on a GPU, tile by tile with drawn data: a compiler that errs does so for some tiles alone."""

from __future__ import annotations

import pytest
import torch

from cases.attention import mask_kinds
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.blockwise import backward, forward
from dilatant.attention.kernels.scores import Gradients, Scores
from dilatant.attention.masks.packing import RowLayout

pytest.importorskip("triton", reason="Triton is not installed: the kernels' results were not checked on a GPU")
if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU: the kernels' results were not checked on one", allow_module_level=True)

from dilatant.attention.kernels.triton_kernel import kernel

pytestmark = pytest.mark.gpu

SAMPLES = [
    [("text", 90), ("image", 576), ("text", 300), ("audio", 375), ("text", 700)],
    [("image", 1000), ("text", 41), ("padding", 60)],
    [("text", 1501)],
]
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2e-5}
"""Roundings of weights and results of order one to 8 and 11 bits; float32 sums of a thousand terms."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["causal", "embedded", "bidirectional_instances"])
def test_every_tile_configuration_equals_blockwise_attention(
    kind: str, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    mask = mask_kinds.build_mask(RowLayout.of_samples(SAMPLES), kind, window=600 if seed == 2 else None)
    random = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(mask.num_tokens, heads, head_dim, generator=random).to(dtype).cuda()

    query, grad_output, key, value = draw(8), draw(8), draw(2), draw(2)
    sinks = torch.randn(8, generator=random).to(dtype).cuda() if seed == 1 else None
    scores = Scores(head_dim**-0.5, softcap=2.0 if seed == 1 else None)
    plan = AttentionPlan(mask)
    exact = [x.float() for x in (query, key, value)]
    exact_sinks = None if sinks is None else sinks.float()
    output, logsumexp = forward(*exact, exact_sinks, plan, scores)
    wanted = backward(grad_output.float(), *exact, exact_sinks, output, logsumexp, plan, scores)
    triton = kernel()
    first = run(triton, grad_output, (query, key, value, sinks), plan, scores)
    check((output, logsumexp), wanted, *first, TOLERANCE[dtype])
    second = run(triton, grad_output, (query, key, value, sinks), plan, scores)
    for once, again in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert once is again is None or torch.equal(once, again), "the same inputs gave other bits"


def run(triton, grad_output, inputs, plan, scores):
    output, logsumexp = triton.forward(*inputs, plan, scores)
    return (output, logsumexp), triton.backward(grad_output, *inputs, output, logsumexp, plan, scores)


def check(wanted: tuple, wanted_gradients: Gradients, found: tuple, gradients: Gradients, tolerance: float) -> None:
    names = ("output", "logsumexp", "query gradient", "key gradient", "value gradient", "sinks gradient")
    for name, got, expected in zip(names, [*found, *gradients], [*wanted, *wanted_gradients], strict=True):
        if expected is not None:
            # Against the largest: a key seen by a thousand queries gathers the roundings of all of them.
            scale = max(1.0, float(expected[expected.isfinite()].abs().max()))
            torch.testing.assert_close(got.float(), expected, rtol=0, atol=tolerance * scale, msg=name)


def test_launches_do_not_wait_for_the_device() -> None:
    mask = mask_kinds.build_mask(RowLayout.of_samples(SAMPLES), "embedded")
    plan, scores = AttentionPlan(mask), Scores(0.1)
    inputs = [torch.randn(mask.num_tokens, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    triton = kernel()
    run(triton, inputs[3], (*inputs[:3], None), plan, scores)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(triton, inputs[3], (*inputs[:3], None), plan, scores)
        run(triton, inputs[3], (*inputs[:3], None), AttentionPlan(mask), scores)
    finally:
        torch.cuda.set_sync_debug_mode("default")

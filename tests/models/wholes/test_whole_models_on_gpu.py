"""The stages of whole vision-language models on a GPU, against the same stages on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from cases.cut_wholes import losses_of, opened
from cases.tiny_wholes import WHOLES
from cases.whole_samples import samples_of
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import choose_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: whole models were not run on one"),
]

LOSS, GRADIENT = 1e-4, 2e-3
"""Relative, of the loss and of a gradient to its largest number: float32 sums in other orders through norms inside
norms; TF32 is off, as it is in training. A wrong mask or position changes parts of their size."""
CANCELLING = ("k_proj.bias", ".A_log", ".dt_bias")
"""Weights whose true gradient is 0 or a sum that nearly cancels."""


def _trained(model: MultimodalModel) -> tuple[float, dict[str, torch.Tensor]]:
    torch.backends.cudnn.allow_tf32 = False
    loss = losses_of(model, samples_of(model), cut=True)
    loss.backward()
    return loss.item(), {
        name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("family", WHOLES)
def test_every_stage_of_a_whole_model_on_a_gpu_gives_the_gradients_of_a_cpu(family: str) -> None:
    on_cpu = opened(family)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    choose_attention(on_gpu)
    loss, wanted = _trained(on_cpu)
    found_loss, found = _trained(on_gpu)
    assert found_loss == pytest.approx(loss, rel=LOSS)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        largest = wanted[name].abs().max()
        if not name.endswith(CANCELLING) and largest > 0:
            assert (gradient - wanted[name]).abs().max() <= GRADIENT * largest, name

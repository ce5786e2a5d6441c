"""cuDNN's planner and kernels compile for sm_90 from our call, without a GPU, where nvidia-cudnn-frontend and its
nvidia-cutlass-dsl are installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dilatant.attention import AttentionPlan, media_mask
from dilatant.attention.kernels import key_intervals
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.masks.packing import RowLayout

TOKENS = 512


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 64), ((6, 2), 80), ((4, 4), 128)])
def test_cudnn_compiles_forward_and_backward_of_our_call(
    heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEX_ATTENTION_ARCH", "90")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    real = pytest.importorskip("cudnn.flex_attention", reason="nvidia-cudnn-frontend is not installed: not compiled")
    from cudnn.flex_attention import dispatch
    from cudnn.flex_attention.plan import builder, validation

    # What asks for a device, or stores into a tensor on one.
    monkeypatch.setattr(validation, "get_device_arch", lambda device: 90)
    monkeypatch.setattr(
        builder, "_exclusive_offsets", lambda counts: counts.new_empty(counts.numel() + 1, dtype=torch.int32)
    )

    def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.empty(array.shape, dtype=torch.int32, device="cuda")

    monkeypatch.setattr(key_intervals, "upload", on_device)
    gradients: list[tuple[torch.Size, ...]] = []

    class Library:
        """The module, without autograd functions, which a torch for CPUs does not run on another device."""

        @staticmethod
        def create_mask_plan(*tensors: torch.Tensor, build_backward: bool) -> Any:
            return real.create_mask_plan(*tensors, build_backward=True)

        @staticmethod
        def flex_attn_func(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask_plan: Any, softmax_scale: float,
            deterministic: bool,
        ) -> torch.Tensor:  # fmt: skip
            mask_plan._validate_runtime(q, k, v)
            of_kernel = {"softmax_scale": softmax_scale, "block_sparse_tensors": mask_plan._packed_plan}
            output, logsumexp = dispatch._flex_attn_fwd(q, k, v, return_lse=True, **of_kernel)
            for ordered in (False, True):
                results = (output, torch.empty_like(output), logsumexp)
                found = dispatch._flex_attn_bwd(q, k, v, *results, deterministic=ordered, **of_kernel)
                gradients.append(tuple(part.shape for part in found[:3]))
            return output

    row = RowLayout.of_samples([[("text", 100), ("image", 212), ("text", 200)]])
    plan = AttentionPlan(media_mask(row, "isolated"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [(TOKENS, count, head_dim) for count in (heads[0], heads[1], heads[1])]
        inputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        output = key_intervals.cudnn_flex(Library, *inputs, None, plan, Scores(0.1))
    assert output.shape == shapes[0]
    assert gradients == 2 * [tuple((1, *shape) for shape in shapes)]

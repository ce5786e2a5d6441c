"""Towers of native resolution run frames in groups, which changes nothing but what is held at once."""

from __future__ import annotations

import pytest
import torch

from cases.cut_wholes import opened
from cases.whole_samples import sample_of
from dilatant.models.core.stage import StepData
from dilatant.models.encoders.native_encoder import NativeStage, _groups

LAYOUT = [("image", 3, 4), ("clip", 3, 2, 2), ("image", 1, 1), ("image", 2, 2), ("text", 2)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_frame_groups_give_the_same_rows_and_gradients(family: str) -> None:
    model = opened(family)
    stage = model["vision"].stage(0, len(model["vision"].layers))
    assert isinstance(stage, NativeStage)
    sample = sample_of(model, 0, LAYOUT)
    data = StepData.of([sample], model.graph.losses)
    seen: list[int] = []
    model["vision"].blocks[0].register_forward_pre_hook(lambda block, given: seen.append(len(given[0])))
    found = []
    for most in (10**6, 40):
        stage.patches_at_once = most
        seen.clear()
        rows = stage.run(data, (0,), {}).rows
        assert isinstance(rows, torch.Tensor)
        stage.zero_grad()
        rows.square().sum().backward()
        found.append([rows.detach(), *(p.grad.clone() for p in stage.parameters() if p.grad is not None)])
        assert max(seen) == (sample.sizes["vision"] if most == 10**6 else 48)  # the first image alone has more than 40
    for whole, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("most", [1, 5, 8, 24, 1000])
def test_every_frame_is_in_one_group_and_groups_are_full(most: int) -> None:
    grids = [[1, 2, 4], [5, 2, 2], [1, 6, 4], [2, 2, 2]]
    groups = _groups(grids, most)
    frames = [(rows, columns) for group in groups for count, rows, columns in group for _ in range(count)]
    assert frames == [(rows, columns) for count, rows, columns in grids for _ in range(count)]
    sizes = [sum(count * rows * columns for count, rows, columns in group) for group in groups]
    assert all(
        size <= most or sum(count for count, *_ in group) == 1 for size, group in zip(sizes, groups, strict=True)
    )
    for size, after in zip(sizes, groups[1:], strict=False):
        assert size + after[0][1] * after[0][2] > most

"""Towers that pack items of unlike sizes in one row give what each item gives alone, in few calls and without asking
their device for anything."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from cases.cut_wholes import opened
from cases.tiny_wholes import reference
from cases.whole_samples import sample_of
from dilatant.attention.kernels.scores import AttentionError
from dilatant.attention.recompute_cache import cached_attention
from dilatant.data.media_units.native_image_unit import GRID
from dilatant.models.core.recompute import recompute
from dilatant.models.core.stage import StepData
from dilatant.models.encoders.native_encoder import NativeStage

Grids = list[tuple[int, int, int]]
ROWS: dict[str, Grids] = {
    "one image": [(1, 6, 10)],
    "many tiny images": [(1, 2, 2)] * 80 + [(1, 2, 4)] * 40 + [(1, 4, 2)] * 4,
    "a huge image among small ones": [(1, 26, 34), (1, 2, 2), (1, 6, 2)],
    "frames of clips": [(5, 4, 6), (1, 6, 6), (3, 2, 10)],
    "windows that do not divide": [(1, 6, 10), (1, 10, 14), (1, 2, 18), (1, 14, 6)],
}
DTYPES = [(torch.float32, 4e-5), (torch.bfloat16, 4e-2)]
"""Tolerance relative to the largest number: other kernels and orders of sums; in bf16 a rounding is 4e-3, of which
five blocks add up. An item that sees another changes parts of the numbers' size."""
CASES = [
    pytest.param("qwen2_5_vl", row, *DTYPES[0], marks=pytest.mark.slow if row == "many tiny images" else ())
    for row in ROWS
] + [
    ("qwen2_5_vl", "windows that do not divide", *DTYPES[1]),
    *(
        pytest.param(family, "frames of clips", *DTYPES[0], marks=pytest.mark.slow)
        for family in ("qwen2_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni_thinker")
    ),
]


def _stage(family: str, unit: str = "vision") -> NativeStage:
    model = opened(family, dict(reference(family).state_dict()))
    return model[unit].stage(0, len(model[unit].layers))


def _pixels(grids: Grids, dtype: torch.dtype) -> list[torch.Tensor]:
    """The patches of every frame."""
    generator = torch.Generator().manual_seed(0)
    sizes = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
    return [torch.randn(size, 96, generator=generator).to(dtype) for size in sizes]


def _alone(family: str, grids: Grids, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows and gradients of transformers' own tower with eager attention, run frame by frame."""
    tower: Any = copy.deepcopy(reference(family).get_submodule("model.visual")).to(dtype)
    tower.set_attn_implementation("eager")
    sizes = [(1, rows, columns) for frames, rows, columns in grids for _ in range(frames)]
    found = []
    for pixels, grid in zip(_pixels(grids, dtype), sizes, strict=True):
        output = tower(pixels, grid_thw=torch.tensor([grid]))
        found.append(torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], -1))
    rows = torch.cat(found)
    rows.float().square().mean().backward()
    gradients = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
    return rows.detach(), gradients


@pytest.mark.parametrize(("family", "row", "dtype", "tolerance"), CASES)
def test_items_in_a_row_equal_each_item_alone(family: str, row: str, dtype: torch.dtype, tolerance: float) -> None:
    grids = ROWS[row]
    expected, wanted = _alone(family, grids, dtype)
    stage = _stage(family).to(dtype)
    for how in ("none", "block_keep_attention") if row == "frames of clips" else ("none",):
        for block in stage.model.get_submodule(stage.blocks_path):
            recompute(block, how)
        stage.zero_grad()
        rows = stage({"pixel_values": torch.cat(_pixels(grids, dtype)), GRID: torch.tensor(grids)})
        rows.float().square().mean().backward()
        found = {n: p.grad for part in (stage.model, stage.projector) for n, p in part.named_parameters()}
        assert found.keys() == wanted.keys()
        for got, true in [(rows, expected), *((found[name], wanted[name]) for name in wanted)]:
            torch.testing.assert_close(got, true, rtol=0, atol=tolerance * float(true.abs().max()) + 1e-9)


class _Calls(TorchFunctionMode):
    """Notes the number of calls of SDPA in every call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.of_block: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is cached_attention:
            self.of_block.append(0)
            with self:
                return args[0](*args[1:])
        if function is scaled_dot_product_attention:
            self.of_block[-1] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("row", ROWS)
def test_a_block_takes_at_most_three_calls_of_attention(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path))  # another test may have measured that SDPA is slower
    stage = _stage("qwen2_5_vl")
    pixels = torch.cat(_pixels(ROWS[row], torch.float32))
    with _Calls() as calls, torch.no_grad():
        stage({"pixel_values": pixels, GRID: torch.tensor(ROWS[row])})
    assert len(calls.of_block) == 5
    assert {*calls.of_block} <= {1, 2, 3}


LAYOUT = [("image", 3, 4), ("text", 2), ("image", 1, 1), ("image", 5, 2), ("text", 2)]
HEARD = [("text", 2), ("sound", 13), ("text", 2), ("sound", 8), ("sound", 3), ("text", 2)]


@pytest.mark.parametrize(
    ("family", "unit"),
    [
        ("qwen2_5_vl", "vision"),
        ("qwen3_vl", "vision"),
        ("qwen2_audio", "audio"),
        pytest.param("qwen2_5_omni_thinker", "audio", marks=pytest.mark.slow),
    ],
)
def test_no_stage_of_a_tower_asks_its_device_for_numbers(family: str, unit: str) -> None:
    """Tensors on the meta device have no numbers: whatever would make the host wait for a GPU raises there."""
    model = opened(family)
    samples = [sample_of(model, 0, LAYOUT if unit == "vision" else HEARD), sample_of(model, 1, [("text", 3)])]
    data = StepData.of(samples, model.graph.losses, device=torch.device("meta"))
    layers = len(model[unit].layers)
    inbound: dict[str, torch.Tensor] = {}
    spans = [(0, 2), (2, layers - 1), (layers - 1, layers)]
    for first, end in spans:
        stage = model[unit].stage(first, end)
        assert stage.run(data, (1,), inbound).rows is None  # no items
        rows = copy.deepcopy(stage).to("meta").run(data, (0, 1), inbound).rows
        assert isinstance(rows, torch.Tensor)
        rows.sum().backward()
        inbound = {unit: rows.detach().requires_grad_()}


def test_attention_dropout_of_a_tower_is_refused_in_training() -> None:
    stage = _stage("qwen2_audio", "audio")
    model = opened("qwen2_audio")
    data = StepData.of([sample_of(model, 0, HEARD)], model.graph.losses)
    for block in stage.model.layers:
        block.self_attn.dropout = 0.1
    with pytest.raises(AttentionError, match="set attention_dropout to 0"):
        stage.run(data, (0,), {})
    assert stage.eval().run(data, (0,), {}).rows is not None


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: towers were not run on one")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("row", ROWS)
def test_items_in_a_row_on_a_gpu_equal_each_item_alone(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expected, wanted = _alone("qwen2_5_vl", ROWS[row], torch.float32)
    stage = _stage("qwen2_5_vl").cuda()
    pixels = torch.cat(_pixels(ROWS[row], torch.float32)).cuda()
    rows = stage({"pixel_values": pixels, GRID: torch.tensor(ROWS[row])})
    rows.square().mean().backward()
    found = {n: p.grad for part in (stage.model, stage.projector) for n, p in part.named_parameters()}
    for got, true in [(rows, expected), *((found[name], wanted[name]) for name in wanted)]:
        # As between families on a GPU and a CPU: float32 sums in other orders through norms.
        torch.testing.assert_close(got.cpu(), true, rtol=0, atol=2e-3 * float(true.abs().max()) + 1e-9)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("row", ["frames of clips", "windows that do not divide", "one image"])
def test_a_tower_never_makes_the_host_wait_for_a_gpu(row: str) -> None:
    stage = _stage("qwen2_5_vl").to("cuda", torch.bfloat16)
    pixels = torch.cat(_pixels(ROWS[row], torch.bfloat16)).cuda()

    def step() -> None:
        rows = stage({"pixel_values": pixels, GRID: torch.tensor(ROWS[row])})
        rows.float().square().mean().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

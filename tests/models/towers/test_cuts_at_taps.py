"""A tower may be cut before, at and behind each block whose hidden states go on by themselves."""

from __future__ import annotations

import pytest
import torch

from cases.cut_wholes import opened
from cases.whole_samples import sample_of
from dilatant.models.core.slicing import ShapePlaceholder
from dilatant.models.core.stage import StepData
from dilatant.models.core.structure import Structure
from dilatant.models.encoders.narrow_encoder import UncutError, find_taps


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_every_cut_sends_rows_of_the_declared_width(family: str) -> None:
    model = opened(family)
    unit = model["vision"]
    data = StepData.of([sample_of(model, 0, [("image", 2, 4), ("text", 2)])], model.graph.losses)
    count = len(unit.layers)
    whole = unit.stage(0, count).run(data, (0,), {}).rows
    assert isinstance(whole, torch.Tensor)
    assert whole.shape[1] == unit.boundary(count, "language").width
    widths = []
    for cut in range(1, count):
        sent = unit.stage(0, cut).run(data, (0,), {}).rows
        assert isinstance(sent, torch.Tensor)
        assert sent.shape[1] == unit.boundary(cut, "vision").width
        assert unit.example(cut, len(sent), sent.device)[0].shape[1] == sent.shape[1]
        rows = unit.stage(cut, count).run(data, (0,), {"vision": sent}).rows
        torch.testing.assert_close(rows, whole, rtol=0, atol=1e-6)  # fp32: the same operations
        widths.append(sent.shape[1] // widths[0] if widths else sent.shape[1])
    taps = len(unit.model.config.deepstack_visual_indexes)
    assert {1, 1 + taps} <= {1, *widths[1:]}, "there are cuts before the first tap and behind the last"


class Block(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor, besides: torch.Tensor | float = 0.0) -> torch.Tensor:
        return super().forward(hidden + besides)


class Skipping(torch.nn.Module):
    """Five blocks; the fourth also reads the output of the first, and the end that of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(4, 4) for _ in range(5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, seen[0]) if number == 3 else block(hidden)
            seen.append(hidden)
        return hidden + seen[2]


class Halving(torch.nn.Module):
    """Embeds every second frame, and says which of the rows are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(3, 4)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.project(frames[:, ::2])
        return rows, torch.arange(rows.shape[1])[None] < (lengths[:, None] + 1) // 2


def test_a_placeholder_keeps_the_mask_that_its_module_makes() -> None:
    module = Halving()
    placeholder = ShapePlaceholder(module)
    for lengths in (torch.tensor([7, 3]), torch.tensor([2, 8])):
        frames = torch.randn(2, 8, 3)
        rows, mask = placeholder(frames, lengths)
        assert torch.equal(mask, module(frames, lengths)[1])
        assert torch.equal(rows, torch.zeros(2, 4, 4))


def test_blocks_that_change_the_number_of_tokens_are_not_cut() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.AvgPool1d(size) for size in (1, 2, 1))

    def forward(part: torch.nn.Module, *_: torch.Tensor) -> torch.Tensor:
        return torch.nn.Sequential(*part.blocks)(torch.randn(3, 4))

    with pytest.raises(UncutError, match="change their shape between blocks"):
        find_taps(model, Structure("blocks", (), (), 3), forward)


def test_outputs_that_later_blocks_or_the_end_read_are_found() -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 4)
    structure = Structure("blocks", (), (), 5)
    assert find_taps(Skipping(), structure, lambda part, *_: part(given)) == (0, 2)

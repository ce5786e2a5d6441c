"""A tower may be cut before, at and behind each block whose hidden states go on by themselves."""

from __future__ import annotations

import pytest
import torch

from cases.cut_wholes import opened
from cases.whole_samples import sample_of
from dilatant.models.core.stage import StepData
from dilatant.models.core.structure import Structure
from dilatant.models.encoders.narrow_encoder import find_taps


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


def test_outputs_that_later_blocks_or_the_end_read_are_found() -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 4)
    structure = Structure("blocks", (), (), 5)
    assert find_taps(Skipping(), structure, lambda part, *_: part(given)) == (0, 2)

"""docs/families.md is what is measured here: packed samples against each sample alone in transformers.

`PYTHONPATH=src:tests python tests/models/test_families_page.py > docs/families.md` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cut_wholes import LOSS_TOLERANCE, TOLERANCE, differences
from dilatant.config.model import LoraConfig
from tiny_wholes import WHOLES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
LORA = LoraConfig(r=4, lora_alpha=1, units=("vision", "language"))
COLUMNS = {
    "packed": {"cut": False},
    "packed, a stage for every layer": {"cut": True},
    "the same with LoRA in both units": {"cut": True, "lora": LORA},
}
HEAD = """# Families: packed equals alone, measured

Four samples (two images of unlike sizes, none, one at the end, one at the beginning) in one packed row of our units,
against each of them alone in transformers (with LoRA: in peft on the plain model). Tiny random models in fp32 on a CPU.
Each cell: difference of the loss, and the largest difference of any gradient, relative to that gradient's largest
number. What is beyond rounding would be parts of 1. `tests/models/test_families_page.py` writes this page and guards
it.

"""


def row(family: str) -> str:
    found = [differences(family, **how) for how in COLUMNS.values()]
    cells = [f"{each.loss:.0e}, {each.gradient:.0e}" for each in found]
    return f"| `{family}` | {' | '.join(cells)} |"


def page() -> str:
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    return HEAD + "\n".join([*lines, *(row(family) for family in WHOLES)]) + "\n"


def test_the_page_lists_every_family_and_nothing_beyond_rounding() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == WHOLES.keys()
    for cells in rows.values():
        for cell in cells.split(" | "):
            loss, gradient = map(float, cell.split(", "))
            assert loss <= LOSS_TOLERANCE
            assert gradient <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", WHOLES)
def test_what_the_page_says_is_measured_again(family: str) -> None:
    cells = row(family).split(" | ")[1:]
    for loss, gradient in (map(float, cell.rstrip(" |").split(", ")) for cell in cells):
        assert loss <= LOSS_TOLERANCE
        assert gradient <= TOLERANCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(page(), end="")

"""docs/families.md is what is measured here: packed samples against each sample alone in transformers.

`PYTHONPATH=src:tests python tests/models/wholes/test_families_page.py > docs/families.md` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cases.cut_wholes import LOSS_TOLERANCE, TOLERANCE, differences, opened
from cases.tiny_wholes import WHOLES, whole_config
from dilatant.config.model import LoraConfig
from dilatant.models.encoders.generic_encoder import GenericTower
from dilatant.models.encoders.native_encoder import NativeTower
from dilatant.models.families.families import FAMILIES
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan

BEGIN = "## Other multimodal architectures of transformers\n"
"""From here on the page is written by `benchmarks/models/families_of_transformers.py`."""
PAGE = Path(__file__).parents[3] / "docs" / "families.md"
COLUMNS = ("packed", "packed, a stage for every layer", "the same with LoRA in all units", "tp")
HEAD = """# Families: packed equals alone, measured

Some samples (two images or sounds of unlike sizes, none, one at the end, one at the beginning; clips among images
where a family sees them; images and sounds where it has both) in one packed row of our units, against each of them
alone in transformers (with LoRA: in peft on the plain model). Tiny random models in fp32 on a CPU. Each cell:
difference of the loss, and the largest difference of any gradient, relative to that gradient's largest number. What is
beyond rounding would be parts of 1. `tests/models/wholes/test_families_page.py` writes this page and guards it.

"""
FOOT = """
M-RoPE: positions in time, height and width. State: layers of linear attention, whose state begins anew with each
sample; their gradients of `A_log` and `dt_bias` nearly cancel and agree to 4e-4. Prefix: all tokens before the answer
see each other. tp: the units that two ranks can share, as told by their plans. That all of these compute the same
loss and gradients is measured on two ranks (`tests/runtime/parallel/test_wholes_tensor_parallel.py`, to 2e-5), for some
families with adapters, recomputation, unlike degrees and cp, and in whole runs
(`tests/cli/trained/test_whole_models.py`).
"""


def row(family: str) -> str:
    towers = FAMILIES[family].towers
    lora = LoraConfig(r=4, lora_alpha=1, units=(*towers, "language"))
    found = [differences(family, False), differences(family, True), differences(family, True, lora)]
    cells = [f"{each.loss:.0e}, {each.gradient:.0e}" for each in found]
    return f"| `{family}` | {besides(family)} | {' | '.join([*cells, shared(family)])} |"


def shared(family: str) -> str:
    """The units that two ranks can share: those whose plan divides something."""
    divided = []
    for name, unit in opened(family).units.items():
        plan = tensor_plan(unit)
        if plan.cuts and not degree_problems(unit, plan, 2):
            divided.append(name)
    return ", ".join(divided) or "none"


def besides(family: str) -> str:
    """What its forward does besides a plain tower, projector and text model."""
    known = FAMILIES[family]
    config = whole_config(family)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    native = any(isinstance(tower, NativeTower | GenericTower) for tower in known.towers.values())
    said = {
        "sounds": "audio" in known.towers,
        "native resolution": native,
        "clips": known.clips is not None,
        "M-RoPE": known.spatial,
        "DeepStack": bool(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)),
        "image masks": known.media_attention in ("bidirectional", "in_windows"),
        "prefix": known.media_attention == "prefix",
        "windows": "sliding_attention" in kinds,
        "state": "linear_attention" in kinds,
        "experts": bool(getattr(text, "num_experts", None)),
        "inputs of each layer, shared keys and values": bool(getattr(text, "hidden_size_per_layer_input", None)),
        "cross attention": bool(getattr(text, "cross_attention_layers", None)),
    }
    return ", ".join(word for word, is_so in said.items() if is_so)


def page() -> str:
    lines = ["| family | besides | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    table = "\n".join([*lines, *(row(family) for family in WHOLES)])
    _, begin, architectures = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{HEAD}{table}\n{FOOT}\n{begin}{architectures}"


def test_the_page_lists_every_family_and_nothing_beyond_rounding() -> None:
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == WHOLES.keys()
    for family, cells in rows.items():
        said, *measured, ranks = cells.split(" | ")
        assert set(ranks.split(", ")) <= {*FAMILIES[family].towers, "language"}
        assert said.strip() == besides(family)
        for cell in measured:
            loss, gradient = map(float, cell.split(", "))
            assert loss <= LOSS_TOLERANCE
            assert gradient <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", WHOLES)
def test_what_the_page_says_is_measured_again(family: str) -> None:
    *cells, ranks = row(family).strip(" |").split(" | ")[2:]
    page = PAGE.read_text(encoding="utf-8")
    assert re.search(rf"^\| `{family}` \|.*\| {ranks} \|$", page, re.MULTILINE)
    for loss, gradient in (map(float, cell.rstrip(" |").split(", ")) for cell in cells):
        assert loss <= LOSS_TOLERANCE
        assert gradient <= TOLERANCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(page(), end="")

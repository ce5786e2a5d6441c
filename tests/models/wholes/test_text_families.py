"""Every text family of transformers: what the proof before a first training finds, and how Dilatant then runs it.

The table in docs/models.md is written here, for some families alone with their names behind it:
`PYTHONPATH=src:tests python tests/models/wholes/test_text_families.py`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cases.often import often
from dilatant.config.errors import UserError
from dilatant.models.language.language import LanguageUnit
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import choose_attention

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- text families: begin -->\n", "<!-- text families: end -->\n"
HEAD = "| family | a packed row | cut into stages | loss, gradients | attention |\n|---|---|---|---|---|\n"
PLANS, MASK, ALONE = "plans of rows", "dense mask", "one sample a row"
KNOWN = {
    "granite": ("right", "right", PLANS),
    "olmo": ("right", "right", PLANS),
    "nanochat": ("right", "right", PLANS),
    "hyperclovax": ("right", "right", PLANS),
    "gpt_oss": ("right", "right", PLANS),
    "gemma3_text": ("right", "right", PLANS),
    "qwen3": ("right", "right", PLANS),
    "gpt2": ("right", "right", MASK),
    "bloom": ("wrong", "right", ALONE),
    "mpt": ("wrong", "right", ALONE),
    "biogpt": ("wrong", "right", ALONE),
    "xglm": ("wrong", "right", ALONE),
    "mamba": ("wrong", "right", ALONE),
    "mamba2": ("wrong", "right", ALONE),
    "granitemoehybrid": ("wrong", "right", ALONE),
    "nemotron_h": ("wrong", "right", ALONE),
    "recurrent_gemma": ("wrong", "right", ALONE),
    "openai-gpt": ("wrong", "wrong", ALONE),
}
"""What is known of the hard ones, which scale or norm around their blocks, or make masks in their own way."""


LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}
"""Settings without which no model of the family runs as a causal model in transformers, whose defaults lack them."""


def opened(family: str, **settings: Any) -> MultimodalModel:
    """The model of the family's default config, without memory, with the attention that is chosen for it."""
    config = CONFIG_MAPPING[family](**settings)
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    model = MultimodalModel({}, {**config.to_dict(), "model_type": family}, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        choose_attention(model)
    return model


def found(language: LanguageUnit) -> tuple[str, str, str]:
    """Packed rows, stages, and how it is run."""
    proof = language.proof
    assert proof is not None
    how = PLANS if language.row_attention is not None else MASK if language.packs_rows else ALONE
    return "wrong" if proof.packed else "right", "wrong" if proof.cut else "right", how


def row(family: str) -> str:
    """A line of the table."""
    try:
        language = opened(family, **LACKING.get(family, {})).language
    except Exception as error:  # a default config may contradict itself
        reason = " ".join(str(error).removeprefix(f"model.language_model: {family} cannot be trained: ").split())
        reason = reason[:160].replace("|", "/")
        kind = "refused" if isinstance(error, UserError) else "its default config does not build"
        return f"| `{family}` | | | | {kind}: {reason} |\n"
    proof = language.proof
    assert proof is not None
    packed, cut, how = found(language)
    numbers = "{:.0e}, {:.0e}".format(*proof.differences) if "right" in (packed, cut) else ""
    beside = "".join(f"; with `{key}: {value}`" for key, value in LACKING.get(family, {}).items())
    return f"| `{family}` | {packed} | {cut if cut != 'wrong' else 'refused'} | {numbers} | {how}{beside} |\n"


def table(families: Iterable[str]) -> str:
    """The table of families, with a count of what is right."""
    rows = []
    for family in families:
        rows.append(row(family))
        print(rows[-1], end="", file=sys.stderr, flush=True)
    packed, cut = (sum(each.split("|")[place].strip() == "right" for each in rows) for place in (2, 3))
    ran = sum(bool(each.split("|")[2].strip()) for each in rows)
    head = f"Of {ran} families whose default config builds, {packed} are packed and {cut} cut into stages.\n\n"
    return head + HEAD + "".join(rows)


def statuses(text: str) -> dict[str, tuple[str, ...]]:
    """Family → what the table says of it but for numbers."""
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {line[1].strip(): (line[2].strip(), line[3].strip()) for line in lines}


@pytest.mark.parametrize(
    "family", often(KNOWN, "olmo", "gpt_oss", "gemma3_text", "gpt2", "bloom", "mamba", "openai-gpt")
)
def test_hard_families_are_run_where_they_are_right(family: str) -> None:
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this version of transformers does not have {family}")
    assert found(opened(family).language) == KNOWN[family]


def test_a_family_with_a_loss_of_its_routers_is_proven_by_its_targets() -> None:
    language = opened("mixtral", output_router_logits=True, router_aux_loss_coef=0.1).language
    assert "language.router" in language.losses
    assert found(language) == ("right", "right", PLANS)


def test_blocks_that_pass_several_streams_are_cut() -> None:
    if "hy_v4" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("this version of transformers does not have hy_v4")
    language = opened("hy_v4", num_hidden_layers=4, indexer_types=["full"] * 4).language
    assert language.proof is not None
    assert language.proof.cut is None
    assert language.streams == 4
    assert language.boundary(1, "language").width == 4 * language.width


@pytest.mark.parametrize("family", ["bert", pytest.param("falcon_h1", marks=pytest.mark.slow), "prophetnet", "xlnet"])
def test_a_family_whose_samples_are_wrong_even_alone_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=r"cannot be trained: even one sample alone|share a logical name"):
        opened(family)


def test_a_family_of_which_nothing_can_be_proven_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"cannot be trained: a small copy .*TypeError: topk.*; mend its config"):
        opened("deepseek_v2")  # its default config leaves out how many experts a token has


@pytest.mark.slow
def test_the_page_says_what_the_proof_finds_of_every_text_family() -> None:
    page = statuses(PAGE.read_text().split(BEGIN)[1].split(END)[0])
    now = statuses(table(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if f"`{name}`" in page))
    assert now == {name: page[name] for name in now}


if __name__ == "__main__":
    chosen: Any = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    text = table(chosen)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")

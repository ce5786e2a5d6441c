"""What is frozen does not train, is counted as such, and keeps no activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.tiny_models import ENCODERS, LANGUAGE_MODELS, images, language_only, tokens, vision_language
from dilatant.config import UserError
from dilatant.models.core.freeze import PartAudit, audit, check, freeze, select
from dilatant.models.multimodal import Encoder, MultimodalModel


def train_step(mllm: MultimodalModel) -> None:
    ids = torch.cat([torch.full((1, 16), mllm.placeholder_ids["vision"]), tokens(1, 6)], dim=1)
    labels = ids.where(ids < 64, -100)
    mllm(ids, encoder_inputs={"vision": {"pixel_values": images(1)}}, labels=labels).loss.backward()


def trained(mllm: MultimodalModel) -> set[str]:
    return {name for unit in mllm.units.values() for name, p in unit.named_logical_parameters() if p.grad is not None}


PATTERNS = {
    "vision": lambda name: name.startswith("vision."),
    "vision.encoder": lambda name: name.startswith("vision.") and not name.startswith("vision.projector."),
    "vision.projector": lambda name: name.startswith("vision.projector."),
    "language": lambda name: name.startswith("language."),
    "language.layers.1": lambda name: name.startswith("language.layers.1."),
    "language.layers.1.mlp": lambda name: name.startswith("language.layers.1.mlp."),
    "vision.layers.[01].*": lambda name: name.startswith(("vision.layers.0.", "vision.layers.1.")),
    "*.bias": lambda name: name.endswith(".bias"),
}


@settings(max_examples=6, deadline=None, print_blob=True)
@given(patterns=st.sets(st.sampled_from(sorted(PATTERNS))))
def test_exactly_what_the_patterns_mean_stays_untrained(patterns: set[str]) -> None:
    mllm = vision_language()
    names = {name for unit in mllm.units.values() for name, _ in unit.named_logical_parameters()}
    expected = {name for name in names if any(PATTERNS[pattern](name) for pattern in patterns)}
    assert select(mllm.units, patterns) == expected
    freeze(mllm.units, patterns)
    train_step(mllm)
    assert trained(mllm) == names - expected


def test_freezing_a_unit_leaves_its_projector_trainable() -> None:
    mllm = vision_language()
    mllm["vision"].freeze()
    train_step(mllm)
    assert {name.split(".")[1] for name in trained(mllm) if name.startswith("vision")} == {"projector"}
    mllm["vision"].freeze("projector")
    assert not any(p.requires_grad for p in mllm["vision"].parameters())


def test_audit_counts_each_part() -> None:
    mllm = vision_language("llama_tied")
    mllm["vision"].freeze()
    freeze(mllm.units, ["language.embedding"])
    encoder, projector, language = audit(mllm.units)
    counts = {
        part: sum(p.numel() for p in module.parameters())
        for part, module in (
            ("vision.encoder", mllm["vision"].model),
            ("vision.projector", mllm["vision"].projector),
            ("language", mllm.language.model),  # torch lists a tied parameter once
        )
    }
    assert encoder == PartAudit("vision.encoder", counts["vision.encoder"], 0, 4 * counts["vision.encoder"])
    assert projector.trainable == projector.parameters == counts["vision.projector"]
    assert (language.parameters, language.trainable) == (counts["language"], counts["language"] - 64 * 32)


def test_a_tied_weight_is_frozen_by_either_name() -> None:
    for pattern in ("language.embedding", "language.head.lm_head.weight"):
        mllm = language_only("llama_tied")
        freeze(mllm.units, [pattern])
        assert not mllm.language.model.lm_head.weight.requires_grad


def test_a_name_without_a_match_is_an_error_with_the_nearest() -> None:
    mllm = vision_language()
    with pytest.raises(UserError) as error:
        freeze(mllm.units, ["vision", "vison.projector", "language.layers.7"])
    assert "'vison.projector' names no weight; did you mean 'vision.projector'?" in str(error.value)
    assert "'language.layers.7' names no weight" in str(error.value)
    assert all(p.requires_grad for p in mllm.parameters())


@pytest.mark.parametrize(
    ("encoder", "unused"),
    [
        ("siglip", ()),
        ("siglip_with_head", ("vision.norm.head.",)),
        ("clip", ("vision.norm.post_layernorm.",)),
        ("dinov2", ("vision.embedding.embeddings.mask_token",)),
        ("whisper", ("vision.embedding.embed_positions.",)),
    ],
)
def test_weights_that_cannot_matter_do_not_count_as_trainable(encoder: str, unused: tuple[str, ...]) -> None:
    """Pooling heads and mask tokens do not reach the language model; Whisper's sinusoids never train."""
    unit = vision_language(encoder=encoder)["vision"]
    assert all(name.startswith(unused) for name in unit.frozen)
    assert all(any(name.startswith(prefix) for name in unit.frozen) for prefix in unused)
    name, shape = (
        ("input_features", (1, 8, 20))
        if encoder == "whisper"
        else ("pixel_values", (1, 1 if encoder == "siglip" else 3, 8, 8))
    )
    unit({name: torch.randn(shape)}).square().sum().backward()
    assert {n for n, p in unit.named_logical_parameters() if p.grad is None} == unit.frozen


def test_what_the_user_froze_before_stays_frozen() -> None:
    model = vision_language().language.model
    model.model.norm.requires_grad_(False)
    mllm = MultimodalModel({}, model)
    assert mllm.language.frozen == {"language.head.norm.weight"}
    freeze(mllm.units, ["language.layers.0"])
    check(mllm.language.named_logical_parameters(), mllm.language.frozen)
    assert not model.model.norm.weight.requires_grad


def test_freezing_can_be_applied_again_and_checked() -> None:
    mllm = vision_language()
    mllm["vision"].freeze()
    unit = mllm["vision"]
    stage = unit.stage(1, 4)
    stage.requires_grad_(True)  # as a careless transformation would
    with pytest.raises(RuntimeError, match="weights train although frozen"):
        check(stage.named_logical_parameters(), unit.frozen)
    stage.set_frozen(unit.frozen)
    check(unit.named_logical_parameters(), unit.frozen)


def test_a_frozen_encoder_keeps_no_activations() -> None:
    unit = vision_language()["vision"]
    inputs = {"pixel_values": images(1)}
    modes = []
    unit.model.encoder.layers[3].register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    assert unit.stage(0, 6)(inputs).requires_grad
    unit.freeze()
    assert not unit.stage(0, 6)(inputs).requires_grad
    assert unit(inputs).requires_grad
    freed = unit.stage(2, 6)(hidden=torch.randn(1, 16, 24, requires_grad=True))
    assert freed.requires_grad  # something before it trains, so the gradient has to pass
    assert modes == [True, False, False, True]


def test_frozen_modules_drop_nothing_out() -> None:
    settings = {**ENCODERS["dinov2"], "drop_path_rate": 0.9, "hidden_dropout_prob": 0.9}
    mllm = MultimodalModel({"vision": Encoder(settings)}, LANGUAGE_MODELS["llama"], seed=0)
    unit = mllm["vision"]
    inputs = {"pixel_values": images(1, channels=3)}
    mllm.train()
    assert not torch.equal(unit(inputs), unit(inputs))
    unit.freeze()
    assert torch.equal(unit(inputs), unit(inputs))
    mllm.train()
    assert torch.equal(unit(inputs), unit(inputs))
    assert unit.projector.training

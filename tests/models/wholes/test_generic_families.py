"""Families that no code names open by transformers' own interface, and are proven or refused in one line."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_torchvision_available

from cases.generic_steps import GENERIC, pretrained
from cases.tiny_wholes import whole_config
from dilatant.config.errors import UserError
from dilatant.config.model import ModelConfig
from dilatant.data.errors import MediaError
from dilatant.data.sample import MediaSize
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.models.encoders.generic_encoder import GenericTower
from dilatant.models.families import media_proof
from dilatant.models.families.families import FAMILIES
from dilatant.models.families.media_proof import MediaProof, in_proven_units, masks_of, proof_of, small_copy
from dilatant.models.families.media_units import units_of_pretrained
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import attend_by_default, choose_attention
from dilatant.models.sources import load_pretrained_config
from dilatant.planning.assemble import media_units


def config_of(family: str) -> Any:
    """The family's default config, with small images if its encoder takes one size."""
    config = CONFIG_MAPPING[family]()
    if hasattr(config, "audio_config"):
        config.audio_config.num_hidden_layers = 3
        if hasattr(config.audio_config, "output_dim"):
            config.audio_config.output_dim = config.get_text_config().hidden_size
    vision = getattr(config, "vision_config", None)
    if isinstance(getattr(vision, "image_size", None), int) and vision.image_size >= 32 * vision.patch_size:
        vision.image_size = 16 * vision.patch_size
    return config


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_vl",
        pytest.param("glmasr", marks=pytest.mark.slow),  # sounds
        pytest.param("mistral3", marks=pytest.mark.slow),  # native sizes, Pixtral
        pytest.param("qwen3_asr", marks=pytest.mark.slow),
        pytest.param("got_ocr2", marks=pytest.mark.slow),
        pytest.param("glm4v", marks=pytest.mark.slow),  # M-RoPE
        pytest.param("paddleocr_vl", marks=pytest.mark.slow),
        pytest.param("lighton_ocr", marks=pytest.mark.slow),
        pytest.param("vipllava", marks=pytest.mark.slow),  # features of several blocks
    ],
)
def test_a_family_that_is_not_named_trains_as_transformers_does(family: str) -> None:
    assert family not in FAMILIES
    model = MultimodalModel({}, PretrainedModel.of(config_of(family), "model"), device="meta")
    choose_attention(model)
    assert model.language.packs_rows
    (encoder,) = model.encoders
    assert model[encoder].uncut is None


@pytest.mark.parametrize(
    ("family", "mask"), [("paligemma", "prefix"), pytest.param("gemma3", "bidirectional", marks=pytest.mark.slow)]
)
def test_the_mask_of_a_family_that_is_not_named_is_found(
    family: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(cast(dict[str, Any], FAMILIES), family)
    proof = proof_of(PretrainedModel.of(whole_config(family), "model"), attend_by_default)
    assert (proof.mask, proof.packed, proof.alone, proof.cut) == (mask, None, None, None)


def test_masks_that_need_keywords_are_tried_first() -> None:
    whole = pretrained("deepseek_vl")
    assert masks_of(whole) == ("causal", "bidirectional")
    config = copy.deepcopy(whole.config)
    config.text_config.use_bidirectional_attention = "vision"
    assert masks_of(replace(whole, config=config)) == ("in_windows", "causal", "bidirectional")


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("blip", {}, "it has neither get_image_features nor get_audio_features"),
        ("kosmos-2", {}, "images are not read: there is no image_token_id in its config"),
        ("florence2", {}, "its text model is an encoder with a decoder"),
        ("t5gemma2", {}, "its text model is an encoder with a decoder"),
        ("chameleon", {}, "transformers cannot build it from its config"),
        (
            "emu3",
            {"vocabulary_map": {"<image>": 151851}},
            "images are not read: their rows are the text model's own embeddings",
        ),
        (
            "instructblip",
            {"image_token_index": 50},
            "get_image_features needs qformer_input_ids, which are not made from the media alone",
        ),
        ("shieldgemma2", {}, "its weights are those of ShieldGemma2ForImageClassification, which does not write text"),
        ("llava", {"architectures": ["LlavaForSequenceClassification"]}, "LlavaForSequenceClassification, which does"),
    ],
)
def test_a_family_with_another_interface_is_refused_in_one_line(
    family: str, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=f"'{family}' does not open whole") as raised:
        PretrainedModel.of(CONFIG_MAPPING[family](**settings), "model")
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_text_model_is_sent_to_its_place() -> None:
    with pytest.raises(UserError, match=r"'llama' is not a family that opens whole.* under model.language_model"):
        PretrainedModel.of(CONFIG_MAPPING["llama"](), "model.id")


def test_a_config_that_contradicts_itself_is_named() -> None:
    config = CONFIG_MAPPING["deepseek_vl"]()
    config.text_config.hidden_act = "nonsense"
    with pytest.raises(
        UserError, match=r"cannot build it from its config \(.*nonsense.*correct its config.json"
    ) as raised:
        PretrainedModel.of(config, "model.id")
    assert "\n" not in str(raised.value)


def test_a_model_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    mapped = {"AutoConfig": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match=r"model.id: .*brings code of its own, which is not run") as raised:
        load_pretrained_config(str(tmp_path), "model.id")
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_clips_whose_processor_needs_torchvision_say_so() -> None:
    whole = pretrained("glm4v")
    assert whole.family.clips == "processed"
    image, clip = units_of_pretrained(whole, None, load_tokenizer("bytes"))
    assert (image.kind, clip.kind) == ("image", "video")
    text = load_tokenizer("bytes").convert_ids_to_tokens(GENERIC["glm4v"]["video_start_token_id"])
    assert ("video_start_token", text) in clip.processor.words
    with pytest.raises(MediaError, match=r"clips of glm4v .* needs torchvision"):
        clip.merged_tokens(MediaSize(8, 8, 1.0, 4))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4v", "exaone4_5", "hyperclovax_vision_v2"])
def test_clips_train_as_in_transformers(family: str) -> None:
    if not is_torchvision_available():
        pytest.skip(f"torchvision is absent; not checked: that {family} trains on clips by its own processor")
    whole = PretrainedModel.of(config_of(family), "model")
    assert whole.family.clips == "processed"
    assert proof_of(whole, attend_by_default).clips is None


@pytest.mark.parametrize(
    ("proof", "kinds"),
    [
        (MediaProof("causal", None, None, None), ["image", "video"]),
        (MediaProof("causal", None, None, None, clips="the loss changes"), ["image"]),
        (MediaProof("causal", "it differs", "it differs", "it differs", one_unit="it differs"), []),
    ],
)
def test_data_commands_see_the_media_that_train(
    proof: MediaProof, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_proof, "proof_of", lambda whole, attend: proof)
    config = ModelConfig.model_validate({"config": {"model_type": "glm4v", **GENERIC["glm4v"]}, "tokenizer": "bytes"})
    tokenizer = load_tokenizer("bytes")
    if not kinds:
        with pytest.raises(UserError, match=r"does not train as in transformers \(it differs\)"):
            media_units(config, tokenizer)
        return
    with pytest.warns(UserWarning, match="clips are not read") if len(kinds) == 1 else nullcontext():
        assert [unit.kind for unit in media_units(config, tokenizer)] == kinds


def test_media_that_would_train_otherwise_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cast(dict[str, Any], FAMILIES), "gemma4")
    whole = PretrainedModel.of(whole_config("gemma4"), "model")
    assert [*whole.family.towers] == ["vision", "audio"]
    right, wrong = (MediaProof("causal", *[why] * 3, one_unit=why) for why in (None, "it differs"))
    monkeypatch.setattr(media_proof, "proof_of", lambda whole, _: wrong if "audio" in whole.family.towers else right)
    found = in_proven_units(whole, attend_by_default)
    assert [*found.family.towers] == [*small_copy(found).family.towers] == ["vision"]
    assert found.family.refused[-1] == "sounds are not read: it differs"
    assert not [path for path, _ in found.language_model().named_parameters() if "audio" in path]
    assert found.family.unread[-2:] == ("model.audio_tower", "model.embed_audio")
    monkeypatch.setattr(media_proof, "proof_of", lambda *_: wrong)
    with pytest.raises(UserError, match=r"does not train as in transformers \(it differs\)"):
        in_proven_units(whole, attend_by_default)


def test_an_encoder_that_fails_on_long_images_is_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"pixel_values": np.ones((1, 3, 32, 128), np.float32)}
    monkeypatch.setattr(GenericTower, "elongated", lambda *_: long)
    tower = PretrainedModel.of(config_of("deepseek_vl"), "model").family.towers["vision"]
    assert isinstance(tower, GenericTower)
    assert tower.inner is None
    assert str(tower.uncut).startswith("its encoder does not run in stages")


def test_media_that_are_not_read_are_named_when_the_model_opens() -> None:
    whole = PretrainedModel.of(config_of("deepseek_vl"), "model")
    why = "sounds are not read: a reason"
    model = MultimodalModel({}, replace(whole, family=replace(whole.family, refused=(why,))), device="meta")
    with pytest.warns(UserWarning, match=f"^model: {why}$"):
        choose_attention(model)


def test_requested_settings_reach_the_processor_or_are_refused() -> None:
    whole, tokenizer = pretrained("deepseek_vl"), load_tokenizer("bytes")
    (unit,) = units_of_pretrained(whole, {"image_mean": [0.25] * 3}, tokenizer)
    assert [*unit.processor.made.image_mean] == [0.25] * 3
    with pytest.raises(UserError, match=r"processor: max_soft_tokens is no setting of DeepseekVLImageProcessor"):
        units_of_pretrained(whole, {"max_soft_tokens": 70}, tokenizer)


def test_a_family_whose_processor_needs_torchvision_says_so() -> None:
    with pytest.raises(UserError, match="needs torchvision"):
        MultimodalModel({}, PretrainedModel.of(config_of("lfm2_vl"), "model"), device="meta")

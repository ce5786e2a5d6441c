"""A saved model is read back bit by bit, and transformers alone can read each of its units."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, SiglipImageProcessor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cases.tiny_models import ENCODERS, LANGUAGE_MODELS, images, tokens, vision_language
from dilatant.config import UserError
from dilatant.models.multimodal import Encoder, MultimodalModel

ENTRY = {"projector": "linear", "placeholder_id": 9, "merge": "placeholder", "features": "all", "code": []}
OFTEN = (
    ("llama_tied", torch.bfloat16),
    ("gemma3_text", torch.float32),
    ("phi3", torch.bfloat16),
    ("whisper", "linear"),
    ("pixtral", "mlp"),
    ("siglip_with_head", "linear"),
)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first
    )


@pytest.mark.parametrize(
    ("language", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in OFTEN else pytest.mark.slow)
        for name in LANGUAGE_MODELS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_language_models_round_trip_and_load_in_transformers(language: str, dtype: torch.dtype, tmp_path: Path) -> None:
    mllm = vision_language(language).to(dtype)
    mllm.save_pretrained(tmp_path)
    assert same_weights(MultimodalModel.from_pretrained(tmp_path), mllm)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "language")
    assert same_weights(plain, mllm.language.model)


@pytest.mark.parametrize(
    ("encoder", "projector"),
    [
        pytest.param(name, projector, marks=() if (name, projector) in OFTEN else pytest.mark.slow)
        for name in ENCODERS
        for projector in ("linear", "mlp")
    ],
)
def test_encoders_round_trip_and_load_in_transformers(encoder: str, projector: str, tmp_path: Path) -> None:
    mllm = vision_language(encoder=encoder, projector=projector, features="patch", merge="prepend").eval()
    mllm.save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path).eval()
    assert same_weights(loaded, mllm)
    assert loaded.placeholder_ids == mllm.placeholder_ids
    assert loaded.encoders["vision"].merge == "prepend"
    loader = WhisperEncoder if encoder == "whisper" else AutoModel
    assert same_weights(loader.from_pretrained(tmp_path / "vision"), mllm["vision"].model)
    inputs = (
        {"input_features": torch.randn(1, 8, 20)}
        if encoder == "whisper"
        else {"pixel_values": images(1, channels=1 if encoder == "siglip" else 3)}
    )
    assert torch.equal(loaded["vision"](inputs), mllm["vision"](inputs))
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/multimodal.json").read_text() == (tmp_path / "multimodal.json").read_text()


def test_a_dtype_holds_for_every_part(tmp_path: Path) -> None:
    vision_language().save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_processor_and_tokenizer_travel_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    mllm = MultimodalModel(
        {"vision": Encoder(ENCODERS["siglip"], processor=SiglipImageProcessor(size={"height": 8, "width": 8}))},
        LANGUAGE_MODELS["llama"],
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"),
        seed=0,
    )
    mllm.save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path)
    assert loaded.tokenizer("b a").input_ids == mllm.tokenizer("b a").input_ids
    assert dict(loaded.encoders["vision"].processor.size) == {"height": 8, "width": 8}


def test_code_is_named_and_must_be_given_again(tmp_path: Path) -> None:
    projector = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 32))
    double = lambda inputs, hidden: 2 * hidden  # noqa: E731
    mllm = vision_language(projector=projector, after_projector=double)
    mllm.save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        MultimodalModel.from_pretrained(tmp_path)
    assert "vision: after_projector is code" in str(error.value)
    assert "vision: projector is code" in str(error.value)
    code = {"vision": {"projector": nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 32)), "after_projector": double}}
    loaded = MultimodalModel.from_pretrained(tmp_path, code=code)
    inputs = {"pixel_values": images(1)}
    assert torch.equal(loaded["vision"](inputs), mllm["vision"](inputs))
    with pytest.raises(UserError, match="'projecter' is not one of projector"):
        MultimodalModel.from_pretrained(tmp_path, code={"vision": {"projecter": projector}})


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    vision_language().save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_loading_leaves_torch_s_generator_alone(tmp_path: Path) -> None:
    vision_language().save_pretrained(tmp_path)
    state = torch.get_rng_state()
    MultimodalModel.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_folder_that_is_no_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no multimodal\.json"):
        MultimodalModel.from_pretrained(tmp_path)
    vision_language().save_pretrained(tmp_path)
    (tmp_path / "projectors/vision.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="does not hold the projector's weights"):
        MultimodalModel.from_pretrained(tmp_path)
    save_file({"weight": torch.tensor([float("nan")])}, tmp_path / "projectors/vision.safetensors")
    with pytest.raises(UserError, match=r"vision\.safetensors': 'weight' holds NaN or infinity"):
        MultimodalModel.from_pretrained(tmp_path)
    manifest = json.loads((tmp_path / "multimodal.json").read_text())
    (tmp_path / "multimodal.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UserError, match="is not of format 1"):
        MultimodalModel.from_pretrained(tmp_path)
    (tmp_path / "multimodal.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        MultimodalModel.from_pretrained(tmp_path)


def test_a_saved_model_generates_the_same(tmp_path: Path) -> None:
    mllm = vision_language("gemma3_text")
    mllm.save_pretrained(tmp_path)
    ids = torch.cat([torch.full((1, 16), 64), tokens(1, 4)], dim=1)
    inputs = {"vision": {"pixel_values": images(1)}}
    given = MultimodalModel.from_pretrained(tmp_path).generate(
        ids, encoder_inputs=inputs, max_new_tokens=5, do_sample=False
    )
    assert torch.equal(given, mllm.generate(ids, encoder_inputs=inputs, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize(
    "change",
    [
        {"encoders": []},
        {"encoders": {"vision": {}}},
        {"encoders": {"../../vision": ENTRY}},
        {"encoders": {"/vision": ENTRY}},
        {"encoders": {"vision": {**ENTRY, "projector": -1}}},
        {"encoders": {"vision": {**ENTRY, "merge": "../x"}}},
        {"encoders": {"vision": {**ENTRY, "placeholder_id": []}}},
        {"encoders": {"vision": {**ENTRY, "code": None}}},
        {"generators": {"../image": {}}},
        {"generators": [1]},
        {"code": 1},
        {"media_attention": {"vision": "all"}},
    ],
    ids=str,
)
def test_a_damaged_manifest_is_refused_before_opening_files(change: dict[str, object], tmp_path: Path) -> None:
    manifest = {"format": 1, "encoders": {"vision": ENTRY}, "generators": {}, "code": [], **change}
    (tmp_path / "multimodal.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"multimodal.json' is damaged: "):
        MultimodalModel.from_pretrained(tmp_path)

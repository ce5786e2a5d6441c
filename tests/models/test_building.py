"""A model comes from the config alone: same seed, same weights; every mistake is one clear line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PreTrainedModel,
)

from cases.often import often
from cases.tiny_models import (
    ENCODER_FAMILIES,
    ENCODERS,
    LANGUAGE_FAMILIES,
    LANGUAGE_MODELS,
    images,
    tokens,
    vision_language,
)
from dilatant.config import ModelConfig, UserError
from dilatant.models.build import build_model
from dilatant.models.core.materialize import materialize
from dilatant.models.language.language import LanguageUnit
from dilatant.models.multimodal import Encoder, MultimodalModel
from dilatant.models.sources import load_pretrained_config, parse_config


def config(**changes: Any) -> dict[str, Any]:
    tree = {
        "language_model": {"config": copy.deepcopy(LANGUAGE_MODELS["llama"])},
        "encoders": {
            "vision": {"kind": "image", "config": copy.deepcopy(ENCODERS["siglip"])},
            "audio": {"kind": "audio", "config": copy.deepcopy(ENCODERS["whisper"]), "projector": "linear"},
        },
    }
    for path, value in changes.items():
        node: Any = tree
        *parents, last = path.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    return tree


def build(tree: dict[str, Any], **arguments: Any) -> MultimodalModel:
    return build_model(ModelConfig.model_validate(tree), **arguments)


def test_a_config_gives_units_projectors_and_what_is_frozen() -> None:
    mllm = build(config(freeze=("vision.encoder", "language.layers.0")))
    assert list(mllm.units) == ["vision", "audio", "language"]
    assert isinstance(mllm["vision"].projector, nn.Sequential)
    assert isinstance(mllm["audio"].projector, nn.Linear)
    assert not any(p.requires_grad for p in mllm["vision"].model.parameters())
    assert all(p.requires_grad for p in mllm["vision"].projector.parameters())
    assert not any(p.requires_grad for p in mllm.language.model.model.layers[0].parameters())


def test_weights_depend_on_seed_and_unit_alone() -> None:
    def state(mllm: MultimodalModel) -> dict[str, torch.Tensor]:
        return {key: tensor.clone() for key, tensor in mllm.state_dict().items()}

    torch.manual_seed(1)
    first = state(build(config(), seed=3))
    torch.manual_seed(2)
    generator = torch.get_rng_state()
    second = state(build(config(), seed=3))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(first[key], second[key]) for key in first)
    fewer = config()
    del fewer["encoders"]["audio"]
    fewer["encoders"]["camera"] = fewer["encoders"].pop("vision")
    third = state(build(fewer, seed=3))
    assert all(torch.equal(third[key], first[key]) for key in third if "language" in key)
    camera = {key: third[key.replace("vision", "camera")] for key in first if "units.vision" in key}
    assert not all(torch.equal(camera[key], first[key]) for key in camera)
    other = state(build(config(), seed=4))
    drawn = [key for key in first if first[key].float().std() > 0]
    assert not any(torch.equal(first[key], other[key]) for key in drawn if "embed_positions" not in key)


@pytest.mark.parametrize("family", LANGUAGE_FAMILIES)
def test_random_weights_are_spread_as_transformers_spreads_them(family: str) -> None:
    settings = dict(LANGUAGE_MODELS[family])
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    ours = MultimodalModel({}, LANGUAGE_MODELS[family], seed=0).language.model
    compare_spread(plain, ours)


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_random_encoders_are_spread_as_transformers_spreads_them(family: str) -> None:
    settings = dict(ENCODERS[family])
    torch.manual_seed(0)
    plain = AutoModel.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    plain = plain.get_encoder() if family == "whisper" else plain
    compare_spread(plain, vision_language(encoder=family)["vision"].model)


def compare_spread(plain: nn.Module, ours: nn.Module) -> None:
    expected, given = plain.state_dict(), ours.state_dict()
    assert expected.keys() == given.keys()
    for key, tensor in expected.items():
        assert not given[key].is_meta
        # Two draws of 24 numbers or more: their spreads are within a factor of two.
        spreads = [t.float().std(unbiased=False).item() for t in (tensor, given[key])]
        assert spreads[1] == pytest.approx(spreads[0], rel=1.0, abs=1e-6), key
        assert spreads[0] == pytest.approx(spreads[1], rel=1.0, abs=1e-6), key
        assert given[key].float().mean().item() == pytest.approx(tensor.float().mean().item(), abs=0.3), key
        if key == "embed_positions.weight":  # Whisper's sinusoids
            assert torch.equal(given[key], tensor)
    buffers = dict(ours.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("family", often(LANGUAGE_MODELS, "llama", "gemma3_text"))
def test_a_process_that_holds_some_layers_draws_the_same_weights(family: str) -> None:
    whole = vision_language(family, seed=5)
    for name, spans in (("language", [(0, 2), (2, 4), (6, 7)]), ("vision", [(0, 1), (3, 6), (6, 7)])):
        for first, end in spans:
            part = MultimodalModel(
                {"vision": Encoder(ENCODERS["siglip"])}, LANGUAGE_MODELS[family], seed=5, device="meta"
            )
            unit = part[name]
            materialize(unit, first, end, seed=5)
            expected = dict(whole[name].stage(first, end).named_logical_parameters())
            stage = unit.stage(first, end)
            given = dict(stage.named_logical_parameters())
            assert given.keys() == expected.keys()
            assert all(torch.equal(given[key], expected[key]) for key in given)
            assert not any(buffer.is_meta for buffer in stage.buffers())
            others = {key for key, p in unit.named_logical_parameters() if not p.is_meta} - given.keys()
            # The source of a tied weight is drawn with it.
            assert others <= set(unit.tied.values())


def test_a_tied_head_with_bias_keeps_the_initial_embedding() -> None:
    config = PhiConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    tables = []
    for ranges in ([(0, 1)], [(0, 4)], [(3, 4)], [(0, 1), (3, 4)]):  # the last: two stages of a rank
        unit = MultimodalModel({}, config, seed=5, device="meta").language
        for first, end in ranges:
            materialize(unit, first, end, seed=5)
        tables.append(unit.model.get_input_embeddings().weight)
    assert all(torch.equal(table, tables[0]) for table in tables[1:])


class Gated(LlamaForCausalLM):
    """A family that draws no gates."""

    @staticmethod
    def gate(width: int) -> torch.Tensor:
        return torch.empty(width)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp.register_parameter("gate", nn.Parameter(self.gate(config.hidden_size)))


class Scaled(Gated):
    """One whose constructor gives them values, like modules of timm."""

    @staticmethod
    def gate(width: int) -> torch.Tensor:
        return 0.1 * torch.ones(width)


def gated(kind: type[LlamaForCausalLM]) -> LanguageUnit:
    with torch.device("meta"):
        return MultimodalModel({}, kind(parse_config(LANGUAGE_MODELS["llama"], "config")), device="meta").language


class Noise(nn.Module):
    """A module of timm, whose weights its constructor draws."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))


Noise.__module__ = "timm.layers.noise"


class Around(PreTrainedModel):
    """transformers' model around one of timm, of whose weights it draws none."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = Noise(config.hidden_size)


class WithTimm(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp.around = Around(config)


def test_weights_that_only_timm_draws_are_drawn_by_the_seed() -> None:
    drawn = []
    for seed in (5, 5, 6):
        unit = gated(WithTimm)
        materialize(unit, 0, 3, seed=seed)
        drawn.append(unit.model.get_submodule("model.layers.1.mlp.around.inner").weight)
    assert drawn[0].isfinite().all()
    assert drawn[0].std() > 0.1
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_weights_that_a_family_does_not_draw_are_named() -> None:
    unit = gated(Gated)
    with pytest.raises(UserError, match=r"does not initialise language.layers.1: .*gate, so it cannot be trained"):
        materialize(unit, 0, len(unit.layers), seed=5)


def test_constants_of_constructors_and_weights_made_on_no_device_are_drawn() -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    apertus = {"model_type": "apertus", "hidden_size": 16, "intermediate_size": 24, **sizes}
    drawn = MultimodalModel({}, apertus, seed=5).language.model.state_dict()
    built = AutoModelForCausalLM.from_config(parse_config(apertus, "config"), dtype=torch.float32).state_dict()
    constants = [name for name in built if "act_fn" in name]
    assert constants
    assert all(torch.equal(drawn[name], built[name]) for name in constants)
    xlnet = {"model_type": "xlnet", "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 64}
    scaled = gated(Scaled)
    materialize(scaled, 0, len(scaled.layers), seed=5)
    assert torch.equal(scaled.model.model.layers[1].mlp.gate, torch.full((scaled.width,), 0.1))
    weights = [*MultimodalModel({}, xlnet, seed=5).language.model.parameters()]
    assert all(weight.isfinite().all() and weight.abs().max() < 10 for weight in weights)


def test_stages_of_a_partly_materialized_unit_run() -> None:
    whole = vision_language("gemma3_text", seed=5).language
    ids = tokens(1, 9)
    hidden = None
    for first, end in ((0, 3), (3, 7)):
        unit = MultimodalModel({}, LANGUAGE_MODELS["gemma3_text"], device="meta").language
        materialize(unit, first, end, seed=5)
        hidden = unit.stage(first, end)(ids if first == 0 else None, hidden=hidden)
    assert torch.equal(hidden.logits, whole(ids).logits)


def test_the_tokenizer_sizes_a_language_model_that_does_not_say() -> None:
    tree = config()
    del tree["language_model"]["config"]["vocab_size"]
    assert build(tree, vocab_size=77).language.model.config.vocab_size == 77
    with pytest.raises(UserError, match="tokenizer gives 77 ids, but the model embeds only 64"):
        build(config(), vocab_size=77)


def test_a_folder_is_a_model_id(tmp_path: Path) -> None:
    vision_language().save_pretrained(tmp_path)
    tree = config(language_model={"id": str(tmp_path / "language")})
    tree["encoders"] = {"vision": {"kind": "image", "id": str(tmp_path / "vision")}}
    mllm = build(tree)
    expected = vision_language()
    inputs = {"pixel_values": images(1)}
    assert torch.equal(mllm["vision"].stage(0, 6)(inputs), expected["vision"].stage(0, 6)(inputs))
    assert torch.equal(mllm(tokens(1, 5)).logits, expected(tokens(1, 5)).logits)


def test_the_tower_of_a_composite_model_is_taken_alone(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    vision = {key: value for key, value in ENCODERS["clip"].items() if key != "model_type"}
    text = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    whole = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=8))
    whole.save_pretrained(tmp_path / "clip")
    from transformers import WhisperConfig, WhisperModel

    audio = {key: value for key, value in ENCODERS["whisper"].items() if key != "model_type"}
    speech = WhisperModel(WhisperConfig(**audio))
    speech.save_pretrained(tmp_path / "whisper")
    mllm = MultimodalModel(
        {"vision": Encoder(str(tmp_path / "clip")), "audio": Encoder(tmp_path / "whisper")}, LANGUAGE_MODELS["llama"]
    )
    for unit, source in ((mllm["vision"], whole.vision_model), (mllm["audio"], speech.encoder)):
        given, expected = unit.model.state_dict(), source.state_dict()
        assert given.keys() == expected.keys()
        assert all(torch.equal(given[key], expected[key]) for key in given)


MISTAKES = {
    "unknown type": (
        {"language_model__config__model_type": "lama"},
        "model.language_model: transformers has no model_type 'lama'; did you mean 'llama'?",
    ),
    "unknown setting": (
        {"encoders__vision__config__hiden_size": 3},
        "'hiden_size' is not a setting of siglip_vision_model; did you mean 'hidden_size'?",
    ),
    "a setting cut short": (
        {"encoders__vision__config__hidden_siz": 3},
        "'hidden_siz' is not a setting of siglip_vision_model; did you mean 'hidden_size'?",
    ),
    "sizes that do not divide": (
        {"language_model__config__hidden_size": 30},
        "model.language_model: llama refuses these settings: .*30.*",
    ),
    "encoder sizes that do not divide": ({"encoders__vision__config__hidden_size": 30}, "model.encoders.vision: .*30"),
    "a language model as encoder": (
        {"encoders__vision__config": {"model_type": "llama"}},
        "model.encoders.vision: LlamaModel reads 'input_ids', so it is not an encoder",
    ),
    "an encoder as language model": (
        {"language_model__config": {"model_type": "dinov2"}},
        "model.language_model: 'dinov2' is not a causal language model",
    ),
    "another kind": (
        {"encoders__vision__kind": "audio", "encoders__vision__placeholder": "<seen>"},
        "model.encoders.vision: kind is 'audio', but siglip_vision_model reads image",
    ),
    "identity between unequal widths": (
        {"encoders__vision__projector": "identity"},
        "encoder 'vision': projector 'identity' needs equal widths, but the encoder gives 24 and",
    ),
    "patches larger than the image": (
        {"encoders__vision__config__patch_size": 16},
        "8x8 is smaller than patch_size 16x16",
    ),
    "an unknown name to freeze": ({"freeze": ("visoin",)}, "'visoin' names no weight; did you mean 'vision'?"),
    "a folder that is no model": (
        {"language_model": {"id": str(Path(__file__).parent)}},
        "model.language_model: folder .* has no config.json",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error(mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        build(config(**changes))


def test_an_id_that_is_not_here_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    tree = config(language_model={"id": "nobody/no-such-model"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"'nobody/no-such-model' is neither a local folder nor in the.*HF_HUB_OFFLINE is set"
    ):
        build(tree)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.model_info", unreachable)
    with pytest.raises(UserError, match=r"the hub cannot be reached \(no route to host\); give a folder"):
        build(tree)


def test_encoders_need_valid_names_and_distinct_placeholders() -> None:
    encoder = Encoder(ENCODERS["siglip"])
    for name in ("language", "a.b", "keys"):
        with pytest.raises(UserError, match="cannot be used"):
            MultimodalModel({name: encoder}, LANGUAGE_MODELS["llama"])
    shared = Encoder(ENCODERS["siglip"], placeholder_id=5)
    with pytest.raises(UserError, match="share a placeholder id"):
        MultimodalModel({"left": shared, "right": shared}, LANGUAGE_MODELS["llama"])


def test_a_projector_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(UserError, match="gives width 31, the language model takes 32"):
        vision_language(projector=nn.Linear(24, 31))
    with pytest.raises(UserError, match="does not take the encoder's width 24"):
        vision_language(projector=nn.Linear(23, 32))


def test_a_model_without_a_head_is_no_language_model() -> None:
    headless = vision_language().language.model.model
    with pytest.raises(UserError, match="LlamaModel has no language-model head"):
        MultimodalModel({}, headless)
    with pytest.raises(UserError, match="not int"):
        MultimodalModel({}, 3)


@pytest.mark.parametrize("outer", ["", "vision_config"])
def test_too_many_blocks_are_refused_before_building_any(tmp_path: Path, outer: str) -> None:
    endless = {"num_hidden_layers": 10**9}
    settings = {"model_type": "siglip", outer: endless} if outer else {"model_type": "qwen2", **endless}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for read in (lambda: parse_config(settings, "here"), lambda: load_pretrained_config(str(tmp_path), "here")):
        with pytest.raises(UserError, match="here: num_hidden_layers is 1,000,000,000"):
            read()

"""LoRA in units is peft's on the whole model: the same loss, gradients and names; and it begins by changing nothing."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig as LoraConfigOfPeft
from peft import get_peft_model, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from cases.cut_wholes import LOSS_TOLERANCE, TOLERANCE, differences, losses_of, opened
from cases.model_cases import cost_model
from cases.tiny_wholes import reference, whole_config
from cases.whole_samples import samples_of
from dilatant.config.errors import UserError
from dilatant.config.model import LoraConfig, ModelConfig
from dilatant.cost.memory import ParameterBytes
from dilatant.hf.stored_weights import read_adapters
from dilatant.models.adapters.lora import inject, is_adapter, merged_state
from dilatant.models.build import build_model
from dilatant.models.core.dtype import four_bit_names
from dilatant.models.core.freeze import select
from dilatant.models.core.slicing import Placeholder
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan
from dilatant.plan.boxes import Box
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.planning.problem.describe_model import describe_model

EVERYWHERE = {"units": ("vision", "language"), "r": 4, "lora_alpha": 6.0}


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        pytest.param("use_rslora", True, id="rslora-cut", marks=pytest.mark.slow),
        pytest.param("use_dora", False, id="dora-whole", marks=pytest.mark.slow),
        pytest.param("use_rslora", False, id="rslora-whole", marks=pytest.mark.slow),
        pytest.param("use_dora", True, id="dora-cut"),
    ],
)
def test_adapters_train_as_those_of_peft_on_the_plain_model(family, cut, kind):
    found = differences(family, cut, LoraConfig(**EVERYWHERE, **{kind: True}))
    assert found.loss <= LOSS_TOLERANCE
    assert found.gradient <= TOLERANCE, found.weight


def test_a_layer_of_another_part_is_not_merged():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    inject_adapter_in_model(LoraConfigOfPeft(target_modules=["0", "1"], init_lora_weights=False), model)
    whole = merged_state(model)
    model[1] = Placeholder(model[1])  # Omni's encoder contains its projector, which is a part of its own
    part = merged_state(model)
    assert part.keys() == {"0.weight", "0.bias"}
    assert all(torch.equal(part[key], whole[key]) for key in part)


def test_an_adapter_of_peft_fits_the_only_part_that_has_adapters(tmp_path):
    settings = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 1, "tie_word_embeddings": True}
    theirs = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**settings)),
        LoraConfigOfPeft(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False),
    )
    theirs.save_pretrained(str(tmp_path))
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "adapter": str(tmp_path)}
    config = ModelConfig.model_validate(
        {"language_model": {"config": {"model_type": "llama", **settings}}, "lora": lora}
    )
    model = build_model(config)
    weights = {weight.name: weight for weight in model.language.weights if is_adapter(weight.name)}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.language.named_logical_parameters()}
    found = read_adapters(model, config, {name: Box.of(name, shapes[name]) for name in weights})
    saved = {key.replace(".default", ""): tensor for key, tensor in theirs.state_dict().items() if "lora_" in key}
    assert len(found) == len(saved) == 2
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[f"base_model.model.{weights[name].key}".replace(".default", "")])


def test_an_adapter_whose_layers_differ_in_scale_is_refused(tmp_path):
    settings = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 1}
    theirs = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**settings)),
        LoraConfigOfPeft(r=2, lora_alpha=4, target_modules=["q_proj"], alpha_pattern={"q_proj": 9}),
    )
    theirs.save_pretrained(str(tmp_path))
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "adapter": str(tmp_path)}
    source = {"model_type": "llama", **settings}
    config = ModelConfig.model_validate({"language_model": {"config": source}, "lora": lora})
    with pytest.raises(UserError, match=r"alpha_pattern is \{'q_proj': 9\} there, which is not read"):
        read_adapters(build_model(config), config, {})


def test_a_pattern_gives_the_b_matrices_a_rate_of_their_own():
    """As LoRA+ asks: `train.optimizer.groups` selects weights as `freeze` does."""
    model = without_memory(LoraConfig(**EVERYWHERE))
    names = {name for unit in model.units.values() for name, _ in unit.named_logical_parameters()}
    chosen = select(model.units, ["*.lora_B.*"])
    assert chosen == {name for name in names if ".lora_B." in name}
    assert 2 * len(chosen) == sum(map(is_adapter, names)) > 0


def without_memory(lora: LoraConfig) -> MultimodalModel:
    return MultimodalModel({}, PretrainedModel.of(whole_config("llava"), "model", lora=lora), device="meta")


def test_only_adapters_train():
    ours = without_memory(LoraConfig(**EVERYWHERE))
    for unit in ours.units.values():
        trains = {name for name, parameter in unit.named_logical_parameters() if parameter.requires_grad}
        assert trains == {weight.name for weight in unit.weights if is_adapter(weight.name)} != set()


class _Called(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_an_adapters_output_is_scaled_and_added_by_one_operation() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9,
                                         num_attention_heads=2, num_key_value_heads=1))  # fmt: skip
    inject(model, LoraConfig(r=2, lora_alpha=6, target_modules=("q_proj",), units=("language",)), {"language": ("",)})
    layer, rows = model.model.layers[0].self_attn.q_proj, torch.randn(3, 8)
    layer.lora_B["default"].weight.data.normal_()
    with _Called() as called:
        output = layer(rows)
    assert called.names.count("add") == 1
    assert "mul" not in called.names
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(output, rows @ (layer.base_layer.weight + 3 * product).t())


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_new_adapters_change_no_output_and_rename_no_weight(use_dora):
    with_lora, without = opened("llava", lora=LoraConfig(use_dora=use_dora)), opened("llava")
    samples = samples_of(without)
    own, plain = losses_of(with_lora, samples, False), losses_of(without, samples, False)
    if use_dora:  # products are multiplied with lengths over themselves
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=0)
    else:
        assert torch.equal(own, plain)
    own = {weight.name for unit in with_lora.units.values() for weight in unit.weights}
    assert {name for name in own if not is_adapter(name)} == {
        weight.name for unit in without.units.values() for weight in unit.weights
    }


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_a_merged_model_computes_what_its_adapters_do(settings: dict[str, bool]) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    adapted, plain = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    inject(adapted, LoraConfig(r=4, lora_alpha=6.0, **settings), {"language": ("",)})
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if is_adapter(name):  # as after some training
                parameter.add_(torch.randn_like(parameter) * 0.3)
    plain.load_state_dict(merged_state(adapted))
    ids = torch.arange(32)[None]
    with torch.no_grad():
        expected, found = adapted(ids).logits, plain(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # fp32: products in another order


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": ("visoin",)}, "'visoin' is no part of this model; there are vision.encoder"),
        ({"target_modules": ("q_porj",)}, r"names no linear layer of language; there are .*q_proj"),
        ({"target_modules": ("q_proj", "nothing")}, "'nothing' names no linear layer"),
        ({"target_modules": ".*visual.*"}, "names no linear layer of language"),
    ],
)
def test_what_names_nothing_is_said(settings, message):
    whole = PretrainedModel.of(whole_config("llava"), "model", lora=LoraConfig(**settings))
    with pytest.raises(UserError, match=message):
        whole.language_model()


def test_planners_count_what_a_stage_holds_in_four_bits():
    ours = without_memory(LoraConfig(target_modules=("q_proj", "v_proj")))
    unit = ours["language"]
    unit.four_bit = four_bit_names(unit)  # beside adapters and elsewhere, but no head
    plain = dict(reference("llava").model.language_model.layers[0].named_parameters())
    held = sum(weight.numel() for key, weight in plain.items() if key.endswith("_proj.weight"))
    layers = describe_model(ours).spec.unit("language").layers
    assert [layer.four_bit for layer in layers] == [0, *[held] * (len(layers) - 2), 0]
    (problem,) = degree_problems(unit, tensor_plan(unit), 2)  # of 16 and 24 columns
    assert "within the blocks of 64 numbers that have one scale" in problem
    layer = LayerSpec("u.0", "u", 1000, fixed=900, four_bit=800)
    stages = stage_costs(
        Plan((UnitPlan("u", (Replica((Stage(0, 1, (0,)),)),)),)),
        ModelSpec((UnitSpec("u", (layer,)),)),
        cost_model({"u": 1.0}),
        ParameterBytes(2.0, 4.0, 12.0),
    )
    # 4 bits and a 64th of a scale in fp32 each; of the others 100 are in bf16 and 100 train.
    assert stages.static_bytes == pytest.approx([800 * (0.5 + 4 / 64) + 100 * 2 + 100 * 18])


def test_the_head_gets_no_adapter_and_patterns_mean_whole_names():
    whole = PretrainedModel.of(
        whole_config("llava"), "model", lora=LoraConfig(target_modules=r".*layers\.[01]\.mlp\.\w+_proj")
    )
    adapted = {name for name in dict(whole.language_model().named_parameters()) if is_adapter(name)}
    assert len(adapted) == 2 * 3 * 2
    everything = PretrainedModel.of(whole_config("llava"), "model", lora=LoraConfig()).language_model()
    assert not any("lm_head.lora" in name for name, _ in everything.named_parameters())


def test_ranks_shard_adapters_like_layers_except_with_dropout():
    unit = without_memory(LoraConfig())["language"]
    plan = tensor_plan(unit)
    assert degree_problems(unit, plan, 2) == []
    block = "language.layers.0"
    assert plan.cuts[f"{block}.self_attn.q_proj.lora_B.weight"].dim == 0
    assert plan.cuts[f"{block}.self_attn.o_proj.lora_A.weight"].dim == 1
    # Of these each rank has a summand: of all outputs' gradient, and of its own tokens'.
    assert {f"{block}.mlp.up_proj.lora_A.weight", f"{block}.mlp.down_proj.lora_B.weight"} <= plan.partial
    assert not any(name.endswith("default.weight") or "base_layer" in name for name in plan.partial)
    plan = tensor_plan(without_memory(LoraConfig(use_dora=True))["language"])
    assert plan.cuts[f"{block}.mlp.up_proj.lora_magnitude_vector.weight"].dim == 0
    assert f"{block}.mlp.down_proj.lora_magnitude_vector.weight" in plan.partial
    dropping = without_memory(LoraConfig(lora_dropout=0.1))["language"]
    (problem,) = degree_problems(dropping, tensor_plan(dropping), 2)
    assert "model.lora.lora_dropout is 0.1" in problem

"""A step's operations are those of its real tokens: counted by hand from the sizes of a small model's matrices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dilatant import Encoder, MultimodalModel
from dilatant.config.model import LoraConfig
from dilatant.cost.analytic import analytic_cost
from dilatant.cost.hardware import load_hardware
from dilatant.cost.memory import FP32
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import inject_parts, is_adapter
from dilatant.models.core.freeze import thaw
from dilatant.models.sources import load_language_model
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.describe_model import describe_model
from dilatant.training.model_flops import model_flops

WIDTH, INNER, HEADS, BLOCKS, WORDS = 16, 40, 4, 3, 50
TEXT = {"model_type": "llama", "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS, "num_key_value_heads": 2}  # fmt: skip
SEEN, PATCH = 12, 4
VISION = {"model_type": "siglip_vision_model", "hidden_size": SEEN, "intermediate_size": 20, "num_hidden_layers": 2,
          "num_attention_heads": 2, "image_size": 8, "patch_size": PATCH, "vision_use_head": False}  # fmt: skip
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * (WIDTH // 2) + 3 * WIDTH * INNER
TOWER = 2 * (4 * SEEN * SEEN + 2 * SEEN * 20)
EMBED, PROJECT = 3 * PATCH * PATCH * SEEN, SEEN * WIDTH


def sample(text: int, patches: int, targets: int) -> EncodedSample:
    nothing = np.zeros(0, np.int64)
    return EncodedSample("s", nothing, nothing, sizes={"language": text, "vision": patches}, targets=targets)


def count(model: MultimodalModel, *samples: EncodedSample) -> float:
    return model_flops(describe_model(model)).of(samples)


def test_all_of_a_model_that_trains() -> None:
    model = MultimodalModel({"vision": Encoder(VISION, "linear")}, TEXT, device="meta")
    text, images, targets = 30, 8, 7
    language = 6 * BLOCKS * (BLOCK * text + WIDTH * text**2) + 6 * WIDTH * WORDS * targets
    # Two images of four patches: no patch sees another image. Nothing before the patches trains, so nobody asks
    # for their gradient.
    vision = (6 * (TOWER + PROJECT) + 4 * EMBED) * images + 12 * 2 * SEEN * images * 4
    assert count(model, sample(text, images, targets)) == pytest.approx(language + vision, rel=1e-9)
    assert count(model, *[sample(9, 0, 3)] * 2) == 2 * count(model, sample(9, 0, 3))


def test_frozen_work_is_not_counted_twice_or_thrice() -> None:
    model = MultimodalModel({"vision": Encoder(VISION, "linear")}, TEXT, device="meta")
    model.freeze(["vision.encoder", "language"])
    text, images, targets = 30, 4, 7
    language = 4 * BLOCKS * BLOCK * text + 6 * BLOCKS * WIDTH * text**2 + 4 * WIDTH * WORDS * targets
    vision = 2 * (TOWER + EMBED) * images + 4 * 2 * SEEN * images * 4 + 4 * PROJECT * images
    assert count(model, sample(text, images, targets)) == pytest.approx(language + vision, rel=1e-9)


def test_only_adapters_of_frozen_layers_have_weight_gradients() -> None:
    language = load_language_model(TEXT, "model")
    inject_parts(language, {}, LoraConfig(r=2, target_modules=("q_proj",)))
    model = MultimodalModel({}, language, device="meta")
    unit = model.language
    unit.freeze_names(frozenset(w.name for w in unit.weights if not is_adapter(w.name)))
    adapter = 2 * (WIDTH + WIDTH)
    spec = describe_model(model).spec.unit("language")
    assert [layer.trained for layer in spec.layers] == [0, *[adapter] * BLOCKS, 0]
    block = spec.layers[1]
    assert FP32.held(block.parameters, block.trained) == 4 * block.parameters + 12 * adapter
    shape = layer_shapes(describe_model(model))[block.kind]
    assert shape.trained_share == adapter / (BLOCK + adapter)
    costs = [
        analytic_cost(each, load_hardware("CPU"), "float32") for each in (shape, replace(shape, trained_share=1.0))
    ]
    assert costs[0].weight_gradient.b == pytest.approx(costs[1].weight_gradient.b * shape.trained_share, rel=1e-3)
    assert costs[0].input_gradient == costs[1].input_gradient
    text, targets = 10, 4
    blocks = BLOCKS * (4 * (BLOCK + adapter) + 2 * adapter) * text
    blocks -= 2 * (WIDTH * WIDTH + 2 * WIDTH * (WIDTH // 2)) * text  # nothing trains before the first block
    expected = blocks + 6 * BLOCKS * WIDTH * text**2 + 4 * WIDTH * WORDS * targets
    assert count(model, sample(text, 0, targets)) == pytest.approx(expected, rel=1e-9)
    thaw(model.units, ["language.head"])
    assert describe_model(model).spec.unit("language").layers[-1].trained == WIDTH * WORDS + WIDTH

"""Modules that transformers does not know, as encoders and behind the language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.tiny_models import LANGUAGE_MODELS, images, tokens, vision_language
from dilatant import Encoder, Generator, MultimodalModel
from dilatant.config import UserError


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 4, 4)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.patches(pixel_values).flatten(2).transpose(1, 2)


STATED: dict[str, Any] = {"kind": "image", "row_shape": (1, 8, 8), "width": 12, "tokens_per_row": 4}


def build(**encoder: Any) -> MultimodalModel:
    return MultimodalModel({"vision": Encoder(Tower(), **{**STATED, **encoder})}, LANGUAGE_MODELS["llama"], seed=0)


def test_a_module_of_one_s_own_is_an_encoder_of_one_layer() -> None:
    mllm = build()
    unit = mllm["vision"]
    assert unit.layers == ("vision.encoder", "vision.projector")
    picture = images(2)
    rows = mllm.encode({"vision": {"pixel_values": picture}})["vision"]
    assert torch.equal(rows, unit.projector(unit.model(picture)).flatten(0, 1))
    hidden = unit.stage(0, 1)({"pixel_values": picture})
    assert torch.equal(unit.stage(1, 2)(None, hidden).flatten(0, 1), rows)
    mllm.freeze(["vision.encoder"])
    ids = torch.cat([torch.full((1, 8), mllm.placeholder_ids["vision"]), tokens(1, 3)], dim=1)
    mllm(ids, encoder_inputs={"vision": {"pixel_values": picture}}, labels=ids.where(ids < 64, -100)).loss.backward()
    assert unit.model.patches.weight.grad is None
    assert unit.projector[0].weight.grad is not None


def test_what_is_not_stated_of_a_module_is_listed() -> None:
    with pytest.raises(UserError) as error:
        build(row_shape=None, width=None, features="patch")
    for problem in ("row_shape is missing", "width is missing", "features 'patch' is for transformers encoders"):
        assert problem in str(error.value)
    with pytest.raises(UserError, match="rows of kind 'audio' have 2 dimensions"):
        build(kind="audio")
    with pytest.raises(UserError, match="width is for a module of your own"):
        vision_language(width=24)


def test_rows_of_any_kind_are_told_by_an_example_and_held_to_it() -> None:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = nn.Embedding(3, 12)

        def forward(self, names: Tensor, weights: Tensor) -> Tensor:
            return self.names(names) * weights[:, None, None]

    stated = {"kind": "lidar", "row_shape": None, "width": 12, "tokens_per_row": 4}
    example = {"names": torch.zeros(1, 4, dtype=torch.long), "weights": torch.ones(1)}
    encoder = Encoder(Points(), example=example, **stated)
    mllm = MultimodalModel({"vision": encoder}, LANGUAGE_MODELS["llama"], seed=0)
    inputs = {"names": torch.ones(2, 4, dtype=torch.long), "weights": torch.ones(2)}
    assert mllm.encode({"vision": inputs})["vision"].shape == (8, 32)
    assert mllm.sizes_of([0] * 9, {"vision": inputs}) == {"language": 9, "vision": 8}
    with pytest.raises(UserError, match="say sizes yourself"):
        mllm.sizes_of([0], {"language": inputs})
    for change, message in (
        ({"names": torch.ones(2, 4)}, r"rows of 'names' are \[4\] of torch.float32, .* \[4\] of torch.int64"),
        ({"names": torch.ones(2, 5, dtype=torch.long)}, r"rows of 'names' .* \[5\]"),
        ({"weights": torch.ones(2, 1)}, r"rows of 'weights' are \[1\]"),
    ):
        with pytest.raises(UserError, match=message):
            mllm.encode({"vision": {**inputs, **change}})
    with pytest.raises(UserError, match="rows of 'weights' are missing"):
        mllm.encode({"vision": {"names": inputs["names"]}})
    for change, message in (
        ({"example": {"names": torch.zeros(2, 4)}}, r"the example of 'names' is no tensor of one row: \[1, ...\]"),
        ({"example": example, "row_shape": (4,)}, "row_shape and input_name are told by the example"),
        ({"row_shape": (4,)}, "input_name is missing; the keyword of its forward"),
        ({"example": {}}, "input_name is missing"),
    ):
        with pytest.raises(UserError, match=message):
            MultimodalModel({"vision": Encoder(Points(), **{**stated, **change})}, LANGUAGE_MODELS["llama"])


class Series(nn.Module):
    """Numbers of unlike length, each with its item's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(2, 12)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        means = [item.mean(0).expand_as(item) for item in values.split(lengths.tolist())]
        return torch.tanh(self.widen(torch.stack([values, torch.cat(means)], dim=-1)))


SERIES: dict[str, Any] = {
    "kind": "series",
    "width": 12,
    "example": {"values": torch.zeros(3), "lengths": torch.tensor([3])},
    "tokens_of": lambda inputs: int(inputs["lengths"].sum()),
}


def test_items_of_a_module_of_one_s_own_may_have_unlike_numbers_of_tokens() -> None:
    mllm = MultimodalModel({"series": Encoder(Series(), **SERIES)}, LANGUAGE_MODELS["llama"], seed=0)
    inputs = {"values": torch.arange(5.0), "lengths": torch.tensor([4, 1])}
    rows = mllm.encode({"series": inputs})["series"]
    assert torch.equal(rows, mllm["series"].projector(mllm["series"].model(**inputs)))
    assert mllm.sizes_of([0] * 9, {"series": inputs}) == {"language": 9, "series": 5}
    for change, message in (
        ({"tokens_per_row": 3}, "tokens_of needs an example, the inputs of one item, and no tokens_per_row"),
        ({"example": None, "row_shape": ()}, "tokens_of needs an example"),
        ({"merge": "prepend"}, "is for items of one size"),
    ):
        with pytest.raises(UserError, match=message):
            MultimodalModel({"series": Encoder(Series(), **{**SERIES, **change})}, LANGUAGE_MODELS["llama"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class Deep(nn.Module):
    """A tower of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 4, 4)
        self.places = nn.Parameter(torch.randn(4, 12))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.LayerNorm(12)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            hidden = self.behind(block, hidden)
        return self.last(hidden)

    def behind(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)


class Chained(Deep):
    """A tower whose blocks are in a sequence that runs them."""

    def __init__(self) -> None:
        super().__init__()
        last, blocks = self.last, self.blocks
        del self.last, self.blocks
        self.blocks, self.last = nn.Sequential(*blocks), last

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(self.blocks(self.patches(pixel_values).flatten(2).transpose(1, 2) + self.places))


class Around(Deep):
    """A tower that adds to what its blocks return."""

    def behind(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return hidden + block(hidden)


def deep(tower: nn.Module) -> MultimodalModel:
    return MultimodalModel({"vision": Encoder(tower, **STATED)}, LANGUAGE_MODELS["llama"], seed=0)


@pytest.mark.parametrize("kind", [Deep, Chained])
def test_a_module_of_one_s_own_is_cut_at_its_blocks(kind: type[nn.Module]) -> None:
    unit = deep(kind())["vision"]
    names = ("embedding", "layers.0", "layers.1", "layers.2", "norm", "projector")
    assert unit.layers == tuple(f"vision.{name}" for name in names)
    picture = images(2)
    whole, hidden = unit({"pixel_values": picture}), unit.stage(0, 2)({"pixel_values": picture})
    for first, end in ((2, 3), (3, 6)):
        held = unit.stage(first, end)
        hidden = held(None, hidden)
        assert {weight.layer for weight in held.weights} == set(unit.layers[first:end])
    assert torch.equal(hidden, whole)


def test_a_module_that_would_run_otherwise_in_parts_is_one_layer() -> None:
    assert deep(Around())["vision"].layers == ("vision.encoder", "vision.projector")


def test_a_module_without_memory_is_cut_like_one_with_it() -> None:
    with torch.device("meta"):
        meta, undrawn = Deep(), Deep()
    with pytest.raises(UserError, match=r"vision.encoder: Deep '' has weights but no reset_parameters"):
        deep(undrawn)
    meta.places = nn.Parameter(torch.zeros(4, 12))
    drawn = deep(meta)
    assert drawn["vision"].layers == deep(Deep())["vision"].layers
    assert drawn.encode({"vision": {"pixel_values": images(2)}})["vision"].isfinite().all()


def test_a_module_with_other_tokens_than_stated_is_refused() -> None:
    class Pooled(Deep):
        def forward(self, pixel_values: Tensor) -> Tensor:
            return super().forward(pixel_values).mean(1)

    with pytest.raises(UserError, match=r"'vision': its forward gives \[1, 1, 12\] for one row, not \[1, 4, 12\]"):
        MultimodalModel({"vision": Encoder(Pooled(), **STATED)}, LANGUAGE_MODELS["llama"], seed=0)
    one = MultimodalModel({"vision": Encoder(Pooled(), **{**STATED, "tokens_per_row": 1})}, LANGUAGE_MODELS["llama"])
    assert one["vision"].layers == ("vision.encoder", "vision.projector")


def test_a_module_that_cannot_be_drawn_says_so() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(12))

    with torch.device("meta"):
        raw = Raw()
    with pytest.raises(UserError, match=r"vision.encoder: Raw '' has weights but no reset_parameters"):
        MultimodalModel({"vision": Encoder(raw, **STATED)}, LANGUAGE_MODELS["llama"], seed=0)


def test_a_custom_module_is_not_saved_as_a_transformers_one(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="vision: a module of your own has no Hugging Face layout"):
        build().save_pretrained(tmp_path)


def test_units_that_do_not_fit_together_are_listed() -> None:
    generators = {
        "vision": Generator(nn.Linear(8, 1), token_id=3, width=8),
        "draw": Generator(nn.Linear(8, 1), token_id=99, width=8),
        "paint": Generator(nn.Linear(8, 1), token_id=3, width=8),
    }
    with pytest.raises(UserError) as error:
        MultimodalModel({"vision": Encoder(Tower(), **STATED)}, LANGUAGE_MODELS["llama"], generators=generators)
    for problem in ("'vision' is an encoder and a generator", "token_id 99 is not in the", "share a token_id"):
        assert problem in str(error.value)


def test_the_graph_says_who_feeds_whom() -> None:
    mllm = MultimodalModel(
        {"vision": Encoder(Tower(), **STATED)},
        LANGUAGE_MODELS["llama"],
        generators={"draw": Generator(nn.Linear(8, 1), token_id=3, width=8, loss_weight=0.5)},
        seed=0,
    )
    graph = mllm.graph
    assert graph.units == ("vision", "language", "draw")
    assert graph.feeds == {"vision": ("language",), "language": ("draw",), "draw": ()}
    assert (graph.anchor, graph.behind_anchor) == ("language", ("draw",))
    assert {name: loss.weight for name, loss in graph.losses.items()} == {"language": 1.0, "draw": 0.5}


def test_unknown_keywords_are_refused_with_the_right_one() -> None:
    mllm = vision_language()
    with pytest.raises(UserError) as error:
        mllm(tokens(1, 4), pixel_values=images(1), label=tokens(1, 4))
    assert "give encoder_inputs={'vision': {'pixel_values': ...}}" in str(error.value)
    assert "did you mean 'labels'?" in str(error.value)


def test_rows_of_another_shape_are_refused_by_the_encoder_s_name() -> None:
    with pytest.raises(UserError, match=r"vision: rows of 'pixel_values' .* \[1, 9, 8\], .* takes \[1, 8, 8\]"):
        build().encode({"vision": {"pixel_values": torch.zeros(2, 1, 9, 8)}})


def test_freezing_takes_the_patterns_of_the_yaml() -> None:
    mllm = vision_language()
    mllm.freeze(["vision.encoder", "language.layers.0"])
    assert not mllm["vision"].model.embeddings.patch_embedding.weight.requires_grad
    assert mllm["vision"].projector[0].weight.requires_grad
    assert not any(p.requires_grad for p in mllm.language.model.model.layers[0].parameters())
    with pytest.raises(UserError, match=r"give a list of patterns: freeze\(\['vision'\]\)"):
        mllm.freeze("vision")

"""Two ranks of a small copy compute what one computes, or what differs is said and they do not share the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cases.generic_steps import pretrained
from dilatant.config.errors import UserError
from dilatant.models.families.media_proof import drawn, samples_with_media
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.language.extension import ContextParallel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan
from dilatant.models.row_attention import attend_by_default
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime import rank_trial
from dilatant.runtime.layouts import context_problems, require_trainable
from dilatant.runtime.rank_trial import Trial, compare_ranks, divide_as_planned, divide_where_proven, trial_of

ERNIE: dict[str, Any] = {
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": [16, 24],
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
    "image_token_id": 127,
    "image_start_token_id": 126,
    "image_end_token_id": 125,
    "video_token_id": 124,
    "video_start_token_id": 123,
    "video_end_token_id": 122,
}
"""Blocks with experts of text beside experts of images."""


def _drawn(small: PretrainedModel) -> MultimodalModel:
    torch.manual_seed(0)
    return drawn(small, attend_by_default)


def test_two_ranks_compute_what_one_does() -> None:
    model = MultimodalModel({}, pretrained("mistral3"), device="meta")
    assert trial_of(model) == Trial(("vision", "language"))
    assert degree_problems(model["vision"], tensor_plan(model["vision"]), 2) != []
    divide_where_proven(model)
    for unit in model.units.values():
        assert degree_problems(unit, tensor_plan(unit), 2) == []


def test_an_encoder_whose_inner_outputs_are_read_is_shared() -> None:
    small = pretrained("vipllava")
    stage = drawn(small, attend_by_default)["vision"].stage(1, 5)
    assert stage.read_blocks == [0]  # of three blocks the first, whose output is a feature
    assert compare_ranks(partial(_drawn, small), samples_with_media(small), ("vision",), tp=2) is None


def test_experts_of_text_and_of_images_are_shared() -> None:
    small = PretrainedModel.of(CONFIG_MAPPING["ernie4_5_vl_moe"](**ERNIE), "model")
    assert compare_ranks(partial(_drawn, small), samples_with_media(small), ("language",), tp=2) is None


def test_ranks_with_other_weights_are_found() -> None:
    small = pretrained("vipllava")
    built: list[MultimodalModel] = []

    def build() -> MultimodalModel:
        model = _drawn(small)
        with torch.no_grad():
            for name, weight in model.language.named_logical_parameters():
                if built and name.endswith("layers.1.mlp.up_proj.weight"):
                    weight[-1] += 1.0
        built.append(model)
        return model

    problem = compare_ranks(build, samples_with_media(small), ("language",), tp=2)
    assert problem is not None
    assert "changes" in problem


def test_rows_are_not_split_where_that_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MultimodalModel({}, pretrained("vipllava"), device="meta")
    attend_by_default(model)
    own = trial_of(model)
    assert own.context is None
    assert context_problems(model.language) == []
    monkeypatch.setattr(rank_trial, "trial_of", lambda model: replace(own, context="on two ranks, the loss changes"))
    count = len(model.language.layers)
    divide_as_planned(model, Plan((UnitPlan("language", (Replica((Stage(0, count, (0, 1), cp=2),)),)),)))
    (problem,) = context_problems(model.language)
    assert "on two ranks, the loss changes); give it cp: 1" in problem


def test_ranks_that_split_rows_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    small = pretrained("vipllava")

    assert compare_ranks(partial(_drawn, small), samples_with_media(small), ("language",), cp=2) is None
    gather = ContextParallel.begin

    def begin(self: ContextParallel, forward: Any) -> None:
        gather(self, forward)
        forward.row = replace(forward.row, position_ids=forward.row.position_ids * 0)

    monkeypatch.setattr(ContextParallel, "begin", begin)
    problem = compare_ranks(partial(_drawn, small), samples_with_media(small), ("language",), cp=2)
    assert problem is not None
    assert "changes" in problem


def test_the_error_of_a_rank_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise UserError("this rank fails")

    monkeypatch.setattr(rank_trial, "Runtime", fails)
    small = pretrained("vipllava")
    with pytest.raises(UserError, match="this rank fails"):
        compare_ranks(lambda: drawn(small, attend_by_default), samples_with_media(small), ("language",), tp=2)


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (Trial(problems={"language": "the loss changes"}), "language: the loss changes; give it tp: 1"),
        (Trial(), "language: two ranks cannot share the small copy that would prove it"),
    ],
)
def test_ranks_do_not_share_what_is_not_proven(monkeypatch: pytest.MonkeyPatch, trial: Trial, why: str) -> None:
    model = MultimodalModel({}, pretrained("vipllava"), device="meta")
    count = {name: len(unit.layers) for name, unit in model.units.items()}
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, count["vision"], (0,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, count["language"], (0, 1), tp=2),)),)),
        )
    )
    require_trainable(plan, model.units)
    monkeypatch.setattr(rank_trial, "trial_of", lambda model: trial)
    divide_where_proven(model)
    with pytest.raises(UserError, match=why):
        require_trainable(plan, model.units)

"""Mixtures of experts: the loss of their routers is one number in every layout."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from cases.engine_case import CASE, build_model, build_samples
from dilatant.comm.comm import Comm
from dilatant.comm.launch import local_worker
from dilatant.config.memory_modes import Recompute
from dilatant.models.language.router_loss import count_routers
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.schedule.assignment.step_assignment import Microbatching
from oracles.engine_step import expected


@pytest.mark.parametrize(("cuts", "recompute"), [((0, 4), "none"), ((0, 1, 2, 3, 4), "block")])
def test_every_stage_adds_what_its_routers_lose(cuts: tuple[int, ...], recompute: Recompute) -> None:
    case = dataclasses.replace(CASE, language="mixtral", frozen=("vision",), recompute=recompute)
    stages = tuple(Stage(first, end, (0,)) for first, end in itertools.pairwise(cuts))
    vision = UnitPlan("vision", (Replica((Stage(0, 5, (0,)),)),), ("language",))
    plan = Plan((vision, UnitPlan("language", (Replica(stages),))))
    losses, gradients, _ = expected(case, steps=1)
    runtime = Runtime(
        build_model(case, "meta"),
        plan,
        Comm(local_worker().store, 0, 1),
        seed=case.seed,
        microbatching=Microbatching(2),
    )
    result = runtime.execute(build_samples(case))
    assert result.losses["language.router"] > 0
    # fp32 sums in another order: tests/harness/checked_steps.py has the rule.
    assert result.losses == pytest.approx(losses[0][1], rel=1e-5)
    assert result.loss == pytest.approx(losses[0][0], rel=1e-5)
    for name, parameter in runtime.parameters.items():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)
    runtime.close()


def test_only_blocks_that_choose_are_counted() -> None:
    config = {
        "model_type": "qwen3_moe", "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 4, "num_experts": 2,
        "moe_intermediate_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8, "decoder_sparse_step": 2, "output_router_logits": True,
    }  # fmt: skip
    language = MultimodalModel({}, config, device="meta").language
    assert count_routers(language.model) == 2
    assert set(language.losses) == {"language", "language.router"}
    quiet = MultimodalModel({}, {**config, "output_router_logits": False}, device="meta").language
    assert set(quiet.losses) == {"language"}

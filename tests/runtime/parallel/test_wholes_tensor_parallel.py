"""Ranks that share layers of a whole model, towers and text, compute what one process computes, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.cut_wholes import LOSS_TOLERANCE, TOLERANCE, losses_of, opened
from cases.tiny_wholes import WHOLES, reference
from cases.whole_samples import samples_of
from dilatant.comm.comm import Comm
from dilatant.config.model import LoraConfig
from dilatant.models.adapters.lora import MAGNITUDE, is_adapter
from dilatant.models.families.families import FAMILIES
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import slice_of
from harness.worker_pool import Worker, WorkerPool

CANCELS = 1e-6
"""Of the largest gradient of all: what cancels exactly (a key's bias under softmax) leaves rounding of that size."""
OFTEN = ("qwen3_vl",)
Layout = tuple[tuple[Any, ...], ...]
"""Of the stages of a unit: ranks, tp, cp and, if not 1, ep."""

PAIR: Layout = (((0, 1), 2, 1), ((0, 1), 2, 1))
PAIR_AND_ONE: Layout = (((0, 1), 2, 1), ((2,), 1, 1))
ONE_AND_PAIR: Layout = (((2,), 1, 1), ((0, 1), 2, 1))
ITEMS_AND_ROW: Layout = (((0, 1), 1, 2), ((0, 1), 1, 2))
ROW: Layout = (((0, 1, 2), 1, 3), ((0, 1, 2), 1, 3))
ROW_AND_ONE: Layout = (((0, 1, 2), 1, 3), ((3,), 1, 1))
ONE_AND_ROW: Layout = (((3,), 1, 1), ((0, 1, 2), 1, 3))
GROUPS: Layout = (((0, 1), 1, 1, 2), ((0, 1), 1, 1, 2))
SQUARE: Layout = (((0, 1, 2, 3), 2, 2), ((0, 1, 2, 3), 2, 2))


def plan_of(units: Any, towers: Layout, language: Layout) -> Plan:
    """Each unit cut in the middle; one that ranks cannot share is on one of them."""
    plans = []
    for name, unit in units.items():
        layout = language if name == "language" else towers
        count = len(unit.layers)
        if unit.structure is None or count < 2 * len(layout):
            layout = layout[:1]
        if degree_problems(unit, tensor_plan(unit), 2):  # Gemma 4's tower of sounds
            layout = ((layout[0][0][:1], 1, 1),)
        cuts = [count * number // len(layout) for number in range(len(layout) + 1)]
        stages = tuple(
            Stage(first, end, ranks, *degrees) for (ranks, *degrees), first, end in zip(layout, cuts, cuts[1:])
        )
        plans.append(UnitPlan(name, (Replica(stages),), () if name == "language" else ("language",)))
    return Plan(tuple(plans))


def lora_of(family: str, dora: bool) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=1, use_dora=dora, units=(*FAMILIES[family].towers, "language"))


def _against_one(
    worker: Worker,
    family: str,
    towers: Layout,
    language: Layout,
    adapted: str,
    recompute: Any,
    picked: tuple[int, ...] | None,
) -> tuple[float, dict[str, float], set[str]]:
    """Relative difference of the loss, and of what this rank has of each gradient; and what trains."""
    options = {"lora": lora_of(family, adapted == "dora")} if adapted else {}
    weights = {key: tensor.clone() for key, tensor in reference(family).state_dict().items()}
    whole = opened(family, weights, **options)
    for _, unit in whole.units.items():
        for name, parameter in unit.named_logical_parameters():
            if MAGNITUDE in name:
                parameter.data.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5, generator=_generator(name)))
            elif is_adapter(name):  # which begin with zeros
                parameter.data.uniform_(-0.3, 0.3, generator=_generator(name))
    every = samples_of(whole)
    samples = every if picked is None else [every[number] for number in picked]
    values = {n: p.detach().clone() for u in whole.units.values() for n, p in u.named_logical_parameters()}
    targets = sum(sample.target_tokens for sample in samples)
    loss = losses_of(whole, samples, False)
    loss.backward()
    expected = {
        name: parameter.grad
        for unit in whole.units.values()
        for name, parameter in unit.named_logical_parameters()
        if parameter.grad is not None
    }
    assert targets
    ours = opened(family, weights, **options)
    for unit in ours.units.values():
        for name, parameter in unit.named_logical_parameters():
            parameter.data.copy_(values[name])
        unit.recompute(recompute)
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(ours, plan_of(ours.units, towers, language), comm)
    result = runtime.execute(samples)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    found: dict[str, float] = {}
    for key, parameter in runtime.owned.parameters.items():
        box = runtime.owned.boxes[key]
        if box.name not in expected:
            assert parameter.grad is None or not parameter.grad.any(), box.name
            continue
        assert parameter.grad is not None, box.name
        own = slice_of(expected[box.name], box).reshape(parameter.grad.shape)
        off = float((parameter.grad - own).abs().max()) if own.numel() else 0.0
        allowed = TOLERANCE * (20 if box.name.endswith((".A_log", ".dt_bias")) else 1)
        scale = float(expected[box.name].abs().max()) * allowed + CANCELS * largest
        found[box.name] = max(found.get(box.name, 0.0), off / scale)
    runtime.close()
    comm.close()
    return abs(result.loss / loss.item() - 1), found, set(expected)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()))


def check(
    workers: WorkerPool,
    family: str,
    towers: Layout = PAIR,
    language: Layout = PAIR,
    adapted: str = "",
    recompute: str = "none",
    picked: tuple[int, ...] | None = None,
) -> None:
    ranks = {rank for layout in (towers, language) for of_stage, *_ in layout for rank in of_stage}
    results = workers.run(_against_one, len(ranks), family, towers, language, adapted, recompute, picked)
    seen: set[str] = set()
    for loss, found, _ in results:
        assert loss <= LOSS_TOLERANCE
        wrong = {name: off for name, off in found.items() if off > 1}
        assert not wrong, wrong
        seen |= found.keys()
    assert seen == results[0][2]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.slow) for f in WHOLES])
def test_towers_and_texts(workers: WorkerPool, family: str) -> None:
    check(workers, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen2_5_omni_thinker", "gemma4", "mllama"])
def test_stages_of_unlike_degrees(workers: WorkerPool, family: str) -> None:
    check(workers, family, PAIR_AND_ONE, ONE_AND_PAIR, recompute="block")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        ("qwen2_5_vl", "lora"),
        ("qwen3_vl", "lora"),
        ("qwen2_5_omni_thinker", "lora"),
        ("gemma4", "lora"),
        ("qwen2_5_vl", "dora"),
        ("qwen3_5", "dora"),
        ("gemma4", "dora"),
        ("mllama", "lora"),
        ("mllama", "dora"),
    ],
)
def test_adapters_and_recomputation(workers: WorkerPool, family: str, adapted: str) -> None:
    check(workers, family, adapted=adapted, recompute="block_keep_attention")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ROW, ROW_AND_ONE, ONE_AND_ROW])
def test_tokens_that_look_at_rows_of_other_ranks(workers: WorkerPool, layout: Layout) -> None:
    check(workers, "mllama", language=layout, recompute="block")


@pytest.mark.slow
def test_a_rank_whose_tokens_look_at_nothing_meets_the_others(workers: WorkerPool) -> None:
    # The second of four ranks has tokens of the sample without images alone.
    layout: Layout = (((0, 1, 2, 3), 1, 4), ((0, 1, 2, 3), 1, 4))
    check(workers, "mllama", language=layout, picked=(2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma4", "mllama"])
def test_ranks_that_share_rows_as_well(workers: WorkerPool, family: str) -> None:
    check(workers, family, SQUARE, SQUARE)


@pytest.mark.slow
@pytest.mark.parametrize("picked", [None, (0,)], ids=["all", "one"])
def test_groups_that_divide_experts(workers: WorkerPool, picked: tuple[int, ...] | None) -> None:
    """With one sample, a group runs none, whose rows beside hidden states and positions are still those of others."""
    check(workers, "qwen3_vl_moe", ITEMS_AND_ROW, GROUPS, recompute="block", picked=picked)


@pytest.mark.slow
def test_ranks_that_share_the_tiles_of_images(workers: WorkerPool) -> None:
    check(workers, "llava_onevision", ITEMS_AND_ROW, ITEMS_AND_ROW)

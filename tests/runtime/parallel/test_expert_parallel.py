"""Expert-parallel ranks compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from cases.engine_case import CASE, Case, build_model, build_samples
from cases.parallel_cases import case_of, plan_of
from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.comm.tensor_group import TensorGroup
from dilatant.config.errors import UserError
from dilatant.models.experts.grouped_experts import group_experts
from dilatant.plan.plan import Stage
from dilatant.runtime.executor import ActionFailed
from dilatant.runtime.layouts import require_trainable
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.schedule.families.families import one_f_one_b, zero_bubble_h1
from harness.checked_steps import check_case
from harness.worker_pool import Worker, WorkerPool

VISION = (Stage(0, 5, (0,)),)
SHAPES = [(2, 2, 2)]
MORE_SHAPES = [pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 2, 2), (2, 1, 2), (2, 2, 4), (1, 4, 2))]
"""tp, cp and ep of a stage."""
OFTEN = {("qwen2_moe", 2, "block"), ("qwen3_moe", 4, "none")}
RECOMPUTED = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
    for family in (("qwen2_moe", 2), ("qwen3_moe", 4))
    for how in ("none", "block", "block_keep_attention")
    for case in [(*family, how)]
]


def expert_case(*language: tuple[Stage, ...], family: Any = one_f_one_b, **changes: Any) -> Case:
    chosen = {"language": "mixtral", "attention": "causal", **changes}
    return case_of(plan_of(VISION, *language), family, **chosen)


def stages(tp: int, cp: int, ep: int) -> tuple[Stage, ...]:
    ranks = tuple(range(tp * cp))
    return (Stage(0, 2, ranks, tp, cp, ep), Stage(2, 4, ranks, tp, cp, ep))


def _experts() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return three experts and inputs of five tokens with two experts each; the last input is the router's weights."""
    torch.manual_seed(0)
    experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=6, num_local_experts=3))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    return experts, (torch.randn(5, 8), chosen, torch.rand(5, 2).requires_grad_())


def _gradient_of_a_router(worker: Worker) -> torch.Tensor:
    comm = Comm(worker.store, worker.rank, worker.size)
    experts, inputs = _experts()
    inner = slice(3 * worker.rank, 3 * worker.rank + 3)
    halves = [half[:, inner] for half in experts.gate_up_proj.chunk(2, dim=1)]
    experts.gate_up_proj = nn.Parameter(torch.cat(halves, dim=1))
    experts.down_proj = nn.Parameter(experts.down_proj[..., inner])
    grouped = group_experts(experts)
    grouped.ranks = TensorGroup(comm.group("tensor", (0, 1)))
    grouped.forward(*inputs).square().sum().backward()
    comm.world.barrier()
    comm.close()
    return inputs[-1].grad


def test_a_router_learns_from_every_ranks_part_of_the_experts(workers: WorkerPool) -> None:
    experts, inputs = _experts()
    experts(*inputs).square().sum().backward()
    for gradient in workers.run(_gradient_of_a_router, 2):
        torch.testing.assert_close(gradient, inputs[-1].grad, rtol=1e-4, atol=1e-4)  # fp32, sums of halves


@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=str)
def test_in_every_group_of_ranks(workers: WorkerPool, shape: tuple[int, int, int]) -> None:
    check_case(workers, expert_case(stages(*shape)), "all", 1)


def test_stages_on_the_same_ranks_divide_experts_unlike(workers: WorkerPool) -> None:
    first, last = stages(2, 1, 2)
    check_case(workers, expert_case((first, replace(last, ep=1))), "all", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("language", "ep", "recompute"), RECOMPUTED)
def test_with_split_backward_and_recomputation(workers: WorkerPool, language: str, ep: int, recompute: str) -> None:
    tp, cp = (2, 1) if ep == 2 else (1, 4)
    stage = Stage(0, 4, tuple(range(1, 1 + tp * cp)), tp, cp, ep)
    changes = {"language": language, "settings": {}, "recompute": recompute}
    case = expert_case((stage,), family=zero_bubble_h1, **changes)
    check_case(workers, case, "none", 1)


@pytest.mark.parametrize("zero", [pytest.param("none", marks=pytest.mark.slow), "node"])
def test_replicas_that_divide_experts_unlike(workers: WorkerPool, zero: Any) -> None:
    """Replicas shard experts whole, by features, or not at all: gradients are summed where the parts overlap."""
    replicas = (
        (Stage(0, 4, (0, 1), tp=2, ep=2),),
        (Stage(0, 3, (2, 3), cp=2, ep=2), Stage(3, 4, (2, 3), cp=2)),
        (Stage(0, 2, (4, 5), tp=2), Stage(2, 4, (6,))),
    )
    batches = ((0, 1), (2, 3), (4, 5))
    assignment = replace(
        CASE.assignment, microbatches={"vision": (batches,), "language": tuple((batch,) for batch in batches)}
    )
    check_case(workers, expert_case(*replicas, assignment=assignment), zero, 2)


def test_frozen_experts_pass_gradients_on(workers: WorkerPool) -> None:
    case = expert_case(stages(1, 2, 2), frozen=("language.layers.*.mlp.experts*",))
    check_case(workers, case, "none", 1)


def _held(worker: Worker, case: Case) -> dict[str, tuple[int, ...]]:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    held = {name: tuple(p.shape) for name, p in runtime.parameters.items() if "experts" in name}
    runtime.predict(build_samples(case))
    runtime.close()
    comm.close()
    return held


def test_a_rank_holds_its_experts_only(workers: WorkerPool) -> None:
    for held in workers.run(_held, 4, expert_case(stages(2, 2, 4))):
        assert {shape[0] for shape in held.values()} == {1}
        assert {shape[1:] for shape in held.values()} == {(48, 16), (16, 24)}


def _one_rank_fails(worker: Worker, case: Case) -> str:
    comm = Comm(worker.store, worker.rank, worker.size)
    runtime = Runtime(build_model(case, "meta"), case.plan, comm, seed=case.seed)
    if worker.rank == 2:
        model: Any = runtime.modules[1].model
        model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: 1 / 0)
    try:
        runtime.execute(build_samples(case))
        return ""
    except (ActionFailed, CommAborted) as error:
        return str(error)
    finally:
        runtime.close()
        comm.close()


def test_a_rank_that_fails_ends_what_waits_for_its_tokens(workers: WorkerPool) -> None:
    case = expert_case((Stage(0, 4, (1, 2), cp=2, ep=2),))
    told = workers.run(_one_rank_fails, 3, case)
    assert all("rank 2" in error and "division by zero" in error for error in told), told


def _in_bf16(worker: Worker, case: Case) -> list[float]:
    comm = Comm(worker.store, worker.rank, worker.size, generation=case.plan.stages()[-1].stage.ep)
    runtime = Runtime(
        build_model(case, "meta"),
        case.plan,
        comm,
        seed=case.seed,
        layout=StateLayout("all"),
        execution=Execution(precision=torch.bfloat16),
    )
    found = runtime.execute(build_samples(case))
    runtime.close()
    comm.close()
    return [found.loss, found.grad_norm]


def test_in_bf16_tokens_and_gradients_travel_as_they_are_held(workers: WorkerPool) -> None:
    """Rounding may choose other experts, so only the first step is compared, and loosely."""
    divided, features = expert_case(stages(2, 1, 2)), expert_case(stages(2, 1, 1))
    for found, expected in zip(workers.run(_in_bf16, 2, divided), workers.run(_in_bf16, 2, features), strict=True):
        assert found == pytest.approx(expected, rel=0.03)


def refusal(shape: tuple[int, int, int], **changes: Any) -> str:
    case = replace(expert_case(stages(1, 1, 1)), **changes)
    plan = plan_of(VISION, stages(*shape))
    with pytest.raises(UserError) as raised:
        require_trainable(plan, build_model(replace(case, plan=plan), "meta").units)
    return str(raised.value)


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    assert "language: 3 experts cannot be divided by ep 2 among stages of tp 2 and cp 1; it takes ep 1 " in refusal(
        (2, 1, 2), settings={"num_local_experts": 3}
    )
    assert "4 experts cannot be divided by ep 2 among stages of tp 1 and cp 3; it takes ep 1 " in refusal((1, 3, 2))
    assert "by ep 3 among stages of tp 2 and cp 2; it takes ep 1, 2, 4 there" in refusal((2, 2, 3))
    assert "ep is 2, but it has no experts" in refusal((1, 2, 2), language="llama", settings={})

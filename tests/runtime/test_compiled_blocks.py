"""Compiled blocks: the numerics rule holds for them, and one graph serves all lengths of rows."""

from __future__ import annotations

import copy
import shutil
import warnings
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cases.drawn_steps import cases
from cases.engine_case import BATCHES, CASE, Case, build_model, build_samples
from cases.generic_steps import generic_cases
from cases.parallel_cases import case_of, plan_of
from dilatant.comm.comm import Comm
from dilatant.config.train import TrainConfig
from dilatant.models.core.recompute import recompute
from dilatant.plan.plan import Stage
from dilatant.runtime.compiled_blocks import SAFE, CompiledBlocks, compiles
from dilatant.runtime.runtime import Execution, Recovery, Runtime
from dilatant.runtime.state.weight_gradients import WeightGradients, accumulate, replace_linears
from dilatant.schedule.families.families import one_f_one_b, zero_bubble_h1
from dilatant.schedule.schedule import Assignment
from harness.checked_generic_steps import check_generic_case, check_generic_rounding
from harness.checked_steps import COMMON, check_case
from harness.worker_pool import WorkerPool

PLAN = plan_of((Stage(0, 5, (0,)),), (Stage(0, 2, (0,)), Stage(2, 4, (1,))))
WIDTH = 64
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "siglip_vision_model", "clip_vision_model")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Block(nn.Module):
    """A gated feed-forward block; its factors have one width, so that inductor can use their memory again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=name == "up") for name in ("gate", "up", "down"))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Counting(Block):
    """A block whose values on the host decide what it computes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (2 if hidden.sum().item() > 0 else 3)


class Pair:
    """Blocks and their compiled copies, in bf16 with fp32 gradients."""

    def __init__(self, kind: type[Block] = Block, how: Any = "none", **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(kind() for _ in range(3))).to(torch.bfloat16)
        self.compiled = copy.deepcopy(self.plain)
        self.gradients = {}
        for model in (self.plain, self.compiled):
            for weight in model.parameters():
                weight.grad_dtype = torch.float32
            self.gradients[model] = WeightGradients()
            replace_linears(model, self.gradients[model])
            for block in model:
                recompute(block, how)
        self.blocks = CompiledBlocks(list(self.compiled), "language", set(), **options)

    def step(self, model: nn.Module, rows: int, defers: bool) -> list[Tensor]:
        """Return the gradients of the input and of all weights after one microbatch."""
        for weight in model.parameters():
            weight.grad = None
        draw = torch.Generator().manual_seed(rows)
        hidden = torch.randn(1, rows, WIDTH, generator=draw).to(torch.bfloat16).requires_grad_()
        gradients = self.gradients[model]
        loss = model(hidden).float().square().sum()
        if defers:
            with gradients.deferring():
                loss.backward()
            accumulate(gradients.take())
        else:
            loss.backward()
        return [hidden.grad, *(weight.grad for weight in model.parameters())]

    def worst(self, rows: int, defers: bool) -> float:
        """Return the largest relative difference of a gradient from the eager blocks' one."""
        pairs = zip(self.step(self.compiled, rows, defers), self.step(self.plain, rows, defers), strict=True)
        return max(((mine.float() - own.float()).norm() / own.float().norm()).item() for mine, own in pairs)


ROUNDING = 2 * 12**0.5 * 2**-9
"""Fused operations round to bf16 at other places: about 12 roundings a block and direction, independent, twice."""


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_one_graph_serves_all_rows_and_splits_in_backward() -> None:
    pair, before = Pair(backend="aot_eager"), _graphs()
    assert pair.worst(24, False) < ROUNDING
    first = _graphs()
    assert first - before <= 2  # inputs of the first block may have another layout
    for rows, defers in ((40, True), (33, False), (57, True)):
        assert pair.worst(rows, defers) < ROUNDING
    assert _graphs() == first
    assert pair.blocks.num_compiled == 3
    pair.blocks.close()
    assert [type(block) for block in pair.compiled] == [Block] * 3


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "block"])
def test_delayed_gradients_of_compiled_blocks_are_those_of_eager_ones(how: str) -> None:
    pair = Pair(how=how)
    for rows, defers in ((24, True), (40, True), (33, False)):
        assert pair.worst(rows, defers) < ROUNDING


@needs_compiler
@pytest.mark.slow
def test_without_the_safe_settings_delayed_gradients_are_wrong() -> None:
    """If this fails, inductor has changed, and `SAFE` can perhaps go."""
    pair = Pair(settings=dict.fromkeys(SAFE, True))
    assert max(pair.worst(rows, True) for rows in (24, 40)) > 0.1


@needs_compiler
@pytest.mark.slow
def test_inductor_rounds_bf16_where_eager_blocks_do() -> None:
    """What is left are sums in another order, each of which rounds to a neighbour at worst: half a step of 2**-8."""
    pair = Pair()
    assert max(pair.worst(rows, False) for rows in (24, 40)) < 1.5 * 2**-9


def test_a_block_that_reads_values_runs_eager_with_one_warning() -> None:
    pair = Pair(Counting, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pair.worst(24, False) < ROUNDING
        assert pair.blocks.num_compiled == 3
        pair.blocks.settle()
        assert pair.worst(24, False) < ROUNDING
    texts = [str(each.message) for each in caught if "train.compile" in str(each.message)]
    assert len(texts) == 1
    assert "blocks of language run eager: its forward is no single graph" in texts[0]
    assert pair.blocks.num_compiled == 0


def test_graphs_made_after_the_first_gradients_are_whole() -> None:
    """Evaluation, or a row that needs no gradient, asks for another graph when weights have gradients in fp32."""
    pair = Pair(backend="aot_eager")
    assert pair.worst(24, False) < ROUNDING
    gradients, first = [weight.grad for weight in pair.compiled.parameters()], _graphs()
    row = torch.ones(1, 24, WIDTH, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = pair.compiled(row)
    assert torch.equal(output, pair.plain(row))
    assert 0 < _graphs() - first <= 2
    assert [weight.grad for weight in pair.compiled.parameters()] == gradients
    pair.blocks.settle()
    assert pair.blocks.num_compiled == 3


def test_blocks_that_cannot_be_compiled_stay_eager_after_recovery() -> None:
    """Graphs stay in the process: one that broke is seen when it is made, and not when it runs again."""
    tried: list[str] = []

    def failing(graph: Any, inputs: Any) -> Any:
        tried.append(str(graph))
        raise RuntimeError("no compiler")

    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (0,)),))
    case = case_of(plan)
    model, samples, before = build_model(case, "meta"), build_samples(case), None
    counts = []
    for _ in range(2):
        comm = Comm(None, 0, 1)
        execution = Execution(compile="blocks", compiler=cast(str, failing))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runtime = Runtime(model, plan, comm, execution=execution, recovery=Recovery(before=before))
            runtime.execute(samples, runtime.prepare(samples, case.assignment, case.schedule))
        runtime.close()
        comm.close()
        before = runtime
        counts.append((len(tried), sum("run eager" in str(each.message) for each in caught)))
    assert counts == [(2, 2), (2, 0)]  # a class of blocks of each unit


def test_auto_compiles_nothing_on_a_cpu_or_unproven() -> None:
    assert not compiles("auto", torch.device("cuda"), "unheard_of")
    assert not compiles("auto", torch.device("cpu"), "llama")
    assert compiles("blocks", torch.device("cpu"), "unheard_of")


@pytest.mark.parametrize("other", [{"kernels": "liger"}, {"deterministic": True}])
def test_compiled_blocks_are_refused_with_what_they_exclude(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="'compile: blocks'"):
        TrainConfig(compile="blocks", **other)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block", "block_keep_attention"])
@pytest.mark.parametrize("family", [one_f_one_b, zero_bubble_h1])
def test_steps_of_compiled_blocks_match_one_process(workers: WorkerPool, family: Any, recompute: str) -> None:
    check_case(workers, case_of(PLAN, family, recompute=recompute, compiler="inductor", attention="causal"), "node", 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_common_families_compile_and_match_one_process(workers: WorkerPool, family: str) -> None:
    changes = {"language": family}
    if family.endswith("vision_model"):
        changes = {"encoders": tuple((name, family, *others) for name, _, *others in CASE.encoders)}
    check_case(workers, case_of(PLAN, zero_bubble_h1, compiler="aot_eager", attention="causal", **changes), "node", 1)


@needs_compiler
@pytest.mark.slow
def test_compiled_blocks_with_sharded_weights_match_one_process(workers: WorkerPool) -> None:
    plan = plan_of((Stage(0, 5, (0,)),), (Stage(0, 4, (0,)),), (Stage(0, 4, (1,)),))
    halves = Assignment({"vision": (BATCHES,), "language": (BATCHES[::2], BATCHES[1::2])})
    check_case(workers, case_of(plan, compiler="inductor", assignment=halves), "node", 1, shard={"language": "weights"})


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_blocks_under_context_parallelism(workers: WorkerPool, compiler: str) -> None:
    """Rank 2 has fewer tokens than a block, so that rows of very unlike lengths meet one graph; rows that one rank
    holds alone are padded."""
    stages = Stage(0, 2, (1, 2, 3), cp=3), Stage(2, 4, (0,))
    case = case_of(plan_of((Stage(0, 5, (0,)),), stages), zero_bubble_h1, attention="causal", compiler=compiler)
    check_case(workers, replace(case, row_multiple=16), "node", 1)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@settings(max_examples=4, **COMMON)
@given(data=st.data())
def test_compiled_blocks_with_adapters_match_peft(workers: WorkerPool, compiler: str, data: Any) -> None:
    case = data.draw(generic_cases(["deepseek_vl"], 3, torch.float32, lora=True))
    check_generic_case(workers, replace(case, compiler=compiler), "node", 1)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=4, **COMMON)
@given(data=st.data())
def test_compiled_adapters_in_bf16_round_no_worse_than_peft(workers: WorkerPool, data: Any) -> None:
    case = data.draw(generic_cases(["deepseek_vl"], 3, torch.bfloat16, lora=True))
    check_generic_rounding(workers, replace(case, compiler="inductor"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=20, **COMMON)
@given(case=cases())
def test_twenty_drawn_steps_of_compiled_blocks_match_one_process(workers: WorkerPool, case: Case) -> None:
    check_case(workers, replace(case, compiler="aot_eager"), "node", 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=20, **COMMON)
@given(case=cases())
def test_twenty_drawn_steps_of_fused_modules_match_one_process(workers: WorkerPool, case: Case) -> None:
    check_case(workers, replace(case, fuses=True), "node", 1)

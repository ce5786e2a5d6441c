"""Rates of attention over the visible area: ours against every contender that can express the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.clock import host_milliseconds, median_seconds
from benchmarks.attention.contenders import Attend, Contender, FlexTuning, Problem, contenders, one_line
from benchmarks.attention.rows import build, count_visible_pairs, draw_row
from dilatant.attention.kernels import flex
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.blockwise import forward as blockwise_forward
from dilatant.attention.kernels.scores import Scores

CHECKED_TOKENS = 2048
MOST_TOKENS_OF_CREATE_BLOCK_MASK = 1 << 15


@dataclass(frozen=True)
class Shape:
    """Heads and channels of the attention that is measured."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.query_heads}:{self.kv_heads} heads of {self.head_dim}, {name}"


def make_problem(kind: str, tokens: int, shape: Shape, device: torch.device, seed: int = 0) -> Problem:
    row = draw_row(kind, tokens, seed)
    mask = build(kind, row)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.head_dim, device=device, generator=generator).to(shape.dtype)

    return Problem(
        kind=kind,
        mask=mask,
        query=draw(shape.query_heads),
        key=draw(shape.kv_heads),
        value=draw(shape.kv_heads),
        grad_output=draw(shape.query_heads),
        visible_pairs=count_visible_pairs(mask),
        document_lengths=tuple(row.length.tolist()) if kind in ("causal", "document_causal") else None,
    )


def forward_and_backward(attend: Attend, problem: Problem) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    return torch.autograd.grad(attend(*inputs), inputs, problem.grad_output)


def measure_rates(
    kinds: Sequence[str],
    sizes: Sequence[int],
    shape: Shape,
    device: torch.device,
    repeats: int,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Every kind at every size, of all contenders or of ours and those in `only`: seconds, TFLOP/s over visible pairs
    (4 products of a pair and channel forward, 10 backward), ratio to ours, and who could not, by name."""
    tuning = FlexTuning(
        lambda attend, problem: median_seconds({"flex": lambda: forward_and_backward(attend, problem)}, device, 3)[
            "flex"
        ]
    )
    everyone = [each for each in contenders(tuning) if only is None or each.name in ("ours", *only)]
    errors = [check(kind, shape, device, everyone) for kind in kinds]
    tuning.best.clear()  # tuned again on a row of a size that is measured
    tuning.tried.clear()
    middle = sizes[len(sizes) // 2]  # first, because FlexAttention is tuned on the first row of a kind
    rates = [
        measure(make_problem(kind, tokens, shape, device), everyone, repeats)
        for kind in kinds
        for tokens in (middle, *(tokens for tokens in sizes if tokens != middle))
    ]
    rates.sort(key=lambda row: (kinds.index(row["mask"]), row["tokens"]))
    return {"shape": str(shape), "rates": rates, "largest_errors": errors, "flex_options_tried": tuning.tried}


def check(kind: str, shape: Shape, device: torch.device, everyone: Sequence[Contender]) -> dict[str, Any]:
    """Largest difference of each contender's output to blockwise attention in float32, values of order one."""
    torch.compiler.reset()
    problem = make_problem(kind, CHECKED_TOKENS, shape, device)
    inputs = (x.float() for x in (problem.query, problem.key, problem.value))
    expected, _ = blockwise_forward(*inputs, None, problem.plan, Scores(shape.head_dim**-0.5))
    found: dict[str, Any] = {"mask": kind, "tokens": CHECKED_TOKENS}
    for contender in everyone:
        if contender.why_not(problem) is None:
            try:
                output = contender.prepare(problem)(problem.query, problem.key, problem.value)
                found[contender.name] = float((output.float() - expected).abs().max())
            except Exception as error:
                found[contender.name] = one_line(error)
    return found


def measure(problem: Problem, everyone: Sequence[Contender], repeats: int) -> dict[str, Any]:
    torch.compiler.reset()  # FlexAttention compiles for each problem, and dynamo gives up after a few of them
    calls: dict[str, Attend] = {}
    unavailable: dict[str, str] = {}
    for contender in everyone:
        reason = contender.why_not(problem)
        if reason is None:
            try:
                attend = contender.prepare(problem)
                forward_and_backward(attend, problem)
                calls[contender.name] = attend
            except Exception as error:
                reason = one_line(error)
        if reason is not None:
            unavailable[contender.name] = reason
    inputs = (problem.query, problem.key, problem.value)
    with torch.no_grad():
        forward = median_seconds(
            {name: lambda attend=attend: attend(*inputs) for name, attend in calls.items()}, problem.device, repeats
        )
    backward = _backward_seconds(calls, problem, repeats)
    products = problem.visible_pairs * problem.query.shape[1] * problem.query.shape[2]
    results = {
        name: {
            "forward_ms": forward[name] * 1e3,
            "backward_ms": backward[name] * 1e3,
            "forward_tflops": 4 * products / forward[name] / 1e12,
            "backward_tflops": 10 * products / backward[name] / 1e12,
            "ours_is_faster_forward": forward[name] / forward["ours"],
            "ours_is_faster_backward": backward[name] / backward["ours"],
        }
        for name in calls
    }
    table = problem.plan.table(128, 128)
    return {
        "mask": problem.kind,
        "tokens": problem.tokens,
        "visible_share": problem.visible_pairs / problem.tokens**2,
        "full_blocks": int(table.full_blocks.sum()),
        "partial_blocks": int(table.partial_blocks.sum()),
        "row_blocks": table.num_rows,
        "results": results,
        "unavailable": unavailable,
        "plan": plan_times(problem),
    }


def _backward_seconds(calls: dict[str, Attend], problem: Problem, repeats: int) -> dict[str, float]:
    """Of the backward alone; one contender's graph is alive at a time."""
    seconds = {}
    for name, attend in calls.items():
        inputs = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
        output = attend(*inputs)

        def backward(output: Tensor = output, inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(output, inputs, problem.grad_output, retain_graph=True)

        seconds |= median_seconds({name: backward}, problem.device, repeats)
    return seconds


def plan_times(problem: Problem) -> dict[str, Any]:
    """Milliseconds on the host to make what a row's attention needs, once for all layers and both passes."""
    times: dict[str, Any] = {"tables_both_ways_ms": host_milliseconds(lambda: _tables(problem), 5)}
    if problem.device.type == "cuda":
        times["tables_work_lists_and_upload_ms"] = host_milliseconds(lambda: _everything(problem), 5)
        times["flex_block_mask_from_our_tables_ms"] = host_milliseconds(
            lambda: (flex.block_mask(AttentionPlan(problem.mask), problem.device), _wait(problem.device)), 3
        )
    if problem.tokens <= MOST_TOKENS_OF_CREATE_BLOCK_MASK:
        from torch.nn.attention.flex_attention import create_block_mask

        rule, tokens = flex.mask_mod(problem.plan, problem.device), problem.tokens
        times["create_block_mask_ms"] = host_milliseconds(
            lambda: (
                create_block_mask(rule, None, None, tokens, tokens, device=str(problem.device)),
                _wait(problem.device),
            ),
            2,
        )
    return times


def _tables(problem: Problem) -> AttentionPlan:
    plan = AttentionPlan(problem.mask)
    plan.table(128, 128)
    plan.table(128, 128, transposed=True)
    return plan


def _everything(problem: Problem) -> None:
    """What the Triton kernels ask a plan for."""
    plan = _tables(problem)
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    plan.work(problem.device, 128, heads, processors)
    plan.work(problem.device, 128, kv_heads, processors, transposed=True, copy_cost=heads // kv_heads)
    plan.tensors(problem.device)
    _wait(problem.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

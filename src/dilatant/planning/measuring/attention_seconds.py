"""Measuring of attention backends on this device, for the head shapes and mask classes of a model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from dilatant.attention import AttentionPlan, RowLayout, attention, document_causal, media_mask
from dilatant.attention.kernels.backends import AttentionCall, capable_backends, installed
from dilatant.attention.kernels.mask_class import Kind
from dilatant.attention.kernels.measured import MeasuredRow, measured_row, measured_rows
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import full
from dilatant.cost.clock import Clock
from dilatant.models.language.language import LanguageUnit
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.describe_model import BLOCK, ModelDescription

KV_HEADS = 4
WARM_UPS, ROWS = 2, 3
"""Rows that warm a backend up, and rows that are timed afterwards. All have samples of other lengths, as rows of
training do: a backend that prepares itself for every new shape pays for it here, too."""


class Rows(NamedTuple):
    """Rows to measure: their mask class, query heads of a KV head, channels of a head, and width of the window."""

    kind: Kind
    group: int
    head_dim: int
    window: int | None


def rows_of(model: ModelDescription) -> list[Rows]:
    """Return the kinds of rows that the blocks of a model attend over."""
    found: dict[Rows, None] = {}
    for kind, shape in layer_shapes(model, guess=True).items():
        entry = next(entry for entry in model.types if entry.kind == kind)
        if entry.role != BLOCK or not shape.heads or not shape.key_value_width:
            continue
        size, group = shape.attention_width // shape.heads, 2 * shape.attention_width // shape.key_value_width
        if not isinstance(entry.unit, LanguageUnit):
            found[Rows("full", group, size, None)] = None
            continue
        found[Rows("causal", group, size, None)] = None
        if width := getattr(entry.unit.config, "sliding_window", None):
            found[Rows("window", group, size, width)] = None
        if len(model.spec.units) > 1:
            found[Rows("media", group, size, None)] = None
    return list(found)


def measure_attention(
    rows: Iterable[Rows],
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[MeasuredRow]:
    """Time a forward and a backward of every backend that can run rows of `tokens` tokens. A backend that raises an
    error is noted as failed, and never chosen."""
    found = []
    for row in rows:
        plans = [AttentionPlan(_mask(row, tokens, number)) for number in range(WARM_UPS + ROWS)]
        call = AttentionCall(device.type, dtype, row.head_dim, row.head_dim, plans[0].mask_class, row.group)
        seconds, failed = dict[str, float](), dict[str, str]()
        names = capable_backends(call, installed(device))
        for name in names if len(names) > 1 else ():
            say(f"measuring attention: {name}, {row.kind} rows, heads of {row.head_dim}")
            try:
                seconds[name] = _seconds(name, plans, device, dtype, row)
            except Exception as error:  # of a compiler, a driver, or for want of memory: others remain
                failed[name] = next(iter(str(error).splitlines()), type(error).__name__)
        name_of_type = str(dtype).removeprefix("torch.")
        found.append(MeasuredRow(row.kind, name_of_type, row.group, row.head_dim, tokens, seconds, failed))
    return found


def measured_attention(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> list[MeasuredRow]:
    """Return what was measured on this device for the kinds of rows of a model, where there was a choice."""
    measured = measured_rows(device.type, device.index)
    found = [measured_row(measured, row.kind, dtype, row.group, row.head_dim) for row in rows_of(model)]
    return [row for row in found if row is not None and row.seconds]


def choice_text(row: MeasuredRow) -> str:
    """Say which backend is the fastest, by how much, and which ones failed."""
    first, second = [*row.ranking, ""][:2]
    times = f", {row.seconds[second] / row.seconds[first]:.2f} times as fast as {second}" if second else ""
    failed = "".join(f"; {name} failed: {why}" for name, why in row.failed.items())
    return f"{row.mask} rows with heads of {row.head_dim}: {first}{times}{failed}"


def _seconds(name: str, plans: list[AttentionPlan], device: torch.device, dtype: torch.dtype, row: Rows) -> float:
    clock, taken = Clock(device), list[float]()
    for plan in plans:
        heads = (row.group * KV_HEADS, KV_HEADS, KV_HEADS)
        shapes = [(plan.mask.num_tokens, count, row.head_dim) for count in heads]
        inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        gradient = torch.randn(shapes[0], device=device, dtype=dtype)
        with clock.into(taken):
            torch.autograd.grad(attention(*inputs, plan, backend=name), inputs, gradient)
    return statistics.median(taken[WARM_UPS:])


def _mask(row: Rows, tokens: int, seed: int) -> AttentionMask:
    """Return a mask of such a row of six samples, of lengths that are drawn."""
    lengths = np.maximum(4, (np.random.default_rng(seed).dirichlet([2.0] * 6) * tokens).astype(int)).tolist()
    if row.kind == "media":
        samples = [[("text", n - n // 2 - n // 4), ("image", n // 2), ("text", n // 4)] for n in lengths]
        return media_mask(RowLayout.of_samples(samples), "bidirectional")
    if row.kind == "full":
        return full(RowLayout.of_lengths(lengths))
    return document_causal(RowLayout.of_lengths(lengths)).with_window(row.window and min(row.window, max(lengths) // 2))

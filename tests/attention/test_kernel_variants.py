"""After the first row of a run, no other row of its layers waits for Triton's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: the variants of its kernels were not counted")

from cases.attention.attention_cases import make_case
from cases.attention.mask_strategies import masks
from dilatant.attention.kernels import triton_kernel
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.kernels.triton_tuning import Tile, Tuning
from dilatant.attention.masks.mask import AttentionMask

CUTS_LONG_ROWS = Tuning(
    Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 32, 4, 1), block=32, processors=64, smallest_piece_tokens=32
)
NAMES = (
    "forward_kernel",
    "join_forward_kernel",
    "delta_kernel",
    "grad_query_kernel",
    "grad_key_value_kernel",
    "add_parts_kernel",
)


class Counted:
    """A kernel that computes nothing. asked: variants that launches need; compiled: those that are there."""

    def __init__(self, kernel: Any, asked: set[Any], compiled: set[Any]) -> None:
        self._kernel, self._asked, self._compiled = kernel, asked, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._asked.add(self._variant(arguments, constants))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self._compiled.add(self._variant(arguments, constants))

    def _variant(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """What Triton specialises on: dtypes, constants and, unless told not to, whether a number is 1 or divisible by
        16."""
        kinds = []
        for name, value in zip(self._kernel.arg_names, arguments):
            if isinstance(value, torch.Tensor):
                kinds.append((name, value.dtype))
            elif isinstance(value, int) and name not in self._kernel.do_not_specialize:
                kinds.append((name, value == 1, value % 16 == 0))
        return self._kernel.fn.__name__, *kinds, *sorted(constants.items())


def run(mask: AttentionMask, sinks: bool, softcap: float | None) -> None:
    case = make_case(mask, sinks=sinks, softcap=softcap)
    plan, scores = AttentionPlan(case.mask), Scores(case.scale, case.softcap)
    triton, inputs = triton_kernel.kernel(CUTS_LONG_ROWS), (case.query, case.key, case.value, case.sinks)
    output, logsumexp = triton.forward(*inputs, plan, scores)
    triton.backward(case.grad_output, *inputs, output, logsumexp, plan, scores)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(masks().filter(lambda mask: mask.num_tokens > 0), min_size=2, max_size=4),
    window=st.sampled_from([None, 20]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
)
def test_the_first_row_compiles_what_later_rows_ask_for(
    rows: list[AttentionMask], window: int | None, sinks: bool, softcap: float | None
) -> None:
    """Rows with and without images, with and without blocks so long that they are cut, whose heads share a cache in
    sections of other sizes."""
    asked: set[Any] = set()
    compiled: set[Any] = set()
    with pytest.MonkeyPatch.context() as patched:
        for name in NAMES:
            patched.setattr(triton_kernel, name, Counted(getattr(triton_kernel, name), asked, compiled))
        patched.setattr(triton_kernel, "_section", lambda streamed, group=1: 1 + (streamed.shape[0] > 40))
        first, *others = [row.with_window(window) for row in rows]
        run(first, sinks, softcap)
        compiled |= asked
        asked.clear()
        for row in others:
            run(row, sinks, softcap)
        assert asked <= compiled

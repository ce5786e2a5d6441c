"""Who computes the same attention: our kernels, and what PyTorch offers, where it can express the mask.

A contender says why it cannot take a problem, or gives a function of query, key and value that can be differentiated.
What it derives from the mask is made before, and timed apart.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dilatant.attention import attention
from dilatant.attention.kernels import flex
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.backends import installed, request_of, unsupported_reason
from dilatant.attention.kernels.blockwise import visible_pairs
from dilatant.attention.masks.mask import AttentionMask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

MOST_DENSE_TOKENS = 1 << 15
"""A dense mask of more tokens than this takes gigabytes."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One row and its tensors: query `[tokens, query_heads, dim]`, key and value `[tokens, kv_heads, dim]`.

    `document_lengths` are given where the mask is causal within each document and nothing else.
    """

    kind: str
    mask: AttentionMask
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    visible_pairs: int
    document_lengths: tuple[int, ...] | None

    @property
    def tokens(self) -> int:
        return self.query.shape[0]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @functools.cached_property
    def plan(self) -> AttentionPlan:
        return AttentionPlan(self.mask)


@dataclass(frozen=True)
class Contender:
    """`prepare` makes the call for a problem; `why_not` says why there is none."""

    name: str
    why_not: Callable[[Problem], str | None]
    prepare: Callable[[Problem], Attend]


@dataclass
class FlexTuning:
    """The kernel options of FlexAttention that were fastest on the problem they were tried on; `tried` keeps all.

    Flex compiles for every option, so the search is done once for each kind of mask and kept.
    """

    measure: Callable[[Attend, Problem], float]
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    tried: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def options(self, problem: Problem, call: Callable[[Mapping[str, Any]], Attend]) -> dict[str, Any]:
        """The options for this kind of mask, found on the first problem of the kind."""
        if problem.kind not in self.best:
            results = []
            for options in FLEX_OPTIONS:
                try:
                    seconds = self.measure(call(options), problem)
                    results.append({"options": options, "forward_and_backward_ms": seconds * 1e3})
                except Exception as error:
                    results.append({"options": options, "failed": one_line(error)})
            self.tried[problem.kind] = results
            able = [entry for entry in results if "failed" not in entry]
            if not able:
                raise RuntimeError(f"no kernel options of FlexAttention work: {results[0]['failed']}")
            self.best[problem.kind] = min(able, key=lambda entry: entry["forward_and_backward_ms"])["options"]
        return self.best[problem.kind]


_WIDE_BACKWARD = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64}
FLEX_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 3},
    {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        **_WIDE_BACKWARD,
        "bwd_num_warps": 8,
    },
    {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 8,
        "fwd_num_stages": 3,
        "fwd_USE_TMA": True,
        **_WIDE_BACKWARD,
        "bwd_num_warps": 4,
    },
)


def contenders(tuning: FlexTuning) -> list[Contender]:
    """All of them, ours first."""
    return [
        Contender("ours", lambda problem: None, _ours),
        Contender("flex_tuned", _why_not_flex, functools.partial(_flex, tuning)),
        Contender("flex_default", _why_not_flex, lambda problem: _flex_call(problem, {})),
        Contender("sdpa_flash", _why_not_sdpa, functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
        Contender("sdpa_cudnn", _why_not_cudnn, functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
        Contender("sdpa_dense_mask", _why_not_dense, _dense),
        Contender("varlen_flash2", _why_not_varlen, _varlen),
        Contender("flash_attention_3", functools.partial(_why_not_package, "flash_attn_interface"), _flash3),
        *(
            Contender(name, functools.partial(_why_not_backend, name), functools.partial(_backend, name))
            for name in ("cudnn_flex", "magi")
        ),
    ]


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _ours(problem: Problem) -> Attend:
    kernel = "triton" if problem.device.type == "cuda" else "blockwise"  # the automatic choice may be PyTorch's
    return lambda q, k, v: attention(q, k, v, problem.plan, backend=kernel)


def _why_not_flex(problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        return "FlexAttention has no gradients on a CPU"
    if problem.tokens > 1 << 18:
        return "its dense tables of blocks would not fit"
    return None


def _flex(tuning: FlexTuning, problem: Problem) -> Attend:
    return _flex_call(problem, tuning.options(problem, functools.partial(_flex_call, problem)))


def _flex_call(problem: Problem, options: Mapping[str, Any]) -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = flex.block_mask(problem.plan, problem.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        output = compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped, kernel_options=dict(options) or None)
        return output[0].transpose(0, 1)

    return attend


def _why_not_sdpa(problem: Problem) -> str | None:
    if problem.document_lengths is None:
        return "it knows no mask but causal"
    if len(problem.document_lengths) > 1:
        return "it keeps no documents apart in one call"
    return None


def _why_not_cudnn(problem: Problem) -> str | None:
    return "cuDNN runs on GPUs" if problem.device.type != "cuda" else _why_not_sdpa(problem)


def _sdpa(backend: SDPBackend, problem: Problem) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(backend):
            output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return output[0].transpose(0, 1)

    return attend


def _why_not_dense(problem: Problem) -> str | None:
    if problem.tokens > MOST_DENSE_TOKENS:
        return f"its mask of tokens by tokens would take {problem.tokens**2 / 2**30:.0f} GiB"
    return None


def _dense(problem: Problem) -> Attend:
    """What transformers does for a packed row."""
    query_fields, query_positions, key_fields, key_positions = problem.plan.tensors(problem.device)
    seen = torch.cat(
        [
            visible_pairs(fields[:, None], key_fields, positions[:, None], key_positions, problem.mask.window)
            for fields, positions in zip(query_fields.split(512), query_positions.split(512))
        ]
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
        return output[0].transpose(0, 1)

    return attend


def _why_not_varlen(problem: Problem) -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no varlen_attn"
    if problem.device.type != "cuda":
        return "varlen_attn runs on GPUs"
    return None if problem.document_lengths is not None else "it knows causal documents and nothing else"


def _varlen(problem: Problem) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    borders, longest = _borders(problem)
    # Without this parameter (torch 2.11) it takes fewer key heads as they are.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0), **grouped)
        assert isinstance(output, Tensor)
        return output

    return attend


def _why_not_package(package: str, problem: Problem) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None if problem.document_lengths is not None else "it knows causal documents and nothing else"


def _flash3(problem: Problem) -> Attend:
    import flash_attn_interface

    borders, longest = _borders(problem)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = flash_attn_interface.flash_attn_varlen_func(q, k, v, borders, borders, longest, longest, causal=True)
        return output[0] if isinstance(output, tuple) else output

    return attend


def _why_not_backend(name: str, problem: Problem) -> str | None:
    request = request_of(problem.query, problem.key, problem.value, problem.plan)
    return unsupported_reason(name, request, installed(problem.device))


def _backend(name: str, problem: Problem) -> Attend:
    return lambda q, k, v: attention(q, k, v, problem.plan, backend=name)


def _borders(problem: Problem) -> tuple[Tensor, int]:
    assert problem.document_lengths is not None
    borders = np.concatenate([[0], np.cumsum(problem.document_lengths)])
    return torch.tensor(borders, dtype=torch.int32, device=problem.device), max(problem.document_lengths)

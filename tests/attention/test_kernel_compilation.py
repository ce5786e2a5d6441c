"""The Triton kernels, compiled for GPUs that are not here, use the tensor cores and keep to their registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the kernels were not compiled")

from benchmarks.attention.compiled_kernels import KERNELS, compile_kernel
from dilatant.attention.kernels.triton_tuning import tuning_for

HOPPER_SHARED_BYTES = 227 * 1024
SPILL_BYTES = {"forward": 48, "grad_query": 64, "grad_key_value": 240}
"""Per thread: the most that the shapes in use take under Triton 3.6 (48, 48, 124) or 3.9 (36, 16, 240). A tile one
size up takes a thousand."""


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "forward" else pytest.mark.slow) for name in KERNELS]
)
def test_hopper_kernels_keep_the_warpgroup_tensor_cores_fed(name: str, head_dim: int) -> None:
    compiled = compile_kernel(name, tuning_for(head_dim, 2, (9, 0)), head_dim)
    assert compiled.warpgroup_products > 0
    assert compiled.warp_products == 0
    assert not compiled.serialized, "the assembler waits for each matrix product before the next"
    assert compiled.spill_store_bytes <= SPILL_BYTES[name]
    assert compiled.shared_bytes <= HOPPER_SHARED_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 80, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_hopper_kernels_of_other_head_dims(name: str, head_dim: int) -> None:
    compiled = compile_kernel(name, tuning_for(head_dim, 2, (9, 0)), head_dim)
    assert compiled.warpgroup_products > 0
    assert not compiled.serialized
    assert compiled.spill_store_bytes <= SPILL_BYTES[name]
    assert compiled.shared_bytes <= HOPPER_SHARED_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"windowed": True}, {"group": 1}, {"together": False}], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_variants_cost_no_more_than_the_plain_kernels(name: str, options: dict) -> None:
    compiled = compile_kernel(name, tuning_for(128, 2, (9, 0)), 128, **options)
    assert not compiled.serialized
    assert compiled.spill_store_bytes <= 2 * SPILL_BYTES[name]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_ampere_kernels_use_tensor_cores_and_fit_consumer_cards(name: str, head_dim: int) -> None:
    compiled = compile_kernel(name, tuning_for(head_dim, 2, (8, 0)), head_dim, capability=80)
    assert compiled.warp_products > 0
    assert compiled.spill_store_bytes <= SPILL_BYTES[name]
    assert compiled.shared_bytes <= 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_float32_kernels_compile_without_spilling_everything(name: str, head_dim: int) -> None:
    import torch

    compiled = compile_kernel(name, tuning_for(head_dim, 4, (9, 0)), head_dim, dtype=torch.float32)
    # None under Triton 3.6; 3.9 spills up to this much. Float32 has no tensor cores and need not be fast.
    assert compiled.spill_store_bytes <= 3072
    assert compiled.shared_bytes <= 99 * 1024

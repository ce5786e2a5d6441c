"""What a run sets for GPUs, checked without one."""

from __future__ import annotations

import contextlib
import gc
import os

import numpy as np
import pytest
import torch

from dilatant.config.environment import cache_folder, prepare_torch
from dilatant.data.media.pixels import EncoderInput, Pixels
from dilatant.models.core import stage
from dilatant.runtime.precision import compute_repeatably
from dilatant.training.trainer import shorten_collections

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR", *ALLOCATOR)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables that are as before after the test, whatever it sets."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_variables_are_set_before_cuda_starts(environment: pytest.MonkeyPatch) -> None:
    prepare_torch()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_folder() / "inductor")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_user_has_set_stays(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.setenv(name, "mine")
    prepare_torch()
    assert os.environ[name] == "mine"
    if name.startswith("PYTORCH"):
        assert {*ALLOCATOR} & {*os.environ} == {name}


def test_deterministic_runs_refuse_operations_that_do_not_repeat() -> None:
    try:
        compute_repeatably(torch.device("cpu"))
        assert not torch.are_deterministic_algorithms_enabled()
        compute_repeatably(torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        # Only so does memory-efficient attention repeat its gradients.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_collections_on_a_gpu_leave_what_was_there_out() -> None:
    gc.unfreeze()  # a library may have frozen what it imported
    with contextlib.ExitStack() as stack:
        shorten_collections(torch.device("cpu"), stack)
        assert not gc.get_freeze_count()
        shorten_collections(torch.device("cuda"), stack)
        assert gc.get_freeze_count() > 1000
    assert not gc.get_freeze_count()


@pytest.mark.parametrize(
    ("encoder_input", "copies"),
    [(Pixels(np.zeros((2, 3, 4, 4), np.uint8), 1 / 255, (0.5,), (0.5,)), 3), (np.zeros((2, 4), "f4"), 1)],
    ids=["pixels", "numbers"],
)
def test_media_are_copied_without_making_the_host_wait(
    monkeypatch: pytest.MonkeyPatch, encoder_input: EncoderInput, copies: int
) -> None:
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(stage, "to_device", lambda tensor, device: copied.append(tensor) or tensor.to(device))
    made = stage.on_device([encoder_input], torch.device("meta"))
    assert made.device.type == "meta"
    assert [tensor.device.type for tensor in copied] == ["cpu"] * copies

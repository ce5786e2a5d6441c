"""No microbatch's statistics reach a result: stored ones are used and kept, and what cannot be held is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from benchmarks.models.families_of_transformers import config_of
from cases.engine_case import CASE, TEXT, build_samples
from dilatant import Encoder, MultimodalModel, ParallelSpec, UserError, parallelize
from dilatant.hf.pretrained_export import write_pretrained
from dilatant.models.encoders.narrow_encoder import auto_class
from dilatant.models.families.media_proof import drawn, small_copy
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.row_attention import attend_by_default, choose_attention
from dilatant.runtime.runtime import Runtime


class Tower(nn.Module):
    """An encoder whose convolution is followed by `norm`, over [items, 12, 2, 2]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.norm = norm

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.norm(self.patches(pixel_values)).flatten(2).transpose(1, 2)


def with_norm(make: Callable[[], nn.Module]) -> MultimodalModel:
    torch.manual_seed(3)
    norm = make()
    stated: dict[str, Any] = {"kind": "image", "row_shape": (3, 8, 8), "width": 12, "tokens_per_row": 4}
    for buffer in norm.buffers():  # stored statistics of some training before
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2)
    text = {"model_type": "llama", **TEXT, "num_hidden_layers": 1}
    return MultimodalModel({"vision": Encoder(Tower(norm), **stated)}, text, seed=3)


def run(model: MultimodalModel, num_microbatches: int) -> Runtime:
    specs = {name: ParallelSpec() for name in model.units}
    options: dict[str, Any] = {"colocated": {"vision": "language"}, "seed": 3, "num_microbatches": num_microbatches}
    return parallelize(model.train(), specs, **options)


def step(norm: Callable[[], nn.Module], num_microbatches: int) -> tuple[float, dict[str, Tensor], MultimodalModel]:
    """Loss, gradients and the model after one step of samples with unlike numbers of pictures."""
    samples = build_samples(replace(CASE, texts=((6, (1,)), (5, (2,)), (7, (0,)), (4, (3,)))))
    model = with_norm(norm)
    runtime = run(model, num_microbatches)
    loss = runtime.execute(samples).loss
    gradients = {name: each.grad.clone() for name, each in model["vision"].named_logical_parameters()}
    runtime.close()
    return loss, gradients, model


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(12),
        lambda: nn.InstanceNorm2d(12, affine=True, track_running_stats=True),
        lambda: parametrizations.spectral_norm(nn.Conv2d(12, 12, 1)),
        lambda: spectral_norm(nn.Conv2d(12, 12, 1)),
    ],
    ids=["batch", "instance", "spectral", "spectral by a hook"],
)
def test_stored_statistics_serve_every_layout_and_stay(norm: Any) -> None:
    untouched = with_norm(norm)["vision"].model
    loss, gradients, _ = step(norm, 1)
    other_loss, other_gradients, model = step(norm, 4)
    assert loss == pytest.approx(other_loss, rel=1e-6)  # fp32 sums in other orders
    torch.testing.assert_close(gradients, other_gradients, rtol=1e-4, atol=1e-6)
    stored = dict(untouched.named_buffers())
    assert stored
    assert all(buffer.equal(stored[name]) for name, buffer in model["vision"].model.named_buffers())
    pictures = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(model.train()["vision"].model(pictures), untouched.eval()(pictures))


def test_a_model_with_stored_statistics_says_so_when_it_opens() -> None:
    line = "vision: BatchNorm2d: the stored statistics are used and kept; only weights train"
    with pytest.warns(UserWarning, match=line):
        choose_attention(with_norm(lambda: nn.BatchNorm2d(12)))
    frozen = with_norm(lambda: nn.BatchNorm2d(12))
    frozen.freeze(["vision.encoder"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="vision: ")
        choose_attention(frozen)


@pytest.mark.slow
def test_stored_statistics_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is absent; not checked: that an export holds a tower's statistics")
    config = config_of("fast_vlm")
    model = drawn(small_copy(PretrainedModel.of(config, "model")), attend_by_default)
    stored = {name: each for name, each in model["vision"].model.named_buffers() if "running" in name}
    assert stored
    for buffer in stored.values():
        buffer.uniform_(0.5, 2)
    write_pretrained(model, tmp_path, None)
    read = dict(auto_class(config).from_pretrained(tmp_path).named_buffers())
    for name, buffer in stored.items():
        (own,) = (each for key, each in read.items() if key.endswith(name.removeprefix("model.")))
        assert torch.equal(own, buffer), name


class Codebook(nn.Module):
    """Moves a buffer towards what it sees, as codebooks do that follow a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(12, 1, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.code.lerp_(hidden.detach().mean((0, 2, 3))[:, None, None], 0.1)
        return hidden - self.code


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (lambda: nn.BatchNorm2d(12, track_running_stats=False), r"model.norm \(BatchNorm2d\); set track_running_stats"),
        (Codebook, "its forward changes the buffer model.norm.code"),
    ],
)
def test_statistics_that_cannot_be_held_are_refused(norm: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        step(norm, 1)

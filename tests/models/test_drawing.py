"""Training targets and image generation equal those of diffusers' schedulers, and depend on random keys alone."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases.models.tiny_nets import CLIP, FLUX, KL, NETS, OF_FEATURES, PIXART, SD3, SIZES, UNET
from cases.often import often
from cases.tiny_models import LANGUAGE_MODELS
from dilatant import Generator, MultimodalModel
from dilatant.config.errors import UserError
from dilatant.models.core.dtype import cast_weights
from dilatant.models.core.materialize import materialize
from dilatant.models.generators.denoiser_source import read_source, scheduler_settings
from dilatant.models.generators.denoisers import build_diffusion, inspect_denoiser, pretrained_weights
from dilatant.models.generators.diffusion import Diffusion, SamplingSettings, add_noise, alphas, draw, draw_noise

diffusers: Any = pytest.importorskip("diffusers", reason="nothing draws without diffusers")
EXACT: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
"""Sums of a few float32 numbers near 1, in another order."""
LANGUAGE = {**LANGUAGE_MODELS["llama"], "num_hidden_layers": 1}
"""A language model that a generator may stand behind; nothing here asks it."""


def _built(settings: Any, vae: Any = None, objective: Any = "flow", seed: int = 0) -> Diffusion:
    return _unit(settings, vae, objective, seed).model


def _unit(settings: Any, vae: Any = None, objective: Any = "flow", seed: int = 0) -> Any:
    size = SIZES.get(settings["_class_name"])
    seen = inspect_denoiser(read_source("net", None, settings, vae, None, size), "net")
    module = build_diffusion(seen, "net", objective, 0.1, hollow=True)
    generator = Generator(module, None, seen.width, "linear", 2)
    model = MultimodalModel({}, LANGUAGE, seed=seed, generators={"image": generator})
    return model["image"]


@pytest.mark.parametrize("objective", ["epsilon", "velocity"])
def test_noisy_pictures_and_targets_are_those_of_diffusers(objective: Any) -> None:
    scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    torch.testing.assert_close(torch.tensor(alphas()), scheduler.alphas_cumprod.double(), rtol=1e-4, atol=1e-7)
    picture, noise, moments = torch.randn(5, 1, 4, 4), torch.randn(5, 1, 4, 4), torch.randn(5)
    mixed = add_noise(objective, picture, noise, moments)
    steps = mixed.times.long()
    torch.testing.assert_close(mixed.seen, scheduler.add_noise(picture, noise, steps), **EXACT)
    target = noise if objective == "epsilon" else scheduler.get_velocity(picture, noise, steps)
    torch.testing.assert_close(mixed.target, target, **EXACT)


def test_flow_is_a_straight_line_and_its_direction() -> None:
    picture, noise, moments = torch.randn(5, 1, 4, 4), torch.randn(5, 1, 4, 4), torch.randn(5)
    mixed = add_noise("flow", picture, noise, moments)
    share = (mixed.times / 1000)[:, None, None, None]
    torch.testing.assert_close(mixed.seen - share * mixed.target, picture, **EXACT)
    torch.testing.assert_close(mixed.seen + (1 - share) * mixed.target, noise, **EXACT)


@pytest.mark.parametrize(
    ("objective", "guidance"),
    [
        ("flow", 2.5),
        ("epsilon", 2.5),
        ("velocity", 1.0),
        pytest.param("flow", 1.0, marks=pytest.mark.slow),
        pytest.param("epsilon", 1.0, marks=pytest.mark.slow),
        pytest.param("velocity", 2.5, marks=pytest.mark.slow),
    ],
)
def test_drawing_takes_the_steps_of_diffusers(objective: Any, guidance: float) -> None:
    """The oracle is the exported diffusers scheduler in the usual loop with guidance."""
    net = _built(SD3, objective=objective).eval()
    rows, noise = torch.randn(2, 3, 12), torch.randn(2, 1, 4, 4)
    settings = scheduler_settings(objective)
    scheduler = getattr(diffusers, settings["_class_name"]).from_config(settings)
    if objective == "flow":
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10))
    else:
        scheduler.set_timesteps(10)
    seen = noise.clone()
    with torch.no_grad():
        for t in scheduler.timesteps:

            def say(given: torch.Tensor, seen: torch.Tensor = seen, t: Any = t) -> torch.Tensor:
                pooled = net.pool(given.mean(1))
                return net.net(seen, given, pooled, t.expand(2).float(), return_dict=False)[0]

            told, untold = say(rows), say(torch.zeros_like(rows))
            seen = scheduler.step(untold + guidance * (told - untold), t, seen, return_dict=False)[0]
    drawn = draw(net, rows, noise, SamplingSettings(10, guidance))
    torch.testing.assert_close(drawn, seen.clamp(-1, 1), rtol=1e-3, atol=1e-3)  # its table of noise is float32


def test_frozen_encoder_patches_are_generated_without_clipping() -> None:
    seen = inspect_denoiser(read_source("net", None, OF_FEATURES, None, CLIP), "net")
    module = build_diffusion(seen, "net", "flow", 0.1, hollow=True)
    generator = Generator(module, None, seen.width, "linear", 2)
    net = MultimodalModel({}, LANGUAGE, seed=0, generators={"image": generator})["image"].model
    assert net.encoder is not None
    assert not any(p.requires_grad for p in net.encoder.parameters())
    pixels = torch.randn(2, 3, 8, 8)
    patches = net.encoder(pixels).last_hidden_state[:, 1:]  # without the class token, row by row
    for row, column in ((0, 0), (1, 3), (3, 2)):
        assert torch.equal(net.encode(pixels)[:, :, row, column], patches[:, 4 * row + column])
    drawn = draw(net.eval(), torch.randn(2, 2, 12), 50 * torch.randn(2, *net.shape), SamplingSettings(2))
    assert drawn.shape == (2, 8, 4, 4)
    assert drawn.abs().max() > 1  # no picture, which would end there


def test_noise_hangs_on_seed_key_and_place_alone() -> None:
    keys = [f"draw {number} item 0" for number in range(400)]
    together = draw_noise(3, keys, (1, 4, 4), 0.25, "image", latent=True)
    for number in (0, 17, 399):
        alone = draw_noise(3, [keys[number]], (1, 4, 4), 0.25, "image", latent=True)
        for name in ("values", "moments", "kept", "latent"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[number])
    for other in (draw_noise(4, keys, (1, 4, 4), 0.25, "image"), draw_noise(3, keys, (1, 4, 4), 0.25, "photo")):
        # Correlations of 6,400 independent numbers lie within 5 of their deviations.
        both = torch.stack([together.values.flatten(), other.values.flatten()])
        assert abs(torch.corrcoef(both)[0, 1].item()) < 5 / 80
    assert abs(together.values.mean().item()) < 5 / 80
    assert abs(together.values.var().item() - 1) < 5 * 2**0.5 / 80
    assert abs(together.moments.var().item() - 1) < 5 * 2**0.5 / 20
    assert abs(together.kept.float().mean().item() - 0.75) < 5 * 0.43 / 20
    assert together.latent is not None
    assert not torch.equal(together.latent, together.values)


@pytest.mark.parametrize("family", often(NETS, "sd3", "unet"))
def test_every_family_learns_in_any_split_of_a_batch(family: str) -> None:
    net, rows = _built(*NETS[family]).eval(), torch.randn(3, 2, 12)
    pixels = torch.rand(3, *net.targets.pixels) * 2 - 1
    keys = ["a", "b", "c"]
    together = net(rows, pixel_values=pixels, seed=1, keys=keys, place="image")
    assert together.shape == (3,)
    alone = [
        net(rows[i : i + 1], pixel_values=pixels[i : i + 1], seed=1, keys=[keys[i]], place="image") for i in range(3)
    ]
    torch.testing.assert_close(together, torch.cat(alone), **EXACT)
    together.sum().backward()
    assert all(p.grad is None for p in net.parameters() if not p.requires_grad)
    assert not any(p.requires_grad for name, p in net.named_parameters() if name.startswith("vae."))
    drawn = draw(net, rows, torch.randn(3, *net.shape), SamplingSettings(2, 2.0))
    assert drawn.shape == (3, *net.targets.pixels)


def test_flux_is_given_what_its_pipeline_gives_it() -> None:
    net, pipeline = _built(FLUX, KL).eval(), diffusers.FluxPipeline
    seen, rows, times = torch.randn(2, 4, 4, 4), torch.randn(2, 3, 12), torch.tensor([250.0, 900.0])
    with torch.no_grad():
        said = net.net(
            pipeline._pack_latents(seen, 2, 4, 4, 4),
            encoder_hidden_states=rows,
            pooled_projections=net.pool(rows.mean(dim=1)),
            timestep=times / 1000,
            img_ids=pipeline._prepare_latent_image_ids(2, 2, 2, "cpu", torch.float32),
            txt_ids=torch.zeros(3, 3),
            guidance=torch.ones(2),
        ).sample
        wanted = pipeline._unpack_latents(said, 32, 32, 8)
        assert torch.equal(net.predict(seen, times, rows), wanted)


@pytest.mark.parametrize("settings", [SD3, PIXART], ids=["persistent", "not persistent"])
def test_computed_position_buffers_survive_the_meta_device(settings: Any) -> None:
    net = _built(settings, KL if settings is PIXART else None).net
    real = getattr(diffusers, settings["_class_name"]).from_config(settings)
    assert torch.equal(net.get_buffer("pos_embed.pos_embed"), real.get_buffer("pos_embed.pos_embed"))


def test_initial_weights_depend_only_on_the_seed() -> None:
    first = _built(SD3, seed=5)
    torch.randn(3)
    again, other = _built(SD3, seed=5), _built(SD3, seed=6)
    for (name, a), (_, b), (_, c) in zip(*(model.named_parameters() for model in (first, again, other))):
        assert torch.equal(a, b), name
        assert a.dim() < 2 or not a.any() or not torch.equal(a, c), name


def test_a_hollow_generator_allocates_only_when_materialized() -> None:
    seen = inspect_denoiser(read_source("net", None, SD3, None), "net")
    module = build_diffusion(seen, "net", "flow", 0.1, hollow=True)
    generator = Generator(module, None, 12, "linear", 2)
    model = MultimodalModel({}, LANGUAGE, seed=0, device="meta", generators={"image": generator})
    assert all(p.is_meta for p in model.parameters())
    unit = model["image"]
    materialize(unit, 0, 3, 0)
    held = {w.name for w in unit.weights if w.layer in unit.layers[:3]}
    assert {name for name, p in unit.named_logical_parameters() if not p.is_meta} <= held
    assert not any(t.is_meta for t in (*unit.stage(0, 3).parameters(), *unit.stage(0, 3).buffers()))
    materialize(unit, 3, len(unit.layers), 0)
    assert not any(t.is_meta for t in (*unit.parameters(), *unit.buffers()))
    assert all(p.is_meta for p in model.language.parameters())
    whole = _built(SD3)
    for (name, part), (_, other) in zip(unit.model.named_parameters(), whole.named_parameters()):
        assert torch.equal(part, other), name  # whoever draws the other layers


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["sd3", "pixart", "sana"])
def test_parts_of_a_net_are_the_net(family: str, dtype: torch.dtype) -> None:
    """With cuts before and after every block, losses are equal to the bit and all gradients are close."""
    unit = _unit(*NETS[family])
    cast_weights(unit, dtype)
    net, count = unit.model, len(unit.layers)
    rows = torch.randn(3, 2, 12, dtype=dtype)
    given: dict[str, Any] = {"pixel_values": torch.rand(3, *net.targets.pixels) * 2 - 1, "seed": 1}
    given |= {"keys": ["a", "b", "c"], "place": "image"}

    def losses(bounds: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]:
        unit.zero_grad()
        value = rows.flatten(0, 1).clone().requires_grad_()
        flowing, held = value, []
        for first, end in itertools.pairwise(bounds):
            stage = unit.stage(first, end)
            held += [name for name, _ in stage.named_logical_parameters()]
            flowing = stage(flowing, **(given if first == 1 else {}))
            if end < count:
                assert flowing.dtype == dtype
                assert flowing.shape == (3 * unit.rows_between, unit.boundary(end, "image").width)
        flowing.sum().backward()
        gradients = {name: p.grad.clone() for name, p in unit.named_logical_parameters() if p.grad is not None}
        return flowing.detach(), gradients | {"rows": value.grad}, held

    whole, expected, names = losses([1, count])
    assert whole.isfinite().all()
    for bounds in ([1, 2, count], [1, 3, count], [1, 2, 3, 4, count], [1, count - 1, count]):
        found, gradients, held = losses(bounds)
        assert torch.equal(found, whole)
        assert held == names
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            # A few sums in another order: moments are told to all blocks, whose gradients are added at each cut.
            error = (gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
            assert error < (1e-5 if dtype == torch.float32 else 0.05), name


@pytest.mark.parametrize(
    ("settings", "vae", "said"),
    [
        ({**SD3, "num_layer": 3}, None, "'num_layer' is not a setting of SD3Transformer2DModel; did you mean 'num_l"),
        ({**SD3, "_class_name": "SD3Transformer"}, None, "did you mean SD3Transformer2DModel?"),
        (PIXART, None, "draws 4 channels, which is no picture; name the autoencoder"),
        ({**UNET, "in_channels": 8, "out_channels": 8}, KL, "its latents have 4 channels, but the net draws 8"),
        ({**UNET, "class_embed_type": "timestep"}, KL, "class_embed_type is 'timestep', which nobody tells it here"),
        ({**UNET, "sample_size": None}, KL, "has no sample_size"),
        ({**SD3, "num_attention_heads": -1}, None, "refuses these settings"),
        ({**FLUX, "in_channels": 6}, KL, "in_channels is 6, which is no multiple of 4"),
        ({**FLUX, "axes_dims_rope": [2, 2, 2]}, KL, "cannot draw pictures of its sample_size [128, 128]"),
    ],
)  # fmt: skip
def test_unsupported_generators_are_refused_before_allocation(settings: Any, vae: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        inspect_denoiser(read_source("model.generators.image", None, settings, vae), "model.generators.image")
    assert str(error.value).startswith("model.generators.image")
    assert said in str(error.value)


def test_a_net_with_nan_is_refused(tmp_path: Path) -> None:
    net = diffusers.SD3Transformer2DModel(**{key: value for key, value in SD3.items() if key != "_class_name"})
    next(net.parameters()).data.view(-1)[0] = float("nan")
    net.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"^net: '{tmp_path}': '.*' holds NaN or infinity"):
        pretrained_weights(read_source("net", str(tmp_path), None, None), "net")


def test_without_diffusers_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r'pip install "dilatant\[generators\]"'):
        inspect_denoiser(read_source("net", None, SD3, None), "net")


def test_a_target_of_another_size_names_both() -> None:
    with pytest.raises(UserError, match="it draws 1 x 4 x 4 numbers, but the target has 1 x 8 x 8"):
        _built(SD3)(torch.randn(1, 2, 12), pixel_values=torch.randn(1, 1, 8, 8), seed=0, keys=["a"], place="x")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({**SD3, "sample_size": 5}, "with these settings draws"),
        ({**SD3, "pos_embed_max_size": 1}, "cannot draw pictures of its sample_size"),
        ({**SD3, "num_attention_heads": 0}, "cannot draw pictures of its sample_size"),
        ({**PIXART, "caption_channels": 10**12}, "takes conditions 1000000000000 wide"),
        ({**SD3, "num_layers": 10**9}, "num_layers is 1,000,000,000"),
    ],
)
def test_conflicting_generator_settings_need_no_allocation(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        inspect_denoiser(read_source("here", None, settings, None), "here")

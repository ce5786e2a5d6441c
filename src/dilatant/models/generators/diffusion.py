"""Diffusion: noising of pictures, the denoiser's targets and the loss in training, and the steps of generation.

An item's noise, timestep and condition dropout depend on the run's seed and the item's key alone. The numbers are drawn
on the host by numpy's Philox, which is stable across versions, so that CPUs and GPUs get the same numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.config.errors import UserError
from dilatant.models.generators.denoiser_families import MOMENTS, DenoiserCut
from dilatant.models.generators.target_encoders import decode

Objective = Literal["flow", "epsilon", "velocity"]
_BETAS = 0.00085, 0.012
"""First and last variance of the noise per step, evenly spaced in their square roots (Stable Diffusion)."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers of items. moments: float32 [items], normal; `add_noise` converts them to timesteps. values:
    float32 [items, ...], normal. kept: bool [items], False if the item's condition is dropped. latent: the noise of a
    variational encoder, shaped like `values`, or None."""

    moments: Tensor
    values: Tensor
    kept: Tensor
    latent: Tensor | None = None


def draw_noise(
    seed: int, keys: Sequence[str], shape: Sequence[int], drop: float, place: str, latent: bool = False
) -> Noise:
    """Draw the noise of items of `shape` from their keys. drop: probability of dropping a condition. place: the unit's
    name, so that two generators get different numbers."""
    moments, values, kept, latents = [], [], [], []
    for key in keys:
        random = generator_of(seed, key, place)
        moments.append(random.standard_normal())
        kept.append(random.random() >= drop)
        values.append(random.standard_normal(shape, np.float32))
        if latent:
            latents.append(random.standard_normal(shape, np.float32))
    return Noise(
        torch.tensor(moments, dtype=torch.float32),
        torch.from_numpy(np.stack(values)),
        torch.tensor(kept),
        torch.from_numpy(np.stack(latents)) if latent else None,
    )


def generator_of(seed: int, key: str, place: str) -> np.random.Generator:
    """Return the random generator of a key at one place of the model, the same on every machine."""
    digest = blake2b(f"{seed}/{key}/{place}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def alphas() -> NDArray[np.float64]:
    """Return the cumulative product of alphas (squared signal factor) at each of `MOMENTS` steps: float64 [moments]."""
    first, last = np.sqrt(_BETAS)
    return np.cumprod(1 - np.linspace(first, last, MOMENTS) ** 2)


@dataclass(frozen=True, slots=True)
class NoisedPictures:
    """Noised pictures. seen: the denoiser's input, target: its target, both shaped like the picture; times: float32
    [items], the timestep passed to it."""

    seen: Tensor
    target: Tensor
    times: Tensor


def add_noise(objective: Objective, picture: Tensor, noise: Tensor, moments: Tensor) -> NoisedPictures:
    """Mix pictures with noise: [items, ...] all in float32, moments [items] normal.

    flow: a point on the straight line from picture to noise, whose direction is the target; timesteps are logit-normal
    (Stable Diffusion 3). epsilon: the target is the noise. velocity: the target is v-prediction (Salimans and Ho).
    Timesteps of the last two are uniform over the steps.
    """
    each = (-1, *[1] * (picture.dim() - 1))
    if objective == "flow":
        share = moments.sigmoid()
        t = share.view(each)
        return NoisedPictures((1 - t) * picture + t * noise, noise - picture, share * MOMENTS)
    steps = (torch.special.ndtr(moments) * MOMENTS).long().clamp(0, MOMENTS - 1)
    left = to_device(torch.from_numpy(alphas()).to(picture.dtype), picture.device)[steps].view(each)
    seen = left.sqrt() * picture + (1 - left).sqrt() * noise
    target = noise if objective == "epsilon" else left.sqrt() * noise - (1 - left).sqrt() * picture
    return NoisedPictures(seen, target, steps.to(torch.float32))


@dataclass(frozen=True, slots=True)
class Targets:
    """Target of a denoiser. shape: [channels, height, width]; pixels: that of the pictures. For latents or
    features of an encoder: encode(encoder, pixels, noise) computes them from pixels, with noise for a variational
    encoder, and of_spread(encoder, latents, noise) from its stored output. are_stored: True if samples hold stored
    encoder outputs instead of pixels."""

    shape: tuple[int, int, int]
    pixels: tuple[int, int, int]
    encode: Callable[..., Tensor] | None = None
    of_spread: Callable[..., Tensor] | None = None
    are_stored: bool = False


class Diffusion(nn.Module):
    """A denoiser that is trained with rows of the language model as its condition.

    predict(net, seen [items, channels, height, width], times [items], rows [items, k, width], pooled [items, width] or
    None) → [items, channels, height, width]: calls the denoiser. pool: maps the rows' mean to the pooled condition, for
    denoisers with one. encoder: frozen; its latents or features are the targets. drop: probability that an item's
    condition is zeroed, for classifier-free guidance. fresh: builds denoiser and encoder in memory with initial
    weights, for a module on the meta device. cut: how to run the denoiser in parts, if possible.
    """

    takes_keys = True

    def __init__(
        self,
        net: nn.Module,
        predict: Callable[..., Tensor],
        targets: Targets,
        objective: Objective = "flow",
        drop: float = 0.1,
        pool: nn.Module | None = None,
        encoder: Any = None,
        fresh: Callable[[], tuple[nn.Module, nn.Module | None]] | None = None,
        cut: DenoiserCut | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.pool = pool
        self.encoder = encoder
        if encoder is not None:
            encoder.requires_grad_(False)
        self.targets = targets
        self.shape = targets.shape
        self.objective = objective
        self.drop = drop
        self.cut = cut
        self._predict = predict
        self._fresh = fresh

    def forward(self, rows: Tensor, *, seed: int, keys: Sequence[str], place: str, **target: Tensor) -> Tensor:
        """Return the mean squared error of every item: float32 [items].

        rows: [items, k, width]; keys: one per item. target: `pixel_values` [items, channels, height, width], or the
        stored output of the autoencoder, `latents` [items, parts, channels, height, width].
        """
        mixed, condition = self.shown(rows, seed=seed, keys=keys, place=place, **target)
        predicted = self.predict(mixed.seen, mixed.times, condition)
        return (predicted.float() - mixed.target).square().flatten(1).mean(dim=1)

    def shown(
        self,
        rows: Tensor,
        *,
        seed: int,
        keys: Sequence[str],
        place: str,
        pixel_values: Tensor | None = None,
        latents: Tensor | None = None,
    ) -> tuple[NoisedPictures, Tensor]:
        """Return the denoiser's input and target, and the condition rows: zeros for dropped conditions."""
        noise = draw_noise(seed, keys, self.shape, self.drop, place, self.targets.of_spread is not None)
        device = rows.device
        drawn = None if noise.latent is None else to_device(noise.latent, device)
        if latents is not None:
            assert self.targets.of_spread is not None
            dtype = next(self.encoder.parameters()).dtype
            picture = self.targets.of_spread(self.encoder, latents.to(dtype).unbind(1), drawn).float()
        else:
            assert pixel_values is not None
            is_encoded = self.targets.encode is not None
            picture = self.encode(pixel_values, drawn) if is_encoded else pixel_values.float()
        if picture.shape[1:] != self.shape:
            raise UserError(
                f"{place}: it draws {_times(self.shape)} numbers, but the target has {_times(picture.shape[1:])}"
            )
        values, moments, kept = (to_device(each, device) for each in (noise.values, noise.moments, noise.kept))
        return add_noise(self.objective, picture, values, moments), rows * kept[:, None, None]

    @property
    def draws_features(self) -> bool:
        """True if the denoiser generates features of an encoder, which cannot be decoded to a picture here."""
        return self.encoder is not None and self.targets.of_spread is None

    def example(self, items: int, device: torch.device) -> dict[str, Any]:
        """Make targets and keys for measuring."""
        keyed: dict[str, Any] = {"seed": 0, "keys": [str(item) for item in range(items)], "place": ""}
        if self.targets.are_stored:
            return {"latents": torch.randn(items, 1, *self.shape, device=device), **keyed}
        pixels = torch.rand(items, *self.targets.pixels, device=device) * 2 - 1
        return {"pixel_values": pixels, **keyed}

    @torch.no_grad()
    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode pixels [items, channels, height, width]: float32 [items, *shape]. noise: of the same shape, for a
        variational autoencoder; None takes the mean."""
        assert self.targets.encode is not None
        return self.targets.encode(self.encoder, pixels, noise).float()

    def predict(self, seen: Tensor, times: Tensor, rows: Tensor) -> Tensor:
        """Return the prediction for `seen` [items, channels, height, width] at the timesteps `times` [items],
        conditioned on `rows`."""
        pooled = None if self.pool is None else self.pool(rows.mean(dim=1))
        return self._predict(self.net, seen.to(rows.dtype), times, rows, pooled)

    @torch.no_grad()
    def draw_weights(self, names: Collection[str] | None = None) -> None:
        """Initialise all or the named parameters and buffers, whose memory is allocated; called by `materialize`, with
        torch's generator seeded. All are drawn even if few are named, so that each depends on the seed alone. (Buffers
        too, since computed buffers, such as positions, are lost on the meta device.)"""
        assert self._fresh is not None
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        net, encoder = self._fresh()
        pool = copy.deepcopy(self.pool)
        if pool is not None:
            pool.to_empty(device="cpu")
            for module in pool.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        for part, built in (("net", net), ("encoder", encoder), ("pool", pool)):
            if built is not None:
                for key, tensor in (*built.named_parameters(), *built.named_buffers()):
                    if names is None or f"{part}.{key}" in names:
                        tensors[f"{part}.{key}"].copy_(tensor)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings. steps: denoising steps. guidance: classifier-free guidance scale; 1 turns guidance off."""

    steps: int = 20
    guidance: float = 2.0


@torch.no_grad()
def draw(model: Diffusion, rows: Tensor, noise: Tensor, how: SamplingSettings) -> Tensor:
    """Sample pictures for the conditions `rows` [items, k, width] from `noise` [items, *model.shape]. Return pixels,
    float32 [items, channels, height, width] in -1 to 1; for a denoiser of features, the features."""
    latents = _flow(model, rows, noise, how) if model.objective == "flow" else _ddim_steps(model, rows, noise, how)
    if model.draws_features:
        return latents.float()
    pixels = latents if model.encoder is None else decode(model.encoder, latents)
    return pixels.float().clamp(-1, 1)


def _flow(model: Diffusion, rows: Tensor, noise: Tensor, how: SamplingSettings) -> Tensor:
    """Take Euler steps from noise to picture."""
    seen = noise.float()
    shares = np.linspace(1.0, 0.0, how.steps + 1)
    for share, following in itertools.pairwise(shares):
        seen = seen + (following - share) * _guided_prediction(model, seen, share * MOMENTS, rows, how.guidance)
    return seen


def _ddim_steps(model: Diffusion, rows: Tensor, noise: Tensor, how: SamplingSettings) -> Tensor:
    """Take deterministic DDIM steps (Song, Meng and Ermon): predict picture and noise, then mix them for the next."""
    left = alphas()
    moments = (np.arange(how.steps) * (MOMENTS // how.steps)).round()[::-1].astype(int)
    seen = noise.float()
    for at, following in zip(moments, [*moments[1:], None]):
        predicted = _guided_prediction(model, seen, float(at), rows, how.guidance)
        picture_part, noise_part = left[at] ** 0.5, (1 - left[at]) ** 0.5
        if model.objective == "epsilon":
            noise_of_step, picture = predicted, (seen - noise_part * predicted) / picture_part
        else:
            picture = picture_part * seen - noise_part * predicted
            noise_of_step = picture_part * predicted + noise_part * seen
        then = left[0] if following is None else left[following]
        seen = then**0.5 * picture + (1 - then) ** 0.5 * noise_of_step
    return seen


def _guided_prediction(model: Diffusion, seen: Tensor, moment: float, rows: Tensor, guidance: float) -> Tensor:
    times = torch.full((len(seen),), moment, dtype=torch.float32, device=seen.device)
    if guidance == 1:
        return model.predict(seen, times, rows).float()
    both = torch.cat([rows, torch.zeros_like(rows)])
    conditioned, free = model.predict(seen.repeat(2, 1, 1, 1), times.repeat(2), both).float().chunk(2)
    return free + guidance * (conditioned - free)

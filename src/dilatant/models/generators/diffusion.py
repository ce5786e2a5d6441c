"""Learning to draw: what is added to a picture, what a net is to say of it, and the loss between them.

The noise of an item, its moment and whether its condition is dropped follow from the run's seed and the item's key
alone. They are drawn on the host by Philox, which numpy keeps stable, so that CPUs and GPUs draw the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.models.generators.denoiser_cuts import Cut

Objective = Literal["flow", "epsilon", "velocity"]
MOMENTS = 1000
"""Moments between picture and noise that nets are told as numbers; of epsilon and velocity, as many steps."""
_BETAS = 0.00085, 0.012
"""First and last variance of the noise that a step adds, their roots evenly spaced (Stable Diffusion)."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What is drawn for items. moments: float32 [items], normal; see `mix`. values: float32 [items, ...], normal. kept:
    bool [items], whether the net is told the item's condition. latent: as `values`, or None; what a variational encoder
    draws by."""

    moments: Tensor
    values: Tensor
    kept: Tensor
    latent: Tensor | None = None


def draw_noise(
    seed: int, keys: Sequence[str], shape: Sequence[int], drop: float, place: str, latent: bool = False
) -> Noise:
    """The noise of items of `shape`, by their keys. drop: how likely a condition is dropped. place: where in the model,
    so that two generators draw apart."""
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
    """What draws for a key in one place of the model, the same on every machine."""
    digest = blake2b(f"{seed}/{key}/{place}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def alphas() -> NDArray[np.float64]:
    """The share of the picture, squared, that is left at each of `MOMENTS` steps: float64 [moments]."""
    first, last = np.sqrt(_BETAS)
    return np.cumprod(1 - np.linspace(first, last, MOMENTS) ** 2)


@dataclass(frozen=True, slots=True)
class Mixed:
    """seen: what the net is shown, target: what it is to say of it, both as the picture; times: float32 [items], what
    it is told of the moment."""

    seen: Tensor
    target: Tensor
    times: Tensor


def mix(objective: Objective, picture: Tensor, noise: Tensor, moments: Tensor) -> Mixed:
    """A picture with noise: [items, ...] all in float32, moments [items] normal.

    flow: a point of the straight line from picture to noise, whose direction is the target; logit-normal (Stable
    Diffusion 3). epsilon: the noise. velocity: noise and picture, turned by the moment (Salimans and Ho). Moments of
    the last two are steps, each as likely.
    """
    each = (-1, *[1] * (picture.dim() - 1))
    if objective == "flow":
        share = moments.sigmoid()
        t = share.view(each)
        return Mixed((1 - t) * picture + t * noise, noise - picture, share * MOMENTS)
    steps = (torch.special.ndtr(moments) * MOMENTS).long().clamp(0, MOMENTS - 1)
    left = torch.from_numpy(alphas()).to(picture)[steps].view(each)
    seen = left.sqrt() * picture + (1 - left).sqrt() * noise
    target = noise if objective == "epsilon" else left.sqrt() * noise - (1 - left).sqrt() * picture
    return Mixed(seen, target, steps.to(torch.float32))


class Diffusion(nn.Module):
    """A net that learns to draw from rows of the language model.

    say(net, seen [items, channels, height, width], times [items], rows [items, k, width], pooled [items, width] or
    None) → [items, channels, height, width]: how the net is called. encoder: frozen; what is drawn are its latents or
    features: encode(encoder, pixels, noise) makes them, where noise is what a variational one draws by, and
    of_spread(encoder, latents, noise) of what it said before. pool: the
    pooled condition of the rows' mean, for nets that want one. drop: how likely an item's condition is dropped to
    zeros, which is what guidance is against. shape: of what is drawn, pixels: of the picture that it stands for,
    [channels, height, width]. fresh: makes the net and the encoder really, with the weights that they begin with, for a
    module on the meta device. cut: how the net runs in parts, where it can. keeps_latents:
    whether it is given what the autoencoder said instead of pixels.
    """

    takes_keys = True

    def __init__(
        self,
        net: nn.Module,
        say: Callable[..., Tensor],
        shape: tuple[int, int, int],
        pixels: tuple[int, int, int],
        objective: Objective = "flow",
        drop: float = 0.1,
        pool: nn.Module | None = None,
        encoder: Any = None,
        encode: Callable[..., Tensor] | None = None,
        of_spread: Callable[..., Tensor] | None = None,
        fresh: Callable[[], tuple[nn.Module, nn.Module | None]] | None = None,
        cut: Cut | None = None,
        keeps_latents: bool = False,
    ) -> None:
        super().__init__()
        self.net = net
        self.pool = pool
        self.encoder = encoder
        if encoder is not None:
            encoder.requires_grad_(False)
        self.shape = shape
        self.pixels = pixels
        self.objective = objective
        self.drop = drop
        self.cut = cut
        self.keeps_latents = keeps_latents
        self._say = say
        self._encode = encode
        self._of_spread = of_spread
        self._fresh = fresh

    def forward(
        self, rows: Tensor, *, seed: int, keys: Sequence[str], place: str, **target: Tensor
    ) -> Tensor:
        """The loss of every item, a mean over its own numbers: float32 [items].

        rows: [items, k, width]; keys: of the items. target: `pixel_values` [items, channels, height, width], or what
        the autoencoder said of them, `latents` [items, parts, channels, height, width].
        """
        mixed, condition = self.shown(rows, seed=seed, keys=keys, place=place, **target)
        said = self.say(mixed.seen, mixed.times, condition)
        return (said.float() - mixed.target).square().flatten(1).mean(dim=1)

    def shown(
        self,
        rows: Tensor,
        *,
        seed: int,
        keys: Sequence[str],
        place: str,
        pixel_values: Tensor | None = None,
        latents: Tensor | None = None,
    ) -> tuple[Mixed, Tensor]:
        """What the net is shown and is to say, and the rows that it is told: those of dropped conditions are zeros."""
        noise = draw_noise(seed, keys, self.shape, self.drop, place, self._of_spread is not None)
        device = rows.device
        drawn = None if noise.latent is None else noise.latent.to(device)
        if latents is not None:
            assert self._of_spread is not None
            dtype = next(self.encoder.parameters()).dtype
            picture = self._of_spread(self.encoder, latents.to(dtype).unbind(1), drawn).float()
        else:
            assert pixel_values is not None
            picture = pixel_values.float() if self._encode is None else self.encode(pixel_values, drawn)
        if picture.shape[1:] != self.shape:
            raise UserError(
                f"{place}: it draws {_times(self.shape)} numbers, but the target has {_times(picture.shape[1:])}"
            )
        mixed = mix(self.objective, picture, noise.values.to(device), noise.moments.to(device))
        return mixed, rows * noise.kept.to(rows)[:, None, None]

    @property
    def draws_features(self) -> bool:
        """Whether what it draws are features of an encoder, of which nobody here makes a picture."""
        return self.encoder is not None and self._of_spread is None

    def example(self, items: int, device: torch.device) -> dict[str, Any]:
        """Targets and keys to measure it with."""
        keyed: dict[str, Any] = {"seed": 0, "keys": [str(item) for item in range(items)], "place": ""}
        if self.keeps_latents:
            return {"latents": torch.randn(items, 1, *self.shape, device=device), **keyed}
        channels, height, width = self.pixels
        pixels = torch.rand(items, channels, height, width, device=device) * 2 - 1
        return {"pixel_values": pixels, **keyed}

    @torch.no_grad()
    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """What is drawn of pixels [items, channels, height, width]: float32 [items, *shape]. noise: as that, what a
        variational autoencoder draws by; None takes the likeliest."""
        assert self._encode is not None
        return self._encode(self.encoder, pixels, noise).float()

    def say(self, seen: Tensor, times: Tensor, rows: Tensor) -> Tensor:
        """What the net says of [items, channels, height, width] at the moments `times` [items], told `rows`."""
        pooled = None if self.pool is None else self.pool(rows.mean(dim=1))
        return self._say(self.net, seen.to(rows.dtype), times, rows, pooled)

    @torch.no_grad()
    def draw_weights(self, names: Collection[str] | None = None) -> None:
        """Give all or some parameters and buffers, which have memory, the numbers that they begin with; called by
        `materialize`, with torch's generator seeded. All are drawn, so that each hangs on the seed alone. (Buffers that
        are computed once, as of positions, are lost on the meta device.)"""
        assert self._fresh is not None
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        net, encoder = self._fresh()
        pool = copy.deepcopy(self.pool)
        if pool is not None:
            pool.to_empty(device="cpu")
            for module in pool.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        for part, made in (("net", net), ("encoder", encoder), ("pool", pool)):
            if made is not None:
                for key, tensor in (*made.named_parameters(), *made.named_buffers()):
                    if names is None or f"{part}.{key}" in names:
                        own[f"{part}.{key}"].copy_(tensor)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))

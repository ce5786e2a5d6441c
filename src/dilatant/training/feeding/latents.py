"""Latent cache: before the first step, encode all pictures that a run learns to draw, if the user wants that."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config import Config, UserError
from dilatant.data.cache import open_cache
from dilatant.data.media_units.image_target import ImageTarget, Latents
from dilatant.data.order.blend import Blend
from dilatant.data.sample import Media, digest_of
from dilatant.data.text.encode import media_of
from dilatant.models.generators.denoiser_source import source_of_entry
from dilatant.models.generators.denoisers import inspect_denoiser, pretrained_autoencoder
from dilatant.models.generators.target_encoders import spread_of
from dilatant.planning.assemble import Samples
from dilatant.runtime.precision import pick_precision

TOGETHER = 8
"""Number of pictures that the autoencoder encodes at once."""


def with_latents(comm: Comm, config: Config, samples: Samples, device: torch.device) -> Samples:
    """Return the samples with the latents of their targets; missing ones are made now, by all ranks of each machine.

    Called by all ranks together. Raises UserError for data that are not read by index, an autoencoder without weights
    of its own, and a folder that cannot be written.
    """
    cached = [name for name, entry in config.model.generators.items() if entry.cache_latents]
    if not cached:
        return samples
    blends = [blend for blend in (samples.train, samples.held_out) if blend is not None]
    if not all(isinstance(blend, Blend) for blend in blends):
        raise UserError(
            f"model.generators.{cached[0]}.cache_latents is for data that are read by index, and these are streamed"
        )
    data = digest_of([reader.fingerprint for blend in blends if isinstance(blend, Blend) for reader in blend.readers])
    hosts = all_gather_object(comm, socket.gethostname())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
    targets, problem = {}, ""
    for name in cached:
        try:
            (target,) = (each for each in samples.encoding.targets if each.name == name)
            latents, autoencoder = _open(config, name, device)
            targets[name] = replace(target, latents=latents)
            if not latents.is_whole(data):
                made = 0
                for items in _own_items(samples, target, here.index(comm.rank), len(here), latents):
                    _keep(latents, target, autoencoder, items, device)
                    made += len(items)
                if made:
                    text = f"rank {comm.rank} made the latents of {made:,} pictures of {name!r}"
                    print(text, file=sys.stderr, flush=True)
        except UserError as error:
            problem = str(error)
    problems = [each for each in all_gather_object(comm, problem) if each]
    if problems:
        raise UserError(problems[0])
    for target in targets.values():
        assert target.latents is not None
        target.latents.note_whole(data)
    encoding = replace(
        samples.encoding, targets=tuple(targets.get(target.name, target) for target in samples.encoding.targets)
    )
    return replace(samples, encoding=encoding)


def _open(config: Config, name: str, device: torch.device) -> tuple[Latents, Any]:
    entry, where = config.model.generators[name], f"model.generators.{name}"
    seen = inspect_denoiser(source_of_entry(entry, where), where)
    dtype = pick_precision(config.train.precision, device)
    autoencoder = pretrained_autoencoder(seen.source, where, dtype)
    if autoencoder is None:
        raise UserError(f"{where}.cache_latents needs an autoencoder with weights of its own; name one: {where}.vae")
    digest = blake2b(repr((sorted(seen.source.vae_settings or {}), seen.pixels, str(dtype))).encode())
    for key, tensor in sorted(autoencoder.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    autoencoder = autoencoder.to(device).eval()
    with torch.no_grad():
        parts = len(spread_of(autoencoder, torch.zeros(1, *seen.pixels, device=device)))
    folder = open_cache(config.data.cache_dir).folder / "latents" / digest.hexdigest()[:24]
    return Latents(folder, (parts, *seen.shape)), autoencoder


def _own_items(
    samples: Samples, target: ImageTarget, place: int, ranks: int, latents: Latents
) -> Iterator[list[tuple[str, Media]]]:
    """Yield this rank's share of the pictures that are not cached yet, in batches. Pictures that cannot be read are
    left to training, which names them."""
    waiting: dict[str, Media] = {}
    for media in _all_items(samples, target, place, ranks):
        try:
            key = latents.key_of(media)
        except UserError:
            continue
        if key in waiting or latents.find(key) is not None:
            continue
        waiting[key] = media
        if len(waiting) == TOGETHER:
            yield [*waiting.items()]
            waiting = {}
    if waiting:
        yield [*waiting.items()]


def _all_items(samples: Samples, target: ImageTarget, place: int, ranks: int) -> Iterator[Media]:
    for blend, sizes, encoding in (
        (samples.train, samples.train_sizes, samples.encoding),
        (samples.held_out, samples.held_out_sizes, samples.held_out_encoding),
    ):
        if not isinstance(blend, Blend) or sizes is None:
            continue
        having = np.flatnonzero(sizes.of(target.name))[place::ranks]
        for index in having.tolist():
            with suppress(UserError):
                yield from (media for _, _, media, unit in media_of(blend[index], encoding) if unit == target.name)


def _keep(
    latents: Latents, target: ImageTarget, autoencoder: Any, items: list[tuple[str, Media]], device: torch.device
) -> None:
    keys, pixels = [], []
    for key, media in items:
        try:
            pixels.append(target.pixels(media))
        except UserError:
            continue
        keys.append(key)
    if not keys:
        return
    with torch.no_grad():
        spread = spread_of(autoencoder, torch.from_numpy(np.concatenate(pixels)).to(device))
    values = torch.stack([part.float() for part in spread], dim=1).cpu().numpy()
    for key, each in zip(keys, values, strict=True):
        latents.keep(key, each)

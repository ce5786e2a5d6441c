"""Denoisers: image-generation models of diffusers, inspected without their weights, built, and cut.

diffusers is an extra and is imported inside functions: models without generators never need it.

Slices exchange rows of one width, equally many per item: patches, condition, timestep embeddings, and the target, which
the first slice computes and the last compares with.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError, as_user_error, list_problems
from dilatant.models.core.slicing import shell_of
from dilatant.models.core.structure import on_meta
from dilatant.models.core.weight_files import require_finite
from dilatant.models.generators.denoiser_families import (
    AUTOENCODERS,
    BLOCKS,
    FAMILIES,
    BlockInputs,
    DenoiserCut,
    DenoiserFamily,
    net_width,
    patches_of,
    unfolded,
)
from dilatant.models.generators.denoiser_source import DenoiserSource
from dilatant.models.generators.diffusion import Diffusion, Objective, Targets
from dilatant.models.generators.target_encoders import encode, features, latents_of, spread_of
from dilatant.models.sources import MOST_BLOCKS

INSTALL = 'pip install "dilatant[generators]"'
WIDEST = 1 << 20
"""Larger widths are treated as a mistake."""


@dataclass(frozen=True, slots=True)
class InspectedDenoiser:
    """A denoiser inspected without its weights. width: width of a condition row. pooled: width of the pooled condition,
    or None. shape: the shape of its output, [channels, height, width]; pixels: the picture's shape, the same without an
    autoencoder. learned_variance: True if it outputs twice the channels."""

    source: DenoiserSource
    family: DenoiserFamily = field(repr=False)
    width: int = 0
    pooled: int | None = None
    shape: tuple[int, int, int] = (0, 0, 0)
    pixels: tuple[int, int, int] = (0, 0, 0)
    learned_variance: bool = False


def inspect_denoiser(source: DenoiserSource, where: str) -> InspectedDenoiser:
    """Inspect a source by building the models on the meta device. Raises UserError that lists what does not fit, or if
    diffusers is not installed."""
    with on_meta():
        net = _build(source.settings, where, tuple(FAMILIES))
        vae = None
        if source.vae_settings is not None:
            vae = _build(source.vae_settings, f"{where}.vae", AUTOENCODERS)
        drawn = None if source.features is None else source.features.shapes(f"{where}.target.encoder")
    name = type(net).__name__
    family = FAMILIES[name]
    config = net.config
    channels = int(config.in_channels)
    out = int(getattr(config, "out_channels", None) or channels)
    own_size = getattr(config, "sample_size", None)
    size = own_size or source.sample_size or family.sample_size
    problems = [f"{name}: {problem}" for problem in family.problems(config)]
    if out not in (channels, 2 * channels):
        problems.append(f"{name} takes {channels} channels and gives {out}; it must give as many, or twice")
    for width in (family.width(config), family.pooled(config)):
        if width is not None and not (isinstance(width, int) and 1 <= width <= WIDEST):
            problems.append(f"{name} takes conditions {width!r} wide; widths are 1 to {WIDEST:,}")
    if own_size is not None and source.sample_size not in (None, own_size):
        problems.append(f"{name} has a sample_size of its own, {own_size}; leave out {source.sample_size}")
    if size is None:
        problems.append(f"{name} has no sample_size, which says how large its pictures are")
    elif any(side % family.folded for side in _pair(size)):
        problems.append(f"{name} needs a sample_size that {family.folded} divides, not {size}")
    if problems:
        raise list_problems(f"{where} cannot be trained:", problems)
    height, width = _pair(size)
    shape = (channels // family.folded**2, height, width)
    _draw_nothing(net, family, shape, where)
    if drawn is not None and drawn[0] != shape:
        raise UserError(
            f"{where}: {name} draws {list(shape)}, but the features of target.encoder are {list(drawn[0])}; set "
            f"in_channels and out_channels to {drawn[0][0]} and sample_size to {drawn[0][1]}"
        )
    pixels = drawn[1] if drawn is not None else shape if vae is None else _pixels_of(vae, shape, where)
    if pixels[0] not in (1, 3):
        raise UserError(
            f"{where}: {name} draws {channels} channels, which is no picture; name the autoencoder whose latents they "
            f"are: {where}.vae"
        )
    return InspectedDenoiser(source, family, family.width(config), family.pooled(config), shape, pixels, out > channels)


@torch.no_grad()
def _draw_nothing(net: nn.Module, family: DenoiserFamily, shape: tuple[int, int, int], where: str) -> None:
    """Run one forward on the meta device, and raise UserError if a denoiser's settings are inconsistent."""
    config: Any = net.config
    pooled = family.pooled(config)
    wanted = f"draw pictures of its sample_size {list(shape[1:])}"
    with torch.device("meta"):
        rows = torch.empty(1, 1, family.width(config))
        pooled_row = None if pooled is None else torch.empty(1, pooled)
        with as_user_error(f"{where}: {type(net).__name__} with these settings cannot {wanted}"):
            drawn = family.predict(net, torch.empty(1, *shape), torch.empty(1), rows, pooled_row)
    if tuple(drawn.shape[2:]) != shape[1:]:
        raise UserError(
            f"{where}: {type(net).__name__} with these settings draws {list(drawn.shape[2:])}, but its sample_size is "
            f"{list(shape[1:])}"
        )


def _pixels_of(vae: Any, shape: tuple[int, int, int], where: str) -> tuple[int, int, int]:
    """Return the shape of pictures with latents of `shape`, by a test picture. Raises UserError for other channels."""
    channels, tried = int(vae.config.in_channels), 64
    with torch.no_grad():
        latents, *_ = spread_of(vae, torch.zeros(1, channels, tried, tried, device="meta"))
    if latents.shape[1] != shape[0]:
        raise UserError(
            f"{where}.vae: its latents have {latents.shape[1]} channels, but the net draws {shape[0]}; name the "
            "autoencoder that the net was made for"
        )
    factor = tried // latents.shape[-1]
    return channels, shape[1] * factor, shape[2] * factor


def build_diffusion(
    seen: InspectedDenoiser, where: str, objective: Objective, drop: float, hollow: bool, keeps_latents: bool = False
) -> Diffusion:
    """Build the trainable module. hollow: leave it on the meta device, for `materialize` or stored weights. Raises
    UserError if pretrained weights cannot be read."""
    source = seen.source

    def fresh() -> tuple[nn.Module, nn.Module | None]:
        net, vae = _build(source.settings, where, tuple(FAMILIES)), source.vae_settings
        if source.features is not None:
            return net, source.features.build(f"{where}.target.encoder")
        return net, None if vae is None else _build(vae, f"{where}.vae", AUTOENCODERS)

    with on_meta():
        net, encoder = fresh()
        pool = None
        if seen.pooled is not None:
            pool = nn.Identity() if seen.pooled == seen.width else nn.Linear(seen.width, seen.pooled)
    config: Any = net.config
    if source.features is not None:
        encoding: tuple[Any, Any] = features, None
    else:
        encoding = (None, None) if source.vae_settings is None else (encode, latents_of)
    predict, cut = seen.family.predict, seen.family.cut
    module = Diffusion(
        net,
        # A learned variance follows the prediction, and is dropped.
        (lambda *inputs: predict(*inputs).chunk(2, dim=1)[0]) if seen.learned_variance else predict,
        Targets(seen.shape, seen.pixels, *encoding, keeps_latents),
        objective,
        drop,
        pool,
        encoder,
        fresh,
        cut if cut is not None and cut.fits(config) else None,
    )
    if not hollow and source.has_weights:
        module.to_empty(device="cpu")
        module.draw_weights()
        module.load_state_dict(pretrained_weights(source, where), strict=False)
    return module


def pretrained_weights(source: DenoiserSource, where: str) -> dict[str, Tensor]:
    """Load the stored weights of denoiser and encoder under the names of a `Diffusion`. Raises UserError."""
    weights: dict[str, Tensor] = {}
    net = _pretrained(source.settings, source.folder, where)
    if source.features is None:
        encoder = pretrained_autoencoder(source, where)
    else:
        encoder = source.features.pretrained(f"{where}.target.encoder")
    for part, model in (("net", net), ("encoder", encoder)):
        if model is not None:
            weights |= {f"{part}.{key}": tensor for key, tensor in model.state_dict().items()}
    return weights


def pretrained_autoencoder(source: DenoiserSource, where: str, dtype: torch.dtype = torch.float32) -> nn.Module | None:
    """Load the autoencoder with its stored weights; None if it has none. Raises UserError."""
    return _pretrained(source.vae_settings, source.vae_folder, where, dtype)


def _pretrained(
    settings: Mapping[str, Any] | None, folder: tuple[str, str] | None, where: str, dtype: torch.dtype = torch.float32
) -> nn.Module | None:
    if folder is None or settings is None:
        return None
    kind = _class_of(settings, where, (*FAMILIES, *AUTOENCODERS))
    place, below = folder
    if Path(place).is_dir():  # diffusers would prefer weights in the parent folder
        place, below = str(Path(place, below)), ""
    with as_user_error(f"{where}: the weights of {folder[0]!r} cannot be loaded"):
        model: nn.Module = kind.from_pretrained(place, subfolder=below or None, torch_dtype=dtype)
    require_finite(model.named_parameters(), f"{where}: {folder[0]!r}")
    return model


def _build(settings: Mapping[str, Any], where: str, known: tuple[str, ...]) -> Any:
    kind = _class_of(settings, where, known)
    values = {key: value for key, value in settings.items() if not key.startswith("_")}
    allowed = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    problems = []
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{key!r} is not a setting of {kind.__name__}{hint}")
    for key, value in values.items():
        if "layers" in key and isinstance(value, int) and value > MOST_BLOCKS:
            raise UserError(f"{where}: {key} is {value:,}; a model has {MOST_BLOCKS:,} blocks at most")
    if problems and "_diffusers_version" not in settings:  # diffusers knows the settings that it wrote
        raise list_problems(f"{where}:", problems)
    with as_user_error(f"{where}: {kind.__name__} refuses these settings"):
        return kind.from_config(dict(settings))


def _class_of(settings: Mapping[str, Any], where: str, known: tuple[str, ...]) -> Any:
    name = settings.get("_class_name")
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{where}: _class_name is {name!r}; {hint}known are {', '.join(known)}")
    try:
        import diffusers

        return getattr(diffusers, str(name))
    except ImportError as error:
        raise UserError(f"{where}: generators need diffusers ({error}); {INSTALL}") from None


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


class DenoiserSlice(nn.Module):
    """Blocks `first <= block < end` of `whole`, sharing its weights. enters: includes the part before the blocks (and
    computes targets); leaves: includes the part after them. rows: (condition rows, rows between slices) per item."""

    takes_keys = True

    def __init__(
        self,
        whole: Diffusion,
        cut: DenoiserCut,
        rows: tuple[int, int],
        first: int,
        end: int,
        enters: bool,
        leaves: bool,
    ) -> None:
        super().__init__()
        net: Any = whole.net
        tokens, self.rows = rows
        # Blocks keep their numbers, and so their keys.
        blocks = nn.ModuleDict({str(number): getattr(net, BLOCKS)[number] for number in range(first, end)})
        self.net = shell_of(
            net, {BLOCKS: blocks}, lambda name: leaves if name in cut.last else enters or name == BLOCKS
        )
        self.pool = whole.pool if enters else None
        self.encoder = whole.encoder if enters else None
        self.enters, self.leaves = enters, leaves
        self._whole = (whole,)  # not registered: weights of other stages
        self._cut = cut
        self._parts = (patches_of(net.config, whole.shape), tokens, cut.moments)
        self._patch = int(net.config.patch_size)
        self._width = net_width(net.config)

    def forward(self, value: Tensor, **targets: Any) -> Tensor:
        """Run the slice. value: for the first slice the condition, [items, k, width], for others the previous slice's
        output. targets: for the first slice, see `Diffusion.forward`. Returns rows for the next slice [items, rows,
        width]; the last slice returns the loss of every item, float32 [items]."""
        if self.enters:
            (whole,) = self._whole
            mixed, rows = whole.shown(value, **targets)
            between, target = self.enter(mixed.seen, mixed.times, rows), mixed.target
        else:
            *parts, target = value.split([*self._parts, value.shape[1] - sum(self._parts)], dim=1)
            # Contiguous as in the uncut denoiser: kernels round differently on strided memory.
            between = BlockInputs(*(part.contiguous() for part in parts))
        for block in getattr(self.net, BLOCKS).children():
            between = self._cut.block(self.net, block, between)
        if self.enters and not self.leaves:
            target = pack(target, value.dtype, self._width)
        if not self.leaves:
            return torch.cat([between.patches, between.condition, between.times, target], dim=1)
        wanted = target if self.enters else unpack(target, self._whole[0].shape)
        return (self.leave(between) - wanted).square().flatten(1).mean(dim=1)

    def enter(self, seen: Tensor, times: Tensor, rows: Tensor) -> BlockInputs:
        """Return the input of the first block; see `Diffusion.predict`."""
        pooled = None if self.pool is None else self.pool(rows.mean(dim=1))
        return self._cut.enter(self.net, seen.to(rows.dtype), times, rows, pooled)

    def leave(self, between: BlockInputs) -> Tensor:
        """Return the prediction, float32 [items, channels, height, width], without the second half of the channels (a
        learned variance)."""
        shape = self._whole[0].shape
        patches = self._cut.leave(self.net, between.patches, between.times)
        return unfolded(patches, self._patch, shape)[:, : shape[0]].float()


def rows_between(model: Diffusion, cut: DenoiserCut, tokens: int, dtype: torch.dtype) -> int:
    """Return the number of rows of an item between slices."""
    config: Any = model.net.config
    target = math.ceil(math.prod(model.shape) * _pieces(dtype) / net_width(config))
    return patches_of(config, model.shape) + tokens + cut.moments + target


def pack(target: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Represent float32 [items, ...] exactly as sums of numbers of `dtype`, in rows [items, n, width]."""
    rest, pieces = target.detach().flatten(1), []
    for _ in range(_pieces(dtype)):
        pieces.append(rest.to(dtype))
        rest = rest - pieces[-1].float()
    numbers = torch.cat(pieces, dim=1)
    padded = nn.functional.pad(numbers, (0, -numbers.shape[1] % width))
    return padded.unflatten(1, (-1, width))


def unpack(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `pack`: float32 [items, *shape]."""
    count, size = _pieces(rows.dtype), math.prod(shape)
    numbers = rows.detach().flatten(1)[:, : count * size].float().unflatten(1, (count, size))
    total = numbers[:, -1]
    for piece in reversed(range(count - 1)):  # from the smallest, so each sum is exact
        total = numbers[:, piece] + total
    return total.unflatten(1, shape)


def _pieces(dtype: torch.dtype) -> int:
    """Return the number of summands of a dtype that represent the 24 bits of a float32."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return math.ceil(24 / bits)

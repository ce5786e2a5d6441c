"""Nets that draw pictures, from diffusers: what each family is told, and how it is built.

diffusers is an extra and is imported inside functions: models without generators never need it.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from dilatant.config.errors import UserError, list_problems
from dilatant.models.diffusion import Diffusion, Objective
from dilatant.models.sources import MOST_BLOCKS

INSTALL = 'pip install "dilatant[generators]"'
WIDEST = 1 << 20
"""More is taken for a mistake."""
_SUBFOLDERS = ("transformer", "unet")
"""Where a pipeline of diffusers keeps its net."""
_PREDICTIONS: dict[str, Objective] = {
    "epsilon": "epsilon", "v_prediction": "velocity", "flow_prediction": "flow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A class of diffusers. width(config): of a row of its condition. pooled(config): of the condition that it is told
    once for a picture, None for none. say: how it is called, see `Diffusion`. problems(config): why we cannot."""

    width: Callable[[Any], int]
    say: Callable[..., Tensor]
    pooled: Callable[[Any], int | None] = lambda config: None
    problems: Callable[[Any], list[str]] = lambda config: []


def _say_sd3(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(
        seen, encoder_hidden_states=rows, pooled_projections=pooled, timestep=times, return_dict=False
    )[0]


def _say_pixart(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    told: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if net.use_additional_conditions:
        height, width = 8.0 * seen.shape[-2], 8.0 * seen.shape[-1]  # in pixels of its autoencoder
        told["resolution"] = seen.new_tensor([height, width]).expand(len(seen), 2)
        told["aspect_ratio"] = seen.new_tensor([height / width]).expand(len(seen), 1)
    return net(seen, encoder_hidden_states=rows, timestep=times, added_cond_kwargs=told, return_dict=False)[0]


def _say_sana(net: Any, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    scale = net.config.timestep_scale
    return net(seen, encoder_hidden_states=rows, timestep=times * scale, return_dict=False)[0]


def _say_unet(net: nn.Module, seen: Tensor, times: Tensor, rows: Tensor, pooled: Tensor | None) -> Tensor:
    return net(seen, times, encoder_hidden_states=rows, return_dict=False)[0]


def _unet_problems(config: Any) -> list[str]:
    names = ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
    return [f"{name} is {config[name]!r}, which nobody tells it here" for name in names if config.get(name)]


def _sana_problems(config: Any) -> list[str]:
    return ["guidance_embeds is true, which nobody tells it here"] if config.get("guidance_embeds") else []


FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": Family(
        lambda config: config.joint_attention_dim, _say_sd3, lambda config: config.pooled_projection_dim
    ),
    "PixArtTransformer2DModel": Family(
        lambda config: config.caption_channels or config.cross_attention_dim, _say_pixart
    ),
    "SanaTransformer2DModel": Family(
        lambda config: config.caption_channels, _say_sana, problems=_sana_problems
    ),
    "UNet2DConditionModel": Family(
        lambda config: _one(config.cross_attention_dim), _say_unet, problems=_unet_problems
    ),
}
AUTOENCODERS = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")


@dataclass(frozen=True, slots=True)
class PictureSource:
    """What a net is made of. settings, vae_settings: of diffusers, with `_class_name`. folder, vae_folder: what their
    pretrained weights are in, as (id or folder, subfolder); None begins at random. objective: what the net was trained
    for, as far as its source says."""

    settings: Mapping[str, Any]
    folder: tuple[str, str] | None = None
    vae_settings: Mapping[str, Any] | None = None
    vae_folder: tuple[str, str] | None = None
    objective: Objective | None = None


@dataclass(frozen=True, slots=True)
class PictureNet:
    """A net that was looked at without its weights. width: of a row of its condition. pooled: of what it is told once,
    or None. shape: of what it draws, [channels, height, width]; pixels: of the picture, the same without an
    autoencoder. settings, vae_settings: every setting, as diffusers has them."""

    source: PictureSource
    family: Family = field(repr=False)
    width: int = 0
    pooled: int | None = None
    shape: tuple[int, int, int] = (0, 0, 0)
    pixels: tuple[int, int, int] = (0, 0, 0)
    learned_variance: bool = False


def read_source(
    where: str, id: str | None, config: Mapping[str, Any] | None, vae: str | Mapping[str, Any] | None
) -> PictureSource:
    """The settings of a net: of a folder or hub id, one net's or a whole pipeline's, or given. vae: an id, a folder or
    settings; None takes the pipeline's own, if there is one. Raises UserError."""
    if config is not None:
        settings, folder, objective, own_vae = dict(config), None, None, None
    else:
        assert id is not None
        settings, folder = _settings_of(where, id, _SUBFOLDERS)
        scheduler = _stored_json(id, "scheduler/scheduler_config.json")
        objective = None if scheduler is None else _objective_of(scheduler)
        own_vae = _stored_json(id, "vae/config.json")
    vae_settings, vae_folder = None, None
    if isinstance(vae, str):
        vae_settings, vae_folder = _settings_of(f"{where}.vae", vae, ("vae",))
    elif vae is not None:
        vae_settings = dict(vae)
    elif own_vae is not None:
        assert id is not None
        vae_settings, vae_folder = own_vae, (id, "vae")
    return PictureSource(settings, folder, vae_settings, vae_folder, objective)


def _settings_of(
    where: str, source: str, subfolders: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, str]]:
    for subfolder in (*subfolders, ""):
        found = _stored_json(source, f"{subfolder}/config.json" if subfolder else "config.json")
        if found is not None and "_class_name" in found:
            return found, (source, subfolder)
    raise UserError(
        f"{where}: {source!r} is not here in diffusers' layout: no config.json with a _class_name in it or in its "
        f"{' or '.join(subfolders)}; give a folder, or download it first (`hf download`)"
    )


def _stored_json(source: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a folder, or of a hub id as far as it is here or can be fetched."""
    try:
        path: Any = Path(source, name)
        if not Path(source).is_dir():
            path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        found = None if path is None else json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _objective_of(scheduler: Mapping[str, Any]) -> Objective | None:
    if "FlowMatch" in str(scheduler.get("_class_name", "")):
        return "flow"
    return _PREDICTIONS.get(str(scheduler.get("prediction_type", "epsilon")))


def look_at(source: PictureSource, where: str) -> PictureNet:
    """What the settings say, proven by building everything without memory. Raises UserError that lists what does not
    fit, also where diffusers is not installed."""
    with torch.device("meta"):
        net = _build(source.settings, where, tuple(FAMILIES))
        vae = None
        if source.vae_settings is not None:
            vae = _build(source.vae_settings, f"{where}.vae", AUTOENCODERS)
    name = type(net).__name__
    family = FAMILIES[name]
    config = net.config
    channels = int(config.in_channels)
    out = int(getattr(config, "out_channels", None) or channels)
    problems = [f"{name}: {problem}" for problem in family.problems(config)]
    if out not in (channels, 2 * channels):
        problems.append(f"{name} takes {channels} channels and gives {out}; it must give as many, or twice")
    for width in (family.width(config), family.pooled(config)):
        if width is not None and not (isinstance(width, int) and 1 <= width <= WIDEST):
            problems.append(f"{name} takes conditions {width!r} wide; widths are 1 to {WIDEST:,}")
    if config.sample_size is None:
        problems.append(f"{name} has no sample_size, which says how large its pictures are")
    if problems:
        raise list_problems(f"{where} cannot be trained:", problems)
    height, width = _pair(config.sample_size)
    shape = (channels, height, width)
    _draw_nothing(net, family, shape, where)
    pixels = shape if vae is None else _pixels_of(vae, shape, where)
    if pixels[0] not in (1, 3):
        raise UserError(
            f"{where}: {name} draws {channels} channels, which is no picture; name the autoencoder whose latents they "
            f"are: {where}.vae"
        )
    return PictureNet(
        source, family, family.width(config), family.pooled(config), shape, pixels, out > channels
    )


@torch.no_grad()
def _draw_nothing(net: nn.Module, family: Family, shape: tuple[int, int, int], where: str) -> None:
    """One forward without memory. Raises UserError where the settings of a net do not fit one another."""
    config: Any = net.config
    pooled = family.pooled(config)
    with torch.device("meta"):
        rows = torch.empty(1, 1, family.width(config))
        told = None if pooled is None else torch.empty(1, pooled)
        try:
            said = family.say(net, torch.empty(1, *shape), torch.empty(1), rows, told)
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{where}: {type(net).__name__} with these settings cannot draw pictures of its sample_size "
                f"{list(shape[1:])}: {reason}"
            ) from None
    if tuple(said.shape[2:]) != shape[1:]:
        raise UserError(
            f"{where}: {type(net).__name__} with these settings draws {list(said.shape[2:])}, but its sample_size is "
            f"{list(shape[1:])}"
        )


def _pixels_of(vae: Any, shape: tuple[int, int, int], where: str) -> tuple[int, int, int]:
    """The picture whose latents have `shape`, found by trying one. Raises UserError for other channels."""
    channels, tried = int(vae.config.in_channels), 64
    with torch.no_grad():
        latents = _latents(vae.encode(torch.zeros(1, channels, tried, tried, device="meta")))
    if latents.shape[1] != shape[0]:
        raise UserError(
            f"{where}.vae: its latents have {latents.shape[1]} channels, but the net draws {shape[0]}; name the "
            "autoencoder that the net was made for"
        )
    factor = tried // latents.shape[-1]
    return channels, shape[1] * factor, shape[2] * factor


def build_diffusion(
    seen: PictureNet, where: str, objective: Objective, drop: float, hollow: bool
) -> Diffusion:
    """The module that learns. hollow: on the meta device; `materialize` or stored weights make it real. Raises
    UserError where pretrained weights cannot be read."""
    source = seen.source

    def fresh() -> tuple[nn.Module, nn.Module | None]:
        vae = source.vae_settings
        return (
            _build(source.settings, where, tuple(FAMILIES)),
            None if vae is None else _build(vae, f"{where}.vae", AUTOENCODERS),
        )

    with torch.device("meta"):
        net, vae = fresh()
        pool = None
        if seen.pooled is not None:
            pool = nn.Identity() if seen.pooled == seen.width else nn.Linear(seen.width, seen.pooled)
    module = Diffusion(
        net,
        _first_half(seen.family.say) if seen.learned_variance else seen.family.say,
        seen.shape,
        seen.pixels,
        objective,
        drop,
        pool,
        vae,
        None if vae is None else encode,
        fresh,
    )
    if not hollow and source.folder is not None:
        module.to_empty(device="cpu")
        module.draw_weights()
        module.load_state_dict(pretrained_weights(source, where), strict=False)
    return module


def pretrained_weights(source: PictureSource, where: str) -> dict[str, Tensor]:
    """The stored weights of net and autoencoder, as `Diffusion` calls them. Raises UserError."""
    weights: dict[str, Tensor] = {}
    for part, settings, folder in (
        ("net", source.settings, source.folder),
        ("vae", source.vae_settings, source.vae_folder),
    ):
        if folder is None or settings is None:
            continue
        kind = _class_of(settings, where, (*FAMILIES, *AUTOENCODERS))
        try:
            model = kind.from_pretrained(folder[0], subfolder=folder[1] or None, torch_dtype=torch.float32)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{where}: the weights of {folder[0]!r} cannot be loaded: {reason}") from None
        weights |= {f"{part}.{key}": tensor for key, tensor in model.state_dict().items()}
    return weights


def encode(vae: Any, pixels: Tensor, noise: Tensor | None) -> Tensor:
    """The latents that a net of this autoencoder draws: [items, channels, height, width]. noise: of a variational one;
    None takes the likeliest."""
    weight = next(vae.parameters())
    latents = _latents(vae.encode(pixels.to(weight.dtype)), noise)
    config = vae.config
    shift = getattr(config, "shift_factor", None) or 0.0
    return (latents - shift) * (getattr(config, "scaling_factor", None) or 1.0)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """The reverse of `encode`: pixels [items, channels, height, width] of about -1 to 1."""
    config = vae.config
    shift = getattr(config, "shift_factor", None) or 0.0
    scaled = latents / (getattr(config, "scaling_factor", None) or 1.0) + shift
    return vae.decode(scaled.to(next(vae.parameters()).dtype)).sample.float()


def _latents(output: Any, noise: Tensor | None = None) -> Tensor:
    spread = getattr(output, "latent_dist", None)
    if spread is not None:
        return spread.mode() if noise is None else spread.mean + spread.std * noise.to(spread.mean)
    latents = getattr(output, "latents", None)
    return output.latent if latents is None else latents


def _first_half(say: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a net that also says how sure it is, what it says."""

    def said(*given: Any) -> Tensor:
        return say(*given).chunk(2, dim=1)[0]

    return said


def _build(settings: Mapping[str, Any], where: str, known: tuple[str, ...]) -> Any:
    kind = _class_of(settings, where, known)
    given = {key: value for key, value in settings.items() if not key.startswith("_")}
    allowed = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    problems = []
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{key!r} is not a setting of {kind.__name__}{hint}")
    for key, value in given.items():
        if "layers" in key and isinstance(value, int) and value > MOST_BLOCKS:
            raise UserError(f"{where}: {key} is {value:,}; a model has {MOST_BLOCKS:,} blocks at most")
    if problems and "_diffusers_version" not in settings:  # what diffusers wrote, it knows
        raise list_problems(f"{where}:", problems)
    try:
        return kind.from_config(dict(settings))
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{where}: {kind.__name__} refuses these settings: {reason}") from None


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


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def scheduler_settings(objective: Objective) -> dict[str, Any]:
    """The scheduler of diffusers that draws with a net of this objective, as its config file has it."""
    if objective == "flow":
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
    return {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "epsilon" if objective == "epsilon" else "v_prediction",
        "clip_sample": False,
        "set_alpha_to_one": False,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A config file as diffusers writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

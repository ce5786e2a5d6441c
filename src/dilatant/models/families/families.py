"""Families of pretrained multimodal models: the towers of their encoders, and the peculiarities of their forwards.

All other properties are derived from the model. transformers' own code projects the rows of an encoder (`Projection`)
and computes the logits; no part of a family's forward is repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dilatant.config.errors import UserError, list_problems
from dilatant.models.encoders.anyres_encoder import AnyresTower
from dilatant.models.encoders.fixed_tower import FixedTower
from dilatant.models.encoders.generic_encoder import GenericSoundTower, GenericTower
from dilatant.models.encoders.native_encoder import NativeTower
from dilatant.models.encoders.sound_encoder import SoundTower
from dilatant.models.encoders.tiled_encoder import TiledTower
from dilatant.models.encoders.tower import Clips, Tower
from dilatant.models.families.shrink import narrow_json

MediaAttention = Literal["causal", "bidirectional", "embedded", "prefix", "in_windows"]


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of transformers.

    towers: unit → its encoder. decoder: path of the text model. spatial: True for positions in time, height and width
    (see `spatial_positions`). media_attention: the mask among tokens of an item, as in
    `model.language_model.media_attention`; "prefix": all tokens before the first target attend to each other;
    "in_windows": tokens of an item attend to each other in sliding-window layers, if the config's
    `use_bidirectional_attention` enables it. behind_time: see `spatial_positions`. narrow: the config of the small copy
    of a family that is read from its model (see `families.generic`), as JSON. unread: paths of modules that no unit
    holds, such as encoders of media that are not read. refused: a line for each kind of media that is not read, with
    the reason. one_unit: the reason why the model trains as one unit (see `language.whole_unit`); None for units of
    parts.
    """

    towers: Mapping[str, Tower]
    decoder: str = "model.language_model"
    spatial: bool = False
    media_attention: MediaAttention = "causal"
    behind_time: bool = False
    narrow: str = ""
    unread: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    one_unit: str | None = None

    @property
    def clips(self) -> Clips | None:
        """Layout of clips, if the family reads them."""
        return next((tower.clips for tower in self.towers.values() if tower.clips is not None), None)


_PROJECTOR = ("model.multi_modal_projector",)
_PLAIN = FixedTower("model.vision_tower", _PROJECTOR)
_CONNECTED = FixedTower(
    "model.vision_model",
    ("model.connector",),
    batched=True,
    opens="<fake_token_around_image><global-img>",
    closes="<fake_token_around_image>",
    settings={"do_image_splitting": False},  # its tiles have texts between them
)
_VISUAL = NativeTower("model.visual", clips="patches")
_QWEN = Family({"vision": _VISUAL}, spatial=True)
_QWEN3 = replace(_QWEN, towers={"vision": replace(_VISUAL, clips="patches apart")})
_SOUND = SoundTower("model.audio_tower", _PROJECTOR, "audio_token_id")

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": replace(
        _QWEN,
        towers={
            "vision": replace(_VISUAL, seconds="vision_config.tokens_per_second", seconds_keyword="second_per_grid_ts")
        },
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen2_5_omni_thinker": Family(
        {
            "vision": replace(_VISUAL, seconds="position_id_per_seconds", seconds_keyword="video_second_per_grid"),
            "audio": replace(_SOUND, projector=("model.audio_tower.proj",)),
        },
        spatial=True,
        behind_time=True,
    ),
    "qwen2_audio": Family({"audio": _SOUND}),
    "llava": Family({"vision": _PLAIN}),
    "llava_onevision": Family(
        {"vision": AnyresTower(_PLAIN.path, (*_PROJECTOR, "model.image_newline"), clips="pooled")}
    ),
    "internvl": Family({"vision": replace(_PLAIN, opens="<img>", closes="</img>", clips="counted")}),
    "gemma3": Family(
        {
            "vision": replace(
                _PLAIN,
                written="{boi_token_index}",
                opens="\n\n{boi_token_index}",
                closes="{eoi_token_index}\n\n",
                settings={"do_pan_and_scan": False},  # its crops have texts between them
            )
        },
        media_attention="bidirectional",
    ),
    "gemma4": Family(
        {
            "vision": GenericTower(
                "model.vision_tower",
                ("model.embed_vision",),
                opens="{boi_token_id}",
                closes="{eoi_token_id}",
                clips="timed",
                inner="encoder.layers",
                inputs=("image_position_ids", "pixel_values"),
            ),
            "audio": GenericSoundTower(
                "model.audio_tower",
                ("model.embed_audio",),
                "audio_token_id",
                opens="{boa_token_id}",
                closes="{eoa_token_index}",
                inner="layers",
                inputs=("input_features", "input_features_mask"),
            ),
        },
        media_attention="in_windows",
    ),
    # All tokens before the answer attend to each other.
    "paligemma": Family({"vision": _PLAIN}, media_attention="prefix"),
    "mllama": Family({"vision": TiledTower("model.vision_model", _PROJECTOR, "image_token_index")}),
    "idefics3": Family({"vision": _CONNECTED}, decoder="model.text_model"),
    "smolvlm": Family({"vision": replace(_CONNECTED, clips="introduced")}, decoder="model.text_model"),
}


def family_of(config: Any, where: str) -> Family:
    """Return the family of a config. Raises UserError for an unknown family, or for unsupported settings."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"{where}: {config.model_type!r} is not a family that opens whole: transformers does not list it among "
            "those that read media and write text. Name its text model under model.language_model, and encoders under "
            "model.encoders"
        )
    if getattr(config, "audio_config", None) is None:  # absent in the large models of some families
        family = replace(family, towers={k: t for k, t in family.towers.items() if t.kind != "audio"})
    if any(isinstance(tower, GenericTower) for tower in family.towers.values()):
        narrow = narrow_json(config, family.spatial)
        towers = {
            name: replace(tower, narrow=narrow, is_listed=True) if isinstance(tower, GenericTower) else tower
            for name, tower in family.towers.items()
        }
        family = replace(family, towers=towers)
    problems = []
    layer = getattr(config, "vision_feature_layer", None)
    for key in {tower.token for tower in family.towers.values()}:
        token = getattr(config, key, None)
        if not isinstance(token, int) or token < 0:
            problems.append(f"{key} is {token!r}; it must be the id of the token that stands for a row of an encoder")
    if isinstance(layer, list | tuple):
        problems.append(f"vision_feature_layer {list(layer)}: rows of one layer can be used, not of several")
    everywhere = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    if family.media_attention == "in_windows" and everywhere not in (None, False, "vision"):
        problems.append(f"use_bidirectional_attention {everywhere!r}: it must be None or 'vision'")
    if problems:
        raise list_problems(f"{where}: {config.model_type} has settings that are not supported:", problems)
    return family

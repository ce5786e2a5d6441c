"""Families of pretrained multimodal models: the paths of their units, and the peculiarities of their forwards.

All other properties are derived from the model. transformers' own code projects the rows of an encoder (`Projection`)
and computes the logits; no part of a family's forward is repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dilatant.config.errors import UserError, list_problems

MediaAttention = Literal["causal", "bidirectional", "embedded", "prefix", "in_windows"]
Clips = Literal["patches", "patches apart", "pooled", "counted", "timed", "introduced"]
"""A clip's layout in the text: temporal patches as one item (Qwen), or apart with text between them; frames whose
neighbouring patches are pooled to one row (LLaVA-OneVision); or frames as separate images, with the texts of this name
around them (see `data.media_units.frame_texts`)."""


@dataclass(frozen=True, slots=True)
class PretrainedEncoder:
    """An encoder inside a pretrained multimodal model; paths are those of the ...ForConditionalGeneration class.

    path: the encoder's. projector: paths of the modules and parameters that project its rows for the text. token:
    config key of the placeholder id that one row replaces. features: the method that projects. batched: True if the
    method takes pixels as [samples, images, ...] instead of [images, ...]. written, opens, closes: see
    `MediaMarkup`; {key} in them is the text of the token whose id is the config's value of `key`; written defaults
    to the text of `token`. settings: overrides of the image processor. native: True if images, or sounds, of
    different sizes are packed in one row (see `NativeEncoderUnit` and `SoundEncoderUnit`); images are projected by
    the encoder itself or, with pooled, averaged and then projected (see `PooledEncoderUnit`). conformer: True for a
    conformer audio encoder (see `ConformerEncoderUnit`). crossing: True if its rows go to cross-attention blocks of
    the text model instead of the text (see `CrossAttentionLayout`). anyres: True if an image's shape determines its
    tiles and rows (see `AnyresEncoderUnit`).
    """

    path: str
    projector: tuple[str, ...]
    token: str = "image_token_id"
    kind: Literal["image", "audio"] = "image"
    features: str = "get_image_features"
    batched: bool = False
    written: str = ""
    opens: str = ""
    closes: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    native: bool = False
    pooled: bool = False
    conformer: bool = False
    crossing: bool = False
    anyres: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of transformers.

    towers: unit → its encoder. decoder: path of the text model. spatial: True for positions in time, height and width
    (see `positions`). media_attention: the mask among tokens of an item, as in `model.language_model.media_attention`;
    "prefix": all tokens before the first target attend to each other; "in_windows": tokens of an item attend to each
    other in sliding-window layers, if the config's `use_bidirectional_attention` enables it. first_position: a sample's
    first position. behind_time: see `spatial_positions`. seconds: config path of the positions per second of a clip;
    empty if positions count its frames; seconds_keyword: the forward's keyword for the seconds per temporal patch.
    clips: layout of clips, if the family reads them (see `Clips`).
    """

    towers: Mapping[str, PretrainedEncoder]
    decoder: str = "model.language_model"
    spatial: bool = False
    media_attention: MediaAttention = "causal"
    first_position: int = 0
    behind_time: bool = False
    seconds: str = ""
    seconds_keyword: str = ""
    clips: Clips | None = None

    @property
    def frames_apart(self) -> bool:
        """True if the text contains timestamps between the temporal patches of a clip."""
        return self.clips == "patches apart"


_PLAIN = PretrainedEncoder("model.vision_tower", ("model.multi_modal_projector",))
_CONNECTED = PretrainedEncoder(
    "model.vision_model",
    ("model.connector",),
    batched=True,
    opens="<fake_token_around_image><global-img>",
    closes="<fake_token_around_image>",
    settings={"do_image_splitting": False},  # its tiles have texts between them
)

_VISUAL = PretrainedEncoder("model.visual", (), native=True)
_QWEN = Family({"vision": _VISUAL}, spatial=True, clips="patches")
_QWEN3 = replace(_QWEN, clips="patches apart")
_SOUND = PretrainedEncoder(
    "model.audio_tower",
    ("model.multi_modal_projector",),
    token="audio_token_id",
    kind="audio",
    native=True,
)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": replace(
        _QWEN, seconds="vision_config.tokens_per_second", seconds_keyword="second_per_grid_ts"
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen2_5_omni_thinker": Family(
        {"vision": _VISUAL, "audio": replace(_SOUND, projector=("model.audio_tower.proj",))},
        spatial=True,
        clips="patches",
        behind_time=True,
        seconds="position_id_per_seconds",
        seconds_keyword="video_second_per_grid",
    ),
    "qwen2_audio": Family({"audio": _SOUND}),
    "llava": Family({"vision": _PLAIN}),
    "llava_onevision": Family(
        {
            "vision": replace(
                _PLAIN, projector=("model.multi_modal_projector", "model.image_newline"), anyres=True
            )
        },
        clips="pooled",
    ),
    "internvl": Family({"vision": replace(_PLAIN, opens="<img>", closes="</img>")}, clips="counted"),
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
            "vision": PretrainedEncoder(
                "model.vision_tower",
                ("model.embed_vision",),
                native=True,
                pooled=True,
                opens="{boi_token_id}",
                closes="{eoi_token_id}",
            ),
            "audio": replace(
                _SOUND,
                projector=("model.embed_audio",),
                conformer=True,
                opens="{boa_token_id}",
                closes="{eoa_token_index}",
            ),
        },
        media_attention="in_windows",
        clips="timed",
    ),
    # All tokens before the answer attend to each other.
    "paligemma": Family({"vision": _PLAIN}, media_attention="prefix", first_position=1),
    "mllama": Family(
        {
            "vision": PretrainedEncoder(
                "model.vision_model",
                ("model.multi_modal_projector",),
                token="image_token_index",
                crossing=True,
            )
        }
    ),
    "idefics3": Family({"vision": _CONNECTED}, decoder="model.text_model"),
    "smolvlm": Family({"vision": _CONNECTED}, decoder="model.text_model", clips="introduced"),
}


def family_of(config: Any, where: str) -> Family:
    """Return the family of a config. Raises UserError for an unknown family, or for unsupported settings."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"{where}: {config.model_type!r} is not a family that opens whole; known are {', '.join(FAMILIES)}. Name "
            "its encoder and its language model under model.encoders and model.language_model, or add a Family to "
            "dilatant.models.families.families: where its towers, projectors and text model are"
        )
    if getattr(config, "audio_config", None) is None:  # absent in the large models of some families
        family = replace(family, towers={k: t for k, t in family.towers.items() if t.kind != "audio"})
    problems = []
    layer = getattr(config, "vision_feature_layer", None)
    for key in {tower.token for tower in family.towers.values()}:
        token = getattr(config, key, None)
        if not isinstance(token, int) or token < 0:
            problems.append(
                f"{key} is {token!r}; it must be the id of the token that stands for a row of an encoder"
            )
    if isinstance(layer, list | tuple):
        problems.append(f"vision_feature_layer {list(layer)}: rows of one layer can be used, not of several")
    everywhere = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    if family.media_attention == "in_windows" and everywhere not in (None, False, "vision"):
        problems.append(f"use_bidirectional_attention {everywhere!r}: it must be None or 'vision'")
    if problems:
        raise list_problems(f"{where}: {config.model_type} has settings that are not supported:", problems)
    return family

"""Samples with images and sounds for tiny whole models, for our units and for transformers' own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from cases.tiny_wholes import IMAGE, SOUND, WHOLES, whole_config
from dilatant.data.media.pixels import as_array
from dilatant.data.media_units.anyres_image_unit import SHAPES
from dilatant.data.media_units.native_image_unit import GRID, STEP
from dilatant.data.media_units.processed_unit import SHAPE, flatten
from dilatant.data.media_units.sound_unit import FRAMES
from dilatant.data.media_units.tiled_image_unit import RATIOS, TILES
from dilatant.data.sample import EncodedSample
from dilatant.models.encoders.anyres_encoder import AnyresEncoderUnit
from dilatant.models.encoders.generic_encoder import GenericEncoderUnit
from dilatant.models.encoders.native_encoder import NativeEncoderUnit
from dilatant.models.encoders.tiled_encoder import TiledTower
from dilatant.models.multimodal import MultimodalModel

EARLY = Version(transformers.__version__) < Version("5.18")
Part = tuple[Any, ...]
LAYOUTS: tuple[tuple[Part, ...], ...] = (
    (("text", 3), ("image", 2, 3), ("text", 2), ("image", 5, 1), ("text", 6)),
    (("text", 9),),
    (("text", 5), ("image", 1, 1)),
    (("image", 3, 4), ("text", 7)),
)
"""Several images, none, one at the end and one at the beginning of the next."""
SOUNDS = {(2, 3): 13, (5, 1): 8, (1, 1): 3, (3, 4): 60}
"""Frames of the sound that stands for an image, where a family hears: more than a chunk, a whole one, the shortest, and
the longest that there is."""
CLIPS: tuple[Part, ...] = (
    *(("text", 2), ("clip", 3, 1, 2), ("text", 1), ("image", 2, 2), ("clip", 2, 2, 1), ("text", 4)),
)
"""Clips among images, where a family sees them: of 3 patches of time of 1 by 2 groups, and of 2."""
ALIKE: tuple[Part, ...] = (
    *(("text", 2), ("clip", 3), ("image", 2, 2), ("text", 1), ("clip", 3), ("image", 1, 2), ("text", 4)),
)
"""Clips of as many frames, which transformers takes in one tensor."""
MIXED: tuple[tuple[Part, ...], ...] = (
    (("text", 3), ("image", 2, 3), ("text", 2), ("sound", 13), ("text", 6), ("image", 5, 1), ("text", 1)),
    (("text", 9),),
    (("text", 5), ("sound", 8), ("sound", 3), ("text", 2)),
    (("image", 3, 4), ("text", 7)),
)


def sample_of(model: MultimodalModel, number: int, parts: Sequence[Part]) -> EncodedSample:
    """A sample of parts ("text", tokens), ("image", rows, columns), in groups of patches where sizes may differ, and
    ("sound", frames)."""
    generator = torch.Generator().manual_seed(number)
    ids: list[int] = []
    media: dict[str, dict[str, list[Any]]] = {}
    sizes = dict.fromkeys(model.units, 0)

    def put(unit: str, tokens: int, **arrays: Any) -> None:
        sizes[unit] += tokens
        for name, array in arrays.items():
            media.setdefault(unit, {}).setdefault(name, []).append(np.asarray(array))

    clips = 0
    around = "audio" in model.units and "vision" in model.units  # Omni counts its items by what opens them
    for kind, *about in parts:
        if kind == "text":
            ids += torch.randint(3, 80, (about[0],), generator=generator).tolist()
        elif kind == "sound":
            (frames,) = about
            if isinstance(model["audio"], GenericEncoderUnit):  # padded frames behind it, as its processor makes
                ids += [95] * around + [SOUND] * -(-frames // 4) + [96] * around
                features = torch.randn(1, frames + 3, 128, generator=generator).numpy()
                item = {"input_features": features, "input_features_mask": np.arange(frames + 3)[None] < frames}
                put("audio", model["audio"].shapes(item)[0], **flatten(item))
                continue
            trailing = 0 if around else 2
            given = min(frames + trailing, 60)
            rows = (frames + 1) // 2
            ids += [95] * around + [SOUND] * (rows // 2) + [96] * around
            features = torch.randn(given, 8, generator=generator)
            put("audio", rows, input_features=features, **{FRAMES: [[frames, given]]})
        elif isinstance(model["vision"], GenericEncoderUnit):
            time, rows, columns = about if kind == "clip" else (1, *about)
            clips += kind == "clip"
            for _ in range(time):
                ids += [*([41] if kind == "clip" else []), 92, *[IMAGE] * (rows * columns), 93]
                item = _patches_of_gemma4(2 * rows, 2 * columns, generator)
                number = clips if kind == "clip" else 0
                put("vision", model["vision"].shapes(item)[0], **flatten(item), of_clip=[number])
        elif isinstance(model["vision"], NativeEncoderUnit):
            time, rows, columns = about if kind == "clip" else (1, *about)
            clips += kind == "clip"
            patches = 4 * time * rows * columns
            apart = kind == "clip" and model.whole.family.clips != "patches"
            for _ in range(time if apart else 1):
                ids += [41, 92] if apart else [92] * around
                ids += [IMAGE] * (rows * columns * (1 if apart else time)) + [93] * (around or apart)
            pixels = torch.randn(patches, 3, 8, 4, generator=generator)
            grids = [[1 if apart else time, 2 * rows, 2 * columns]] * (time if apart else 1)
            tower = model.whole.family.towers["vision"]
            # Seconds of a patch of time; 5.17 cuts them to whole ones.
            scale = getattr(tower, "seconds_scale", lambda config: None)(model.whole.config)
            step = 1.0 if scale is None or kind != "clip" else scale if EARLY else 2.5
            steps = [step] * len(grids)
            numbers = [clips if kind == "clip" else 0] * len(grids)
            put("vision", patches, pixel_values=pixels, **{GRID: grids, STEP: steps, "of_clip": numbers})
        elif isinstance(model.whole.family.towers["vision"], TiledTower):
            shapes = model.whole.config.vision_config.supported_aspect_ratios
            ratio = (3 * about[0] + about[1]) % len(shapes)
            used = (np.arange(4) < np.prod(shapes[ratio])).astype(np.int64)
            ids += [IMAGE]
            pixels = torch.randn(1, 1, 4, 3, 8, 8, generator=generator)
            rows = model["vision"].geometry.encoder_tokens
            put("vision", rows, pixel_values=pixels, **{RATIOS: [[ratio + 1]], TILES: used[None, None]})
        elif isinstance(model["vision"], AnyresEncoderUnit) and kind == "clip":
            unit, frames = model["vision"], about[0]
            ids += [IMAGE] * (frames * 2 * 2 + 1)  # of 4 by 4 patches, and what ends them
            pixels = torch.randn(frames, 3, 8, 8, generator=generator)
            put(*("vision", frames * unit.geometry.encoder_tokens), pixel_values=pixels, **{SHAPES: [[frames, 0, 2]]})
        elif isinstance(model["vision"], AnyresEncoderUnit):
            unit = model["vision"]
            height, width = (3 * each + 1 for each in about)
            alone = sum(each == "image" for each, *_ in parts) == 1
            tiles = 1 + int(np.prod(unit.shape.tiles(height, width))) if alone else 1
            ids += [IMAGE] * unit.shape.rows(height, width, alone)
            pixels = torch.randn(tiles, 3, 8, 8, generator=generator)
            shapes = [[height, width, int(alone)]]
            put("vision", tiles * unit.geometry.encoder_tokens, pixel_values=pixels, **{SHAPES: shapes})
        else:
            geometry = model["vision"].geometry
            ids += [IMAGE] * geometry.tokens_per_row
            put("vision", geometry.encoder_tokens, pixel_values=torch.randn(1, 3, 8, 8, generator=generator))
    input_ids = np.array(ids, np.int64)
    labels = np.where(np.isin(input_ids, (IMAGE, SOUND)), -100, input_ids)
    labels[0] = -100
    inputs = {unit: {name: np.concatenate(arrays) for name, arrays in given.items()} for unit, given in media.items()}
    return EncodedSample(f"sample {number}", input_ids, labels, inputs, {**sizes, "language": len(ids)})


def _patches_of_gemma4(rows: int, columns: int, generator: torch.Generator) -> dict[str, Any]:
    """An image's patches line by line, padding behind them, and where they are: (column, row)."""
    at = np.full((1, rows * columns + 4, 2), -1)
    at[0, : rows * columns] = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
    pixels = torch.randn(1, rows * columns + 4, 48, generator=generator).numpy()
    return {"pixel_values": pixels, "image_position_ids": at}


def samples_of(model: MultimodalModel) -> list[EncodedSample]:
    """Samples of unlike layouts."""
    if "audio" in model.units and "vision" in model.units:
        layouts: Sequence[Sequence[Part]] = MIXED
    elif "audio" in model.units:
        layouts = [[_heard(part) for part in layout] for layout in LAYOUTS]
    else:
        layouts = LAYOUTS
    if model.whole.family.clips in ("patches", "patches apart", "timed"):
        layouts = [*layouts, CLIPS]
    if model.whole.family.clips == "pooled":
        layouts = [*layouts, ALIKE, (("clip", 1), ("text", 2), ("image", 3, 2))]
    return [sample_of(model, number, layout) for number, layout in enumerate(layouts)]


def _heard(part: Part) -> Part:
    kind, *about = part
    return ("sound", SOUNDS[tuple(about)]) if kind == "image" else part


def transformers_inputs(family: str, sample: EncodedSample, image: int = IMAGE) -> dict[str, torch.Tensor]:
    """What transformers' model is given for a sample."""
    ids = torch.from_numpy(sample.input_ids)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "vision" in sample.media:
        given |= {name: torch.as_tensor(as_array(each)) for name, each in sample.media["vision"].items()}
    if family in ("smolvlm", "idefics3") and sample.media:
        given["pixel_values"] = given["pixel_values"][None]
    if SHAPES in given:
        given |= _tiles(given, image)
        if not len(given[SHAPES]):
            del given["pixel_values"], given[SHAPES], given["batch_num_images"]
    kinds = (ids == image).long()
    if TILES in given:
        counts = given[TILES].sum((1, 2)).tolist()
        spans = get_cross_attention_token_mask(ids[0].tolist(), image)
        dense = convert_sparse_cross_attention_mask_to_dense([spans], [counts], 4, ids.shape[1])
        given |= {
            "pixel_values": given["pixel_values"].transpose(0, 1),
            RATIOS: given[RATIOS].T,
            TILES: given[TILES].transpose(0, 1),
            "cross_attention_mask": torch.from_numpy(dense),
        }
    if "vision" in sample.media and family == "gemma4":
        given, kinds = _of_gemma4(given, image)
    elif GRID in given:
        given, kinds = _with_clips(family, given, image)
    if "audio" in sample.media:
        given |= _sounds(sample) if family != "gemma4" else _sounds_of_gemma4(sample)
    if family == "gemma3":
        given["token_type_ids"] = (ids == image).long()
    if family == "paligemma":
        given["token_type_ids"] = (torch.arange(ids.shape[1]) >= sample.prefix_tokens).long()[None]
    if family == "gemma4" or ("mrope_section" in str(WHOLES[family]) and "omni" not in family):
        given["mm_token_type_ids"] = kinds
    return given


def _tiles(given: dict[str, torch.Tensor], image: int) -> dict[str, torch.Tensor]:
    """Of one sample: clips, all of as many frames, apart from images."""
    shapes, tiles, ids = given[SHAPES], given["pixel_values"], given["input_ids"].clone()
    clips = shapes[:, 2] == 2
    frames = int(shapes[clips, 0].sum())
    alone = int((~clips).sum()) == 1
    counts = [int(first) if kind == 2 else (len(tiles) - frames if alone else 1) for first, _, kind in shapes]
    parts = list(zip(clips.tolist(), tiles.split(counts), strict=True))
    found = {SHAPES: shapes[~clips, :2], "batch_num_images": torch.tensor([int((~clips).sum())])}
    if not clips.all():
        found["pixel_values"] = torch.cat([part for is_clip, part in parts if not is_clip])
    if clips.any():
        found["pixel_values_videos"] = torch.stack([part for is_clip, part in parts if is_clip])
        places = (ids[0] == image).nonzero()[:, 0]
        at = 0
        # Images of such samples are one tile each, or the last item.
        for first, _, kind in shapes.tolist():
            rows = 4 * first + 1 if kind == 2 else (17 if not alone else len(places) - at)
            if kind == 2:
                ids[0, places[at : at + rows]] = 91
            at += rows
    return {**found, "input_ids": ids}


def _of_gemma4(given: dict[str, torch.Tensor], image: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Frames of clips apart from images, and the kind of each token; patches as many of each image."""
    ids = given["input_ids"].clone()
    pixels, at = (_items(given, name) for name in ("pixel_values", "image_position_ids"))
    of_clip = given.pop("of_clip", torch.zeros(len(pixels))).long()  # frames as images are the same
    kinds = (ids == image).long()
    rows = [int((each[..., 0] >= 0).sum()) // 4 for each in at]
    places = (ids[0] == image).nonzero()[:, 0].split(rows)
    for number in (of_clip > 0).nonzero()[:, 0].tolist():
        ids[0, places[number]] = 91
        kinds[0, places[number]] = 2
    most = max(each.shape[1] for each in at) + 4
    values = torch.randn(len(at), most, pixels[0].shape[-1], generator=torch.Generator().manual_seed(9))
    where = torch.full((len(at), most, 2), -1)
    for number, (own, own_at) in enumerate(zip(pixels, at, strict=True)):
        values[number, : own.shape[1]], where[number, : own.shape[1]] = own[0], own_at[0]
    if (of_clip == 0).any():
        given |= {"pixel_values": values[of_clip == 0], "image_position_ids": where[of_clip == 0]}
    if (of_clip > 0).any():
        counts = torch.tensor([int((of_clip == clip).sum()) for clip in of_clip[of_clip > 0].unique()])
        values, where = values[of_clip > 0], where[of_clip > 0]
        given |= {"pixel_values_videos": values, "video_position_ids": where, "num_frames_per_video": counts}
        if EARLY:
            # All frames as of one clip, which makes no difference.
            given |= {"pixel_values_videos": values[None], "video_position_ids": where[None]}
            del given["num_frames_per_video"]
    return {**given, "input_ids": ids}, kinds


def _items(given: dict[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    """Take the flattened arrays of items out of `given`."""
    shapes = [each[each >= 0].tolist() for each in given.pop(name + SHAPE)]
    parts = given.pop(name).split([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _with_clips(
    family: str, given: dict[str, torch.Tensor], image: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Clips apart from images, as transformers has them, and the kind of each token."""
    grids, ids = given.pop(GRID), given["input_ids"]
    told = torch.arange(1, 1 + len(grids)) * (grids[:, 0] > 1)  # where a sample was read, not made here
    clips = given.pop("of_clip", told)
    pixels = given.pop("pixel_values").flatten(1).split(grids.prod(1).tolist())
    places = (ids[0] == image).nonzero()[:, 0].split((grids.prod(1) // 4).tolist())
    steps = given.pop(STEP, None)
    kinds, ids = (ids == image).long(), ids.clone()
    images = [number for number in range(len(grids)) if clips[number] == 0]
    if images:
        given |= {GRID: grids[images], "pixel_values": torch.cat([pixels[number] for number in images])}
    numbers = [number for number in range(len(grids)) if clips[number] > 0]
    if numbers:
        own = [
            [number for number in numbers if clips[number] == clip]
            for clip in sorted({int(clips[number]) for number in numbers})
        ]
        kinds[0, torch.cat([places[number] for number in numbers])] = 2
        ids[0, torch.cat([places[number] for number in numbers])] = 91
        grid = torch.stack([torch.tensor([grids[each, 0].sum(), *grids[each[0], 1:]]) for each in own])
        given |= {"video_grid_thw": grid, "pixel_values_videos": torch.cat([pixels[number] for number in numbers])}
        config = whole_config(family)
        scale = getattr(config, "position_id_per_seconds", None) or getattr(
            config.vision_config, "tokens_per_second", 1
        )
        seconds = torch.stack([steps[each[0]] for each in own]).float() / scale
        if family == "qwen2_5_vl":
            given["second_per_grid_ts"] = seconds
        if "omni" in family:
            given["video_second_per_grid"] = seconds
    return {**given, "input_ids": ids}, kinds


def _sounds_of_gemma4(sample: EncodedSample) -> dict[str, torch.Tensor]:
    """Sounds padded to any length, with noise that nobody may hear."""
    media = {name: torch.as_tensor(as_array(each)) for name, each in sample.media["audio"].items()}
    sounds, there = (_items(media, name) for name in ("input_features", "input_features_mask"))
    features = torch.randn(len(sounds), 67, 128, generator=torch.Generator().manual_seed(9))
    mask = torch.zeros(len(sounds), 67, dtype=torch.bool)
    for number, (own, own_there) in enumerate(zip(sounds, there, strict=True)):
        features[number, : own.shape[1]], mask[number, : own.shape[1]] = own[0], own_there[0]
    return {"input_features": features, "input_features_mask": mask}


def _sounds(sample: EncodedSample) -> dict[str, torch.Tensor]:
    """Sounds padded to the window, with noise that nobody may hear."""
    media = {name: torch.as_tensor(as_array(each)) for name, each in sample.media["audio"].items()}
    lengths, given = media[FRAMES].T.tolist()
    features = torch.randn(len(lengths), 60, 8, generator=torch.Generator().manual_seed(9))
    for sound, frames, own in zip(features, given, media["input_features"].split(given), strict=True):
        sound[:frames] = own
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    return {"input_features": features.transpose(1, 2), "feature_attention_mask": mask.long()}


def transformers_loss(
    theirs: Any, family: str, sample: EncodedSample, image: int = IMAGE, **given: torch.Tensor
) -> torch.Tensor:
    """The sum over targets, of a sample alone."""
    logits = theirs(**transformers_inputs(family, sample, image), **given).logits[0, :-1].float()
    targets = torch.from_numpy(sample.labels)[1:]
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

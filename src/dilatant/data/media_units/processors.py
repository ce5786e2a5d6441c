"""Processor factory: an encoder's image or audio processor, from an id, folder, settings, or the encoder's shape."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, as_user_error
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.media_units.image_unit import RESAMPLE_NAMES, ImageProcessor, PixelProcessor
from dilatant.data.sample import Fingerprinted

_OTHER_STEPS = ("pad", "reduce_labels", "thumbnail", "align_long_axis", "image_splitting", "pan_and_scan")

ProcessorSettings = Mapping[str, Any]
SOFT_TOKENS = "max_soft_tokens"
"""Setting of processors that limits the rows of an image."""


@dataclass(frozen=True, slots=True)
class HuggingFaceImageProcessor(Fingerprinted):
    """Any transformers image processor, built from its saved settings in the process that uses it. names: of the
    outputs that are read; all by default."""

    settings_json: str
    channels: int = 3
    names: tuple[str, ...] = ()

    @property
    def made(self) -> Any:
        """The transformers processor."""
        return _transformers_image_processor(self.settings_json)

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(self.settings_json)

    @property
    def known_settings(self) -> frozenset[str]:
        """The names of the settings that the processor reads."""
        kind = type(self.made)
        return frozenset({*vars(kind()), *kind.valid_kwargs.__annotations__})

    @property
    def limits(self) -> dict[str, Any]:
        """The setting that limits the rows of an image, if there is one."""
        return {key: value for key, value in self.settings.items() if key == SOFT_TOKENS}

    def __call__(self, pixels: NDArray[np.uint8], *more: NDArray[np.uint8]) -> Mapping[str, NDArray]:
        """Return the inputs of images, uint8 [height, width, channels]."""
        made = self.made
        kind = "pt" if getattr(made, "backend", "pil") == "torchvision" else "np"
        images = [pixels, *more] if more else pixels
        outputs = made(images=images, return_tensors=kind, input_data_format="channels_last")
        read = {name: array for name, array in outputs.items() if name in self.names or not self.names}
        for name, array in read.items():  # numpy knows no bfloat16
            read[name] = array.float() if str(getattr(array, "dtype", "")) == "torch.bfloat16" else array
        return {name: np.asarray(array) for name, array in read.items()}

    def patches(self, height: int, width: int) -> int:
        """Return the number of patches or tiles that the processor makes of an image of this size by its own rule; 1 if
        it has none."""
        tell = getattr(self.made, "get_number_of_image_patches", None)
        told = 1 if tell is None else tell(height, width, {})
        return int(told[0] if isinstance(told, tuple) else told)

    def measure(self, height: int, width: int) -> int:
        """Return the measure of an image of this size to which its tokens may be proportional: its patches or, if only
        the class that prepares texts has a rule, the tokens by that rule."""
        count = None if hasattr(self.made, "get_number_of_image_patches") else _token_rule(self.settings_json)
        return self.patches(height, width) if count is None else count(image_sizes=[[height, width]])[_TOKENS][0]

    def axes(self, pixels: NDArray[np.uint8]) -> Mapping[str, int]:
        """Return the axis, by name, along which outputs of an image are joined to those of another one, if it is not
        the first one. That axis is twice as long for two such images."""
        one, two = self(pixels), self(pixels, pixels)
        found = {}
        for name, array in one.items():
            longer = [axis for axis, size in enumerate(array.shape) if two[name].shape[axis] == 2 * size]
            if two[name].ndim == array.ndim and longer and 0 not in longer:
                found[name] = longer[0]
        return found


@dataclass(frozen=True, slots=True)
class HuggingFaceSoundProcessor(Fingerprinted):
    """A model's own processor of sounds: its saved feature extractor in the class that prepares the inputs of
    `model_type`, built in the process that uses it. names: of the outputs that are read; all by default."""

    settings_json: str
    model_type: str
    names: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(self.settings_json)

    @property
    def made(self) -> Any:
        """The transformers processor."""
        return _transformers_sound_processor(self.settings_json, self.model_type)

    @property
    def known_settings(self) -> frozenset[str]:
        """The names of the settings that the processor reads."""
        kind = type(self.made._audio_processor)
        return frozenset({*vars(kind()), *inspect.signature(kind).parameters})

    @property
    def sampling_rate(self) -> int:
        """Samples per second."""
        return int(self.made._audio_processor.sampling_rate)

    def __call__(self, wave: NDArray[np.float32]) -> Mapping[str, NDArray]:
        """Return the inputs of a wave, float32 [samples]. Raises ValueError if the processor refuses it."""
        # No public API prepares sounds without texts.
        settings = self.made._merge_kwargs(self.made.valid_processor_kwargs, {}, sampling_rate=self.sampling_rate)
        outputs, _ = self.made._process_audio([wave], **{"return_tensors": "pt", **settings["audio_kwargs"]})
        unused = {*self.made.unused_input_names}
        return {
            name: np.asarray(array)
            for name, array in outputs.items()
            if name not in unused and (name in self.names or not self.names)
        }


def image_processor(
    source: str | ProcessorSettings | None, *, height: int, width: int, channels: int = 3
) -> ImageProcessor:
    """Return the processor for an encoder of images [channels, height, width].

    source: a hub id or folder; settings of a transformers processor (with `image_processor_type`) or of
    `PixelProcessor`; or None for plain resizing with values in [-1, 1]. Raises UserError, also if the processor's image
    size differs from the encoder's.
    """
    if source is None:
        return PixelProcessor(height=height, width=width, channels=channels)
    settings = pretrained_settings(source, ("image_processor",)) if isinstance(source, str) else dict(source)
    if isinstance(source, Mapping) and not any(key.endswith("_type") for key in settings):
        known = {item.name for item in fields(PixelProcessor)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise UserError(f"processor: unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        given: dict[str, Any] = {"height": height, "width": width, "channels": channels, **settings}
        for name in ("mean", "std"):
            if name in given:
                given[name] = tuple(given[name]) if isinstance(given[name], list | tuple) else (given[name],)
        processor: ImageProcessor = PixelProcessor(**given)
    else:
        processor = fixed_size(settings, channels) or HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True))
    _check_image(processor, (channels, height, width), source)
    return processor


def audio_processor(source: str | ProcessorSettings | None, *, frames: int, mel_bins: int) -> LogMelProcessor:
    """Return the processor for an encoder of sounds [mel_bins, frames].

    source: a hub id or folder of a Whisper feature extractor, its settings or those of `LogMelProcessor`, or None for
    16 kHz and a frame every 10 ms. Raises UserError.
    """
    if source is None:
        return LogMelProcessor(window_frames=frames, mel_bins=mel_bins)
    settings = pretrained_settings(source, ("feature_extractor",)) if isinstance(source, str) else dict(source)
    kind = settings.get("feature_extractor_type", "WhisperFeatureExtractor")
    if kind != "WhisperFeatureExtractor":
        raise UserError(f"processor {_shown(source)}: {kind} is not supported; known: WhisperFeatureExtractor")
    names = {"feature_size": "mel_bins", "n_fft": "fft_length", "nb_max_frames": "window_frames"}
    known = {item.name for item in fields(LogMelProcessor)}
    given = {names.get(key, key): value for key, value in settings.items()}
    if isinstance(source, Mapping):
        saved = {"feature_extractor_type", "chunk_length", "n_samples", "padding_side", "padding_value",
                 "return_attention_mask", "dither", "processor_class"}  # fmt: skip
        unknown = sorted(set(given) - known - saved)
        if unknown:
            raise UserError(f"processor: unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if given.get("dither"):
        raise UserError(f"processor {_shown(source)}: dither would make samples differ from run to run; set it to 0")
    chosen = {"window_frames": frames, "mel_bins": mel_bins, **{k: v for k, v in given.items() if k in known}}
    # The encoder takes one window length, whatever the saved extractor has.
    processor = LogMelProcessor(**{**chosen, "window_frames": frames})
    if processor.mel_bins != mel_bins:
        raise UserError(
            f"processor {_shown(source)} makes {processor.mel_bins} mel bins, but the encoder takes {mel_bins}"
        )
    return processor


def fixed_size(settings: ProcessorSettings, channels: int) -> PixelProcessor | None:
    """Return an equivalent `PixelProcessor` if the settings only resize, crop, rescale and normalise; else None.

    Covers the processors of CLIP, SigLIP, ViT, DeiT and DINOv2 (Bit).
    """
    kind = str(settings.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    known = (f"{family}ImageProcessor" for family in ("CLIP", "Siglip", "ViT", "Bit", "DeiT"))
    if kind not in known or any(settings.get(f"do_{step}") for step in _OTHER_STEPS):
        return None
    defaults = {
        "resample": 2 if kind.startswith("ViT") else 3,
        "do_center_crop": kind.startswith(("CLIP", "Bit", "De")),
    }
    settings = defaults | {key: value for key, value in settings.items() if value is not None}
    size = settings.get("size") or {}
    crop = settings.get("crop_size") or {}
    size = {"shortest_edge": size} if isinstance(size, int) and kind == "CLIPImageProcessor" else size
    size = {"height": size, "width": size} if isinstance(size, int) else size
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    cropped = bool(settings["do_center_crop"]) and "height" in crop
    normalized = settings.get("do_normalize", True)
    if not settings.get("do_resize", True) or not isinstance(settings["resample"], int):
        return None
    if (
        ("shortest_edge" if cropped else "height") not in size
        or cropped != settings["do_center_crop"]
        or (normalized and not {"image_mean", "image_std"} <= settings.keys())
    ):
        return None  # the class has values of its own
    return PixelProcessor(
        height=crop["height"] if cropped else size["height"],
        width=crop["width"] if cropped else size["width"],
        channels=channels,
        shortest_edge=size["shortest_edge"] if cropped else None,
        resample=RESAMPLE_NAMES[int(settings["resample"])],
        rescale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        mean=tuple(settings["image_mean"]) if normalized else (0.0,),
        std=tuple(settings["image_std"]) if normalized else (1.0,),
    )


def pretrained_settings(name: str, parts: Sequence[str] = ("image_processor", "feature_extractor")) -> dict[str, Any]:
    """Return the saved image and sound processor settings of a model in a folder or on the hub. As in transformers,
    they are the `parts` of `processor_config.json` or, if it has none, `preprocessor_config.json`. Raises UserError."""
    saved = _settings_if_there(name, "processor_config.json")
    nested = [saved[part] for part in parts if isinstance(saved.get(part), dict)]
    if nested:
        return {key: value for each in nested for key, value in each.items()}
    return (_settings_if_there if saved else saved_settings)(name, "preprocessor_config.json")


def clip_settings(name: str) -> dict[str, Any]:
    """Return the saved clip processor settings of a model, found as `pretrained_settings` does; empty if there are
    none."""
    nested = _settings_if_there(name, "processor_config.json").get("video_processor")
    return nested if isinstance(nested, dict) else _settings_if_there(name, "video_preprocessor_config.json")


def _settings_if_there(name: str, file: str) -> dict[str, Any]:
    from transformers.utils import cached_file

    try:
        is_there = cached_file(name, file, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:
        is_there = False
    return saved_settings(name, file) if is_there else {}


def sound_processor(settings: ProcessorSettings | None, *, frames: int, mel_bins: int) -> LogMelProcessor:
    """Return the processor of a pretrained audio model; settings may include those of images. Raises UserError."""
    own = {key: value for key, value in (settings or {}).items() if key in _OF_SOUNDS}
    return audio_processor(own or None, frames=frames, mel_bins=mel_bins)


_OF_SOUNDS = ("feature_extractor_type", "feature_size", "n_fft", "hop_length", "sampling_rate", "dither")


def saved_settings(name: str, file: str) -> dict[str, Any]:
    """Return the settings in a file of a folder or on the hub. Raises UserError."""
    from transformers.utils import cached_file

    if Path(name).is_dir() and not (Path(name) / file).is_file():
        raise UserError(
            f"there is no processor in {name!r}: put its {file} there, or name another folder, an id or settings with "
            "'processor' (of a whole model: `--set model.processor=FOLDER`)"
        )
    try:
        path = cached_file(name, file)
        with open(str(path), encoding="utf-8") as stream:
            settings = json.load(stream)
        if not isinstance(settings, dict):
            raise ValueError(f"{file} holds no object")
    except (OSError, ValueError, RecursionError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"processor {name!r} cannot be loaded: {first}") from None
    return settings


def of_family(names: Mapping[str, Any], model_type: str) -> Any:
    """Return the entry of a model type, or else of the longest one that it begins with (glm4v for glm4v_moe); None if
    there is none."""
    found = [key for key in names if f"{model_type}_".startswith(f"{key}_")]
    return names[max(found, key=len)] if found else None


@lru_cache(maxsize=8)
def _transformers_image_processor(settings_json: str) -> Any:
    # `transformers.AutoImageProcessor` needs torchvision in 5.17.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(settings_json, encoding="utf-8")
        try:
            return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError, TypeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise UserError(f"the image processor cannot be made from its settings: {first}") from None


_TOKENS = "num_image_tokens"


@lru_cache(maxsize=8)
def _token_rule(settings_json: str) -> Any:
    """Return the method of the family's processor that counts the tokens of images from their sizes; None if it has
    none, or one that needs more than the image processor."""
    from transformers.models.auto import processing_auto

    made = _transformers_image_processor(settings_json)
    try:
        family = type(made).__module__.split(".")[2]
        # Its constructor wants a tokenizer, of which this method needs nothing.
        whole: Any = object.__new__(
            processing_auto.processor_class_from_name(processing_auto.PROCESSOR_MAPPING_NAMES[family])
        )
        whole.image_processor = made
        count = whole._get_num_multimodal_tokens
        return count if len(count(image_sizes=[[96, 96]])[_TOKENS]) == 1 else None
    except Exception:  # no public API
        return None


@lru_cache(maxsize=8)
def _transformers_sound_processor(settings_json: str, model_type: str) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.feature_extraction_auto import feature_extractor_class_from_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    settings = json.loads(settings_json)
    try:
        extractor: Any = feature_extractor_class_from_name(settings.pop("feature_extractor_type"))
        processor: Any = processor_class_from_name(of_family(PROCESSOR_MAPPING_NAMES, model_type))
        # Sounds are prepared without texts, but the class takes a tokenizer.
        words = Tokenizer(WordLevel({"<unk>": 0}, "<unk>"))
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
        for kind, end in product(("audio", "image", "video", "vision"), ("", "_bos", "_eos")):
            setattr(tokenizer, f"{kind}{end}_token", f"<{kind}>")
        parts = {each: tokenizer for each in processor.get_attributes() if each.endswith("tokenizer")}
        name = next(each for each in processor.get_attributes() if each in ("feature_extractor", "audio_processor"))
        made = extractor.from_dict(settings)
        try:
            return processor(**{name: made}, **parts)
        except TypeError:  # it wants processors of other media, too
            return _ExtractorAlone(made)
    except Exception as error:
        raise UserError(
            f"{model_type}: its processor of sounds cannot be made: {str(error).strip().partition(chr(10))[0]}"
        ) from None


class _ExtractorAlone:
    """A feature extractor with the methods of processors that `HuggingFaceSoundProcessor` calls."""

    valid_processor_kwargs = None
    unused_input_names = ()

    def __init__(self, extractor: Any) -> None:
        self._audio_processor = extractor

    def _merge_kwargs(self, *_: Any, sampling_rate: int) -> dict[str, Any]:
        return {"audio_kwargs": {"sampling_rate": sampling_rate}}

    def _process_audio(self, waves: list[NDArray[np.float32]], **settings: Any) -> tuple[Any, list[str]]:
        return self._audio_processor(waves, **settings), []


def _check_image(processor: ImageProcessor, shape: tuple[int, int, int], source: str | ProcessorSettings) -> None:
    """Run the processor on a grey image and raise UserError if its output does not fit the encoder."""
    _, height, width = shape
    with as_user_error(f"processor {_shown(source)} cannot be used", ValueError, TypeError, LookupError):
        outputs = processor(np.full((height + 7, width + 3, shape[0]), 128, np.uint8))
    made = {name: array.shape for name, array in outputs.items()}
    if made.get("pixel_values") != (1, *shape):
        raise UserError(
            f"processor {_shown(source)} makes {made.get('pixel_values', made)} of one image, but the encoder takes "
            f"{(1, *shape)} (rows, channels, height, width)"
        )


def _shown(source: str | ProcessorSettings) -> str:
    return repr(source) if isinstance(source, str) else "settings"

"""Processed clips: a pretrained model's own processor selects and prepares frames, and writes the text between."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.media.clip import decode_clip
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.frame_choice import UNTIMED_FPS
from dilatant.data.media_units.processed_unit import IS_CLIP, Arrays, CountsTokens, ProcessedUnit, flatten
from dilatant.data.media_units.processors import of_family
from dilatant.data.media_units.unit_base import PiecedClipUnit
from dilatant.data.sample import Fingerprinted, Media, MediaMarkup, MediaSize


@dataclass(frozen=True, slots=True)
class HuggingFaceClipProcessor(Fingerprinted):
    """A model's own processor of clips, built in the process that uses it. It is its video processor with saved
    settings, in the class that writes texts for `model_type`. names: of the outputs that are read. words: token that
    the processor may write beside those of clips, and its text. Methods raise MediaError without torchvision."""

    settings_json: str
    model_type: str
    names: tuple[str, ...]
    words: tuple[tuple[str, str], ...] = ()

    @property
    def made(self) -> Any:
        """The transformers processor."""
        return _transformers_processor(self.settings_json, self.model_type, self.words)

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        """Return the indices of the frames that the processor selects; all frames if they were sampled already."""
        own = self.made.video_processor
        settings = {name: getattr(own, name, None) for name in own.valid_kwargs.__annotations__}
        if not size.seconds or not settings.pop("do_sample_frames", True):
            return np.arange(size.frames)
        chosen = own.sample_frames(metadata=_metadata(size), **settings)
        return np.asarray(chosen).astype(np.int64).clip(0, size.frames - 1)

    def outputs(self, frames: NDArray[np.uint8]) -> Mapping[str, Any]:
        """Return all outputs for a clip, uint8 [frames, height, width, channels]."""
        settings = {"do_sample_frames": False, "input_data_format": "channels_last", "return_tensors": "pt"}
        made = self.made
        try:
            return made.video_processor([frames], **settings)
        except Exception as error:  # such as a font that it lacks
            raise ValueError(str(error)) from None

    def __call__(self, frames: NDArray[np.uint8]) -> Arrays:
        """Return the inputs of a clip."""
        return {name: np.asarray(each) for name, each in self.outputs(frames).items() if name in self.names}

    def pieces(self, size: MediaSize, tokens: int) -> list[tuple[str, int, str]]:
        """Return the groups of the `tokens` of a clip (see `ProcessedClipUnit.pieces`). Raises ValueError if the
        processor writes tokens that are not known here, or another number of groups' tokens."""
        chosen = self.frames(size)
        blank = self.outputs(np.full((len(chosen), size.height, size.width, 3), 128, np.uint8))
        timing = _metadata(size)
        timing.frames_indices = chosen.tolist()
        inputs = {**blank, "video_metadata": [timing]}
        try:
            text = self.made.replace_video_token(inputs, video_idx=0)
        except (NotImplementedError, AttributeError) as error:
            if (name := getattr(error, "name", None) or "").endswith("_token"):
                raise ValueError(f"its processor writes its {name} around frames, which is not known here") from None
            text = _MARKS[0] * tokens  # it counts by numbers of the model
        pattern = "|".join(map(re.escape, _MARKS))
        *parts, end = re.split(f"((?:{pattern})+)", text)
        counts = [len(re.findall(pattern, run)) for run in parts[1::2]]
        if sum(counts) != tokens:
            raise ValueError(f"its processor writes {sum(counts)} tokens of it, and its encoder makes {tokens} rows")
        ends = [*[""] * (len(counts) - 1), end]
        return list(zip(parts[::2], counts, ends, strict=True))


_MARKS = ("<dilatant:image>", "<dilatant:video>")
"""Placeholders of images and clips in the texts of processors."""


@dataclass(frozen=True, slots=True)
class ProcessedClipUnit(ProcessedUnit, PiecedClipUnit):
    """Media unit of clips that a model's own processor prepares."""

    name: str
    placeholder_id: int
    processor: HuggingFaceClipProcessor
    count: CountsTokens
    marker: str = "<video>"
    written: MediaMarkup | None = None

    def decoded_shape(self, size: MediaSize) -> tuple[int, ...]:
        return len(self.processor.frames(size)), size.height, size.width, 3

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """Return, for each group of the clip's tokens, the text before them, their number, and the text after them."""
        return self.processor.pieces(size, self.merged_tokens(size))

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        frames = self.processor.frames(size).tolist()
        return self.see(np.stack(decode_clip(media, frames, lambda frame: frame)))

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {} if before and not is_requested else json.loads(self.processor.settings_json)

    def flat(self, item: Arrays) -> dict[str, EncoderInput]:
        return flatten(item) | {IS_CLIP: np.ones(1, np.int64)}


def _metadata(size: MediaSize) -> Any:
    from transformers.video_utils import VideoMetadata

    fps = size.frames / size.seconds if size.seconds else UNTIMED_FPS
    return VideoMetadata(size.frames, fps, size.width, size.height, duration=size.frames / fps)


@lru_cache(maxsize=8)
def _transformers_processor(settings_json: str, model_type: str, words: tuple[tuple[str, str], ...]) -> Any:
    from transformers.models.auto import processing_auto, video_processing_auto
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        remedy = "install it (`pip install 'dilatant[torchvision]'`), or give frames as images"
        raise MediaError(f"clips of {model_type} are prepared by its own processor, which needs torchvision", remedy)
    settings = json.loads(settings_json)
    try:
        names: Any = of_family(video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES, model_type)
        name = names["torchvision"] if isinstance(names, dict) else names  # early versions
        name = settings.pop("video_processor_type", None) or name
        kind: Any = video_processing_auto.video_processor_class_from_name(name)
        texts = of_family(processing_auto.PROCESSOR_MAPPING_NAMES, model_type)
        # Its constructor wants the tokenizer, of which these texts need nothing.
        made: Any = object.__new__(processing_auto.processor_class_from_name(texts))
        made.video_processor = made.image_processor = kind(**settings)
        vars(made).update(words)
        made.image_token, made.video_token = made.IMAGE_TOKEN, made.VIDEO_TOKEN = _MARKS  # under one of these names
        return made
    except Exception as error:
        problem = str(error).strip().partition("\n")[0]
        remedy = "correct video_preprocessor_config.json, or model.processor"
        raise MediaError(f"the clip processor of {model_type} cannot be made: {problem}", remedy) from None

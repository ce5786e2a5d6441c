"""The data room: readers, encoding, the sizes index, samplers and loaders, from records on disk to model inputs.

The names below are imported on first use, so that worker processes start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.data.errors import SampleError
    from dilatant.data.index.lint import Problem
    from dilatant.data.index.sizes import SizesIndex, blend_sizes, known_sizes, reader_sizes
    from dilatant.data.index.stats import DataStats, describe
    from dilatant.data.media_units.audio_unit import AudioUnit
    from dilatant.data.media_units.image_unit import ImageUnit
    from dilatant.data.media_units.processors import audio_processor, image_processor
    from dilatant.data.order.blend import Blend, StreamBlend, open_blend
    from dilatant.data.order.sampler import Sampler, SamplerState
    from dilatant.data.order.stream_sampler import StreamSampler
    from dilatant.data.readers.reader import Reader, open_source
    from dilatant.data.sample import EncodedSample, Media, MediaUnit, Sample, Turn
    from dilatant.data.text.chat import ChatTokenizer, chat_tokenizer
    from dilatant.data.text.encode import encode_prompt, encode_sample, measure_sample
    from dilatant.data.text.encoding import Encoding
    from dilatant.data.text.tokenizer import byte_tokenizer, load_tokenizer
    from dilatant.data.workers.loader import GlobalBatch, Loader

_NAMES = {
    "media_units.audio_unit": "AudioUnit",
    "order.blend": "Blend StreamBlend open_blend",
    "text.chat": "ChatTokenizer chat_tokenizer",
    "text.encode": "Encoding encode_prompt encode_sample measure_sample",
    "errors": "SampleError",
    "media_units.image_unit": "ImageUnit",
    "index.lint": "Problem",
    "workers.loader": "GlobalBatch Loader",
    "media_units.processors": "audio_processor image_processor",
    "readers.reader": "Reader open_source",
    "sample": "EncodedSample Media MediaUnit Sample Turn",
    "order.sampler": "Sampler SamplerState",
    "index.sizes": "SizesIndex blend_sizes known_sizes reader_sizes",
    "index.stats": "DataStats describe",
    "order.stream_sampler": "StreamSampler",
    "text.tokenizer": "byte_tokenizer load_tokenizer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AudioUnit",
    "Blend",
    "ChatTokenizer",
    "DataStats",
    "EncodedSample",
    "Encoding",
    "GlobalBatch",
    "ImageUnit",
    "Loader",
    "Media",
    "MediaUnit",
    "Problem",
    "Reader",
    "Sample",
    "SampleError",
    "Sampler",
    "SamplerState",
    "SizesIndex",
    "StreamBlend",
    "StreamSampler",
    "Turn",
    "audio_processor",
    "blend_sizes",
    "byte_tokenizer",
    "chat_tokenizer",
    "describe",
    "encode_prompt",
    "encode_sample",
    "image_processor",
    "known_sizes",
    "load_tokenizer",
    "measure_sample",
    "open_blend",
    "open_source",
    "reader_sizes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

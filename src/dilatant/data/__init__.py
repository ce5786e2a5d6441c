"""Where samples come from: readers, encoding, sizes, sampling, packing, loading.

The names below are imported when they are first used, so that worker processes start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.data.audio_unit import AudioUnit
    from dilatant.data.blend import Blend, StreamBlend, open_blend
    from dilatant.data.chat import ChatTokenizer, chat_tokenizer
    from dilatant.data.encode import encode_prompt, encode_sample, measure_sample
    from dilatant.data.encoding import Encoding
    from dilatant.data.errors import SampleError
    from dilatant.data.image_unit import ImageUnit
    from dilatant.data.lint import Problem
    from dilatant.data.loader import GlobalBatch, Loader
    from dilatant.data.processors import audio_processor, image_processor
    from dilatant.data.reader import Reader, open_source
    from dilatant.data.sample import EncodedSample, Media, MediaUnit, Sample, Turn
    from dilatant.data.sampler import Sampler, SamplerState
    from dilatant.data.sizes import SizesIndex, blend_sizes, known_sizes, reader_sizes
    from dilatant.data.stats import DataStats, describe
    from dilatant.data.stream_sampler import StreamSampler
    from dilatant.data.tokenizer import byte_tokenizer, load_tokenizer

_NAMES = {
    "audio_unit": "AudioUnit",
    "blend": "Blend StreamBlend open_blend",
    "chat": "ChatTokenizer chat_tokenizer",
    "encode": "Encoding encode_prompt encode_sample measure_sample",
    "errors": "SampleError",
    "image_unit": "ImageUnit",
    "lint": "Problem",
    "loader": "GlobalBatch Loader",
    "processors": "audio_processor image_processor",
    "reader": "Reader open_source",
    "sample": "EncodedSample Media MediaUnit Sample Turn",
    "sampler": "Sampler SamplerState",
    "sizes": "SizesIndex blend_sizes known_sizes reader_sizes",
    "stats": "DataStats describe",
    "stream_sampler": "StreamSampler",
    "tokenizer": "byte_tokenizer load_tokenizer",
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

"""The data room: readers, encoding, the sizes index, samplers and batches, from records on disk to model inputs.

The names below are imported on first use, so that worker processes start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilatant.config.lazy import lazy_names

if TYPE_CHECKING:
    from dilatant.data.errors import SampleError as SampleError
    from dilatant.data.index.sizes import SizesIndex as SizesIndex
    from dilatant.data.index.sizes import blend_sizes as blend_sizes
    from dilatant.data.index.stats import describe as describe
    from dilatant.data.media_units.audio_unit import AudioUnit as AudioUnit
    from dilatant.data.media_units.image_unit import ImageUnit as ImageUnit
    from dilatant.data.media_units.processors import audio_processor as audio_processor
    from dilatant.data.media_units.processors import image_processor as image_processor
    from dilatant.data.order.blend import open_blend as open_blend
    from dilatant.data.sample import EncodedSample as EncodedSample
    from dilatant.data.sample import Media as Media
    from dilatant.data.sample import Sample as Sample
    from dilatant.data.sample import Turn as Turn
    from dilatant.data.text.chat import chat_tokenizer as chat_tokenizer
    from dilatant.data.text.encode import encode_sample as encode_sample
    from dilatant.data.text.encoding import Encoding as Encoding
    from dilatant.data.text.tokenizer import byte_tokenizer as byte_tokenizer
    from dilatant.data.text.tokenizer import load_tokenizer as load_tokenizer
    from dilatant.data.workers.batches import GlobalBatch as GlobalBatch

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "errors": "SampleError",
        "index.sizes": "SizesIndex blend_sizes",
        "index.stats": "describe",
        "media_units.audio_unit": "AudioUnit",
        "media_units.image_unit": "ImageUnit",
        "media_units.processors": "audio_processor image_processor",
        "order.blend": "open_blend",
        "sample": "EncodedSample Media Sample Turn",
        "text.chat": "chat_tokenizer",
        "text.encode": "encode_sample",
        "text.encoding": "Encoding",
        "text.tokenizer": "byte_tokenizer load_tokenizer",
        "workers.batches": "GlobalBatch",
    },
)

"""A mask of your own for media: pictures without text between them are frames of one clip and see each other.

    mllm = MultimodalModel(encoders, language_model, media_attention=frames_see_each_other)

docs/attention_kernels.md says when such a function is called.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dilatant.attention import AttentionMask, RowLayout
from dilatant.attention.masks.packing import media_mask


def frames_see_each_other(segments: RowLayout) -> AttentionMask:
    """Return the mask of one sample, whose `segments` have an entry each in `modality`, `instance` and `length`."""
    stretch = 1 + np.cumsum(np.diff(segments.modality, prepend=segments.modality[:1]) != 0)
    one_clip = replace(segments, instance=np.where(segments.is_text, 0, stretch))
    return media_mask(one_clip, {"vision": "bidirectional"})

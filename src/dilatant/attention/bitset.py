"""The papers' one-hot attention word, read as Cornstarch's kernel reads it.

There, bit 0 marks text and every other bit up to 61 a modality (thesis 3.4.2 and figure 3.4). A text token sees the
tokens up to itself that share a bit with it; any other token sees exactly the tokens with the same word. Bits 62 and
63 carry nothing: the published kernel never reads the causal bit. Samples and two images of one modality cannot be told
apart in that word, so neither can they here; `dilatant.attention.packing` builds masks that can.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dilatant.attention.mask import MODALITY_BITS, AttentionMask, MaskError, Runs, pack_fields

_GROUPS = (1 << 62) - 1


def from_bitset(words: ArrayLike) -> AttentionMask:
    """The mask of one row of one-hot words, one a token: int64 `[tokens]`; 0 is padding.

    All 62 groups may occur. What is limited is how differently text tokens may choose among them: groups that the same
    text tokens see share one of our modality bits.

    Raises:
        MaskError: if text tells more groups apart than a word of ours has bits for.
    """
    words = np.asarray(words).astype(np.int64) & _GROUPS
    if words.ndim != 1:
        raise MaskError(f"expected one word a token, got shape {words.shape}")
    first = np.flatnonzero(np.diff(words, prepend=~words[:1]))
    lengths, words = np.diff(first, append=words.size), words[first]

    is_text = words & 1 != 0
    text_words = np.unique(words[is_text])
    groups = np.unique(words[~is_text & (words != 0)])
    seen_by = (text_words[None, :] & groups[:, None]) != 0
    classes, class_of = np.unique(seen_by, axis=0, return_inverse=True)
    if len(classes) >= MODALITY_BITS:
        raise MaskError(
            f"the row's text tokens tell {len(classes)} classes of modalities apart; besides text a word holds "
            f"{MODALITY_BITS - 1}: let text tokens attend to the same modalities"
        )
    bit_of_class = 2 << np.arange(len(classes))
    own_of_group = bit_of_class[class_of.reshape(-1)]
    attend_of_text = 1 | (classes * bit_of_class[:, None]).sum(axis=0)

    fields = np.zeros(words.size, dtype=np.int64)
    place = np.searchsorted(text_words, words[is_text])
    fields[is_text] = pack_fields(1, attend_of_text[place], causal=True, window=True)
    other = ~is_text & (words != 0)
    place = np.searchsorted(groups, words[other])
    own = own_of_group[place]
    fields[other] = pack_fields(own, own, instance=1 + place, local=True, window=True)
    return AttentionMask(Runs.build(lengths, fields, first))

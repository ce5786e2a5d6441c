"""Make a config of a language model small, as a plain dictionary: few blocks, narrow, with every feature it had.

All kinds of blocks stay, and so do windows, caps and kinds of positions. A multiplier that is 1, which would hide where
and how often it is applied, becomes another number. Token ids are folded into the small vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from dilatant.models.structure import DEPTH_KEYS

VOCABULARY = 128
FIRST_PLAIN_ID = 16
"""From here on to `LAST_PLAIN_ID` no id means anything: not padding, not the end of a text, no image."""
LAST_PLAIN_ID = 96
WINDOW = 4
"""Tokens that a layer with a window sees: fewer than a sample has."""
_MULTIPLIER = 1.25

_WIDTH, _HEAD_WIDTH, _POSITIONS = 64, 16, 1024
_DEPTH = re.compile(rf"^({'|'.join(DEPTH_KEYS)}|n_layers)$")
_LAYER_LISTS = re.compile(
    r"layer_types|layers_block_type|block_types|attention_layers|indexer_types|_per_layer|sparsity"
)
_LAYER_NUMBERS = re.compile(r"(_layers|_layer_ids|_idxs)$")
_LAYER_BORDERS = re.compile(r"^(max_window_layers|moe_layer_(start|end)_index)$")
_HEADS = re.compile(r"^(n_heads?|.*num_(attention_|q_)?heads|.*attention_heads|linear_num_value_heads)$")
_KEY_HEADS = re.compile(r"(key_value|kv|key)_heads$|^num_query_groups$")
_HEAD_WIDTHS = re.compile(r"(head_dim|_head_size|^kv_channels|lora_rank|^rotary_dim|^qk_.*_dim)$")
_WIDTHS = re.compile(
    r"^(.*hidden_size.*|.*intermediate_size.*|d_model|n_embd|n_inner|.*ffn_dim|.*ffn_hidden_size|d_inner|dim_ff|dff"
    r"|word_embed_proj_dim|embedding_size|embedding_dim|laurel_rank|lru_width)$"
)
_EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts)$")
_CHOSEN = re.compile(r"(experts_per_tok(en)?|moe_k|moe_topk)$")
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_group)$")
_WINDOWS = re.compile(r"^(sliding_window(_size)?|attention_chunk_size|attention_window_size|window_size)$")
_LONGEST = re.compile(r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len)$")
_IDS = re.compile(r"(token_id|token_index)s?$")
_MULTIPLIERS = re.compile(r"(multiplier|_scale|_scaling|scaling_factor)$|^scale_(emb|depth)$")
_AT_MOST: tuple[tuple[re.Pattern[str], int], ...] = (
    (_KEY_HEADS, 2),
    (_HEADS, 4),
    (_HEAD_WIDTHS, _HEAD_WIDTH),
    (_EXPERTS, 4),
    (_CHOSEN, 2),
    (_GROUPS, 1),
    (_WINDOWS, WINDOW),
    (_LONGEST, _POSITIONS),
)


def shrink(config: Any) -> dict[str, Any]:
    """The settings of a small model like that of `config`, as `type(config).from_dict` takes them; of a whole model its
    text model is made small, and its towers stay."""
    settings = config.to_dict()
    for key in ("quantization_config", "dtype", "torch_dtype"):
        settings.pop(key, None)
    text = config.get_text_config()
    holders = [key for key in config.sub_configs if getattr(config, key, None) is text]
    if holders:
        settings[holders[0]] = _shrink_text(settings[holders[0]])
        _fold_ids(settings)
        return settings
    return _shrink_text(settings)


def _shrink_text(settings: Mapping[str, Any]) -> dict[str, Any]:
    small = dict(settings)
    depth = next((value for key, value in small.items() if _DEPTH.match(key) and isinstance(value, int)), 0)
    if depth:
        _cut_layers(small, depth)
    _narrow(small)
    _fold_ids(small)
    for key, value in small.items():
        if _MULTIPLIERS.search(key) and value == 1 and not isinstance(value, bool):
            small[key] = _MULTIPLIER
    return small


def _cut_layers(small: dict[str, Any], depth: int) -> None:
    """Keep the first blocks, up to one of each kind, in all that is said of single blocks."""
    lists = [
        key
        for key, value in small.items()
        if isinstance(value, list) and len(value) == depth and _LAYER_LISTS.search(key)
    ]
    kept = list(range(min(depth, 3)))
    for key in lists:
        kinds = [repr(kind) for kind in small[key]]
        kept += [kinds.index(kind) for kind in dict.fromkeys(kinds) if len(set(kinds)) < 8]
    shared = min(int(small.get("num_kv_shared_layers") or 0), 2)
    kept = sorted({*kept, *range(depth - shared, depth)})
    for key, value in small.items():
        if key in lists or (isinstance(value, list) and len(value) == depth and key == "no_rope_layers"):
            small[key] = [value[index] for index in kept]
        elif _DEPTH.match(key) and value == depth:
            small[key] = len(kept)
        elif (
            _LAYER_NUMBERS.search(key) and isinstance(value, list) and all(isinstance(v, int) for v in value)
        ):
            small[key] = [kept.index(index) for index in value if index in kept]
        elif key == "per_layer_config" and isinstance(value, dict):
            small[key] = {kept.index(int(index)): own for index, own in value.items() if int(index) in kept}
            for own in small[key].values():
                _narrow(own)
        elif _LAYER_BORDERS.match(key) and isinstance(value, int):
            small[key] = sum(index < value for index in kept)
    if shared:
        small["num_kv_shared_layers"] = shared


def _narrow(small: dict[str, Any]) -> None:
    """Fewer heads, narrower ones, and all other widths by one divisor."""
    heads = next((small[key] for key in ("num_attention_heads", "n_head", "n_heads") if small.get(key)), None)
    wide = next((small[key] for key in ("hidden_size", "d_model", "n_embd") if small.get(key)), 0)
    divisor = max(1, wide // _WIDTH) if isinstance(wide, int) else 1
    equal = [key for key in small if _KEY_HEADS.search(key) and small[key] == heads]
    for key, value in small.items():
        if isinstance(value, dict):
            small[key] = _narrow_positions(value) if key.startswith("rope") else value
            if key in ("attn_config", "ffn_config"):
                _narrow(small[key])
        if isinstance(value, list) and _WIDTHS.match(key):
            small[key] = [_divided(each, divisor) for each in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            continue
        most = next((most for pattern, most in _AT_MOST if pattern.search(key)), None)
        if key in equal:
            small[key] = min(value, 4)
        elif most is not None:
            small[key] = min(value, most)
        elif _WIDTHS.match(key):
            small[key] = _divided(value, divisor)
    if small.get("qk_head_dim") and small.get("qk_rope_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if isinstance(small.get("head_dim"), int) and small.get("qk_rope_head_dim") and wide > _WIDTH:
        small["head_dim"] = small["qk_rope_head_dim"]


def _divided(width: int, divisor: int) -> int:
    return width if divisor == 1 or width < 8 else max(16, width // divisor // 8 * 8)


def _narrow_positions(rope: dict[str, Any]) -> dict[str, Any]:
    """Parameters of rotary positions for narrow heads; those of each kind of layer, where they are told apart."""
    narrow: dict[str, Any] = {}
    for key, value in rope.items():
        narrow[key] = value
        if isinstance(value, dict):
            narrow[key] = _narrow_positions(value)
        elif key in ("short_factor", "long_factor"):
            rotary = int(_HEAD_WIDTH * float(rope.get("partial_rotary_factor") or 1))
            narrow[key] = value[: rotary // 2]
        elif key == "mrope_section" and sum(value) > _HEAD_WIDTH // 2:
            rotary = int(_HEAD_WIDTH * float(rope.get("partial_rotary_factor") or 1)) // 2
            parts = [max(1, rotary * part // sum(value)) if part else 0 for part in value]
            narrow[key] = [rotary - sum(parts[1:]), *parts[1:]]
    return narrow


def _fold_ids(settings: dict[str, Any]) -> None:
    """Ids of special tokens into the small vocabulary: what a text ends with below the plain ids, media above them,
    each its own."""
    above = iter(range(VOCABULARY - 1, LAST_PLAIN_ID, -1))
    below = iter(range(1, FIRST_PLAIN_ID))
    seen: dict[int, int] = {}

    def fold(ids: Callable[[], int]) -> Callable[[int], int]:
        return lambda value: value if value < FIRST_PLAIN_ID else seen.setdefault(value, ids())

    for key, value in settings.items():
        if "vocab_size" in key and isinstance(value, int):
            settings[key] = min(value, VOCABULARY)
        elif _IDS.search(key) and value is not None and not isinstance(value, bool):
            is_of_text = re.match(r"(pad|bos|eos|sep|cls|eod|unk|decoder)", key) is not None
            folded = fold(lambda: next(below)) if is_of_text else fold(lambda: next(above))
            settings[key] = [folded(each) for each in value] if isinstance(value, list) else folded(value)

"""Shrinking: derive the config of a small language model (few blocks, narrow) that has all features of a large one.

Kinds of blocks, windows, caps and kinds of positions are preserved. A multiplier of 1 would hide errors in its use, so
it becomes another number. Token ids are mapped into the small vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from transformers import PreTrainedConfig

from dilatant.models.core.structure import DEPTH_KEYS

_VOCABULARY, _WIDTH, _HEAD_WIDTH, _MULTIPLIER = 128, 64, 16, 1.25
_AT_MOST = {
    r"(key_value|kv|key)_heads$|^num_query_groups$": 2,
    r"^(n_heads?|.*num_(attention_|q_)?heads|.*attention_heads|linear_num_value_heads)$": 4,
    r"(head_dim|^d_head|_head_size|^kv_channels|lora_rank|^rotary_dim|^qk_.*_dim)$": _HEAD_WIDTH,
    r"(num_experts|num_local_experts|n_routed_experts)$": 4,
    r"(experts_per_tok(en)?|moe_k|moe_topk)$": 2,
    r"^(n_group|topk_group|num_expert_group)$": 1,
    r"^(mamba_)?n_?groups$": 2,
    r"^(sliding_window(_size)?|attention_chunk_size|attention_window_size|window_size|.*_window_len)$": 4,
    r"^(local|lsh)_attn_chunk_length$": 4,
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len)$": 1024,
    r"vocab(_size|$)": _VOCABULARY,
}
"""Limits of settings in a small model, by name pattern. A window is shorter than a sample."""
_WIDTHS = re.compile(
    r"^(.*hidden_size.*|.*intermediate_size.*|d_model|n_embd|n_inner|.*ffn_dim|.*ffn_hidden_size|d_inner|dim_ff|dff"
    r"|word_embed_proj_dim|embedding_size|embedding_dim|emb_dim|axial_pos_embds_dim|laurel_rank|lru_width"
    r"|.*_(in|out|input|output)_(dim|size))$"
)
_STATE_SPACES = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
    ("expand", "num_heads", "head_dim"),
)
"""Settings of Mamba 2's blocks: the model's width times the first is the product of the other two."""
_DEPTH = re.compile(rf"^({'|'.join(DEPTH_KEYS)}|n_layers|num_blocks)$")
_OF_BLOCKS = re.compile(
    r"layer_types|layers_block_type|block_types|attention_layers|attn_layers|indexer_types|_per_layer|sparsity|^no_rope_layers$|^intermediate_size$"
)
_SECTIONS = re.compile(r"^n_\w+_layers$")
_NUMBERS_OF_BLOCKS = re.compile(r"(_layers|_layer_ids|_idxs)$")
_BORDERS = re.compile(r"^(max_window_layers|moe_layer_(start|end)_index|loop_layer_index_(start|end))$")
_IDS = re.compile(r"(token_id|token_index|patch_id)s?$|^vocab_offset$")
_MULTIPLIERS = re.compile(r"(multiplier|_scale|_scaling|scaling_factor)$|^scale_(emb|depth)$")


def shrink(config: Any, has_encoders: bool) -> dict[str, Any]:
    """Return the settings of a small model like that of `config`, as `type(config).from_dict` takes them. Without
    `has_encoders` only the text model of a multimodal model is shrunk."""
    settings, parts = _settings_and_parts(config)
    texts = [key for key in parts if getattr(config, key) is config.get_text_config()]
    # All parts are divided by one number, so that widths that must be equal stay equal.
    width = _width(settings[texts[0]] if texts else settings)
    divisor = (width or max((_width(settings[key]) for key in parts), default=0)) // _WIDTH or 1
    for key in parts if has_encoders else texts:
        settings[key] = _shrink_part(settings[key], divisor)
    if texts:
        _fold_ids(settings)
        for key in () if has_encoders else parts:
            same = {name: _width(settings[texts[0]]) for name in _OF_TEXT if settings[key].get(name) == width}
            settings[key] = {**settings[key], **same}
    else:
        settings = _shrink_part(settings, divisor)
    small = settings[texts[0]] if texts else settings
    for key, value in small.items():
        if _MULTIPLIERS.search(key) and value == 1 and not isinstance(value, bool):
            small[key] = _MULTIPLIER
    return settings


def shrink_widths(config: Any, spatial: bool) -> dict[str, Any]:
    """Return the settings of a narrow multimodal model, whose encoders keep all their blocks and their windows; its
    text model is shortened, too. spatial: True for positions in time, height and width."""
    settings, parts = _settings_and_parts(config)
    # The settings of an encoder may contain the text model's width, and the reverse.
    all_parts = [part for key in parts for part in (settings[key], *_parts_in(settings[key]).values())]
    widths = {wide: _divided(wide, wide // _WIDTH or 1) for part in all_parts if (wide := _width_of(part))}
    for key in parts:
        part = dict(settings[key])
        rope = part.get("rope_parameters")
        if getattr(config, key) is config.get_text_config():
            if spatial and isinstance(rope, dict):
                part["rope_parameters"] = _with_sections(rope)  # narrowed below
            narrow = _shrink_part(part, _width_of(part) // _WIDTH or 1)
            settings[key] = _equal_widths(part, narrow, widths)
        else:
            settings[key] = _narrow_encoder(part, widths)
    for name, wide in settings.items():
        # A projector may take the features of as many patches as are merged.
        is_width = isinstance(wide, int) and (_WIDTHS.match(name) or name in _OF_ENCODERS)
        for merged in (1, 4) if is_width else ():
            if wide % merged == 0 and wide // merged in widths:
                settings[name] = merged * widths[wide // merged]
                break
    _fold_ids(settings)
    return settings


def _narrow_encoder(part: Mapping[str, Any], widths: Mapping[int, int]) -> dict[str, Any]:
    """Narrow the settings of an encoder and of the encoders inside it; no setting changes the widths of timm's."""
    if "architecture" in part:
        return dict(part)
    narrow = dict(part)
    _narrow(narrow, _width_of(part) // _WIDTH or 1)
    narrow |= {name: part[name] for name in ("window_size",) if name in part}
    narrow |= {name: _narrow_encoder(each, widths) for name, each in _parts_in(part).items()}
    _fold_ids(narrow)
    return _equal_widths(part, narrow, widths)


def _equal_widths(part: Mapping[str, Any], narrow: dict[str, Any], widths: Mapping[int, int]) -> dict[str, Any]:
    """Give the same narrow width to all settings of the same width."""
    for name, wide in part.items():
        if isinstance(wide, int) and wide in widths and _WIDTHS.match(name):
            narrow[name] = widths[wide]
        elif name in _OF_ENCODERS and isinstance(wide, int) and narrow[name] == wide:
            narrow[name] = widths.get(wide) or _divided(wide, _width_of(part) // _WIDTH or 1)
        elif name.endswith("_channels") and isinstance(wide, list | tuple):
            narrow[name] = [widths.get(each, each) for each in wide]
    return narrow


def _parts_in(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the nested settings of encoders inside an encoder."""
    return {
        name: each
        for name, each in settings.items()
        if isinstance(each, dict) and name.endswith("_config") and _width(each)
    }


def _width_of(part: Mapping[str, Any]) -> int:
    return part.get("embed_dim") or _width(part)


def _with_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sections of positions in time, height and width, also to the parameters per kind of layer."""
    inner = {name: _with_sections(each) for name, each in rope.items() if isinstance(each, dict)}
    return {**rope, **inner} if inner else {"mrope_section": [_HEAD_WIDTH] * 3, **rope}


def narrow_json(config: Any, spatial: bool) -> str:
    """Return the settings of `shrink_widths` and the model type, as JSON."""
    return json.dumps({**shrink_widths(config, spatial), "model_type": config.model_type}, default=str)


_OF_TEXT = ("text_hidden_size", "adapter_out_dim")
"""Settings of encoders that must be the text model's width, also where the encoder is not built."""
_OF_ENCODERS = ("embed_dim", "mlp_dim", "projection_dim", "hidden_dim", "output_dim")
"""Names of further widths in the settings of encoders."""


def _settings_and_parts(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a model without its data types, and the keys of its parts' settings."""
    settings = PreTrainedConfig.to_dict(config)  # a family's own may have the layout of released files
    for key in ("quantization_config", "dtype", "torch_dtype"):
        settings.pop(key, None)
    return settings, [key for key in config.sub_configs if isinstance(settings.get(key), dict)]


def special_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yield the token ids in settings and in their nested parts."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from special_ids(value)
        elif isinstance(key, str) and _IDS.search(key):  # non-string keys are label numbers
            yield from (each for each in (value if isinstance(value, list) else [value]) if each is not None)


def _shrink_part(settings: Mapping[str, Any], divisor: int) -> dict[str, Any]:
    small = dict(settings)
    depth = next((value for key, value in small.items() if _DEPTH.match(key) and isinstance(value, int)), 0)
    if depth:
        _cut_blocks(small, depth, divisor)
    _narrow(small, divisor)
    _fold_ids(small)
    return small


def _width(settings: Mapping[str, Any]) -> int:
    keys = ("hidden_size", "d_model", "n_embd", "emb_dim")
    return next((settings[key] for key in keys if isinstance(settings.get(key), int)), 0)


def _cut_blocks(small: dict[str, Any], depth: int, divisor: int) -> None:
    """Keep the first blocks, two of each kind (they may share weights) and one of each section, in all per-block
    settings."""
    lists = [
        key
        for key, value in small.items()
        if isinstance(value, list | tuple) and len(value) == depth and _OF_BLOCKS.search(key)
    ]
    kept = list(range(min(depth, 3)))
    for key in lists:
        kinds = [repr(kind) for kind in small[key]]
        if len(set(kinds)) < 8:
            kept += [place for place, kind in enumerate(kinds) if kinds[:place].count(kind) < 2]
    sections = {key: value for key, value in small.items() if _SECTIONS.match(key) and isinstance(value, int)}
    is_whole = sum(sections.values()) == depth
    begins = dict(zip(sections, accumulate([0, *sections.values()]), strict=False)) if is_whole else {}
    kept += begins.values()
    shared = min(int(small.get("num_kv_shared_layers") or 0), 2)
    kept = sorted({*kept, *range(depth - shared, depth)})
    for key, value in small.items():
        if key in lists:
            small[key] = [value[index] for index in kept]
        elif key in begins:
            small[key] = sum(0 <= index - begins[key] < value for index in kept)
        elif _DEPTH.match(key) and value == depth:
            small[key] = len(kept)
        elif _NUMBERS_OF_BLOCKS.search(key) and isinstance(value, list):
            small[key] = [kept.index(index) for index in value if index in kept]
        elif key == "per_layer_config" and isinstance(value, dict):
            small[key] = {
                kept.index(int(index)): _differences(small, own, divisor)
                for index, own in value.items()
                if int(index) in kept
            }
        elif _BORDERS.match(key) and isinstance(value, int):
            small[key] = sum(index < value for index in kept)
    if shared:
        small["num_kv_shared_layers"] = shared


def _differences(whole: dict[str, Any], own: Mapping[str, Any], divisor: int) -> dict[str, Any]:
    """Return the small settings of a block whose large ones differ from those of the `whole` model by `own`."""
    others, block = dict(whole), {**whole, **own}
    _narrow(others, divisor)
    _narrow(block, divisor)
    return {key: value for key, value in block.items() if key in own or value != others[key]}


def _narrow(small: dict[str, Any], divisor: int) -> None:
    """Reduce the number and the width of heads, and divide all other widths by `divisor`."""
    heads = next((small[key] for key in ("num_attention_heads", "n_head", "n_heads") if small.get(key)), None)
    positional = small.get("qk_rope_head_dim")
    all_of_head = positional and small.get("head_dim") == small.get("qk_nope_head_dim", 0) + positional
    for key, value in small.items():
        if isinstance(value, dict) and key.startswith("rope"):
            small[key] = _narrow_positions(value)
        elif isinstance(value, dict) and key in ("attn_config", "ffn_config"):
            _narrow(value, divisor)
        elif isinstance(value, list | tuple) and _WIDTHS.match(key):
            small[key] = [_divided(each, divisor) for each in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            continue
        most = next((most for pattern, most in _AT_MOST.items() if re.search(pattern, key)), None)
        if most == 2 and value == heads:  # every head has its own keys
            most = 4
        if divisor == 1 and "heads" in key:  # the head width may follow from their number
            continue
        if most is not None:
            small[key] = min(value, most)
        elif _WIDTHS.match(key):
            small[key] = _divided(value, divisor)
    for expand, number, width in _STATE_SPACES:
        if small.get(expand) and small.get(number) and not small.get("mamba_d_ssm"):
            small[number] = min(small[number], 4)
            small[width] = small[expand] * small["hidden_size"] // small[number]
    if positional:
        whole = small.get("qk_nope_head_dim", 0) + small["qk_rope_head_dim"]
        if small.get("qk_head_dim"):
            small["qk_head_dim"] = whole
        if small.get("head_dim"):
            small["head_dim"] = whole if all_of_head else small["qk_rope_head_dim"]


def _divided(width: int, divisor: int) -> int:
    return width if divisor == 1 or width < 8 else max(16, width // divisor // 8 * 8)


def _narrow_positions(rope: dict[str, Any]) -> dict[str, Any]:
    """Adapt the rotary parameters to narrow heads, also those per kind of layer."""
    pairs = int(_HEAD_WIDTH * float(rope.get("partial_rotary_factor") or 1)) // 2
    narrow = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):
            narrow[key] = _narrow_positions(value)
        elif key in ("short_factor", "long_factor"):
            narrow[key] = value[:pairs]
        elif key == "mrope_section" and sum(value) > pairs:
            parts = [max(1, pairs * part // sum(value)) if part else 0 for part in value]
            narrow[key] = [*parts[:-1], pairs - sum(parts[:-1])]
    return narrow


def _fold_ids(settings: dict[str, Any]) -> None:
    """Map ids beyond the small vocabulary to its last ids, one to one."""
    seen: dict[int, int] = {}
    for key, value in settings.items():
        if _IDS.search(key) and value is not None:
            ids = value if isinstance(value, list) else [value]
            ids = [each if each < _VOCABULARY else seen.setdefault(each, _VOCABULARY - 1 - len(seen)) for each in ids]
            settings[key] = ids if isinstance(value, list) else ids[0]

"""What a row of measured runs says, in the words of its source: GPU, node and network, number formats, sharding,
recomputation, feed-forward. A row that leaves a fact out has what is usual."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dilatant.config.memory_modes import Recompute, Shard
from dilatant.cost.memory import Zero

GPUS = {
    "GB300": "GB300", "GB200": "GB200", "GH200": "GH200", "B300": "B300", "B200": "B200",
    "H200": "H200", "H20": "H20", "H100": "H100", "H800": "H800", "A800": "A800",
    "A100[-_ ]*(?:SXM4?[-_ ]*)?40": "A100 40GB", "A100": "A100",
    "MI300": "MI300X", "MI325": "MI325X", "MI355": "MI355X", "V100": "V100", "(?:RTX)?[-_ ]*3090": "RTX 3090",
    "(?:RTX)?[-_ ]*4090": "RTX 4090", "(?:RTX)?[-_ ]*5090": "RTX 5090", r"A40\b": "A40", "L40S": "L40S", r"L4\b": "L4",
    r"T4\b": "T4",
}  # fmt: skip
"""Patterns of names → entry of the hardware file; the first that matches counts."""

NUMBERS = ("gpus", "tp", "pp", "vpp", "cp", "dp", "ep", "mbs", "gbs")
OF_MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "parameters", "head_dim")
TEXTS = ("source_id", "source", "hardware", "precision", "zero", "notes", "quality", "id")
DEFAULTS: Mapping[str, Any] = {
    "source": "", "quality": "B", "multimodal": False, "hardware": "", "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1,
    "precision": "bf16", "recompute": "none",
}  # fmt: skip
"""Facts of a row that leaves them out."""


def completed(row: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """Return a row with all keys, of which those that it leaves out have a default or None. The data-parallel degree
    follows from the others, and seconds from a rate, where they are absent."""
    told = {**row, **{key: _whole(row.get(key)) for key in NUMBERS}}
    told |= {key: None if row.get(key) in (None, "") else str(row[key]) for key in TEXTS}
    own = {**dict.fromkeys(NUMBERS + TEXTS), **DEFAULTS, **{key: one for key, one in told.items() if one is not None}}
    own["source_id"] = own["source_id"] or own["source"].split(" ")[0] or "unknown"
    own["id"] = own["id"] or f"{own['source_id']}-{number:04d}"
    own["measured"] = own.get("measured") if isinstance(own.get("measured"), Mapping) else {}
    model = row["model"] if isinstance(row.get("model"), Mapping) else {}
    own["model"] = {**model, **{key: _whole(model.get(key)) for key in OF_MODEL}}
    own["model"]["name"] = str(model.get("name") or own["source_id"])
    if own["dp"] is None and own["gpus"]:
        own["dp"] = own["gpus"] // (own["tp"] * own["pp"] * own["cp"])
    if not own.get("derived_step_seconds"):
        own["derived_step_seconds"] = _seconds(own)
    return own


def _whole(value: Any) -> int | None:
    """Return a positive whole number that may be written as a text ("1,024"), None for anything else."""
    try:
        return max(0, int(float(str(value).replace(",", "")))) or None
    except (ValueError, OverflowError):
        return None


def replicas(row: Mapping[str, Any]) -> int:
    """Return the data-parallel degree. Raises ValueError if the row's degrees contradict its number of devices; a model
    with experts may tell the replicas of these."""
    ranks, rest = divmod(row["gpus"], row["tp"] * row["pp"] * row["cp"])
    if rest or (ranks != row["dp"] and not row["model"].get("moe")):
        raise ValueError("its degrees contradict its number of devices")
    return int(ranks)


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step by the milliseconds, tokens or samples a second that a row's source prints."""
    measured, tokens = row["measured"], row["model"]["seq"]

    def figure(*names: str) -> float:
        return next((float(measured[name]) for name in names if measured.get(name)), 0.0)

    if milliseconds := figure("step_ms", "ms_per_step", "iteration_ms"):
        return milliseconds / 1e3
    each = figure("tokens_per_s_per_gpu", "tokens_per_second_per_gpu") * (row["gpus"] or 0)
    rate = (figure("tokens_per_s", "tokens_per_second") or each) / (tokens or 1)
    samples = figure("samples_per_s", "samples_per_second") or rate * (tokens is not None)
    return row["gbs"] / samples if samples and row["gbs"] else None


def gpu_of(text: str) -> str:
    """Return the entry of the hardware file of a GPU. Raises ValueError for an unknown one."""
    # What precedes a name may be a number of devices ("8xH100"), but no other word.
    for pattern, name in GPUS.items():
        if found := re.search(rf"(?<![a-wyz0-9]){pattern}", text, re.IGNORECASE):
            # A card on PCIe has another clock, and no links beside it.
            if re.match(r"[-_ ]*(?:\d+ ?GB?)?[-_ ]*PCI", text[found.end() :], re.IGNORECASE) and name != "L40S":
                raise ValueError(f"{name} on PCIe is not in the hardware file")
            return name
    raise ValueError("its GPU is not in the hardware file" if text else "incomplete")


def node_of(text: str) -> int:
    """Return the GPUs of a node, eight if a row does not say."""
    kind = r"(?:NVIDIA |AMD )?(?:GPUs?|[A-Z]+\d+[A-Z]*)?(?: \(?\d+ ?GB\)?)?"
    found = re.search(rf"\b(\d+) ?x? ?{kind} ?(?:a|per|/) ?node", text)
    return int(found[1]) if found else 8


def network_of(text: str, node: int) -> float | None:
    """Return the bytes per second of all ports of a node, if a row says."""
    gigabits = r"(\d+) ?G(?:b/s|bps|bit/s)"
    if found := re.search(rf"(\d+) ?x (?:[A-Za-z][A-Za-z-]* )?{gigabits}", text):
        return int(found[1]) * int(found[2]) * 1e9 / 8
    if found := re.search(rf"{gigabits}(?: \w+)? (?:a|per) (node|GPU)", text):
        return int(found[1]) * (node if found[2] == "GPU" else 1) * 1e9 / 8
    return None


def low_precision(text: str) -> str | None:
    """Return the dtype of products in fewer than 16 bits, None if they are in 16. Raises ValueError for 32."""
    text = text.lower()
    if found := re.search("(?:fp|float)([48])|e[45]m[23]", text):
        return f"float{found[1] or 8}"
    if re.search("fp32|float32|tf32", text) and not re.search("16|half|amp|mixed", text):
        raise ValueError("products in fp32 are not modelled")
    return None


def is_half(text: str) -> bool:
    """Return True if weights and gradients are fp16."""
    return re.match(r"(fp16|float16|half)\b", text.lower()) is not None


def zero_of(text: str | None) -> tuple[Zero, Shard]:
    """Return where optimizer state is sharded, and what is sharded besides."""
    words = str(text).lower()
    found = re.search(r"(?:zero|stage)[-_ ]*(?:stage|dp)?[-_ ]*(\d)", words)
    stage = int(found[1]) if found else None
    if "shard_grad_op" in words or stage == 2:
        shard: Shard = "gradients"
    else:
        shard = "weights" if "fsdp" in words or "full_shard" in words or stage == 3 else "none"
    if "groups" in words or "hybrid" in words:
        return "node", shard
    whole = stage == 0 or (shard == "none" and not stage and re.search(r"\b(no|none|ddp)\b", words) and text)
    return "none" if whole else "all", shard


def recompute_of(value: Any) -> Recompute:
    """Return which activations are recomputed: those of blocks, or all but attention's and every second product's, as
    torchtitan's "op"; what is called selective elsewhere recomputes no product."""
    words = "full" if value is True else str(value or "").lower()
    if re.match("full|all|every|uniform|block|yes|true|on$|(gradient|activation)[-_ ]check", words):
        return "none" if re.search(r"\b(none|false|off|disabled)\b", words) else "block"
    return "block_keep_attention" if re.search(r"\bop\b", words) else "none"


PLAIN = re.compile("GPT|MPT|BLOOM|OPT|Falcon|Pythia|NeoX|StarCoder|MT-NLG|Nemotron-?[34]|Nemotron-(8|15|22|340)B")
"""Names of models whose feed-forward has two products: the second one's input is not a product of two."""


def is_gated(row: Mapping[str, Any]) -> bool:
    """Return True if the feed-forward multiplies by a gate: by what the row says of it, by its weights, or by name."""
    model = row["model"]
    if isinstance(model.get("gated"), bool):
        return bool(model["gated"])
    told = " ".join(str(model.get(key) or "") for key in ("activation", "mlp", "note"))
    if found := re.search(r"not gated|\w*glu\b|silu|gelu|relu", told, re.IGNORECASE):
        return found[0].lower().endswith("glu") or found[0].lower() == "silu"
    if (weights := model.get("parameters")) and model.get("ffn") and not model.get("moe"):
        hidden, heads = model["hidden"], model.get("heads") or 1
        attention = 2 * hidden**2 * (1 + (model.get("kv_heads") or heads) / heads)
        tables = hidden * model["vocab"] * (1 if model.get("tied") else 2)
        one = model["layers"] * hidden * model["ffn"]
        return bool(weights > model["layers"] * attention + tables + 2.5 * one)
    return not PLAIN.search(model["name"])

"""Configs of LLaMA-Factory and ms-swift, translated as far as their keys mean the same here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dilatant.config.config import place_of
from dilatant.config.errors import UserError
from dilatant.config.files.own_files import read_text
from dilatant.config.files.yaml_text import read_yaml
from dilatant.config.others_keys import CALLED_HERE
from dilatant.config.start import source_of

_FROZEN = {
    "language": (False, "freeze_language_model", "freeze_llm"),
    "vision.encoder": (True, "freeze_vision_tower", "freeze_vit"),
    "vision.projector": (True, "freeze_multi_modal_projector", "freeze_aligner"),
}
"""Part of a model → whether both tools freeze it if nothing is said, and their keys."""
_OTHER_VALUES = ("evaluation.metrics", "train.resume", "train.optimizer.groups", "model.attn_implementation",
                 "data.chat_template", "train.schedule.kind")  # fmt: skip
"""Keys here whose values are not those of the keys that `CALLED_HERE` answers."""
_ZEROS = {"seed": 0, "train.optimizer.weight_decay": 0.0, "train.max_grad_norm": None}
"""Keys here for which zero is a value, and what it is here; for others it means that nothing was chosen."""
_SAID = frozenset({"formatting", "ranking", "tags", "ms_hub_url", "om_hub_url", "file_sha1"})
"""Keys of `dataset_info.json` for what files show by themselves, or for other places of the same data."""
_PAIRS = {"sigmoid": "dpo", "dpo": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo", "kto": "kto"}
"""Their losses of pairs of answers, and of marked ones → the method here."""
_OF_PAIRS = {
    "beta": ("pref_beta", "beta"),
    "gamma": ("simpo_gamma",),
    "label_smoothing": ("dpo_label_smoothing", "label_smoothing"),
    "sft_weight": ("pref_ftx",),
    "desirable_weight": ("kto_chosen_weight", "desirable_weight"),
    "undesirable_weight": ("kto_rejected_weight", "undesirable_weight"),
}
_WORDS = {
    "lr_scheduler_type": {"cosine": "train.schedule.kind=cosine", "linear": "train.schedule.kind=linear",
        "constant": "train.schedule.kind=constant", "constant_with_warmup": "train.schedule.kind=constant"},
    "bf16": {"True": "train.precision=bf16"},
    "pure_bf16": {"True": "train.precision=bf16"},
    "torch_dtype": {"bfloat16": "train.precision=bf16", "float32": "train.precision=fp32"},
    "optim": {"adamw_torch": "", "adamw_torch_fused": "", "adamw_8bit": "train.optimizer.name=adamw_8bit",
        "adamw_bnb_8bit": "train.optimizer.name=adamw_8bit"},
    "gradient_checkpointing": {"True": "train.recompute=block", "False": "train.recompute=none"},
    "disable_gradient_checkpointing": {"True": "train.recompute=none", "False": "train.recompute=block"},
    "quantization_bit": {"4": "model.lora.load_in_4bit=true"},
    "quant_bits": {"4": "model.lora.load_in_4bit=true"},
    "train_on_prompt": {"True": "data.train_on=all", "False": ""},
    "stage": {"sft": "", "pt": "data.train_on=all"},
    "truncation_strategy": {"right": "data.truncation=right", "delete": "data.on_error=skip"},
}  # fmt: skip
"""Their keys → value → what to set here; other values are left out."""


def read_others(text: str) -> dict[str, Any]:
    """Return the keys of a YAML file, or of a command line with the variables before it. Raises ValueError."""
    tree = _plain(text)
    words = [] if isinstance(tree, dict) else shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    found: dict[str, Any] = tree if isinstance(tree, dict) else {}
    key = ""
    for word in words:
        if word in ("pt", "rlhf") and not key:
            found["stage"] = word
        name, equals, value = word.partition("=")
        if word.startswith("--") or (equals and name.isupper() and not key):
            key = name.lstrip("-").replace("-", "_") if word.startswith("--") else ""
            found[key or name] = value if equals else True
        elif key:
            found[key] = word if found[key] is True else [*_listed(found[key]), word]
    return {key: _plain(value) for key, value in found.items() if value is not None}


def convert(theirs: Mapping[str, Any], devices: int) -> tuple[dict[str, Any], list[str]]:
    """Return the tree of a config, and a line for each key that it leaves out. Paths are those of the working folder.

    Raises UserError for anything but supervised training and pairs of answers, and OSError or ValueError for a damaged
    `dataset_info.json`.
    """
    left, tree = dict(theirs), dict[str, Any]()
    stage = left.get("stage", "sft")
    if not left or stage not in ("sft", "pt", "dpo", "kto", "rlhf"):
        raise UserError(
            "only configs and command lines of supervised training (sft, pt) and of preferences (dpo, kto, rlhf) are "
            "converted"
        )

    def put(place: str, value: Any) -> None:
        *parents, last = place.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value

    def take(*names: str, default: Any = None) -> Any:
        return next((left.pop(name) for name in names if name in left), default)

    if stage in ("dpo", "kto", "rlhf"):
        said = [left.pop(name, None) for name in ("stage", "loss_type", "pref_loss", "rlhf_type")]
        loss = "kto" if stage == "kto" else next(filter(None, said[1:]), "dpo")
        if loss not in _PAIRS:
            raise UserError(f"{loss!r} is no loss of pairs here; {', '.join(_PAIRS)} are converted")
        # LLaMA-Factory's own values where they are others than those here
        defaults = {"beta": 0.1, "gamma": 0.5} if (stage, loss) == ("dpo", "simpo") else {}
        values = {key: take(*names, default=defaults.get(key)) for key, names in _OF_PAIRS.items()}
        kept = {key: value for key, value in values.items() if value}  # theirs have zeros for "not"
        put("train.preferences", {"method": _PAIRS[loss], **kept})
    put("model.id", take("model_name_or_path", "model", "model_id_or_path"))
    kind = take("finetuning_type", "train_type", "tuner_type", default="lora")
    if kind not in ("lora", "full"):
        raise UserError(f"{kind!r} is no kind of tuning here; 'lora' and 'full' are converted")
    is_lora = kind == "lora"
    free = [part for part, (default, *names) in _FROZEN.items() if take(*names, default=default) is not True]
    targets = take("lora_target", "target_modules", default="all")
    if is_lora:
        put("model.lora", {} if free == ["language"] else {"units": free})
        if targets not in ("all", "all-linear"):
            put("model.lora.target_modules", _listed(targets))
    elif frozen := [part for part in _FROZEN if part not in free]:
        put("model.freeze", frozen)
    each, times = take("per_device_train_batch_size"), take("gradient_accumulation_steps")
    if each or times:
        put("train.global_batch_size", int(each or 1) * int(times or 1) * int(take("NPROC_PER_NODE") or devices))
    data, unread = Path(str(take("dataset_dir", default="data"))), list[str]()
    for place, *names in (("data.train", "dataset"), ("data.eval", "eval_dataset", "val_dataset")):
        if sources := [_source(name, data) for name in _listed(take(*names, default=[]))]:
            put(place, [source for source, _ in sources])
            unread += [line for _, lines in sources for line in lines]
    for limit in ("min_pixels", "max_pixels", "video_max_pixels"):
        if (pixels := take(f"image_{limit}", limit, limit.upper())) is not None:
            put(f"model.processor.{limit}", pixels)
    betas = take("adam_beta1"), take("adam_beta2")
    if any(betas):
        put("train.optimizer.betas", [betas[0] or 0.9, betas[1] or 0.999])
    ratio = take("loraplus_lr_ratio", "lorap_lr_ratio")
    rates = {"vision.encoder": take("vit_lr"), "vision.projector": take("aligner_lr")}
    rates["*.lora_B.*"] = ratio and float(ratio) * float(left.get("learning_rate", 1e-4))
    if groups := {name: {"learning_rate": rate} for name, rate in rates.items() if rate}:
        put("train.optimizer.groups", groups)
    for name, meanings in _WORDS.items():
        if (meaning := meanings.get(str(left.get(name)))) is not None:
            del left[name]
            if meaning:
                put(*map(_plain, meaning.split("=")))
    for key in [*left]:
        answer = re.fullmatch(r"write '([a-z_\d.]+)'", CALLED_HERE.get(key, ""))
        here = (answer[1] if answer else place_of(key)) or ""
        is_same = here and here not in _OTHER_VALUES and (is_lora or not here.startswith("model.lora"))
        if is_same and ((value := left.pop(key)) not in (0, -1) or here in _ZEROS):  # theirs for "not"
            put(here, value if value or here not in _ZEROS else _ZEROS[here])
    left_out = [*unread] + [f"{key}: {value!r}: {CALLED_HERE.get(key, 'no key here')}" for key, value in left.items()]
    if "model_name_or_path" in theirs and not (data / "dataset_info.json").is_file():
        left_out.append(f"dataset: {data / 'dataset_info.json'} is not there, so names are taken for ids of the hub")
    return tree, left_out


def _source(name: str, data: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a data source, and a line for each key that it leaves out. name: a file, an id (in ms-swift `HUB::ID` and
    `ID:SUBSET`), both also with `#` and a number of samples, or a name in `dataset_info.json`."""
    name, _, limit = str(name).partition("#")
    table = data / "dataset_info.json"
    known = dict((json.loads(read_text(table)) if table.is_file() else {}).get(name, {}))
    path, hub, number = (known.pop(key, None) for key in ("file_name", "hf_hub_url", "num_samples"))
    if path is not None:
        found: dict[str, Any] = {"path": str(data / path)}
    else:
        found = {"id": hub} if hub is not None else {**source_of(name.removeprefix("HF::"), Path())}
        if ":" in found.get("id", ""):
            found["id"], _, found["subset"] = found["id"].partition(":")
    ours = {"prompt": "question", "query": "input", "response": "answer"}
    if columns := {ours.get(theirs, theirs): own for theirs, own in known.pop("columns", {}).items()}:
        found["columns"] = columns
    found |= {key: known.pop(key) for key in ("subset", "split") if known.get(key)}
    if limit or number:
        found["limit"] = int(limit or number)
    return found, [f"{name}.{key} of {table}: {known[key]!r}: no key here" for key in known if key not in _SAID]


def _listed(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip() and part is not True]


def _plain(value: Any) -> Any:
    """Return the value of a text, which may be a number in exponent notation or what YAML reads."""
    if not isinstance(value, str):
        return value
    with suppress(yaml.YAMLError):
        return float(value) if re.fullmatch(r"[+-]?\d[\d.]*[eE][+-]?\d+", value) else read_yaml(value)
    return value

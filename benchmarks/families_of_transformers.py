"""Check which multimodal architectures of transformers train here, and how: a table of docs/families.md.

    python benchmarks/families_of_transformers.py [FAMILY ...]   checks them (default: all), a process each
    python benchmarks/families_of_transformers.py --write        writes the table of all results into the page

Configs are the families' defaults with small images and few blocks in the encoders, and an id for every kind of
placeholder that has none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
BEGIN = "## Other multimodal architectures of transformers\n"
RESULTS = Path(__file__).parent / "results" / "families_of_transformers.json"
SECONDS = 120
"""Time for one family on a CPU."""
DEPTH_KEYS, BLOCKS = ("num_hidden_layers", "encoder_layers", "depth"), 4


CONSISTENT: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14}
    },
    "gemma3": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "shieldgemma2": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "idefics3": {"vision_config": {"image_size": 128, "patch_size": 16}},
    "smolvlm": {"vision_config": {"image_size": 128, "patch_size": 16}},
    "qianfan_ocr": {"vision_config": {"image_size": 224, "patch_size": 14}},
    "gemma4": {"vision_config": {}},
}
"""Settings where a family's defaults contradict each other; the configs of released models do not."""


def architectures() -> list[str]:
    """Return the model types that transformers lists as multimodal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def config_of(family: str) -> Any:
    """Return the family's default config, with small images if its encoder takes one size."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**CONSISTENT.get(family, {}))
    vision = getattr(config, "vision_config", None)
    patch, side = getattr(vision, "patch_size", None), getattr(vision, "image_size", None)
    if isinstance(side, int) and isinstance(patch, int) and side >= 32 * patch:
        vision.image_size = 16 * patch
    if not isinstance(getattr(config, "vision_feature_layer", None), list):
        for encoder in (vision, getattr(config, "audio_config", None)):
            _shorten(encoder)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    for number, (key, value) in enumerate(vars(config).items()):
        if re.fullmatch(r"(image|video|audio)_token_(id|index)", key) and value is None and vocabulary:
            setattr(config, key, vocabulary - 1 - number)
    return config


def _shorten(encoder: Any) -> None:
    """Keep four blocks of an encoder, unless its settings list some of them."""
    if encoder is None or any(isinstance(value, list | tuple) for value in vars(encoder).values()):
        return
    for key in DEPTH_KEYS:
        if isinstance(depth := getattr(encoder, key, None), int):
            setattr(encoder, key, min(depth, BLOCKS))


def check(family: str) -> dict[str, Any]:
    """Check one family in this process."""
    import torch

    from dilatant.config.errors import one_line
    from dilatant.hf.check_model import ModelCheck, check_config

    torch.set_num_threads(1)
    try:
        config = config_of(family)
    except Exception as error:
        return ModelCheck(
            family, {}, 0, {1: f"its default config does not build: {one_line(error)}"}
        ).to_json()
    return asdict(check_config(config, family))


def check_all(families: list[str]) -> None:
    """Check families one after the other, each in a process of its own, and store each result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dilatant.hf.check_model"])
    for family in families:
        with context.Pool(1) as pool:
            try:
                result = pool.apply_async(check, (family,)).get(SECONDS)
            except multiprocessing.TimeoutError:
                reason = f"its check takes more than {SECONDS} s on one core"
                result = {"family": family, "rung": 0, "refusals": {1: reason}, "found": {}, "proven": {}}
        results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps(dict(sorted({**results, family: result}.items())), indent=1) + "\n")
        print(family, result["rung"], result["refusals"], flush=True)


def markdown() -> str:
    """Return the table of the stored results."""
    results = json.loads(RESULTS.read_text())
    counts = [sum(each["rung"] == rung for each in results.values()) for rung in (3, 2, 1, 0)]
    lines = [
        BEGIN,
        "Checked on a small copy of the family's default config by the proof of `dilatant check-model`",
        "([rungs](models.md#before-you-fetch-weights)), without torchvision, torchaudio and timm. Made by",
        "`python benchmarks/families_of_transformers.py`, then `--write`; a slow test of each row fails where a rung",
        "is no longer reached.",
        "",
        f"{len(results)} architectures were checked: {counts[0]} reach rung 3, {counts[1]} rung 2 and {counts[2]} "
        f"rung 1; {counts[3]} do not open whole. Others were not checked yet.",
        "",
        "| architecture | rung | LoRA | export | why no higher rung |",
        "|---|---|---|---|---|",
    ]
    for family, each in results.items():
        proven = each["proven"]
        why = " ".join(str(next(iter(each["refusals"].values()), "")).split()).replace("|", "\\|")
        cells = (proven.get(name, "").partition(",")[0].partition(":")[0] for name in ("LoRA", "export"))
        lines.append(f"| `{family}` | {each['rung'] or '–'} | {' | '.join(cells)} | {why[:200]} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        before, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before.rstrip() + "\n\n" + markdown(), encoding="utf-8")
    else:
        check_all(arguments.families or architectures())

"""Check which multimodal architectures of transformers train here, and how: a table of docs/families.md.

    python -m benchmarks.models.families_of_transformers [FAMILY ...]   checks them (default: all), a process each
    python -m benchmarks.models.families_of_transformers --write        writes the table of all results into the page

Configs are the families' defaults with small images and few blocks in the encoders, and an id for every kind of
placeholder that has none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT

PAGE = ROOT / "docs" / "families.md"
SOURCE = ROOT / "src"
BEGIN = "## Other multimodal architectures of transformers\n"
CHECKED = RESULTS / "families_of_transformers.json"
SECONDS = 300
"""Time for one family on a CPU."""
DEPTH_KEYS, BLOCKS = ("num_hidden_layers", "encoder_layers", "num_layers", "depth"), 4
MEDIA = {"images": "vision", "clips": "clips", "sounds": "audio"}
TEXT_WIDTHS = ("out_hidden_size", "text_hidden_size", "adapter_out_dim", "output_dim", "projection_dim")
"""Settings of encoders that repeat the text model's hidden size, which their defaults often contradict."""
QFORMER = {"model_type": "blip_2_qformer", "hidden_size": 1024, "encoder_hidden_size": 1024, "num_attention_heads": 16}
TILES = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}

CONSISTENT: dict[str, dict[str, Any]] = {
    "aria": {
        "vision_config": {"model_type": "idefics3_vision", "image_size": 490, "patch_size": 70},
        "projector_patch_to_query_dict": {49: 8},
    },
    "apertus1p5": {"audio_config": {"model_type": "wavtokenizer_encoder", "codebook_dim": 512}},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14}},
    "chameleon": {"vocabulary_map": {"<image>": 8711, "IMGIMGAZ": 4}},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {"image_size": 256},
            "encoder_config": {
                "hidden_size": 896,
                "num_hidden_layers": 4,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            },
        },
        "text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31, "num_experts_per_tok": 6},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"model_type": "sam_vision_model", "image_size": 256}},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}},
    "dots3_note": {
        "vision_config": {
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_local_experts": 4,
            "temporal_patch_size": 1,
        }
    },
    "emu3": {"vocabulary_map": {"<image>": 151851, "<|extra_200|>": 151846, "<|visual token 000000|>": 151854}},
    "fast_vlm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "do_pooling": True,
            "global_pool": "avg",
            "hidden_size": 256,
            "model_args": {"inference_mode": True, "layers": [1, 1, 2, 1, 1], "embed_dims": [8, 16, 32, 64, 128]},
        }
    },
    "fun_asr_nano": {
        "audio_config": {
            "model_type": "fun_asr_nano_encoder",
            "num_hidden_layers": 4,
            "num_timestamp_prediction_layers": 1,
        }
    },
    "gemma3": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "gemma3n": {"vision_config": {"model_args": {"channel_multiplier": 0.125}}},
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
    "granite4_vision": {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        "deepstack_layer_map": [[1, 0], [2, 1]],
        "spatial_target_layers": [0, 1, 1, 2],
        "downsample_rate": "2/4",
        **TILES,
    },
    "granite_speech": {"projector_config": QFORMER},
    "granite_speech_plus": {"projector_config": QFORMER},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 1.0,
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "mrope_section": [16, 16, 16, 16],
            },
        }
    },
    "idefics3": {"vision_config": {"image_size": 128, "patch_size": 16}},
    "inkling2_loop": {"text_config": {"n_layers_per_attn_res_block": 1}},
    "janus": {"vision_config": {"image_size": 128}},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "llava_next": {"vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}, **TILES},
    "llava_next_video": {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        **TILES,
    },
    "minicpm_ocr": {"insert_layer_id": 1},
    "minicpmv4_6": {"insert_layer_id": 1},
    "minicpmv4_7": {"insert_layer_id": 1},
    "molmo2": {"adapter_config": {"text_hidden_size": 4096}},
    "muse_glimmer": {"vision_config": {"num_hidden_layers": 4}},
    "ovis2": {"hidden_size": 4096},
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {"embed_dim": 256, "depth": 2, "img_size": [448, 448], "ref_feat_shape": [32, 32]},
        }
    },
    "qianfan_ocr": {"vision_config": {"image_size": 224, "patch_size": 14}},
    "qwen2_5_omni": {"thinker_config": {"vision_start_token_id": 151652, "vision_end_token_id": 151653}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},  # the width behind its merger
    "qwen3_omni_moe": {"thinker_config": {"vision_start_token_id": 151652}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 16,
        }
    },
    "shieldgemma2": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "smolvlm": {"vision_config": {"image_size": 128, "patch_size": 16}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "unlimited_ocr": {"vision_config": {"sam_config": {"image_size": 256}}},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {
            "model_type": "vibevoice_acoustic_tokenizer_encoder",
            "num_filters": 4,
            "depths": [1] * 7,
            "vae_std": 0.0,  # noise is not the same on both sides of a proof
        },
        "semantic_tokenizer_encoder_config": {
            "model_type": "vibevoice_acoustic_tokenizer_encoder",
            "hidden_size": 128,
            "num_filters": 4,
            "depths": [1] * 7,
        },
    },
}
"""Settings where a family's defaults contradict each other, are incomplete, or too large for a check; the configs of
released models have none of these faults."""


def architectures() -> list[str]:
    """Return the model types that transformers lists as multimodal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def config_of(family: str) -> Any:
    """Return the family's default config, with small images if its encoder takes one size."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**CONSISTENT.get(family, {}))
    config = getattr(config, "thinker_config", config)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    patch, side = getattr(vision, "patch_size", None), getattr(vision, "image_size", None)
    if isinstance(side, int) and isinstance(patch, int) and side >= 32 * patch:
        vision.image_size = 16 * patch
    others = (getattr(config, f"{kind}_config", None) for kind in ("audio", "encoder"))
    encoders = [each for each in (vision, *others) if each is not None]
    holders = (config, getattr(config, "adapter_config", None))
    layers = (getattr(each, f"vision_feature_layer{end}", None) for each in holders for end in ("", "s"))
    for encoder in encoders if not any(isinstance(each, list | tuple) for each in layers) else ():
        for part in (encoder, *(getattr(encoder, key) for key in encoder.sub_configs)):
            _shorten(part)
    for part in encoders:
        for key in TEXT_WIDTHS:
            if isinstance(vars(part).get(key), int):
                setattr(part, key, text.hidden_size)
    vocabulary = getattr(text, "vocab_size", None)
    for number, (key, value) in enumerate(vars(config).items()):
        if re.fullmatch(r"(image|video|audio)_token_(id|index)", key) and vocabulary:
            if value is None:
                setattr(config, key, vocabulary - 1 - number)
            elif value >= text.vocab_size:
                text.vocab_size = value + 1
    return config


def _shorten(encoder: Any) -> None:
    """Keep four blocks of an encoder, unless its settings list some of them."""
    lists = [key for key, value in vars(encoder).items() if isinstance(value, list | tuple) and value]
    if any(re.search(r"layer|index|depth|blocks", key) for key in lists):
        return
    for key in DEPTH_KEYS:
        if isinstance(depth := getattr(encoder, key, None), int):
            setattr(encoder, key, min(depth, BLOCKS))


def needs(family: str) -> list[str]:
    """Return the packages that the family's processor needs besides transformers and Pillow."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    kinds = IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {}
    found = ["torchvision"] if "torchvision" in kinds and "pil" not in kinds else []
    timm = ["timm"] * (family in ("fast_vlm", "gemma3n", "perception_lm"))
    return found + timm + ["torchaudio"] * family.startswith(("fun_asr", "granite_speech"))


def check(family: str) -> dict[str, Any]:
    """Check one family in this process."""
    import torch

    from dilatant.config.errors import one_line
    from dilatant.hf.check_model import ModelCheck, check_config

    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        result = asdict(check_config(config_of(family), family))
    except Exception as error:
        result = asdict(ModelCheck(family, {}, None, {0: f"its default config does not build: {one_line(error)}"}))
    if result["rung"] is not None and "read" not in result["found"]:
        result |= {"rung": None, "refusals": {0: "it opens as a text model alone"}}
    seconds = round(time.perf_counter() - begin, 1)
    return {**result, "needs": needs(family), "seconds": seconds, "checked": date.today().isoformat()}


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
                result = {"family": family, "rung": None, "refusals": {0: reason}, "found": {}, "proven": {}}
                result |= {"needs": needs(family), "seconds": float(SECONDS), "checked": date.today().isoformat()}
        results = json.loads(CHECKED.read_text()) if CHECKED.is_file() else {}
        CHECKED.write_text(json.dumps(dict(sorted({**results, family: result}.items())), indent=1) + "\n")
        print(family, result["rung"], result["refusals"], flush=True)


def markdown() -> str:
    """Return the table of the stored results."""
    results = json.loads(CHECKED.read_text())
    counts = [sum(each["rung"] == rung for each in results.values()) for rung in (3, 2, 1, 0)]
    trained = sum(is_trained(each) for each in results.values())
    dates = sorted(each["checked"] for each in results.values())
    named = named_in_source(results, SOURCE)
    unnamed = sum(is_trained(each) for family, each in results.items() if family not in named)
    about = (
        "Checked on a small copy of the family's default config by the proof of `dilatant check-model` "
        "([rungs](models.md#before-you-fetch-weights)); *needs*: packages that prepare its media, besides transformers "
        "and Pillow; for this table, torchvision ran without its compiled operators. *tp*: units whose layers two "
        "ranks shared. Made by `python -m benchmarks.models.families_of_transformers`, then `--write`; a slow test of "
        "each row guards its rung. The listed families are among them. *named*: `src` has the type of the family or a "
        "class whose name begins like its own; the others open without a line of code for them. Name a family to check "
        f"it again; these rows are of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )
    counted = (
        f"{len(results)} of {len(architectures())} architectures were checked; {trained} train and export: "
        f"{counts[0]} reach rung 3, {counts[1]} rung 2, {counts[2]} rung 1, {counts[3]} rung 0. "
        f"{unnamed} of the {trained} are named nowhere in `src`."
    )
    lines = [
        BEGIN,
        *textwrap.wrap(about, 120, break_on_hyphens=False),
        "",
        *textwrap.wrap(counted, 120, break_on_hyphens=False),
        "",
        "| architecture | rung | named | media | LoRA | export | tp | needs | why no higher rung, or not all media |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family, each in results.items():
        proven, rung = each["proven"], each["rung"]
        unread = [line for line in each["found"].get("not read", "").split("; ") if line != "clips are not read"]
        if not any(unread) and "not trained" in each["found"]:
            unread = [f"not trained: {each['found']['not trained']}"]
        reasons = [*each["refusals"].values()][:1] + [line for line in unread if line]
        reasons += [f"its export is wrong ({proven['export']})"] if proven.get("export", "yes") != "yes" else []
        why = "; ".join(dict.fromkeys(map(plain, reasons))).replace("|", "\\|")
        media = [kind for kind, part in MEDIA.items() if not each["found"].get(part, "not").startswith("not")]
        cells = [re.split("[,: ]", proven.get(name, ""))[0] for name in ("LoRA", "export")]
        shared = re.match("yes, in ([^;]+)", proven.get("tp", ""))
        cells.append(shared[1] if shared else "no" if "tp" in proven else "")
        shown = "–" if rung is None else rung
        cells = [
            f"`{family}`",
            str(shown),
            "yes" if family in named else "",
            ", ".join(media),
            *cells,
            ", ".join(each["needs"]),
            why,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


OF_OTHERS = "framework_models.py"
"""The file of `src` that lists the models of other frameworks."""


def named_in_source(families: Iterable[str], source: Path) -> set[str]:
    """Return the families whose type, or the beginning of whose class name, stands in a Python file below `source`,
    except in `OF_OTHERS`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    files = (path for path in source.rglob("*.py") if path.name != OF_OTHERS)
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = set()
    for family in families:
        types = re.escape(family).replace(r"\-", "[-_]?")
        names = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(family, ())
        stems = [re.split("For[A-Z]|Model$", name)[0] for name in ([names] if isinstance(names, str) else names)]
        if re.search("|".join([rf"(?<![\w-]){types}", *(rf"\b{stem}(?=[A-Z]|\b)" for stem in stems)]), text):
            named.add(family)
    return named


def plain(reason: str) -> str:
    """Return a reason without the names around it, and without the error of Python behind it."""
    line = " ".join(reason.split())
    line = line.partition("does not open whole: ")[2].partition(". Name its encoder")[0] or line
    line = re.sub(r" \((on a small copy, )?\w*(Error|Exception)\b.*", "", line)
    line = re.sub(r"^UserError: |encoder tokens do not fit into the text: - ", "", line)
    return re.sub(r"^\w*(Error|Exception): .*", "a small copy ends in an error of Python", line)[:200]


def is_trained(result: Mapping[str, Any]) -> bool:
    """Return True if a family is on a rung, and its export is right."""
    return result["rung"] is not None and result["proven"].get("export", "") == "yes"


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

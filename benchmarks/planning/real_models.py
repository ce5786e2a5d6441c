"""How long real models take to plan: meta model, modelled costs and search, and `dilatant plan --help`.

    python -m benchmarks.planning.real_models [--only NAME ..] [--as before|after] [--json FILE]

Configs have the published sizes of each model; weights and tokenizers are not needed. Samples are synthetic: one to
four images, each of a number of patches drawn around the typical one, and a log-normal number of words. Seconds are
those of the processor in one thread, with compiled planners cached. Goals: 20 s for each model, 10 s for the search on
1,296 devices, 3 s for the command's start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.planning.frozen_settings import MODEL
from dilatant.config import load_config
from dilatant.plan.costs.workload import Workload, squares_of
from dilatant.planning.assemble import recompute_by_unit
from dilatant.planning.planning import model_problem, plan_run
from dilatant.planning.problem.describe_model import ModelDescription, build_meta_model, describe_model
from dilatant.planning.problem.planned_samples import PlannedSamples

QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
QWEN_72B = {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 152064,
}  # fmt: skip
QWEN_TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


def qwen_vl(text: dict[str, Any], inner: int) -> dict[str, Any]:
    """Return the config of Qwen2.5-VL around a text model; inner: width of the tower's feed-forward."""
    vision = {
        "hidden_size": 1280, "intermediate_size": inner, "depth": 32, "num_heads": 16, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": text["hidden_size"], "patch_size": 14,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    own = {"model_type": "qwen2_5_vl_text", "rope_parameters": rope, **text}
    return {"model_type": "qwen2_5_vl", "vision_config": vision, "text_config": own, **QWEN_TOKENS}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, from a config.json or (`model`) of parts, on `devices` H100."""

    devices: int
    batch: int
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    "Qwen2.5-VL-7B": Case(64, 512, qwen_vl(QWEN_7B, 3420)),
    "Qwen2.5-VL-72B": Case(1024, 2048, qwen_vl(QWEN_72B, 3456)),
    "Qwen2.5-VL-72B on 1,296": Case(1296, 2048, qwen_vl(QWEN_72B, 3456)),
    "InternVL3-8B": Case(
        64, 512,
        {
            "model_type": "internvl", "image_token_id": 151667,
            "vision_config": {
                "model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096,
                "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14],
            },
            "text_config": {"model_type": "qwen2", **QWEN_7B},
        },
    ),
    "LLaVA-OneVision-7B": Case(
        64, 512,
        {
            "model_type": "llava_onevision", "image_token_id": 151646, "video_token_id": 151647,
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                "num_hidden_layers": 26, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
                "vision_use_head": False,
            },
            "text_config": {"model_type": "qwen2", **QWEN_7B},
        },
    ),
    "Qwen3-VL-30B-A3B": Case(
        64, 512,
        {
            "model_type": "qwen3_vl_moe", **QWEN_TOKENS,
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "out_hidden_size": 2048,
                "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "patch_size": 16,
            },
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                "vocab_size": 151936,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
            },
        },
    ),
    "Qwen3-235B-A22B": Case(
        256, 1024,
        model={"language_model": {"config": {
            "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        }}},
    ),
    "DeepSeek-V3": Case(
        1024, 4096,
        model={"language_model": {"config": {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "vocab_size": 129280,
        }}},
    ),
    "vision, audio, Llama-3-8B and SD 2.1": Case(
        64, 512,
        model={
            **MODEL,
            "encoders": {
                **MODEL["encoders"],
                "audio": {
                    "kind": "audio", "projector": "mlp",
                    "config": {
                        "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
                        "encoder_ffn_dim": 5120, "num_mel_bins": 128, "decoder_attention_heads": 20,
                    },
                },
            },
        },
    ),
}  # fmt: skip


def samples_of(model: ModelDescription, batch: int, steps: int = 2) -> PlannedSamples:
    """Draw global batches of samples."""
    draw, count = np.random.default_rng(0), batch * steps
    tokens, rows = {}, draw.lognormal(5.3, 1.0, count).round()
    for unit in model.units.values():
        if unit.unit == model.anchor:
            continue
        each = model.item_tokens.get(unit.unit, 64.0)
        items = draw.integers(1, 5, count) * np.maximum(
            1, each * (draw.lognormal(0.0, 0.5, count) if unit.packs else 1)
        )
        tokens[unit.unit] = items.round()
        geometry = unit.geometry
        rows += items * (1 if geometry is None else geometry.tokens_per_row / geometry.encoder_tokens)
    tokens[model.anchor] = rows.round()
    ordered = {unit.name: tokens[unit.name] for unit in model.spec.units}
    workload = Workload(ordered, squares_of(ordered, model.item_tokens, model.media_pairs))
    return PlannedSamples(workload, 0.5, count, 0)


def planned(case: Case, folder: Path) -> dict[str, Any]:
    """Plan one model; return its plan and the seconds of each part."""
    (folder / "config.json").write_text(json.dumps(case.config), encoding="utf-8")
    (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
    content = {
        "output_dir": str(folder / "run"),
        "model": case.model or {"id": str(folder)},
        "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": 16384},
        "train": {"steps": 1, "global_batch_size": case.batch, "precision": "bf16"},
        "cluster": {"nodes": case.devices // 8, "gpus_per_node": 8, "hardware": "H100"},
    }
    (folder / "run.yaml").write_text(json.dumps(content), encoding="utf-8")
    config = load_config(folder / "run.yaml")
    times = [time.process_time()]
    whole = build_meta_model(config, 256)
    model = describe_model(whole, recompute_by_unit(config, whole.units))
    samples = samples_of(model, case.batch)
    times.append(time.process_time())
    problem = model_problem(config, model, samples)
    times.append(time.process_time())
    run = plan_run(problem)
    times.append(time.process_time())
    winner = run.result.winner
    layouts = [
        f"{unit.name} {len(unit.replicas)} x {len(own)} stages of {own[0].degrees.text(always=('tp',))}"
        for unit in winner.plan.units
        for own in [unit.replicas[0].stages]
    ]
    parts = dict(zip(("model", "costs", "search"), np.diff(times).tolist(), strict=True))
    return {
        "devices": case.devices, "batch": case.batch, "seconds": times[-1] - times[0], **parts,
        "candidates": run.result.candidates, "simulated": run.result.simulated,
        "step_seconds": winner.score.seconds, "plan": ", ".join(layouts), "zero": winner.zero,
    }  # fmt: skip


def start() -> float:
    """Return the wall-clock seconds of `dilatant plan --help`, the fastest of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        program = "from dilatant.cli.app import main; main()"
        subprocess.run([sys.executable, "-c", program, "plan", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument(
        "--as", dest="state", choices=("before", "after"), default="after", help="column of the results"
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well; others of this file stay")
    given = parser.parse_args()
    document: dict[str, Any] = {"models": {}, "start": {}}
    if given.json and given.json.exists():
        document = json.loads(given.json.read_text(encoding="utf-8"))
    document |= machine()
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            found = planned(CASES[name], Path(folder))
        document["models"].setdefault(name, {})[given.state] = found
        print(name, json.dumps(found), flush=True)
        if given.json:
            given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    document["start"][given.state] = start()
    print(f"dilatant plan --help: {document['start'][given.state]:.2f} s")
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

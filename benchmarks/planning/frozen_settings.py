"""What DistTrain's frozen settings (section 7.4) make of a plan: each unit's share of a step's work, and its devices.

    python -m benchmarks.planning.frozen_settings [--nodes 4] [--only SETTING ...] [--out FILE.json] [--markdown]

A model of DistTrain's kind: a vision tower of 0.4 billion parameters (SigLIP SO400M, 384 pixels), a language model of 8
billion (Llama 3), a generator of 0.9 billion (Stable Diffusion 2.1's UNet at 512 pixels, behind a frozen autoencoder),
on nodes of eight H100. Samples are conversations with one to four images to see and one to draw. Projector, connector
and learned queries train in every setting, as in the paper. All costs are modelled from FLOPs and bytes; nothing is
measured, and no weight is read.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.machine import machine
from benchmarks.planning.model_configs import MODEL
from dilatant.config import Config, load_config
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.planning import plan_run, planning_problem

SETTINGS = {
    "nothing frozen": [],
    "all frozen": ["vision.encoder", "language.model", "image.generator"],
    "encoder only": ["language.model", "image.generator"],
    "language model only": ["vision.encoder", "image.generator"],
    "generator only": ["vision.encoder", "language.model"],
}
"""DistTrain's name of what trains beside the projectors → `model.freeze`."""


def write_conversations(folder: Path, count: int) -> None:
    """Of one to four images to see and one to draw; only their headers are read."""
    random = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.new("RGB", (512, 512)).save(buffer, "PNG")
    (folder / "image.png").write_bytes(buffer.getvalue())
    picture = {"type": "image", "image": "image.png"}
    lines = []
    for _ in range(count):
        words = "a word or two " * int(random.integers(4, 40))
        seen = [picture] * int(random.integers(1, 5))
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": [*seen, {"type": "text", "text": words}]},
                    {"role": "assistant", "content": [{"type": "text", "text": words[:200]}, picture]},
                ]
            }
        )
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")


def config_of(folder: Path, frozen: list[str], nodes: int) -> Config:
    content = {
        "output_dir": str(folder / "run"),
        "model": {**MODEL, "freeze": frozen},
        "data": {
            "train": [{"path": str(folder / "train.jsonl")}], "max_length": 8192,
            "cache_dir": str(folder / "cache"),
        },
        "train": {"steps": 1, "global_batch_size": 64, "precision": "bf16"},
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "hardware": "H100"},
        "debug": {"planned_samples": 256},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return load_config(path)


def planned(config: Config) -> dict[str, Any]:
    began = time.perf_counter()
    run = plan_run(planning_problem(config, assemble_samples(config)))
    work = run.work.sum(axis=0)
    winner = run.result.winner
    units = [unit.name for unit in run.problem.model.spec.units]
    devices = {
        unit.name: len({rank for replica in unit.replicas for stage in replica.stages for rank in stage.ranks})
        for unit in winner.plan.units
    }
    return {
        "shares": dict(zip(units, (work / work.sum()).tolist(), strict=True)),
        "devices": devices,
        "step_seconds": winner.score.seconds,
        "planning_seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", action="store_true", help="the table of examples/recipes.md")
    parser.add_argument("--only", nargs="*", choices=SETTINGS, help="the others' results are read from --out")
    given = parser.parse_args()
    results = {}
    if given.only is not None:
        results = json.loads(given.out.read_text())["settings"]
    with tempfile.TemporaryDirectory() as name:
        write_conversations(Path(name), 256)
        for setting in SETTINGS if given.only is None else given.only:
            frozen = SETTINGS[setting]
            results[setting] = {"freeze": frozen, **planned(config_of(Path(name), frozen, given.nodes))}
    heads = ["DistTrain's setting", "`model.freeze`", "work: vision", "language", "image", "GPUs", "step"]
    if given.markdown:
        print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for setting, found in results.items():
        shares = [f"{100 * found['shares'][unit]:.1f} %" for unit in ("vision", "language", "image")]
        devices = " + ".join(str(found["devices"][unit]) for unit in ("vision", "language", "image"))
        row = [setting, f"`[{', '.join(found['freeze'])}]`", *shares, devices, f"{found['step_seconds']:.2f} s"]
        print("| " + " | ".join(row) + " |" if given.markdown else "  ".join(f"{cell:>20}" for cell in row))
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": machine(), "nodes": given.nodes, "settings": results}, indent=2))


if __name__ == "__main__":
    main()

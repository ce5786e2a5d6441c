"""Compare the predicted with the measured time and peak memory of a training step on one device.

A LLaVA (random weights) trains with the defaults of `dilatant train`. Its layers' costs are modelled from the data
sheet, or measured first as `dilatant plan` does. For each of these, one row holds the prediction and the measurement:

    python benchmarks/gpu_prediction.py --size 1b --json gpu_prediction.json         # 0.8 B parameters, 80 GB
    python benchmarks/gpu_prediction.py --size tiny --precision fp32 --steps 2       # also without a GPU

`compute_seconds` is what is predicted: the time from the start of a step's first action to the end of its last one.
`step_seconds` also includes the wait for data and the update. Without a GPU there are no peak bytes and no MFU.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from one_device_trainer import SIZES, save_model, tree

COSTS = ("modelled", "measured")


def write_charts(folder: Path, count: int) -> None:
    """Write `count` samples to a Parquet file: images of noise with questions, and answers of 1 to 65 words."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        pixels = random.integers(0, 255, (*random.integers(64, 400, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
        answer = "chart " * int(np.exp(random.uniform(0, np.log(66))))
        texts = [{"user": "What does it show?", "assistant": answer}]
        rows.append({"images": [{"bytes": file.getvalue()}], "texts": texts})
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "charts.parquet")


def predict(
    costs: str, model: Path, data: Path, scratch: Path, settings: argparse.Namespace
) -> dict[str, Any]:
    """Predict a step under `costs`, modelled or measured; then train, and return the row."""
    from dilatant.comm.launch import local_worker
    from dilatant.config.config import parse_config
    from dilatant.planning.planning import planning_problem, scorer_of
    from dilatant.report.metrics import StepMetrics
    from dilatant.training.prepare import prepare
    from dilatant.training.trainer import Trainer

    whole = tree(model, data, scratch / "run", settings)
    whole["cluster"] = {"gpus_per_node": 1}
    if costs == "modelled":
        whole["plan"] = {"measure_seconds": 0}
    config = parse_config(whole, scratch)
    samples = prepare(config).samples
    problem = planning_problem(config, samples)  # measures the layers, unless their costs are modelled
    run = prepare(config)
    planned = run.planned
    tokens = planned.row_tokens or config.row_tokens
    problem = problem.sharing(planned.zero).with_row_tokens(tokens)
    score = scorer_of(problem, "1f1b")(planned.plan, planned.num_microbatches, tokens)
    steps: list[StepMetrics] = []
    seconds: list[float] = []

    def observe(metrics: StepMetrics) -> None:
        actions = trainer.runtime.measured()
        seconds.append(max(one.end for one in actions) - min(one.start for one in actions))
        steps.append(metrics)

    trainer = Trainer(config, samples, run.model, planned, local_worker(), scratch / "checkpoints")
    try:
        weights = sum(parameter.numel() for parameter in trainer.runtime.parameters.values())
        trainer.run(observe)
    finally:
        trainer.close()
    timed = steps[settings.warm_up :]
    compute = statistics.median(seconds[settings.warm_up :])
    predicted = statistics.median(metrics.predicted_seconds or float("nan") for metrics in timed)
    peak = max((metrics.peak_bytes for metrics in steps if metrics.peak_bytes is not None), default=None)
    utilization = [metrics.mfu for metrics in timed if metrics.mfu is not None]
    return {
        "size": settings.size,
        "parameters": weights,
        "lora": settings.lora,
        "precision": settings.precision,
        "samples": settings.batch,
        "row_tokens": tokens,
        "costs": costs,
        "origin": planned.costs.origin if planned.costs is not None else None,
        "compute_seconds": compute,
        "predicted_seconds": predicted,
        "predicted_over_measured": predicted / compute,
        "step_seconds": statistics.median(metrics.step_seconds for metrics in timed),
        "data_wait_seconds": statistics.median(metrics.data_wait_seconds for metrics in timed),
        "teraflops": statistics.median(metrics.teraflops for metrics in timed),
        "mfu": statistics.median(utilization) if utilization else None,
        "predicted_peak_bytes": max(score.peak_bytes),
        "peak_bytes": peak,
        "predicted_over_measured_bytes": max(score.peak_bytes) / peak if peak else None,
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", choices=SIZES, default="1b")
    options.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    options.add_argument("--lora", action="store_true", help="train adapters of the language model alone")
    options.add_argument("--costs", nargs="+", choices=COSTS, default=list(COSTS))
    options.add_argument("--steps", type=int, default=5, help="that count, after --warm-up")
    options.add_argument("--warm-up", type=int, default=3)
    options.add_argument("--batch", type=int, default=32, help="samples of a step")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--json", type=Path)
    return options


def main() -> None:
    settings = parser().parse_args()
    report: dict[str, Any] = {"machine": machine(), "threads": torch.get_num_threads(), "rows": []}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ["DILATANT_CACHE"] = str(scratch / "cache")  # costs of earlier measurements are not wanted
        save_model(scratch / "model", SIZES[settings.size])
        write_charts(scratch / "charts", 2 * settings.batch)
        for costs in settings.costs:
            (scratch / costs).mkdir()
            row = predict(costs, scratch / "model", scratch / "charts", scratch / costs, settings)
            report["rows"].append(row)
            if settings.json:
                settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

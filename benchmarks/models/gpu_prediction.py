"""Compare the predicted with the measured time and peak memory of a training step on one device.

A LLaVA (random weights) trains with the defaults of `dilatant train`. Its layers' costs are modelled from the data
sheet, or measured first as `dilatant plan` does. For each of these, one row holds the prediction and the measurement:

    python -m benchmarks.models.gpu_prediction --size 1b --json gpu_prediction.json         # 0.8 B parameters, 80 GB
    python -m benchmarks.models.gpu_prediction --size tiny --precision fp32 --steps 2       # also without a GPU

`compute_seconds` lasts from the start of a step's first action to the end of its last one; `step_seconds` also
includes the wait for data and the update. Both have a prediction. `actions` has the seconds of a step by unit and kind:
as predicted (the device's and the host's, of which an action takes the longer), as measured, and, with `--trace`, from
a trace of one more step, those in which kernels ran and in which the host issued them (longer than without a trace).
`kernels` are those that took most of that step; `layers` the predicted seconds of one layer of each type on a
microbatch's mean row.
Without a GPU there are no peak bytes, no MFU and no kernels.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import io
import json
import os
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.models.one_device_trainer import SIZES, add_ways_to_train, save_model, tree

if TYPE_CHECKING:
    from dilatant.schedule.schedule import MeasuredAction
    from dilatant.schedule.simulator.predict import TimedStep

COSTS = ("modelled", "measured")
MOST_KERNELS = 25


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


def predicted_actions(timed: TimedStep) -> dict[str, dict[str, float]]:
    """Return the predicted seconds of a step by unit and kind of action: what it takes, the device's and the host's."""
    graph, stages = timed.graph, timed.costs.stages
    device = np.einsum("ij,ij->i", stages.seconds[graph.stage, graph.kind], timed.sums)
    host = stages.host_seconds[graph.stage, graph.kind] * timed.sums[:, 2]
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for op in range(graph.num_ops):
        action = graph.action(op)
        own = found[f"{graph.arrays.placed[action.stage].unit} {action.kind}"]
        own["predicted"] += float(timed.durations[op])
        own["predicted_device"] += float(device[op])
        own["predicted_host"] += float(host[op])
    return found


def measured_actions(actions: tuple[MeasuredAction, ...]) -> dict[str, float]:
    """Return the measured seconds of a step by unit and kind of action."""
    found: dict[str, float] = defaultdict(float)
    for one in actions:
        found[f"{one.unit} {one.action.kind}"] += one.seconds
    return found


def read_trace(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return, of the trace of a step in `folder`, the seconds in which kernels ran and the host issued them by unit and
    kind of action, and the seconds by kernel."""
    (path,) = folder.glob("step-*/*.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if "dur" in event]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], " ".join(words[0::3][:2]))
        for event in events
        if event.get("cat") == "user_annotation"
        and len(words := event["name"].split()) == 6  # "language stage 1 F microbatch 0"
        and words[1] == "stage"
    )
    starts = [begin for begin, _, _ in ranges]
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"kernels": 0.0, "issuing": 0.0})
    for begin, end, name in ranges:
        found[name]["issuing"] += (end - begin) / 1e6
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    kernels: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[event["name"]] += event["dur"] / 1e6
            at = launched.get(event.get("args", {}).get("correlation"), -1.0)
            place = bisect.bisect_right(starts, at) - 1
            if place >= 0 and at <= ranges[place][1]:
                found[ranges[place][2]]["kernels"] += event["dur"] / 1e6
    return found, kernels


def predict(costs: str, model: Path, data: Path, scratch: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Predict a step under `costs`, modelled or measured; then train, and return the row."""
    from dilatant.comm.launch import local_worker
    from dilatant.config.config import parse_config
    from dilatant.planning.planning import planning_problem, scorer_of
    from dilatant.report.metrics import StepMetrics
    from dilatant.training.prepare import prepare
    from dilatant.training.trainer import Trainer

    whole = tree(model, data, scratch / "run", settings)
    whole["cluster"] = {"gpus_per_node": 1}
    last = whole["train"]["steps"]
    if settings.trace:
        whole["train"]["steps"] += 1  # the last one is traced and not timed
        whole["train"]["profile"] = {"steps": [last + 1] * 2, "memory": False}
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
    seconds: list[tuple[float, float]] = []  # measured and predicted, of the actions
    by_action: list[tuple[dict[str, float], dict[str, dict[str, float]]]] = []
    rows: dict[str, list[float]] = defaultdict(list)

    def observe(metrics: StepMetrics) -> None:
        actions, step = trainer.runtime.measured(), trainer.runtime.last_step
        assert step is not None
        timed = step.prediction.timed
        seconds.append((max(one.end for one in actions) - min(one.start for one in actions), float(timed.seconds)))
        by_action.append((measured_actions(actions), predicted_actions(timed)))
        for one in actions:
            if one.action.kind == "F":
                rows[one.unit].append(float(sum(step.tokens[one.unit][sample] for sample in one.samples)))
        steps.append(metrics)

    trainer = Trainer(config, samples, run.model, planned, local_worker(), scratch / "checkpoints")
    try:
        weights = sum(parameter.numel() for parameter in trainer.runtime.parameters.values())
        trainer.run(observe)
    finally:
        trainer.close()
    timed = steps[settings.warm_up : last]
    compute, predicted = (statistics.median(own) for own in zip(*seconds[settings.warm_up : last], strict=True))
    taken = statistics.median(metrics.step_seconds - metrics.data_wait_seconds for metrics in timed)
    whole_step = statistics.median(metrics.predicted_seconds or float("nan") for metrics in timed)
    traced, kernels = read_trace(scratch / "run" / "traces") if settings.trace else ({}, {})
    actions = {
        name: {
            **{
                key: statistics.median(known[name][key] for _, known in by_action[settings.warm_up : last])
                for key in ("predicted", "predicted_device", "predicted_host")
            },
            "measured": statistics.median(own[name] for own, _ in by_action[settings.warm_up : last]),
            **traced.get(name, {}),
        }
        for name in by_action[-1][0]
    }
    layers = {}
    for unit in problem.model.spec.units:
        row = statistics.fmean(rows[unit.name])
        sample = row * len(rows[unit.name]) / (len(steps) * settings.batch)
        for kind in dict.fromkeys(layer.kind for layer in unit.layers):
            cost = problem.costs.layer(kind)
            parts = cost.forward, cost.input_gradient, cost.weight_gradient
            layers[kind] = {
                "count": sum(layer.kind == kind for layer in unit.layers),
                "row_tokens": row,
                "device": [part.a * sample * row + part.b * row + part.c for part in parts],
                "host": cost.host,
                "fit_error": cost.fit_error,
            }
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
        "predicted_step_seconds": whole_step,
        "predicted_step_over_measured": whole_step / taken,
        "step_seconds": statistics.median(metrics.step_seconds for metrics in timed),
        "data_wait_seconds": statistics.median(metrics.data_wait_seconds for metrics in timed),
        "teraflops": statistics.median(metrics.teraflops for metrics in timed),
        "mfu": statistics.median(utilization) if utilization else None,
        "predicted_peak_bytes": max(score.peak_bytes),
        "peak_bytes": peak,
        "predicted_over_measured_bytes": max(score.peak_bytes) / peak if peak else None,
        "seconds_of_steps": [own for own, _ in seconds],
        "actions": actions,
        "kernels": dict(sorted(kernels.items(), key=lambda one: -one[1])[:MOST_KERNELS]),
        "kernel_seconds": sum(kernels.values()),
        "layers": layers,
    }


def show(row: dict[str, Any]) -> None:
    """Print a row: one line of totals, one for each unit and kind of action, and one for each layer type."""
    plain = {key: value for key, value in row.items() if not isinstance(value, dict | list)}
    print(json.dumps(plain), flush=True)
    for name, own in row["actions"].items():
        texts = (f"{key} {1e3 * value:.1f}" for key, value in own.items())
        print(f"  {name}, ms: {', '.join(texts)}", flush=True)
    for kind, own in row["layers"].items():
        device = " + ".join(f"{1e3 * value:.3f}" for value in own["device"])
        print(
            f"  {own['count']} x {kind}, {own['row_tokens']:.0f} tokens, ms: device {device}, host "
            f"{1e3 * own['host']:.3f}, fit error {own['fit_error']}",
            flush=True,
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", choices=SIZES, default="1b")
    options.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    add_ways_to_train(options)
    options.add_argument("--costs", nargs="+", choices=COSTS, default=list(COSTS))
    options.add_argument("--steps", type=int, default=5, help="that count, after --warm-up")
    options.add_argument("--warm-up", type=int, default=3)
    options.add_argument("--batch", type=int, default=32, help="samples of a step")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--trace", action="store_true", help="also trace a step, for its kernels")
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
            show(row)


if __name__ == "__main__":
    main()

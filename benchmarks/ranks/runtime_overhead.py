"""What the runtime costs: against torch.distributed.pipelining on a chain, and against the schedule's critical path.

Both run the same stages (a text-only Llama-type model cut in equal parts) in the same processes, step by step in
turn, so noise of the machine falls on both. Their gradients are compared once. Times are the best and the median of
the steps. More ranks than cores share the cores, in our steps and in theirs.

    python -m benchmarks.ranks.runtime_overhead --json benchmarks/results/runtime_overhead.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.machine import machine
from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker, launch_local
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.simulate import simulate


class AsModule(nn.Module):
    """A stage with the one tensor in, one tensor out that torch's pipelining wants."""

    def __init__(self, stage: Any, tokens: int) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("positions", torch.arange(tokens)[None], persistent=False)

    def forward(self, given: Tensor) -> Tensor:
        if self.stage.span.is_first:
            output = self.stage(given, {}, position_ids=self.positions)
        else:
            output = self.stage(hidden=given, position_ids=self.positions)
        return output if isinstance(output, Tensor) else output.logits


def build_model(settings: argparse.Namespace) -> MultimodalModel:
    language = parse_config(
        {
            "model_type": "llama",
            "vocab_size": settings.vocabulary,
            "hidden_size": settings.hidden,
            "intermediate_size": 4 * settings.hidden,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        "model",
    )
    return MultimodalModel({}, language, device="meta").train()


def compare(worker: Worker, settings: argparse.Namespace) -> dict[str, Any]:
    """Runs on every rank; what rank 0 returns is the result."""
    comm = Comm(worker.store, worker.rank, worker.size)
    model = build_model(settings)
    # The embedding goes with the first blocks, norm and head with the last ones.
    cuts = [1 + round(settings.layers * part / worker.size) for part in range(worker.size + 1)]
    cuts[0], cuts[-1] = 0, settings.layers + 2
    stages = tuple(Stage(a, b, (rank,)) for rank, (a, b) in enumerate(itertools.pairwise(cuts)))
    plan = Plan((UnitPlan("language", (Replica(stages),)),))
    assignment = Assignment({"language": (tuple((k,) for k in range(settings.microbatches)),)})
    schedule = one_f_one_b(plan, assignment)
    runtime = Runtime(model, plan, comm)

    generator = np.random.default_rng(0)
    ids = generator.integers(0, settings.vocabulary, (settings.microbatches, settings.tokens))
    labels = ids.copy()
    labels[:, 0] = -100
    samples = [
        EncodedSample(f"s{k}", ids[k], labels[k], sizes={"language": settings.tokens})
        for k in range(settings.microbatches)
    ]
    targets = settings.microbatches * (settings.tokens - 1)

    dist.init_process_group(
        "gloo", store=dist.PrefixStore("theirs", worker.store), rank=worker.rank, world_size=worker.size
    )
    stage = PipelineStage(
        AsModule(model.units["language"].stage(stages[worker.rank].first, stages[worker.rank].end), settings.tokens),
        worker.rank,
        worker.size,
        torch.device("cpu"),
    )  # fmt: skip

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return (
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten(), reduction="sum")
            / targets
        )

    theirs = Schedule1F1B(stage, settings.microbatches, loss_fn=loss_of, scale_grads=False)
    batch = torch.as_tensor(ids)
    parameters = list(runtime.parameters.values())

    prepared = runtime.prepare(samples, assignment, schedule)

    def run_ours() -> None:
        runtime.execute(samples, prepared)

    def run_theirs() -> None:
        if worker.rank == 0:
            theirs.step(batch)
        elif worker.rank == worker.size - 1:
            theirs.step(target=batch)
        else:
            theirs.step()

    def timed(run: Any) -> float:
        comm.world.barrier()
        began = time.perf_counter()
        run()
        comm.world.barrier()
        return time.perf_counter() - began

    gradients = []
    for run in (run_ours, run_theirs):  # also the warm-up
        run()
        gradients.append([p.grad.clone() for p in parameters])
        for p in parameters:
            p.grad = None
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients))
    ours_seconds, theirs_seconds, critical = [], [], []
    for _ in range(settings.steps):
        ours_seconds.append(timed(run_ours))
        measured = runtime.measured()
        seconds = {row.action: row.seconds for row in measured}
        longest = simulate(schedule, plan, assignment, seconds.__getitem__).seconds
        step = max(row.end for row in measured) - min(row.start for row in measured)
        critical.append(step / longest)
        for p in parameters:
            p.grad = None
        theirs_seconds.append(timed(run_theirs))
        for p in parameters:
            p.grad = None
    dist.destroy_process_group()
    runtime.close()
    comm.close()
    best = min(range(settings.steps), key=lambda k: ours_seconds[k])
    return {
        "ranks": worker.size,
        "microbatches": settings.microbatches,
        "gradient_error": error,
        "ours_seconds": {"best": min(ours_seconds), "median": statistics.median(ours_seconds)},
        "schedule_1f1b_seconds": {"best": min(theirs_seconds), "median": statistics.median(theirs_seconds)},
        "ratio_to_schedule_1f1b": {
            "best": min(ours_seconds) / min(theirs_seconds),
            "median_of_pairs": statistics.median(a / b for a, b in zip(ours_seconds, theirs_seconds)),
        },
        "ratio_to_critical_path": {"best_step": critical[best], "median": statistics.median(critical)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    results = []
    for ranks in settings.ranks:
        results.append(launch_local(compare, ranks, settings)[0])
        show(results[-1])
    if settings.json:
        report = {"machine": machine(), "runs": results}
        settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['ranks']} ranks, {result['microbatches']} microbatches; "
        f"gradients differ by {result['gradient_error']:.1e}"
    )
    print(f"{'':24}{'best':>10}{'median':>10}")
    for name, key in (("this runtime", "ours_seconds"), ("torch Schedule1F1B", "schedule_1f1b_seconds")):
        print(f"{name:24}{result[key]['best']:9.3f}s{result[key]['median']:9.3f}s")
    ratio, path = result["ratio_to_schedule_1f1b"], result["ratio_to_critical_path"]
    print(f"{'ratio':24}{ratio['best']:10.3f}{ratio['median_of_pairs']:10.3f}   (aim: at most 1.05)")
    print(f"{'step / critical path':24}{path['best_step']:10.3f}{path['median']:10.3f}   (aim: at most 1.05)")


if __name__ == "__main__":
    main()

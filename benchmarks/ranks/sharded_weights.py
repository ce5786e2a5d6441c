"""What sharded weights cost: `train.shard: weights` against torch's `fully_shard` (FSDP2) on the same model and ranks.

Both train the same Llama-type model in fp32, with the same microbatches and AdamW, in the same processes, step by step
in turn, so noise of the machine falls on both. Gradients of the first step are compared. Peak bytes are those that
torch's allocator gave, in processes of their own, from all that is held before a step to its end. More ranks than cores
share the cores, in our steps and in theirs. On a CPU both exchange by Gloo.

    python -m benchmarks.ranks.sharded_weights --json benchmarks/results/sharded_weights.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import machine
from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker, launch_local
from dilatant.data.sample import EncodedSample
from dilatant.models.core.materialize import materialize
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.schedule.families.families import serial
from dilatant.schedule.schedule import Assignment

MARK = 7_654_321
"""Bytes of a tensor that marks the last step among the allocator's events."""
CONTENDERS = ("ours", "fully_shard")


def build_model(settings: argparse.Namespace) -> MultimodalModel:
    language = parse_config(
        {
            "model_type": "llama",
            "vocab_size": settings.vocabulary,
            "hidden_size": settings.hidden,
            "intermediate_size": 4 * settings.hidden,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
        "model",
    )
    return MultimodalModel({}, language, device="meta").train()


class Ours:
    """The runtime with one replica per rank and sharded weights."""

    def __init__(self, worker: Worker, settings: argparse.Namespace, comm: Comm, ids: np.ndarray) -> None:
        end, count = settings.layers + 2, settings.microbatches
        replicas = tuple(Replica((Stage(0, end, (rank,)),)) for rank in range(worker.size))
        plan = Plan((UnitPlan("language", replicas),))
        labels = ids.copy()
        labels[:, 0] = -100
        self.samples = [
            EncodedSample(f"s{k}", ids[k], labels[k], sizes={"language": settings.tokens}) for k in range(len(ids))
        ]
        batches = tuple(tuple((k,) for k in range(rank * count, (rank + 1) * count)) for rank in range(worker.size))
        assignment = Assignment({"language": batches})
        layout = StateLayout("all", [0] * worker.size, shard={"language": "weights"})
        self.runtime = Runtime(build_model(settings), plan, comm, layout=layout)
        self.step = self.runtime.prepare(self.samples, assignment, serial(plan, assignment))
        self.optimizer = torch.optim.AdamW(self.runtime.owned.parameters.values(), lr=1e-4)

    def gradients(self) -> float:
        """Run forward and backward; return the norm of the gradient."""
        return self.runtime.execute(self.samples, self.step).grad_norm

    def update(self) -> None:
        self.optimizer.step()
        self.runtime.owned.gather()
        self.optimizer.zero_grad(set_to_none=True)


class Theirs:
    """The transformers model under `fully_shard`: blocks, then the rest."""

    def __init__(self, worker: Worker, settings: argparse.Namespace, ids: np.ndarray) -> None:
        unit = build_model(settings).language
        materialize(unit, 0, settings.layers + 2, 0)
        self.model: Any = unit.model
        mesh = init_device_mesh("cpu", (worker.size,))
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        count = settings.microbatches
        own = ids[worker.rank * count : (worker.rank + 1) * count]
        self.batches = [torch.as_tensor(row)[None] for row in own]
        self.targets = len(ids) * (settings.tokens - 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def gradients(self) -> float:
        for row in self.batches:
            logits = self.model(input_ids=row, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="sum")
            (loss / self.targets).backward()
        total = torch.stack([p.grad.to_local().square().sum() for p in self.model.parameters()]).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def compare(worker: Worker, settings: argparse.Namespace, names: tuple[str, ...], measures: bool) -> dict[str, Any]:
    """Train with the contenders in turn; runs on every rank. measures: return peak bytes instead of seconds."""
    torch.set_num_threads(1)
    comm = Comm(worker.store, worker.rank, worker.size)
    store = dist.PrefixStore("theirs", worker.store)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.size)
    shape = (worker.size * settings.microbatches, settings.tokens)
    ids = np.random.default_rng(0).integers(0, settings.vocabulary, shape)
    make: dict[str, Callable[[], Any]] = {
        "ours": lambda: Ours(worker, settings, comm, ids),
        "fully_shard": lambda: Theirs(worker, settings, ids),
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if measures else nullcontext() as found:
        contenders = {name: make[name]() for name in names}
        norms = {}
        for name, one in contenders.items():  # also the warm-up
            norms[name] = one.gradients()
            one.update()
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(1 if measures else settings.steps):
            for name, one in contenders.items():
                if measures:
                    torch.empty(MARK, dtype=torch.uint8)
                comm.world.barrier()
                began = time.perf_counter()
                one.gradients()
                one.update()
                comm.world.barrier()
                seconds[name].append(time.perf_counter() - began)
    result: dict[str, Any] = {"seconds": seconds, "norms": norms}
    if measures:
        events = sorted(
            (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
        )
        sizes = [event.nbytes() for event in events]
        held = np.cumsum(sizes)
        last = max(number for number, size in enumerate(sizes) if size == MARK)
        result["peak_bytes"] = int(held[last + 1 :].max())
    if "ours" in contenders:
        contenders["ours"].runtime.close()
    dist.destroy_process_group()
    comm.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2, help="of one sample, per rank and step")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    results = []
    for ranks in settings.ranks:
        timed = launch_local(compare, ranks, settings, CONTENDERS, False)[0]
        ours, theirs = (timed["seconds"][name] for name in CONTENDERS)
        peaks = {
            name: max(rank["peak_bytes"] for rank in launch_local(compare, ranks, settings, (name,), True))
            for name in CONTENDERS
        }
        result = {
            "ranks": ranks,
            "microbatches": settings.microbatches,
            "layers": settings.layers,
            "hidden": settings.hidden,
            "tokens": settings.tokens,
            "gradient_norms": timed["norms"],
            "seconds": {
                name: {"best": min(each), "median": statistics.median(each)} for name, each in timed["seconds"].items()
            },
            "peak_bytes": peaks,
            "step_time_ratio": {
                "best": min(ours) / min(theirs),
                "median_of_pairs": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            },
            "peak_bytes_ratio": peaks["ours"] / peaks["fully_shard"],
        }
        results.append(result)
        seconds, ratio = result["seconds"], result["step_time_ratio"]["median_of_pairs"]
        print(
            f"{ranks} ranks: ours {seconds['ours']['median']:.3f} s, fully_shard "
            f"{seconds['fully_shard']['median']:.3f} s, ratio {ratio:.3f} "
            f"(median of pairs; aim: at most 1.05); peak {peaks['ours'] / 2**20:.0f} and "
            f"{peaks['fully_shard'] / 2**20:.0f} MiB, ratio {result['peak_bytes_ratio']:.3f} (aim: at most 1.05); "
            f"norms of the gradients {timed['norms']['ours']:.6g} and {timed['norms']['fully_shard']:.6g}",
            flush=True,
        )
    if settings.json:
        report = {"machine": machine(), "runs": results}
        settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

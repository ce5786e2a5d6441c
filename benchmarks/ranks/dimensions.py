"""What shared layers cost: our tensor parallelism against torch's DTensor (`parallelize_module`).

Both run the blocks of the same Llama-type model with the same weights, forward and backward, in the same processes,
step by step in turn, so noise of the machine falls on both; ours with rows that travel whole, as they do on a CPU, and
in four pieces, as between GPUs. Gradients of the input are compared once. Counted, too, are our collectives, and what
travels between stages of unlike degrees. Attention over ranks that share tokens is compared with torch's
`context_parallel` where that runs, which wants GPUs. NCCL and bf16 where there is a GPU for every rank, else Gloo and
fp32 on a CPU; more ranks than cores share the cores, in our steps and in theirs.

    python -m benchmarks.ranks.dimensions --json benchmarks/results/dimensions.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.attention.context_parallel import compare_context
from benchmarks.machine import machine
from benchmarks.ranks.edge_bytes import DEGREES
from dilatant.comm.comm import Comm
from dilatant.comm.group import Group
from dilatant.comm.launch import Worker, launch_local
from dilatant.models.core.materialize import materialize
from dilatant.models.core.sequence_parallel import PIECES
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.state.holders import boxes_held_on, holdings_of
from dilatant.runtime.state.shared_unit import ShardedUnit

STYLES = {
    **{f"self_attn.{name}": ColwiseParallel for name in ("q_proj", "k_proj", "v_proj")},
    **{f"mlp.{name}": ColwiseParallel for name in ("gate_proj", "up_proj")},
    "self_attn.o_proj": RowwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}
SIZES = {
    "cpu": {"hidden": [64, 256, 512], "tokens": 256, "row": 2048},
    "cuda": {"hidden": [1024, 2048, 4096], "tokens": 4096, "row": 16384},
}
"""What is run by default: widths and tokens of the blocks, and tokens of the row that ranks share."""
TRAVELS = {"cpu": "whole", "cuda": "pieces"}
"""How our rows travel."""


def build_model(settings: argparse.Namespace, hidden: int) -> MultimodalModel:
    language = parse_config(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
        "model",
    )
    return MultimodalModel({}, language, device="meta").train()


def our_stage(settings: argparse.Namespace, hidden: int, comm: Comm, device: torch.device) -> Any:
    model = build_model(settings, hidden)
    unit, ranks, end = model.language, tuple(range(comm.size)), settings.layers + 2
    placed = Stage(0, end, ranks, tp=comm.size)
    plan = Plan((UnitPlan("language", (Replica((placed,)),)),))
    boxes = boxes_held_on(holdings_of(plan, model.units), comm.rank)
    shared = ShardedUnit(unit, comm, placed, boxes)
    with torch.no_grad():
        shared.materialize(0, end, 0, ())
        stage: Any = unit.stage(0, end)
        shared.share(stage, 0, end)
    stage.model.to(device, _dtype(device))
    return stage


def their_model(settings: argparse.Namespace, hidden: int, size: int, device: torch.device) -> Any:
    model = build_model(settings, hidden)
    materialize(model.language, 0, settings.layers + 2, 0)
    mesh = init_device_mesh(device.type, (size,))
    whole: Any = model.language.model.to(device, _dtype(device))
    for block in whole.model.layers:
        parallelize_module(block, mesh, {path: style() for path, style in STYLES.items()})
    return whole


def compare(worker: Worker, settings: argparse.Namespace, hidden: int) -> dict[str, Any]:
    """Runs on every rank; what rank 0 returns is the result."""
    torch.set_num_threads(1)
    device = worker.device
    comm = Comm(worker.store, worker.rank, worker.size, device=device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("theirs", worker.store),
        rank=worker.rank,
        world_size=worker.size,
    )
    stages = {name: our_stage(settings, hidden, comm, device) for name in ("whole", "pieces")}
    stages["whole"].shards.rows_of_piece = None
    stages["pieces"].shards.rows_of_piece = settings.tokens // worker.size // PIECES
    models = {
        **{name: stage.model for name, stage in stages.items()},
        "theirs": their_model(settings, hidden, worker.size, device),
    }
    ours = TRAVELS[device.type]
    given = torch.randn(1, settings.tokens, hidden, generator=torch.Generator().manual_seed(0))
    given = given.to(device, _dtype(device))
    positions = torch.arange(settings.tokens, device=device)[None]

    def step(model: nn.Module) -> Tensor:
        rows = given.clone().requires_grad_()
        base: Any = model.base_model
        made = base(inputs_embeds=rows, position_ids=positions, use_cache=False).last_hidden_state
        made.float().square().sum().backward()
        assert rows.grad is not None
        for parameter in model.parameters():
            parameter.grad = None
        return rows.grad

    def timed(model: nn.Module) -> float:
        comm.world.barrier()
        began = time.perf_counter()
        step(model)
        if device.type == "cuda":
            torch.cuda.synchronize()
        comm.world.barrier()
        return time.perf_counter() - began

    collectives: list[str] = []
    methods = {name: getattr(Group, name) for name in ("_all_reduce", "all_gather", "reduce_scatter")}

    def counting(send: Any) -> Any:
        def counted(group: Group, *given: Any) -> Any:
            collectives.append(group.name)
            return send(group, *given)

        return counted

    for name, method in methods.items():
        setattr(Group, name, counting(method))
    step(models["whole"])
    for name, method in methods.items():
        setattr(Group, name, method)
    gradients = {name: step(model).float() for name, model in models.items()}  # also the warm-up
    error = float((gradients[ours] - gradients["theirs"]).norm() / gradients["theirs"].norm())
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(settings.steps):
        for name, model in models.items():
            seconds[name].append(timed(model))
    dist.destroy_process_group()
    comm.close()
    pairs = list(zip(seconds[ours], seconds["theirs"], strict=True))
    return {
        "ranks": worker.size,
        "device": device.type,
        "dtype": str(_dtype(device)).removeprefix("torch."),
        "ours": ours,
        "hidden": hidden,
        "layers": settings.layers,
        "tokens": settings.tokens,
        "gradient_error": error,
        "collectives_a_block": len(collectives) / settings.layers,
        **{f"{name}_seconds": {"best": min(s), "median": statistics.median(s)} for name, s in seconds.items()},
        "ratio": {
            "best": min(seconds[ours]) / min(seconds["theirs"]),
            "median_of_pairs": statistics.median(a / b for a, b in pairs),
        },
        "pieces_ratio": statistics.median(a / b for a, b in zip(seconds["pieces"], seconds["whole"], strict=True)),
    }


def edges_here() -> dict[str, Any]:
    """`edge_bytes.py` in processes that see no GPU, of which it would need one for each rank; bytes are the same."""
    told = subprocess.run(
        [sys.executable, Path(__file__).with_name("edge_bytes.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    edges: dict[str, Any] = json.loads(told)
    return edges


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", help="widths of the blocks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--row", type=int, help="tokens of the row that ranks share")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= settings.ranks
    if not on_gpus:  # before workers start, which would each want one
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, size in SIZES["cuda" if on_gpus else "cpu"].items():
        setattr(settings, name, getattr(settings, name) or size)
    results = []
    for hidden in settings.hidden:
        result = launch_local(compare, settings.ranks, settings, hidden)[0]
        results.append(result)
        print(
            f"hidden {hidden}: ours {1e3 * result[result['ours'] + '_seconds']['median']:.1f} ms, DTensor "
            f"{1e3 * result['theirs_seconds']['median']:.1f} ms, ratio {result['ratio']['median_of_pairs']:.2f} "
            f"(median of pairs); gradients differ by {result['gradient_error']:.0e}; "
            f"{result['collectives_a_block']:g} collectives a block; in pieces {result['pieces_ratio']:.2f} of whole "
            "rows",
            flush=True,
        )
    edges = edges_here()
    print(
        f"edges between stages of (tp, cp) {', '.join(map(str, DEGREES))}: {edges['sent']:,} bytes a step, "
        f"{edges['sent'] / edges['least']:.3f} of the least; whole rows for every rank: {edges['whole_rows']:,}"
    )
    context = launch_local(compare_context, settings.ranks, settings.row, settings.steps)[0]
    if "theirs_raises" in context:
        print(
            f"attention over {settings.row} tokens: ours {1e3 * context['ours_seconds']:.1f} ms; torch's "
            f"context_parallel on {context['device']}: {context['theirs_raises']}"
        )
    else:
        print(
            f"attention over {settings.row} tokens: ours {1e3 * context['ours_seconds']:.1f} ms, torch's "
            f"context_parallel {1e3 * context['theirs_seconds']:.1f} ms, ratio {context['ratio']:.2f}; norms of the "
            f"outputs {context['norms'][0]:.6g} and {context['norms'][1]:.6g}"
        )
    if settings.json:
        report = {"machine": machine(), "runs": results, "edges": edges, "context": context}
        settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

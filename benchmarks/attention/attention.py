"""Attention over packed multimodal rows: kernels, contenders, context-parallel shares, and what a CPU can check.

    python -m benchmarks.attention.attention                 # all of it on a GPU, a fast form without one
    python -m benchmarks.attention.attention --device cpu    # the fast form (under two minutes)

On a GPU: rates over the visible area at 8k to 128k tokens for five kinds of mask, ours against FlexAttention (tuned
over its kernel options), SDPA's flash and cuDNN kernels, SDPA with a dense mask (what transformers does for packed
rows), varlen flash attention, cuDNN's Flex and MagiAttention; who cannot express a mask is listed by name with the
reason, and what each derives from the mask is timed apart. Then context parallelism on 4, 8 and 32 ranks: every rank's
share run in turn under every placement; communication is modelled, never measured, and labelled so. Then what cutting
long rows gains.

Without a GPU the same functions run on short rows with the blockwise kernels, and two checks of the GPU kernels are
added: their results under Triton's interpreter, and their registers, spills and tensor-core instructions as compiled
for sm_90. Rates on a CPU say nothing of GPUs.

Writes benchmarks/results/attention-<device>.json with date and machine. FlexAttention compiles for every row: a whole
run takes about half an hour on a GPU (an estimate). To run it in pieces give --sections, --kinds and --out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._functorch import config as functorch_config

from benchmarks import RESULTS
from benchmarks.attention import without_gpu
from benchmarks.attention.attention_placement import measure_planning
from benchmarks.attention.kernels import Shape, measure_rates
from benchmarks.attention.rows import KINDS
from benchmarks.attention.shares import fit_block_cost, measure_shares, measure_splitting
from benchmarks.machine import machine
from dilatant.attention import AttentionPlan, RowLayout, document_causal
from dilatant.attention.kernels.backends import PREFERENCE, AttentionCall, installed, unsupported_reason
from dilatant.attention.kernels.mask_class import Kind
from dilatant.planning.measuring.attention_seconds import Rows, measure_attention

BY_CLASS: tuple[Kind, ...] = ("causal", "window", "full", "media")
WINDOW = 1024
GPU_SECTIONS = ("backends", "rates", "shares", "splitting", "planning", "memory")
CPU_SECTIONS = ("backends", "rates", "shares", "interpreter", "compiled", "planning", "memory")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    settings = parse(arguments)
    device = torch.device(settings.device)
    report: dict[str, Any] = {"machine": {**machine(), "threads": torch.get_num_threads()}, "device": str(device)}
    for section in settings.sections:
        print(f"\n== {section}", flush=True)
        # A backward pass is timed again and again over one graph, whose buffers FlexAttention would give away.
        with functorch_config.patch(donated_buffer=False):
            SECTIONS[section](settings, device, report)
        if settings.out:  # kept as it grows: a long run that is cut off leaves what it had
            settings.out.parent.mkdir(parents=True, exist_ok=True)
            settings.out.write_text(json.dumps(report, indent=1) + "\n")
    if settings.out:
        print(f"\nwritten to {settings.out}")
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sections", nargs="+", choices=sorted(SECTIONS), help="default: all that the device has")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="who is timed beside ours; default: all")
    parser.add_argument("--tokens", nargs="+", type=int, help="row lengths of the rates")
    parser.add_argument("--share-tokens", type=int, help="row length of the shares")
    parser.add_argument("--ranks", nargs="+", type=int, help="context-parallel degrees")
    parser.add_argument("--heads", type=int, nargs=3, metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--repeats", type=int, help="repetitions of which the median counts")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--no-out", action="store_true", help="write no file")
    settings = parser.parse_args(arguments)
    on_gpu = torch.device(settings.device).type == "cuda"
    settings.sections = settings.sections or (GPU_SECTIONS if on_gpu else CPU_SECTIONS)
    settings.tokens = settings.tokens or ([8192 << i for i in range(5)] if on_gpu else [1024, 2048])
    settings.share_tokens = settings.share_tokens or (65536 if on_gpu else 4096)
    settings.ranks = settings.ranks or ([4, 8, 32] if on_gpu else [4])
    settings.repeats = settings.repeats or (10 if on_gpu else 2)
    query, kv, dim = settings.heads or ((32, 8, 128) if on_gpu else (4, 2, 64))
    settings.shape = Shape(query, kv, dim, torch.bfloat16 if on_gpu else torch.float32)
    if settings.no_out:
        settings.out = None
    elif settings.out is None:
        settings.out = RESULTS / f"attention-{'gpu' if on_gpu else 'cpu'}.json"
    return settings


def rates(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found = measure_rates(settings.kinds, settings.tokens, settings.shape, device, settings.repeats, settings.only)
    report["rates"] = found
    print(f"{found['shape']}; TFLOP/s over visible pairs; x: how many times as fast ours is")
    columns = "".join(f"{name:>{width}}" for name, width in (("fwd ms", 9), ("bwd ms", 9), ("fwd", 8), ("bwd", 8)))
    print(f"{'mask':16}{'tokens':>8}{'visible':>9}  {'':18}{columns}{'x fwd':>8}{'x bwd':>8}")
    for row in found["rates"]:
        for number, (name, result) in enumerate(row["results"].items()):
            head = f"{row['mask']:16}{row['tokens']:8}{row['visible_share']:9.1%}" if number == 0 else " " * 33
            print(
                f"{head}  {name:18}{result['forward_ms']:9.2f}{result['backward_ms']:9.2f}"
                f"{result['forward_tflops']:8.3g}{result['backward_tflops']:8.3g}"
                f"{result['ours_is_faster_forward']:8.2f}{result['ours_is_faster_backward']:8.2f}"
            )
        for name, reason in row["unavailable"].items():
            print(f"{'':33}  {name:18}not run: {reason}")
        times = ", ".join(f"{name.removesuffix('_ms')} {value:.2f}" for name, value in row["plan"].items())
        print(f"{'':33}  plan, ms on the host: {times}")
    print("largest difference of outputs to float32, values of order one:")
    for row in found["largest_errors"]:
        parts = (f"{name} {v if isinstance(v, str) else format(v, '.1e')}" for name, v in list(row.items())[2:])
        print(f"  {row['mask']:16}{', '.join(parts)}")


def backends(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    """Time every backend of the package on rows of new lengths, as `dilatant profile` does; nothing is kept."""
    shape = settings.shape
    group = shape.query_heads // shape.kv_heads
    kinds = [Rows(kind, group, shape.head_dim, WINDOW if kind == "window" else None) for kind in BY_CLASS]
    found = measure_attention(kinds, device, shape.dtype, max(settings.tokens))
    report["backends"] = [msgspec.to_builtins(row) for row in found]
    for row in found:
        times = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in sorted(row.seconds.items()))
        failed = "".join(f"; {name} failed: {why}" for name, why in row.failed.items())
        print(f"{row.mask:8}{row.tokens:8} tokens, ms forward and backward: {times or 'one backend only'}{failed}")
    row_class = AttentionPlan(document_causal(RowLayout.of_lengths([2, 3]))).mask_class
    call = AttentionCall(device.type, shape.dtype, shape.head_dim, shape.head_dim, row_class, group)
    report["backends_not_run"] = {
        name: reason for name in PREFERENCE["cuda"] if (reason := unsupported_reason(name, call, installed(device)))
    }
    for name, reason in report["backends_not_run"].items():
        print(f"{name} not run: {reason}")


def shares(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found, observations = measure_shares(
        settings.kinds, settings.share_tokens, settings.ranks, settings.shape, device, max(1, settings.repeats // 3)
    )
    report["shares"] = found
    print(f"{settings.share_tokens} tokens, {settings.shape}; every rank's share in turn, forward and backward")
    print(f"{'mask':16}{'ranks':>6}  {'placement':16}{'slowest ms':>11}{'max/mean':>10}{'counted':>9}{'x of lpt':>10}")
    for row in found:
        for entry in row["policies"]:
            print(
                f"{row['mask']:16}{row['ranks']:6}  {entry['policy']:16}{entry['slowest_ms']:11.2f}"
                f"{entry['max_over_mean']:10.3f}{entry['counted_max_over_mean']:9.3f}{entry['lpt_is_faster']:10.2f}"
            )
        modelled = ", ".join(f"{ms:.2f} ms {name}" for name, ms in row["modelled_gather_ms"].items())
        print(f"{'':24}communication MODELLED, not measured: {modelled}")
    fitted = report["block_cost"] = fit_block_cost(observations)
    print(
        f"fitted to {fitted['observations']} shares: a partial block costs {fitted['partial_in_full_blocks']:.2f} and "
        f"a row of blocks {fitted['row_in_full_blocks']:.2f} full blocks; full block "
        f"{fitted['full_block_seconds'] * 1e6:.3g} us, errors {fitted['median_relative_error']:.1%} median, "
        f"{fitted['worst_relative_error']:.1%} worst"
    )


def splitting(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found = report["splitting"] = measure_splitting(
        settings.kinds, settings.share_tokens, settings.shape, device, settings.repeats
    )
    for row in found:
        print(
            f"{row['mask']:16}{row['where']:28}whole {row['whole_ms']:8.2f} ms, cut {row['cut_ms']:8.2f} ms: "
            f"{row['speedup']:.2f} times as fast"
        )


def interpreter(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found = report["interpreter"] = without_gpu.interpreted_errors()
    print("largest error against float64, output and gradients:")
    for name, value in found.items():
        print(f"  {name:16}{value}")


def compiled(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found = report["compiled_for_sm_90"] = without_gpu.compiled_for_hopper((64, 128))
    if not found:
        print("Triton is not installed: nothing was compiled")
    for row in found:
        print(
            f"  {row['kernel']:16}head_dim {row['head_dim']:4}{row['registers']:5} registers, "
            f"{row['spill_store_bytes']:4} bytes spilled, {row['shared_bytes'] / 1024:6.1f} KiB shared, "
            f"{row['warpgroup_products']} warpgroup products{', SERIALIZED' if row['serialized'] else ''}"
        )


def planning(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found = report["planning"] = measure_planning(1 << 20, 30)
    print("a million tokens in blocks of 128, ms: workloads from runs and lpt placement; bound 1 ms")
    for row in found:
        plans = ", ".join(f"{ranks} ranks {row[f'G{ranks}']['plan_ms']:.2f}" for ranks in (8, 64, 256))
        print(f"  {row['mask']:16}{row['runs']:6} runs: {plans}")


def memory(settings: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    found = report["memory"] = without_gpu.table_memory((1 << 14, 1 << 16, 1 << 18))
    print("tables both ways, work lists, words and positions; beside a dense mask of one byte a pair")
    for row in found:
        print(
            f"  {row['mask']:16}{row['tokens']:8} tokens {row['bytes_per_token']:7.1f} bytes a token, "
            f"{row['of_a_dense_mask']:.4%} of a dense mask"
        )


Section = Callable[[argparse.Namespace, torch.device, dict[str, Any]], None]
SECTIONS: dict[str, Section] = {
    "backends": backends,
    "rates": rates,
    "shares": shares,
    "splitting": splitting,
    "interpreter": interpreter,
    "compiled": compiled,
    "planning": planning,
    "memory": memory,
}


if __name__ == "__main__":
    main(sys.argv[1:])

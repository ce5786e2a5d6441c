"""Tensor-parallel plan of a unit: which shard of every weight each rank holds.

The plan follows the family's own (`base_model_tp_plan` of transformers), or ours for encoders, which have none. A block
consists of *regions*: inside attention or feed-forward each rank computes its heads or features; between regions
(norms, residuals) it computes its slice of the tokens. In a mixture of experts each rank holds some features of every
expert or, under expert parallelism, some whole experts. Everything outside of blocks (norms, position tables, patch
convolutions, projectors, modules of the user's own), and routers, is replicated; token embedding and head are divided
by the vocabulary. Undivided weights are held whole by each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dilatant.config.degrees import Degrees
from dilatant.models.adapters.four_bit import BLOCK
from dilatant.models.adapters.lora import adapted_key, has_adapter, is_adapter, layers_of, plain_key, plain_linear
from dilatant.models.core.cross_attention import is_cross_attention
from dilatant.models.core.dtype import TILE
from dilatant.models.core.unit import Unit
from dilatant.models.experts.grouped_experts import fused_experts
from dilatant.models.parallel.linear_heads import linear_paths, linear_refusals, linear_region
from dilatant.models.parallel.tensor_regions import Experts, Region, ShardIntervals, SplitDimension, SplitPart
from dilatant.models.parallel.tensor_rules import GATED, PARTIAL, rules_of_family

_NORMS_OF_HEADS = ("q_norm", "k_norm")
_SHARED_EXPERTS = ("shared_expert", "shared_experts")
"""Experts that every token passes; not every family's plan lists them."""

_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
_GATHERED = "colwise_gather_output"
"""transformers gathers such a layer's output on every rank; fused layers are divided here, others are refused."""

_PER_TOKEN = ("Norm", "LayerScale")
"""Words in the class names of modules that are allowed between regions."""
_OF_OWN_INPUTS = ("per_layer_input_gate", "per_layer_projection")
"""Per-token linear layers of a block for its per-layer input (Gemma 3n, 4)."""

_DIVIDED_BY_OUTPUT = ("", ".weight", ".bias", ".lora_B.weight", ".lora_magnitude_vector.weight")
_DIVIDED_BY_INPUT = (".weight", ".lora_A.weight")
"""Weights of a column- and of a row-parallel layer, and of its adapter, by the ends of their names."""

_QUERY, _KEY_VALUE = ("q_proj", "query", "q"), ("k_proj", "v_proj", "key", "value", "k", "v")
_QKV = ("qkv_proj", "qkv")
_HALVES = ("gate_up_proj", "weights_in")
_INTERLEAVED = "query_key_value"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The division of a unit's weights among tensor- and expert-parallel ranks. cuts: logical name → cut; all other
    weights are replicated. partial: replicated weights whose gradient on each rank is a summand; for other replicated
    weights every rank computes the full gradient. regions, experts: per block. of_experts: logical names of the weights
    that expert parallelism divides by expert. problems: reasons why the unit cannot be tensor parallel at all."""

    cuts: Mapping[str, SplitDimension] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    regions: tuple[tuple[Region, ...], ...] = ()
    experts: tuple[tuple[Experts, ...], ...] = ()
    of_experts: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()

    def held(
        self, name: str, shape: tuple[int, ...], degrees: Degrees, place: int
    ) -> tuple[ShardIntervals | None, bool]:
        """Return the intervals of a weight on the rank at index `place` of a stage (None for the whole weight). The
        second value is True if the rank's gradient is a summand rather than a copy of the other ranks' gradient."""
        tp, ep = degrees.tp, degrees.ep
        if ep > 1 and name in self.of_experts:
            return SplitDimension(0, (SplitPart(shape[0]),)).intervals(shape, ep, place % ep), True
        cut = self.cuts.get(name)
        if tp == 1 or cut is None:
            return None, name in self.partial
        return cut.intervals(shape, tp, place % tp), True


def tensor_plan(unit: Unit) -> TensorPlan:
    """Make the plan of `unit`, which is valid for every degree without `degree_problems`."""
    if unit.structure is None:
        return TensorPlan()
    blocks = list(zip(unit.layers[1:], unit.blocks))
    mixtures = tuple(tuple(_experts(block)) for block in unit.blocks)
    cuts: dict[str, SplitDimension] = {}
    summed: set[str] = set()
    for (layer, _), of_block in zip(blocks, mixtures):
        for experts in of_block:
            path, inner = f"{layer}.{experts.path}", SplitPart(experts.inner)
            for end in ("", "lora_B."):
                cuts[f"{path}.{end}gate_up_proj"] = SplitDimension(1, (inner, inner))
            for end in ("", "lora_A."):
                cuts[f"{path}.{end}down_proj"] = SplitDimension(2, (inner,))
            summed |= {f"{path}.lora_A.gate_up_proj", f"{path}.lora_B.down_proj"}
    of_experts = frozenset(cuts) | summed
    rules = rules_of_family(unit)
    reason = unit.undivided
    if not (reason or rules):
        reason = f"how ranks share the layers of {unit.family!r} is not known"
    for block in unit.blocks:
        reason = reason or next(_refusals(block, rules), None)
    if reason is not None:
        return TensorPlan(experts=mixtures, of_experts=of_experts, problems=(f"{unit.unit}: {reason}",))
    partial, found = summed, []
    for layer, block in blocks:
        regions = tuple(_regions(block, rules))
        found.append(regions)
        for region in regions:
            for path, parts in {**region.columns, **region.others}.items():
                cuts |= {f"{layer}.{path}{end}": SplitDimension(0, parts) for end in _DIVIDED_BY_OUTPUT}
            for path, part in region.rows.items():
                cuts |= {f"{layer}.{path}{end}": SplitDimension(1, (part,)) for end in _DIVIDED_BY_INPUT}
        # Other weights of a block are applied to a slice of the tokens or heads, so their gradients are summands. In
        # mixtures of experts and cross-attention blocks all tokens are replicated.
        alike = tuple(f"{layer}.{path}." for path in _mixtures(block))
        crosses = any(region.whole for region in regions)
        within = tuple(f"{layer}.{region.path}." for region in regions) if crosses else ""
        behind = {f"{layer}.{path}" for region in regions if region.whole for path in region.rows}
        partial |= {
            name
            for path, _ in block.named_parameters()
            if (name := f"{layer}.{plain_key(path)}").startswith(within)
            and not name.startswith(alike)
            and name not in cuts
            and not (is_adapter(name) and adapted_key(name).removesuffix(".weight") in behind)
        }
    return TensorPlan({**cuts, **_vocabulary(unit)}, frozenset(partial), tuple(found), mixtures, of_experts)


def degree_problems(unit: Unit, plan: TensorPlan, tp: int) -> list[str]:
    """Return the reasons why the unit cannot run with this `tp`, one line each, with the degrees that work."""
    if plan.problems:
        return [f"{problem}; give it tp: 1 and more stages or replicas" for problem in plan.problems]
    rates = (
        dropout.p
        for _, layer in layers_of(unit.model)
        for dropout in layer.lora_dropout.values()
        if hasattr(dropout, "p")
    )
    if rate := max(rates, default=0.0):
        return [
            f"{unit.unit}: model.lora.lora_dropout is {rate}, and ranks that share its layers would drop other "
            "features than one; set it to 0, or give the unit tp: 1"
        ]
    kinds = (
        ("heads", "attention heads"),
        ("kv_heads", "key/value heads"),
        ("key_heads", "key heads of linear attention"),
    )
    counts = {
        f"{count} {name}": count for kind, name in kinds for region in _all(plan) if (count := getattr(region, kind))
    }

    def fits(name: str, count: int, degree: int) -> bool:
        return count % degree == 0 or ("key/value" in name and degree % count == 0)

    wrong = [name for name, count in counts.items() if not fits(name, count, tp)]
    if wrong:
        working = [d for d in range(1, tp + 1) if all(fits(name, count, d) for name, count in counts.items())]
        return [
            f"{unit.unit}: {' and '.join(wrong)} cannot be shared by {tp} ranks; it takes tp "
            f"{', '.join(map(str, working))}"
        ]
    shapes = {name: tuple(p.shape) for name, p in unit.named_logical_parameters() if name in unit.four_bit}
    for name, shape in shapes.items():
        if not all(_has_whole_blocks(plan, name, shape, tp, index) for index in range(tp)):
            return [
                f"{unit.unit}: {tp} ranks would cut {name!r}, {list(shape)}, within the blocks of {BLOCK} numbers "
                "that have one scale in four bits; give it less tp, or leave model.lora.load_in_4bit out"
            ]
    for name, weight in unit.named_logical_parameters():
        if name in unit.fp8 and any(
            sum(end - first for first, end in spans) % TILE
            for index in range(tp)
            for spans in plan.held(name, tuple(weight.shape), Degrees(tp), index)[0] or ()
        ):
            return [
                f"{unit.unit}: {tp} ranks would cut {name!r}, {list(weight.shape)}, into parts that are no multiples "
                f"of {TILE}, which FP8 needs; give it less tp, or write train.precision: bf16"
            ]
        if name in unit.orthogonal and plan.held(name, tuple(weight.shape), Degrees(tp), 0)[0] is not None:
            return [
                f"{unit.unit}: Muon updates whole matrices, and {tp} ranks would divide {name!r}; give the unit tp: 1, "
                "or leave it out of train.optimizer.muon.weights"
            ]
    inner = [experts.inner for of_block in plan.experts for experts in of_block]
    narrow = min((*(part.count for region in _all(plan) for part in region.rows.values()), *inner), default=tp)
    if narrow < tp and not any(region.heads == narrow for region in _all(plan)):
        return [f"{unit.unit}: {narrow} features cannot be shared by {tp} ranks; it takes tp up to {narrow}"]
    return []


def _has_whole_blocks(plan: TensorPlan, name: str, shape: tuple[int, ...], tp: int, index: int) -> bool:
    """Return True if a rank's shard of a weight [out, in] has the same bits quantised before or after sharding."""
    intervals, _ = plan.held(name, shape, Degrees(tp), index)
    if intervals is None:
        return True
    (rows, columns), width = intervals, shape[1]
    if columns == ((0, width),):
        return all(border * width % BLOCK == 0 for span in rows for border in span)
    return width % BLOCK == 0 and all(border % BLOCK == 0 for span in columns for border in span)


def expert_problems(unit: Unit, plan: TensorPlan, degrees: Degrees) -> list[str]:
    """Return why a stage with these degrees cannot divide experts among `ep` ranks, with the degrees that work."""
    counts, ep = sorted({experts.count for of_block in plan.experts for experts in of_block}), degrees.ep
    if ep == 1:
        return []
    if not counts:
        return [f"{unit.unit}: ep is {ep}, but it has no experts that ranks could divide; leave ep out"]
    working = [one for one in degrees.expert_degrees(counts[0]) if not any(count % one for count in counts)]
    if ep in working:
        return []
    experts, stages = " and ".join(map(str, counts)), degrees.grid(" and ")
    return [
        f"{unit.unit}: {experts} experts cannot be divided by ep {ep} among stages of {stages}; it takes ep "
        f"{', '.join(map(str, working))} there (a multiple of tp that divides the experts, and tp x cp or vice versa)"
    ]


def _all(plan: TensorPlan) -> Iterator[Region]:
    for regions in plan.regions:
        yield from regions


def _rules_of(block: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return path → rule for the block's linear layers, without experts and linear attention (separate rules)."""
    experts = [path for path, _ in fused_experts(block)]
    apart = [*experts, *linear_paths(block)]
    found = {
        path: rule
        for path, rule in rules.items()
        if _has(block, path) and not any(path == one or path.startswith(one + ".") for one in apart)
    }
    for parent in {path.rpartition(".")[0] for path in found}:
        for norm in _NORMS_OF_HEADS:  # not every plan lists the norms that all heads share
            path = f"{parent}.{norm}" if parent else norm
            width = getattr(block.get_submodule(parent), "head_dim", None)
            if _has(block, path) and getattr(block.get_submodule(path), "weight", torch.empty(0)).shape == (width,):
                found.setdefault(path, PARTIAL)
    for parent in {path.rpartition(".")[0] for path in experts}:
        for name in _SHARED_EXPERTS:
            mlp = f"{parent}.{name}" if parent else name
            shared = {f"{mlp}.{linear}": rule for linear, rule in GATED.items()}
            if all(_has(block, path) for path in shared):
                found |= shared
    return found


def _entry(block: nn.Module, path: str) -> str:
    """Return the path of the module at whose entry hidden states are replicated; "" for the block itself."""
    parts = path.split(".")
    beside_experts = any(mixture.startswith(parts[0] + ".") for mixture, _ in fused_experts(block))
    return ".".join(parts[:-1]) if beside_experts else ".".join(parts[:-1][:1])


def _refusals(block: nn.Module, rules: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons why this version cannot divide a block."""
    there = _rules_of(block, rules)
    mixtures = [f"{path}." for path in _mixtures(block) if path]
    covered = [path for path, rule in there.items() if rule in (*_COLUMNS, *_ROWS, PARTIAL)]
    for path, rule in there.items():
        name = path.rpartition(".")[2]
        if rule not in (*_COLUMNS, *_ROWS, PARTIAL):
            yield f"layers such as {path!r} ({rule}) cannot be shared yet"
        elif name == _INTERLEAVED:
            yield f"{path!r} holds queries, keys and values of one head after another"
        elif rule == _GATHERED and name not in (*_QKV, *_HALVES):
            yield f"{path!r} is normalised over all heads"
        elif rule in (*_COLUMNS, *_ROWS) and not isinstance(plain_linear(block, path), nn.Linear):
            yield f"{path!r} is no linear layer"
        elif has_adapter(block.get_submodule(path)) and any(map(path.startswith, mixtures)):
            yield f"layers with LoRA beside them among experts, such as {path!r}, cannot be shared yet"
    if "" in _mixtures(block):
        yield "its blocks choose experts themselves"
    for path in linear_paths(block):
        yield from linear_refusals(block, path)
    heads = {path.partition(".")[0] for path in (*covered, *_mixtures(block), *linear_paths(block))}
    for name, child in block.named_children():
        if name not in (*heads, *_OF_OWN_INPUTS) and not all(map(_is_per_token, child.modules())):
            yield f"its plan says nothing of {name!r}, which may need more than a rank's tokens"
    for entry in {_entry(block, path) for path in covered} - {""}:
        for name, _ in block.get_submodule(entry).named_parameters():
            if not any(f"{entry}.{name}".startswith(one + ".") for one in covered):
                yield f"its plan says nothing of '{entry}.{name}'"


def _experts(block: nn.Module) -> Iterator[Experts]:
    found = dict(fused_experts(block))
    parents = [path.split(".")[:-1] for path in found]
    around = ".".join(parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*parents)))
    for path, module in found.items():
        count, _, inner = cast(nn.Parameter, module.down_proj).shape
        yield Experts(path, count, inner, around)


def _mixtures(block: nn.Module) -> list[str]:
    """Return the paths of the modules that contain routers and experts."""
    return [experts.mixture for experts in _experts(block)]


def _is_per_token(module: nn.Module) -> bool:
    """Return True if a module is known to map each token's hidden states independently of other tokens."""
    own = any(True for _ in module.parameters(recurse=False))
    return not own or any(word in type(module).__name__ for word in _PER_TOKEN)


def _regions(block: nn.Module, rules: Mapping[str, str]) -> Iterator[Region]:
    for path in linear_paths(block):
        yield linear_region(block, path)
    groups: dict[str, dict[str, str]] = {}
    for path, rule in _rules_of(block, rules).items():
        groups.setdefault(_entry(block, path), {})[path] = rule
    whole = is_cross_attention(block)
    for entry, members in groups.items():
        columns = [path for path, rule in members.items() if rule in _COLUMNS]
        rows = [path for path, rule in members.items() if rule in _ROWS]
        if any(_last(path) in (*_QUERY, *_QKV) for path in columns):
            yield replace(_attention(block, entry, columns, rows), whole=whole)
        else:
            outs = {path: _features(block, path)[0] for path in columns}
            yield Region(
                entry,
                {p: (SplitPart(n // 2),) * 2 if _last(p) in _HALVES else (SplitPart(n),) for p, n in outs.items()},
                {path: SplitPart(_features(block, path)[1]) for path in rows},
                whole=whole,
            )


def _attention(block: nn.Module, entry: str, columns: list[str], rows: list[str]) -> Region:
    owner: Any = block.get_submodule(columns[0].removesuffix(".linear").rpartition(".")[0])
    head: int = getattr(owner, "head_dim", None) or owner.attention_head_size
    (row,) = rows
    ins = _features(block, row)[1]
    heads = ins // head
    kv_heads = heads // getattr(owner, "num_key_value_groups", 1)  # also if it reuses another block's keys and values
    parts: dict[str, tuple[SplitPart, ...]] = {}
    for path in columns:
        out = _features(block, path)[0]
        if _last(path) in _QKV:
            kv_heads = (out // head - heads) // 2
            parts[path] = (SplitPart(heads, head), SplitPart(kv_heads, head), SplitPart(kv_heads, head))
        elif _last(path) in _KEY_VALUE:
            kv_heads = out // head
            parts[path] = (SplitPart(kv_heads, head),)
        else:
            parts[path] = (SplitPart(heads, out // heads),)
    return Region(entry, parts, {row: SplitPart(heads, head)}, heads, kv_heads)


def _vocabulary(unit: Unit) -> dict[str, SplitDimension]:
    """Return the cuts of a language model's embedding and head; a tied weight appears once."""
    model = cast(PreTrainedModel, unit.model)
    head = model.get_output_embeddings()
    if head is None:
        return {}
    held = dict(model.named_parameters(remove_duplicate=False))
    divided = [*head.parameters(), *model.get_input_embeddings().parameters()]
    return {
        weight.canonical: SplitDimension(0, (SplitPart(held[weight.key].shape[0]),))
        for weight in unit.weights
        if weight.key in held and any(held[weight.key] is one for one in divided)
    }


def _features(block: nn.Module, path: str) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer."""
    outs, ins = cast(nn.Linear, block.get_submodule(path)).weight.shape
    return outs, ins


def _last(path: str) -> str:
    """Return the name of a linear layer, or of the module that clips its inputs and outputs (Gemma 4's encoder)."""
    return path.removesuffix(".linear").rpartition(".")[2]


def _has(block: nn.Module, path: str) -> bool:
    try:
        block.get_submodule(path)
    except AttributeError:
        return False
    return True

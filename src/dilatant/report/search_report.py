"""Facts of a plan report that follow from a search: units, runners-up, memory and data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.cost.memory import BF16, MUON_SAVES, ParameterBytes
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.stable_batch import StableBatch
from dilatant.plan.costs.sync_time import sharing
from dilatant.plan.model_spec import EncoderPosition, ModelSpec, roles_of
from dilatant.plan.plan import PlacedStage
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.search_result import SearchResult
from dilatant.report.plan_report import (
    ComparedPlan,
    MemoryUse,
    SearchedPlans,
    SizeDistribution,
    UnitFacts,
    WorkloadRatio,
)
from dilatant.report.text.search_reasons import cut_text, layout_text, recomputation_text
from dilatant.report.text.wording import counted

_BINS = 24
_RUNNERS_UP = 6
_CONFIDENCE = 0.95


def unit_facts(model: ModelSpec, names: Mapping[str, str]) -> tuple[UnitFacts, ...]:
    """Return facts about units. A tied weight counts in every layer that needs it. names: descriptions of the units."""
    roles = roles_of(model)
    role_of = dict.fromkeys(roles.encoders, "encoder") | {roles.language: "language model"}
    return tuple(
        UnitFacts(
            name=unit.name,
            role=role_of.get(unit.name, "generator"),
            model=names.get(unit.name, unit.name),
            layers=len(unit.layers),
            parameters=sum(layer.parameters for layer in unit.layers),
            trainable_parameters=sum(layer.trained for layer in unit.layers),
        )
        for unit in model.units
    )


def searched_plans(result: SearchResult) -> tuple[SearchedPlans, ...]:
    """Return the counts of candidates by encoder position, number of pipelines and, if it differs, sharding."""
    several = len({group.zero for group in result.groups}) > 1
    units = len(result.winner.plan.units)
    return tuple(
        SearchedPlans(
            name=_shape_name(group.encoders_at, group.replicas, units) + (f", zero {group.zero}" if several else ""),
            candidates=group.candidates,
            simulated=group.simulated,
            overflowed=group.overflowed,
            cut=group.cut,
            left=group.left,
            bound_seconds=group.bound,
            step_seconds=group.seconds,
        )
        for group in result.groups
    )


def size_distribution(unit: str, tokens: ArrayLike) -> SizeDistribution:
    """Return the distribution of tokens per sample in equal bins of whole numbers from 0; samples without work count as
    0."""
    values = np.asarray(tokens, dtype=np.float64)
    top = max(float(values.max(initial=0.0)), 1.0)
    width = math.ceil((top + 1.0) / _BINS)
    counts, edges = np.histogram(values, np.arange(0.0, top + width + 1.0, width))
    return SizeDistribution(
        unit=unit,
        samples=len(values),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        mean=float(values.mean()),
        median=float(np.median(values)),
        p95=float(np.percentile(values, 95)),
        largest=top if len(values) else 0.0,
    )


def workload_ratio(
    units: Sequence[str], work: ArrayLike, global_batch: int, stable: StableBatch | None = None
) -> WorkloadRatio:
    """Return shares of mean work with their confidence interval.

    A share is a ratio of means, s = mean(w) / mean(W); to first order its error is that of the mean of (w - s W) /
    mean(W), which is normal for many samples.
    """
    samples = np.asarray(work, dtype=np.float64)
    total = samples.sum(axis=1)
    shares = samples.mean(axis=0) / total.mean()
    residual = (samples - shares * total[:, None]) / total.mean()
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2.0)
    margin = z * residual.std(axis=0, ddof=1 if len(samples) > 1 else 0) / math.sqrt(len(samples))
    low, high = np.maximum(shares - margin, 0.0), np.minimum(shares + margin, 1.0)
    return WorkloadRatio(
        shares=dict(zip(units, shares.tolist(), strict=True)),
        low=dict(zip(units, low.tolist(), strict=True)),
        high=dict(zip(units, high.tolist(), strict=True)),
        confidence=_CONFIDENCE,
        samples=len(samples),
        global_batch=global_batch,
        stable_batch=stable.batch if stable else None,
    )


def memory_use(
    ranked: RankedPlan,
    model: ModelSpec,
    cluster: Cluster,
    rules: ParameterBytes = BF16,
    kept: Sequence[float] | None = None,
) -> tuple[MemoryUse, ...]:
    """Return peak memory by use, the maximum over all simulated steps, which decides whether plans fit. Ranks with the
    same stages and peak form one entry. The reserve counts as used. Empty when no memory was simulated. kept: peaks of
    the ranks without buffers, which are counted as activations if it is missing."""
    plan, peaks = ranked.plan, ranked.score.peak_bytes
    if not peaks:
        return ()
    held = plan.stages_of_rank
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank, peak in zip(plan.ranks, peaks, strict=True):
        groups.setdefault((tuple(placed.index for placed in held[rank]), round(peak)), []).append(rank)
    without = dict(zip(plan.ranks, peaks if kept is None else kept, strict=True))
    uses = []
    shared_by = sharing(plan, model, rules)
    for (stages, peak), ranks in groups.items():
        own = cluster.at(ranks[0])
        reserved = {"reserve": round(own.reserve.total)} if own.reserve.total else {}
        fixed = _parameter_bytes(held[ranks[0]], model, rules, shared_by)
        buffers = max(peak - round(without[ranks[0]]), 0)
        fixed["activations"] = max(peak - buffers - sum(fixed.values()), 0)
        uses.append(
            MemoryUse(
                ranks=tuple(ranks),
                stages=stages,
                bytes_by_use={**fixed, **({"buffers": buffers} if buffers else {}), **reserved},
                capacity_bytes=round(own.memory) if math.isfinite(own.memory) else peak,
            )
        )
    return tuple(uses)


def _parameter_bytes(
    held: Sequence[PlacedStage], model: ModelSpec, rules: ParameterBytes, shared_by: Sequence[NDArray[np.float64]]
) -> dict[str, int]:
    weights = gradients = optimizer = 0.0
    for placed in held:
        layers = model.unit(placed.unit).layers[placed.stage.first : placed.stage.end]
        degrees = placed.stage.degrees
        shard, by = rules.shard_of(placed.unit), shared_by[placed.index]
        trained = np.array([layer.held_trained(degrees, placed.is_first) for layer in layers])
        frozen = np.array([layer.held_frozen(degrees, placed.is_first) for layer in layers])
        weights += rules.weight * sum(layer.held(degrees, placed.is_first) for layer in layers)
        gone = rules.weight * (shard == "weights") * (1.0 - 1.0 / by)
        for counts, trains in ((trained, True), (frozen, False)):
            weights -= float((counts * (gone + rules.spared_by_masters(placed.unit, trains) / by))[by > 1].sum())
        weights -= sum(rules.spared(layer.held_in_four_bits(degrees)) for layer in layers)
        gradients += rules.gradients * float((trained if shard == "none" else trained / by).sum())
        orthogonal = np.array([layer.orthogonal for layer in layers])
        optimizer += float(((rules.optimizer * trained - MUON_SAVES * orthogonal) / by).sum())
    return {"parameters": round(weights), "gradients": round(gradients), "optimizer": round(optimizer)}


def compared_plans(result: SearchResult, cluster: Cluster) -> tuple[ComparedPlan, ...]:
    """Return the winner and the next plans, the fastest of each layout: rank orders and sharding of state vary."""
    fastest: dict[tuple[str, str], ComparedPlan] = {}
    for one in (result.winner, *result.runners_up):
        plan = compared_plan(one, cluster, chosen=one is result.winner)
        if one.zero != result.winner.zero:
            plan = replace(plan, layout=f"{plan.layout}; zero {one.zero}")
        key = plan.name, plan.layout.removesuffix(f"; zero {one.zero}")
        fastest.setdefault(key, plan)
    return tuple(itertools.islice(fastest.values(), 1 + _RUNNERS_UP))


def compared_plan(ranked: RankedPlan, cluster: Cluster, chosen: bool = False) -> ComparedPlan:
    """Return a searched plan as the report compares it."""
    score, plan = ranked.score, ranked.plan
    total = score.seconds * len(plan.ranks)
    devices = [cluster.at(rank) for rank in plan.ranks]
    idle = {cause: seconds / total for cause, seconds in score.idle_seconds.items() if seconds > 0.0}
    return ComparedPlan(
        name=_shape_name(ranked.encoders_at, ranked.replicas + ranked.extra, len(ranked.plan.units)),
        layout=f"{layout_text(plan, cluster)}; {cut_text(ranked)}",
        devices=len(plan.ranks),
        step_seconds=score.seconds,
        peak_memory=max(
            ((peak + own.reserve.total) / own.memory for peak, own in zip(score.peak_bytes, devices)), default=0.0
        ),
        idle=dict(sorted(idle.items(), key=lambda item: -item[1])),
        chosen=chosen,
        sync_seconds=score.sync_seconds,
        recomputed=recomputation_text(plan),
    )


def _shape_name(encoders_at: EncoderPosition, replicas: int, units: int) -> str:
    """Return the number of pipelines and the encoder position in words."""
    pipelines = counted(replicas, "pipeline")
    if units == 1:
        return pipelines
    where = {
        EncoderPosition.PARALLEL: "units apart",
        EncoderPosition.COLOCATED: "encoders together",
        EncoderPosition.IN_LANGUAGE: "encoders in language",
        EncoderPosition.MIXED: "encoders in different places",
    }
    return f"{where[encoders_at]}, {pipelines}"

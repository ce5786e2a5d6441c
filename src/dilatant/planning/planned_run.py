"""Outputs of a planned run: the plan that trains, the report that people read, and the files of a plan folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from dilatant.config import Config, UserError
from dilatant.config.degrees import AXES
from dilatant.config.errors import file_errors
from dilatant.config.files.own_files import require_plain
from dilatant.config.memory_modes import Shard
from dilatant.cost.analytic import FP8
from dilatant.cost.memory import ZEROS, bytes_text
from dilatant.cost.published_runs import PublishedRun, mean_errors, nearest_runs
from dilatant.plan.costs.stable_batch import sample_work
from dilatant.plan.costs.sync_time import sharing, sync_seconds
from dilatant.plan.model_spec import roles_of
from dilatant.plan.plan import Plan
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.why_not import AskedLayout, either
from dilatant.plan.sharding import shard_by_unit
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.plan.templates.membership import ChainCosts, pipelines_of, ranks_of
from dilatant.planning.data_parallelism import why_not_data_parallelism
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.limiting_links import device_reasons, link_reasons, peaks_without_buffers
from dilatant.planning.measuring.attention_seconds import measured_attention
from dilatant.planning.measuring.layer_costs import degrees_of, described_costs
from dilatant.planning.plan_advice import plan_advice
from dilatant.planning.planning import PlannedRun, PlanningProblem, answer_why_not, searched_row_tokens, tried_schedules
from dilatant.planning.problem.dense_rows import is_assumed
from dilatant.report.gantt import predicted_chart
from dilatant.report.pages.plan_page import write_plan_page
from dilatant.report.plan_report import DeviceGroup, PlanReport, WhyNotFacts
from dilatant.report.run_folder import RunFolder
from dilatant.report.search_report import (
    compared_plans,
    memory_use,
    searched_plans,
    size_distribution,
    unit_facts,
    workload_ratio,
)  # fmt: skip
from dilatant.report.text.plan_summary import why_not_text
from dilatant.report.text.search_reasons import group_reasons, search_reasons
from dilatant.report.text.wording import count_text, counted, listed, origin_text, percent_text, seconds_text
from dilatant.runtime.precision import pick_device


def training_plan(problem: PlanningProblem, ranked: RankedPlan, chain: ChainCosts | None = None) -> TrainingPlan:
    """Return the plan that trains as `ranked` was simulated. chain: as in `PlannedRun`."""
    target = problem.target.sharing(ranked.zero)
    return TrainingPlan(
        ranked.plan,
        ranked.num_microbatches,
        ranked.score.schedule,
        problem.policy,
        ranked.score.seconds,
        described_costs(ranked.plan, problem.model, problem.costs, target),
        ranked.row_tokens,
        ranked.zero,
        chain,
        _sharded(problem, ranked.plan),
    )


def _sharded(problem: PlanningProblem, plan: Plan) -> dict[str, Shard]:
    """Return what is sharded of each unit of a plan, as its simulation counted."""
    trains = {unit.name: any(unit.trainable) for unit in problem.model.spec.units}
    if problem.config.train.shard is not None:
        return shard_by_unit(plan, trains, problem.config.train.shard)
    words = {unit.name: problem.target.rules.shard_of(unit.name) for unit in plan.units}
    return {unit: how for unit, how in words.items() if unit in shard_by_unit(plan, trains, how)}


def plan_report(planned: PlannedRun, title: str, asked: Mapping[str, AskedLayout] | None = None) -> PlanReport:
    """Return the report of a planned run. It has warnings about the run's data and costs, what would make it faster,
    and why the layouts in `asked`, by their texts, were not chosen."""
    problem, result, cluster = planned.problem, planned.result, planned.problem.target.cluster
    winner, units = result.winner, [unit.name for unit in problem.model.spec.units]
    tokens = problem.samples.first(problem.samples.available).tokens
    stable = planned.stable.warning(problem.global_batch) if planned.stable else ""
    sync = sync_seconds(winner.plan, problem.model.spec, cluster, problem.target.sharing(winner.zero).rules)
    report = PlanReport(
        title=title,
        hardware=problem.target.text,
        cost_source=_cost_source(problem),
        schedule=winner.score.schedule or "1f1b",
        plan=winner.plan,
        units=tuple(
            # A tied weight counts in every layer that needs it; a reader expects it once.
            replace(unit, parameters=whole, trainable_parameters=trainable)
            for unit in unit_facts(problem.model.spec, problem.model.names)
            for whole, trainable in [problem.model.parameters[unit.name]]
        ),
        timeline=predicted_chart(planned.typical, winner.score.sync_seconds, max(sync.updates.values(), default=0.0)),
        global_batch=problem.global_batch,
        sizes=tuple(size_distribution(name, tokens[name]) for name in units),
        ratio=workload_ratio(units, planned.work, problem.global_batch, planned.stable),
        memory=memory_use(winner, problem.model.spec, cluster, problem.target.rules, peaks_without_buffers(planned)),
        candidates=compared_plans(result, cluster),
        lower_bound_seconds=result.lower_bound,
        proven=result.proven,
        planning_seconds=result.wall_seconds,
        allocated_devices=cluster.num_devices,
        reasons=_reasons(planned) if result.groups else (),
        nearest=_nearest(planned),
        advice=plan_advice(planned),
        warnings=(*planned.notes, *([stable] if stable else []), *_warnings(planned)),
        searched=_searched(planned),
        groups=searched_plans(result),
        why_not=tuple(
            WhyNotFacts(text, why_not_text(answer_why_not(planned, layout), result, cluster))
            for text, layout in (asked or {}).items()
        ),
        gpus_per_node=cluster.gpus_per_node,
        ports_per_node=cluster.ports,
        device_groups=tuple(
            DeviceGroup(group.name, group.device, group.nodes, group.gpus_per_node, group.ports)
            for group in cluster.parts
        ),
        zero=winner.zero,
        shard={**_sharded(problem, winner.plan)},
        limits=problem.model.limits,
    )
    if planned.chain is None:
        return report
    return replace(fixed_plan_report(report), reasons=(_members(planned, planned.chain),))


def _reasons(planned: PlannedRun) -> tuple[str, ...]:
    """Return why the search chose its plan, from the plan's shape to how sure the search is."""
    first, *reasons, last = search_reasons(planned.result, planned.typical, planned.problem.target.cluster)
    limits = *_frozen_parts(planned), *device_reasons(planned), *link_reasons(planned), *_decoding(planned)
    more = *planned.rows, *limits, *_compared(planned)
    return (first, *_groups(planned), *why_not_data_parallelism(planned), *reasons, *more, last)


def _members(planned: PlannedRun, chain: ChainCosts) -> str:
    """Describe the pipelines of a plan that was made from chain costs, which recovery continues."""
    plan, devices = planned.result.winner.plan, chain.devices
    sizes = [len(ranks_of(one)) for one in pipelines_of(plan)]
    share_nodes = any(size % devices for size in sizes)
    each = [counted(*((size, "device") if share_nodes else (size // devices, "node"))) for size in sizes]
    copies = min(copies_on_nodes(plan, devices).values())
    return (
        f"Pipelines of {listed(each)} run all units in a row and fit memory; "
        f"{min(chain.fault_tolerance, copies - 1)} may be lost at once. After a loss the run adopts the plans that "
        "`dilatant simulate --failures` predicts."
    )


def fixed_plan_report(report: PlanReport, layout: str = "") -> PlanReport:
    """Return the report of a plan that was not compared with all others: held to a layout, or timed as it is."""
    held = f"It is the fastest plan like {layout!r} that was simulated; others were not looked at."
    return replace(
        report,
        lower_bound_seconds=None,
        candidates=report.candidates if layout else (),
        reasons=(held,) if layout else (),
        planning_seconds=None,
        mean_seconds=report.step_seconds,
    )


def _groups(planned: PlannedRun) -> tuple[str, ...]:
    """Return the report's reasons about groups of unlike devices."""
    problem = planned.problem
    spec, samples = problem.model.spec, problem.samples.first(problem.samples.available)
    names = [unit.name for unit in spec.units]
    work = {
        name: dict(zip(names, sample_work(spec, own, samples).mean(axis=0).tolist(), strict=True))
        for name, own in problem.costs.groups.items()
    }
    cluster, language = problem.target.cluster, roles_of(spec).language
    return group_reasons(planned.result, planned.typical, cluster, language, work)


_REPORT = "report.json"


def check_plan_folder(config: Config) -> None:
    """Raise UserError if the run folder's plan/ holds files that no plan wrote, or cannot be written."""
    folder = Path(config.output_dir) / "plan"
    require_plain(folder.parent, is_run=True)
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    with file_errors(f"output_dir {str(folder)!r} cannot be written"), tempfile.TemporaryFile(dir=there):
        pass
    foreign = [name for name in ("plan.json", "config.yaml", "costs.yaml") if (folder / name).exists()]
    if foreign and not (folder / _REPORT).is_file():
        raise UserError(
            f"output_dir: {str(folder)!r} holds {foreign[0]!r}, which no plan wrote and this one would replace; choose "
            "another output_dir"
        )


def write_plan_folder(planned: PlannedRun, report: PlanReport) -> Path:
    """Write plan/ in the run folder with all that `dilatant train` and `simulate` read, and a page; return its path."""
    problem, winner = planned.problem, planned.result.winner
    check_plan_folder(problem.config)
    folder = RunFolder(Path(problem.config.output_dir) / "plan")
    folder.write_text(_REPORT, report.to_json() + "\n")  # first, as it marks the folder as ours
    folder.write_text("plan.json", training_plan(problem, winner, planned.chain).to_json())
    folder.write_config(problem.config)
    folder.write_text("costs.yaml", problem.measured.to_yaml())
    write_plan_page(report, folder.path / "plan.html")
    return folder.path


def _cost_source(problem: PlanningProblem) -> str:
    """Describe where the costs are from, for a reader."""
    groups = problem.measured.groups
    if len({own.origin for own in groups.values()}) > 1:
        return "; ".join(f"{name}: {origin_text(own.origin)}" for name, own in groups.items())
    origin = origin_text(problem.measured.origin)
    before = " before (`dilatant profile` measures again)" if problem.from_before else ""
    eager = ", with eager blocks, which are slower than compiled ones" * (problem.config.train.compile == "blocks")
    return f"{origin}{before}{problem.measured.unmeasured_text}{eager}{_attention_text(problem)}"


def _attention_text(problem: PlanningProblem) -> str:
    """Say which attention backends `dilatant profile` found the fastest, if the devices to plan for are here."""
    if not problem.target.is_local:
        return ""
    rows = measured_attention(problem.model, pick_device(), problem.target.activations)
    kinds: dict[str, dict[str, None]] = {}
    for row in rows:
        kinds.setdefault(row.ranking[0], {})[row.mask] = None
    chosen = listed([f"{name} for {listed([*own])} rows" for name, own in kinds.items()])
    return f"; attention by {chosen}" if kinds else ""


def _compared(planned: PlannedRun) -> list[str]:
    """Say how far modelled steps are from published ones on these devices."""
    problem = planned.problem
    hardware = problem.target.hardware.name
    if problem.measured.origin != "analytic" or problem.target.groups or problem.target.is_local:
        return []
    found = [f"{name} {percent_text(off)}" for name, off in mean_errors(hardware).items()]
    if not found:
        return [f"No published run on {hardware} was compared with its modelled step."]
    nearest = "; ".join(map(str, _nearest(planned)))
    return [
        f"Mean errors of modelled steps of published runs on {hardware}: {listed(found)}. Modelled over measured "
        f"seconds of those most like this plan: {nearest or 'none is known'}."
    ]


def _nearest(planned: PlannedRun) -> tuple[PublishedRun, ...]:
    """Return the published runs most like the language model of the plan."""
    problem, winner = planned.problem, planned.result.winner
    if problem.measured.origin != "analytic" or problem.target.groups or problem.target.is_local:
        return ()
    unit = winner.plan.unit(roles_of(problem.model.spec).language)
    stages = unit.replicas[0].stages
    sharded = "nothing" if winner.zero == "none" or len(unit.replicas) == 1 else "optimizer state"
    if _sharded(problem, winner.plan).get(unit.name) == "weights":
        sharded = "weights"
    of_unit = problem.model.spec.unit(unit.name)
    kinds = {"experts": any(layer.experts for layer in of_unit.layers), "FP8": problem.target.dtype == FP8}
    name = ", ".join([unit.name, *(kind for kind, is_so in kinds.items() if is_so)])
    size = len(winner.plan.ranks), problem.model.parameters[unit.name][0] / 1e9
    degrees = stages[0].tp, len({stage.ranks for stage in stages})
    return nearest_runs(PublishedRun("", name, problem.target.hardware.name, *size, *degrees, sharded, 1.0))


def _frozen_parts(planned: PlannedRun) -> list[str]:
    """Return how many bytes of the frozen weights of sharded units a rank holds."""
    problem, plan = planned.problem, planned.result.winner.plan
    rules, largest = problem.target.sharing(planned.result.winner.zero).rules, dict[str, tuple[float, float]]()
    shard = {unit: how for unit, how in _sharded(problem, plan).items() if how.startswith("weights")}
    for placed, shared_by in zip(plan.stages(), sharing(plan, problem.model.spec, rules)):
        layers = problem.model.spec.unit(placed.unit).layers[placed.stage.first : placed.stage.end]
        frozen = [rules.weight * layer.held_frozen(placed.stage.degrees, placed.is_first) for layer in layers]
        held = sum(frozen), sum(size / by for size, by in zip(frozen, shared_by))
        largest[placed.unit] = max(held, largest.get(placed.unit, held))
    return [
        f"Ranks share the frozen weights of {unit}: of {bytes_text(largest[unit][0])} each keeps "
        f"{bytes_text(largest[unit][1])} (train.shard: {how})."
        for unit, how in shard.items()
        if largest[unit][0]
    ]


def _searched(planned: PlannedRun) -> str:
    """Describe the candidates among which the winner is the best."""
    problem, result = planned.problem, planned.result
    tried = {name: sorted({getattr(one, name) for one in degrees_of(problem.costs)}) for name in AXES}
    degrees = [f"{name} {either(own)}" for name, own in tried.items() if name == "tp" or own != [1]]
    count, sizes = problem.config.parallel.microbatches, problem.config.plan.microbatch_sizes
    cut = f"microbatches of {either(sizes)} samples" if count is None else counted(count, "microbatch")
    if budgets := searched_row_tokens(problem.config):
        cut += f" or of up to {either(f'{budget:,}' for budget in budgets)} tokens"
    known = {result.winner.zero, *(group.zero for group in result.groups)}
    zeros = [zero for zero in ZEROS if zero in known]
    return (
        f"equal pipelines cut where work is most even, and single layers from there, {', '.join(degrees)}, {cut}, "
        f"schedule {either(tried_schedules(problem))}, zero {either(zeros)}"
    )


def _decoding(planned: PlannedRun) -> list[str]:
    """Say how many processors must decode and, if that is more than there are workers, what helps."""
    cost, config = planned.problem.decoding, planned.problem.config
    if cost is None:
        return []
    rate = planned.problem.global_batch / planned.result.winner.score.seconds
    needed = cost.processors(rate)
    keep = "keeps" if needed == 1 else "keep"
    sentences = [
        f"Decoding takes {seconds_text(cost.seconds)} of a processor a sample (mean of {cost.samples}, measured here): "
        f"{counted(needed, 'processor')} {keep} up with {count_text(rate)} samples per second."
    ]
    machines = planned.problem.target.cluster.nodes if config.data.preprocess == "local" else 1
    if config.data.workers is not None and config.data.workers * machines < needed:
        sentences.append(
            f"data.workers allows only {config.data.workers * machines}: training would wait for data; raise it, or "
            "let other machines decode (data.preprocess: ray)."
        )
    return sentences


def _warnings(planned: PlannedRun) -> list[str]:
    problem = planned.problem
    notable, fixed_at_most = 0.1, 0.25
    parts = problem.forward_seconds(planned.result.winner.microbatch_size)
    whole = sum(seconds for seconds, _ in parts.values())
    worst = problem.measured.rough

    def share_of(kinds: Iterable[str]) -> float:
        return sum(parts[kind][0] for kind in {*kinds} & parts.keys()) / whole

    warnings = []
    if lacking := problem.measured.unmeasured:
        warnings.append(
            f"{counted(len(lacking), 'layer type')}, {share_of(lacking):.0%} of the work, were not measured in "
            f"plan.measure_seconds ({problem.config.plan.measure_seconds:g} s) and are modelled in proportion to the "
            "others; the next plan of this model measures them"
        )
    if (share := share_of(kind for _, kind in worst)) > notable:
        error, kind = worst[0]
        warnings.append(
            f"measured times of {counted(len(worst), 'layer type')}, {share:.0%} of the work, scatter (worst: {kind}, "
            f"whose fit is off by {error:.0%}): the machine was busy, or the layers are tiny; predictions are as "
            "rough. Measure again with `dilatant profile`"
        )
    fixed = sum(constant for _, constant in parts.values()) / whole
    if fixed > fixed_at_most and problem.target.is_local:
        warnings.append(
            f"this model is tiny: {fixed:.0%} of its time are calls, not arithmetic; calls between layers are "
            "not measured, so steps may take longer than predicted"
        )
    if is_assumed(problem.model, problem.measured):
        warnings.append(
            "rows of several samples were not measured: their attention counts as computing twice the pairs of one "
            "sample's, which is too much for short rows. Measure again with `dilatant profile`"
        )
    if problem.samples.left_out:
        warnings.append(f"{problem.samples.left_out:,} samples cannot be trained on and were left out")
    return warnings

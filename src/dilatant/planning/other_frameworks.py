"""Plans for other training frameworks: the search of a run among what such a framework can run, by its kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from dilatant.config import Config
from dilatant.config.memory_modes import Recompute, Shard
from dilatant.cost.memory import Zero
from dilatant.models.sources import load_pretrained_config
from dilatant.plan.errors import PlanError
from dilatant.plan.framework_flags import FrameworkFlags, framework_flags
from dilatant.plan.rank_mapping import RankOrder
from dilatant.plan.search.finals import RankedPlan
from dilatant.plan.search.framework_models import FRAMEWORK_MODELS
from dilatant.plan.search.frameworks import FRAMEWORKS
from dilatant.plan.search.search import search
from dilatant.planning.planning import PlannedRun, PlanningProblem, scorer_of, search_problem, searched_sizes
from dilatant.planning.remodelled import remodelled
from dilatant.report.plan_report import OtherFramework
from dilatant.report.text.wording import listed, seconds_text

_OF_STEPS = (
    "preferences", "loss", "callbacks", "deterministic", "row_multiple", "label_smoothing", "neftune_noise_alpha"
)  # fmt: skip
"""Keys of `train` that change what a step computes, and that no flag of a layout says."""

LEVELS: tuple[Recompute, ...] = "none", "block"
"""What other frameworks can recompute: in no block, or in all."""


def plan_for(planned: PlannedRun, name: str) -> OtherFramework:
    """Return the fastest plan of this run that the framework can run, what the framework lacks of the plan of
    `planned`, and how much that costs. name: one of `FRAMEWORKS`."""
    runner, models = FRAMEWORKS[name].runner, _models(planned.problem.config, name)
    try:
        problem, found = _fastest(planned.problem, name)
    except PlanError as error:
        return OtherFramework(name, "", {}, None, (f"Nothing fits under the limits of {name}: {error}.",), models)
    flags, ours = _flags(problem, found, name), _flags(planned.problem, planned.result.winner, name)
    groups = _groups(problem, found)
    lacks = (*ours.lost, *_unlike(planned, planned.result.winner, bool(FRAMEWORKS[name].chunks)))
    as_theirs = remodelled(planned.problem, runner=runner)
    winner = planned.result.winner
    score = scorer_of(as_theirs)(winner.plan, winner.num_microbatches, winner.row_tokens, winner.score.schedule or None)
    seconds, times = found.score.seconds, found.score.seconds / score.seconds
    most, rows = planned.problem.config.row_tokens, found.microbatch_size // groups * _longest(problem)
    longer = f"; its rows hold up to {most:,} tokens (train.row_tokens), theirs {rows:,}"
    why = longer if rows > most and times < 1.0 else ""
    modelled = as_theirs.measured is not planned.problem.measured
    there = f"The plan above takes {seconds_text(score.seconds)} with the same layers"
    if modelled:
        own = seconds_text(planned.result.seconds)
        there = f"With these kernels, the plan above would take {seconds_text(score.seconds)} ({own} with our own)"
    kernels = f"kernels modelled as those of {runner.name}" if modelled else "layers as measured with our kernels"
    return OtherFramework(
        name,
        flags.command(),
        flags.flags,
        seconds,
        (
            f"{seconds_text(seconds)} a step, {problem.memory_text(found.plan, found.score)}; {kernels}.",
            *([f"Its experts are divided among {groups} replicas."] if groups > 1 else []),
            *(f"Note {lost}." for lost in flags.lost),
            *_beside(planned.problem.config),
            *(f"It cannot express {lost}." for lost in lacks if lost not in flags.lost),
            f"{there}: {times:.2f} times as fast{why}.",
        ),
        models,
    )


def _models(config: Config, name: str) -> str:
    """Say what of the config's model the framework lacks, in a sentence; "" for nothing."""
    model, source = config.model, config.model.text
    if source.config is None:
        family = load_pretrained_config(str(source.id), "model", source.trust_remote_code).model_type
    else:
        family = source.config["model_type"]
    kinds = {unit: encoder.kind for unit, encoder in model.encoders.items()}
    note = FRAMEWORK_MODELS[name].note(family, kinds, len(model.generators), model.is_whole)
    return f"{note}." if note else ""


def _beside(config: Config) -> list[str]:
    """Name keys that the prediction counts and that no flag of a layout says, and those that do not count."""
    model, train = config.model, config.train
    counted = {
        "model.freeze": model.freeze,
        "model.lora": model.lora,
        "train.precision: fp8": train.precision == "fp8",
        f"train.optimizer.name: {train.optimizer.name}": train.optimizer.name != "adamw",
        **{f"train.optimizer.{key}": getattr(train.optimizer, key) for key in ("offload", "ema", "muon")},
        **{f"train.{key}": getattr(train, key) for key in _OF_STEPS},
        **{f"train.{key}": getattr(train, key) not in ("auto", "none") for key in ("compile", "kernels")},
    }
    found = [key for key, value in counted.items() if value]
    others = [f"train.{key}" for key in ("zero", "shard") if getattr(train, key) is not None]
    lines = [f"These flags give the layout; set what corresponds to {listed(found)} beside them."] if found else []
    return lines + ([f"What its ranks share follows from these flags, not from {listed(others)}."] if others else [])


def _groups(problem: PlanningProblem, ranked: RankedPlan) -> int:
    """Return how many replicas of the language model divide experts among them."""
    return ranked.plan.unit(problem.model.anchor).replicas[0].stages[0].degrees.groups


def _fastest(problem: PlanningProblem, name: str) -> tuple[PlanningProblem, RankedPlan]:
    """Return the fastest plan that the framework can run, after the problem under which it was scored. Raises the first
    PlanError if none fits."""
    if problem.target.groups:
        raise PlanError("the devices are unlike, and it divides work evenly")
    framework, language = FRAMEWORKS[name], problem.model.spec.unit(problem.model.anchor)
    levels = LEVELS if language.recompute is None else LEVELS[language.recompute != "none" :][:1]
    schedules = ("1f1b", "interleaved") if max(framework.chunks, default=1) > 1 else ("1f1b",)
    refused: list[PlanError] = []
    found: list[tuple[PlanningProblem, RankedPlan]] = []
    modelled = remodelled(problem, runner=framework.runner)
    most = problem.target.cluster.reach if any(layer.experts for layer in language.layers) else 1
    sizes = searched_sizes(problem.config, problem.target)
    for (zero, shard), level, schedule in itertools.product(framework.sharing, levels, schedules):
        own = _restricted(modelled, zero, shard, level, schedule, most)
        searched = search_problem(own, all_devices=True)
        settings = replace(searched.settings, orders=(RankOrder.REPLICAS,))
        try:
            result = search(
                replace(searched, settings=settings), scorer_of(own), own.config.debug.finalists,
                only=partial(framework.candidates, sizes=sizes),
            )  # fmt: skip
        except PlanError as error:
            refused.append(error)
        else:
            found.append((own, result.winner))
    if not found:
        raise refused[0]
    return min(found, key=lambda one: one[1].score.seconds)


def _restricted(
    problem: PlanningProblem, zero: Zero, shard: Shard, level: Recompute, schedule: str, most: int
) -> PlanningProblem:
    """Return the problem of a run without what only Dilatant does: microbatches by tokens or by seconds, recomputation
    of some blocks, and recovery. most: replicas whose microbatches count as one."""
    config, spec = problem.config, problem.model.spec
    times = [1 << power for power in range(most.bit_length())]
    sizes = sorted({size * each for size in config.plan.microbatch_sizes for each in times})
    sections = {
        "plan": {"microbatch_tokens": (), "assignment": "random", "microbatch_sizes": sizes},
        "parallel": {"schedule": schedule},
        "train": {"zero": zero},
        "resilience": {"enabled": False},
    }
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    target = problem.target.sharing(zero, {"": shard})
    units = tuple(replace(unit, recompute=level) for unit in spec.units)
    own = replace(
        problem,
        config=config.model_copy(update=changed),
        target=replace(target, rules=replace(target.rules, keeps_gradients=False)),
        model=replace(problem.model, spec=replace(spec, units=units)),
    )
    return own.with_row_tokens(_longest(problem) * max(sizes))  # microbatches are not cut


def _longest(problem: PlanningProblem) -> int:
    return max(1, int(max(problem.samples.workload.tokens[problem.model.anchor])))


def _flags(problem: PlanningProblem, ranked: RankedPlan, name: str) -> FrameworkFlags:
    language = problem.model.anchor
    fixed = problem.model.spec.unit(language).recompute or "none"
    batch = problem.global_batch, ranked.num_microbatches
    length = int(problem.samples.workload.tokens[language].max())
    return framework_flags(ranked.plan, name, language, *batch, ranked.zero, fixed, length)


def _unlike(planned: PlannedRun, winner: RankedPlan, has_pipelines: bool) -> list[str]:
    """Return what of a plan's steps no other framework can run. has_pipelines: those of the framework are named."""
    found = []
    if has_pipelines and winner.score.schedule not in ("", "1f1b", "interleaved"):
        found.append(f"the order {winner.score.schedule}: its pipelines run 1f1b")
    if winner.row_tokens is not None:
        found.append("microbatches by tokens: they get equally many samples")
    elif max(winner.microbatches[0], winner.replicas) > 1 and planned.problem.policy != "random":
        found.append("microbatches of samples that take equally long: each gets the next samples")
    return found

"""Row length on GPUs: how many tokens a microbatch holds where the config leaves `train.row_tokens` open.

The host issues as many operations for a short row as for a long one. A GPU computes a row of a few thousand tokens
faster than the host can issue them, so where no pipeline needs more microbatches, rows are as long as memory allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from dilatant.config import Config
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.plan import Plan
from dilatant.planning.planning import PlannedRun, PlanningProblem, scorer_of, typical_step, with_row_tokens
from dilatant.planning.problem.planned_hardware import Target, is_same_hardware
from dilatant.report.text.wording import bytes_text

LENGTHS = (4096, 8192, 16384)
"""Row lengths that are tried beside `data.max_length`, in tokens of the language model."""


@dataclass(frozen=True, slots=True, eq=False)
class RowLength:
    """Chosen row length. problem: the planning problem with such rows. score: of the plan with them. reason: a sentence
    for the user."""

    problem: PlanningProblem
    score: PlanScore
    reason: str

    @property
    def tokens(self) -> int:
        return self.problem.config.row_tokens


def is_row_length_open(config: Config, target: Target) -> bool:
    """Return True if nothing in the config says how long rows are, and the devices are GPUs of one kind."""
    asked = {"microbatch_sizes", "microbatch_tokens"} & config.plan.model_fields_set
    on_gpus = not target.groups and not is_same_hardware("CPU", target.hardware.name)
    return on_gpus and config.train.row_tokens is None and not config.train.deterministic and not asked


def row_length(problem: PlanningProblem, plan: Plan, schedule: str | None = None) -> RowLength | None:
    """Return the longest rows with which `plan` fits the memory of its GPUs, or None where they are not chosen here: a
    plan with pipelines keeps its microbatches, and a config that says how long rows are is heeded."""
    if not is_row_length_open(problem.config, problem.target) or not _is_one_stage(plan):
        return None
    shortest, cluster = problem.config.row_tokens, problem.target.cluster
    replicas = max(len(unit.replicas) for unit in plan.units)
    batches = problem.simulated().tokens[problem.model.anchor].reshape(-1, problem.global_batch)
    held = float(batches.sum(axis=1).max()) / replicas
    known = sorted({shortest, *(length for length in LENGTHS if length > shortest)})
    lengths = [known[0], *(longer for shorter, longer in pairwise(known) if shorter < held)]
    why = "longer ones would not fit memory" if len(lengths) > 1 else "a step has no more for a replica"
    for tokens in reversed(lengths):
        longer = with_row_tokens(problem, tokens)
        count = problem.config.parallel.microbatches or 1
        score = scorer_of(longer, schedule)(plan, count, tokens)
        if tokens == shortest or cluster.overflow(plan.ranks, score.peak_bytes) <= 0.0:
            break
    if tokens != shortest:
        named = " and ".join(f"{length:,}" for length in lengths)
        why = f"the longest of {named} that fit memory, {memory_text(problem, plan, score)}"
    return RowLength(longer, score, f"Rows hold up to {tokens:,} tokens (train.row_tokens is open): {why}.")


def with_long_rows(planned: PlannedRun) -> PlannedRun:
    """Return the planned run with rows as long as its winner allows, where their length is chosen here."""
    winner = planned.result.winner
    found = row_length(planned.problem, winner.plan)
    if found is None:
        return planned
    count = planned.problem.config.parallel.microbatches or 1
    size = max(1, round(planned.problem.global_batch / (winner.replicas * count)))
    ranked = replace(
        winner, num_microbatches=count, microbatch_size=size, row_tokens=found.tokens, score=found.score
    )
    result = replace(planned.result, winner=ranked, seconds=found.score.seconds)
    typical = typical_step(found.problem, ranked).timeline
    return replace(planned, problem=found.problem, result=result, typical=typical, rows=found.reason)


def memory_text(problem: PlanningProblem, plan: Plan, score: PlanScore) -> str:
    """Describe the memory of the fullest device as the plan's own is: used and total include the reserve."""
    cluster, ranks = problem.target.cluster, plan.ranks
    peaks = zip(score.peak_bytes, cluster.bytes_of(ranks).tolist(), ranks, strict=True)
    peak, capacity, rank = max(peaks, key=lambda one: one[0] - one[1])
    reserve = cluster.at(rank).reserve.total
    return f"{bytes_text(peak + reserve)} of {bytes_text(capacity + reserve)} on the fullest device"


def _is_one_stage(plan: Plan) -> bool:
    """Return True if every replica of the model lies whole on ranks of its own."""
    stages = [placed.stage.ranks for placed in plan.stages()]
    units = len(plan.units)
    return len(stages) == units * len(set(stages)) and len(stages) == sum(
        len(unit.replicas) for unit in plan.units
    )

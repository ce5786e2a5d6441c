"""A paper's case put to our own planner, in its modes, and layouts that others chose, under the same simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.papers.models import PaperUnit, cost_model, model_spec
from benchmarks.papers.searches import Mode, candidates_of
from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.cost.hardware import Hardware
from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan import Cluster, PlanScore, SearchProblem, SearchResult, SearchSettings, Workload
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan
from dilatant.plan.rank_mapping import Chain, RankOrder, map_ranks
from dilatant.plan.search.search import search
from dilatant.schedule.assignment.assign import Policy
from dilatant.schedule.plan_scorer import PlanSimulator, families_for


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model on a cluster, and the samples of some global batches of `batch`."""

    units: tuple[PaperUnit, ...]
    hardware: Hardware
    cluster: Cluster
    workload: Workload
    batch: int
    rules: ParameterBytes = BF16

    def search(
        self,
        mode: Mode | None = None,
        sizes: Sequence[int] = (1, 2, 4, 8),
        num_microbatches: int | None = None,
        chunks: Sequence[int] = (1,),
        policy: Policy = "balanced",
    ) -> SearchResult | None:
        """What `dilatant plan` chooses, or the search of a published system; None where nothing fits. policy: forms
        microbatches."""
        model, costs = model_spec(self.units), cost_model(self.units, self.hardware)
        splits = mode is None  # as published systems do not
        scorer = PlanSimulator(
            model, costs, self.cluster, self.workload, self.batch, policy=policy, rules=self.rules,
            families=partial(families_for, splits=splits),
        )  # fmt: skip
        settings = SearchSettings(sizes, num_microbatches, chunks, splits_backward=splits)
        known = self.cluster, self.workload, self.batch, self.rules
        problem = SearchProblem(model, costs, *known, settings)
        try:
            return search(problem, scorer, only=None if mode is None else candidates_of(mode, problem))
        except PlanError:
            return None

    def score(
        self, plans: Iterable[Plan], num_microbatches: int, policy: Policy = "balanced", schedule: str | None = None
    ) -> PlanScore:
        """The fastest of some plans in simulation, whether or not it fits memory."""
        from dilatant.schedule.families import FAMILIES

        model, costs = model_spec(self.units), cost_model(self.units, self.hardware)
        scorer = PlanSimulator(
            model,
            costs,
            self.cluster,
            self.workload,
            self.batch,
            policy=policy,
            rules=self.rules,
            families=None if schedule is None else {schedule: FAMILIES[schedule]},
        )
        return min((scorer(plan, num_microbatches) for plan in plans), key=lambda score: score.seconds)

    def plans(self, chains: Sequence[Chain], orders: Iterable[RankOrder] = tuple(RankOrder)) -> list[Plan]:
        """These chains in every order of ranks that has room for them."""
        found = []
        for order in orders:
            with suppress(PlanError):
                layers = {unit.name: sum(part.count for part in unit.parts) for unit in self.units}
                feeds = {unit.name: unit.feeds for unit in self.units}
                found.append(map_ranks(chains, layers, feeds, self.cluster, order))
        return found


def even_chain(
    name: str, layers: int, replicas: int, tp: int, pp: int, cp: int = 1, chunks: int = 1,
    recompute: Recompute = "none", recomputed: float = 1.0, work: Sequence[float] | None = None,
) -> Chain:  # fmt: skip
    """One unit alone on its devices, its first layer an embedding and its last a head: stages get equal numbers of
    blocks where that is possible, the embedding and the head in addition; else of layers, as nearly as can be.
    recomputed: share of the layers, the first ones, if not all. work: of each layer, by which `cuts_by_work` cuts."""
    stages = pp * chunks
    blocks, rest = divmod(layers - 2, stages)
    cuts = tuple(layers * stage // stages if rest else blocks * stage + (stage > 0) for stage in range(stages))
    if work is not None:
        cuts = cuts_by_work(work, stages)
    again = math.ceil(recomputed * layers)
    modes: tuple[Recompute, ...] = (recompute,) * again + ("none",) * (layers - again)
    return Chain(replicas, Degrees(tp, cp), {name: cuts}, chunks, {name: modes})


def cuts_by_work(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the first layer of each stage, if a stage ends with the layer at which the work up to there reaches the
    stages' equal share of all; later stages get a layer each where only so many are left."""
    cuts, done = [0], 0.0
    for layer, own in enumerate(work[:-1]):
        done += own
        left = stages - len(cuts)
        if left and (done >= sum(work) * len(cuts) / stages or len(work) - 1 - layer == left):
            cuts.append(layer + 1)
    return tuple(cuts)


def same_samples(tokens: Mapping[str, int], batch: int) -> Workload:
    """A batch of equal samples."""
    return Workload({unit: np.full(batch, float(count)) for unit, count in tokens.items()})


def layout_text(plan: Plan) -> str:
    """`language 16 x tp8 x pp2` for every unit: replicas, degrees, stages; `x cp2` where there is one."""
    words = []
    for unit in plan.units:
        stage, ranks = unit.replicas[0].stages[0], {one.ranks for one in unit.replicas[0].stages}
        chunks = len(unit.replicas[0].stages) // len(ranks)
        text = f"{unit.name} {len(unit.replicas)} x tp{stage.tp}" + (f" x cp{stage.cp}" if stage.cp > 1 else "")
        words.append(f"{text} x pp{len(ranks)}" + (f" x {chunks} chunks" if chunks > 1 else ""))
    return ", ".join(words)

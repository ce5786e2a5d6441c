"""What a search makes its plans of: a model, its layouts unit by unit, and a cluster."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.option import ChainTimes, Option
from dilatant.plan.options import OptionTable
from dilatant.plan.roles import Roles, roles_of
from dilatant.plan.sides import Side, side_by_side
from dilatant.plan.unit_layers import UnitLayers
from dilatant.plan.workload import Workload

FEW = 16
"""On no more devices of all groups, whatever could help is looked at, so that more of them never hurt."""


@dataclass(eq=False)
class Space:
    """What plans of one model on one cluster are made of. chunks: stages that a group of devices may have of the
    language model. times: those known, by chain, number of pipelines and microbatches."""

    model: ModelSpec
    roles: Roles
    table: OptionTable
    unaware: OptionTable
    cluster: Cluster
    global_batch: int
    chunks: tuple[int, ...] = (1,)
    times: dict[tuple[Option, int, int], ChainTimes] = field(init=False, default_factory=dict)
    _chains: dict[tuple[int, int], dict[tuple[object, ...], list[Option]]] = field(
        init=False, default_factory=dict
    )
    _sides: dict[tuple[int, tuple[tuple[Option, ...], ...]], list[list[Side]]] = field(
        init=False, default_factory=dict
    )
    _heaviest: dict[int, float] = field(init=False, default_factory=dict)

    def with_roles(self, roles: Roles) -> Space:
        """What these units, not all of the model's, are made of; of their chains what is known here."""
        other = replace(self, roles=roles)
        other.times, other._chains, other._heaviest = self.times, self._chains, self._heaviest
        return other

    def chains(self, replicas: int, samples: int) -> dict[tuple[object, ...], list[Option]]:
        """The chains known for so many pipelines and samples of a microbatch, by what was asked; to be added to."""
        return self._chains.setdefault((replicas, samples), {})

    def heaviest(self, samples: int) -> float:
        """The load of the heaviest microbatch of the language model as a multiple of the mean, where so many samples
        each are spread evenly: in the mean global batch."""
        if samples not in self._heaviest:
            name = self.roles.language
            tp, cp = self.table.units.degrees([name])[0]
            loads = self.table.units.of_samples(name, tp, cp).reshape(-1, self.global_batch)
            ratios = []
            for batch in loads:
                bins = [0.0] * (self.global_batch // samples)
                for load in sorted(batch.tolist(), reverse=True):
                    heapq.heapreplace(bins, bins[0] + load)
                ratios.append(max(bins) / (sum(bins) / len(bins)) if any(bins) else 1.0)
            self._heaviest[samples] = float(np.mean(ratios))
        return self._heaviest[samples]

    def joined(self, each: Sequence[Sequence[Option]], budget: int) -> list[list[Side]]:
        """[devices]: the undominated ways to run one option of each list side by side on so many, or on fewer."""
        key = budget, tuple(tuple(options) for options in each)
        if key not in self._sides:
            self._sides[key] = side_by_side(each, budget)
        return self._sides[key]


def open_space(
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    workload: Workload,
    global_batch: int,
    rules: ParameterBytes = BF16,
    chunks: Sequence[int] = (1,),
    halves: bool = False,
) -> Space:
    """What `search` searches, with arguments as there, on the devices of one kind."""
    limits = cluster.gpus_per_node, rules, global_batch, halves
    table = OptionTable(UnitLayers(model, costs, workload, *limits), cluster.bytes_per_device)
    unaware = OptionTable(UnitLayers(_all_trainable(model), costs, workload, *limits), math.inf)
    return Space(model, roles_of(model), table, unaware, cluster, global_batch, tuple(chunks))


def _all_trainable(model: ModelSpec) -> ModelSpec:
    return ModelSpec(
        tuple(
            replace(unit, layers=tuple(replace(layer, trainable=True) for layer in unit.layers))
            for unit in model.units
        )
    )


def are_few(spaces: Sequence[Space]) -> bool:
    """Whether groups of devices, one space each, are so few that nothing need be left out."""
    return sum(space.cluster.num_devices for space in spaces) <= FEW

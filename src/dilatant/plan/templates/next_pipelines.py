"""Next pipelines: choose which pipelines continue after a change of membership, and form others of the other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilatant.plan.errors import BatchError, PlanError
from dilatant.plan.templates.compose import share_microbatches
from dilatant.plan.templates.reinstantiate import LayerSpan, Reinstantiation, node_layers, reinstantiate
from dilatant.plan.templates.templates import Template

STABLE_SECONDS = 600.0
"""Assumed time until the next change of membership, about the mean of public spot traces: moving state pays if faster
steps save more seconds within this time than the move takes."""


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """A running pipeline: its nodes in order, the layers of each, and its times in the form of a template.

    It need not be an instance of a template. For a node that holds several spans of layers, `spans` has the largest."""

    nodes: tuple[int, ...]
    spans: tuple[LayerSpan, ...]
    times: Template


@dataclass(frozen=True, slots=True)
class NextPipelines:
    """Pipelines of a new membership. kept: numbers of the running pipelines that continue unchanged. made: pipelines of
    all other nodes. microbatches: of each, kept ones first. tolerance: nodes that may be lost at once."""

    kept: tuple[int, ...]
    made: Reinstantiation | None
    microbatches: tuple[int, ...]
    seconds: float
    tolerance: int

    @property
    def moved_bytes(self) -> int:
        """Most bytes that one node sends or receives for this change."""
        return self.made.busiest_bytes if self.made else 0


@dataclass(frozen=True, slots=True, eq=False)
class PipelineChooser:
    """Choose pipelines of `templates` for one membership after another.

    If the nodes are too few for fault_tolerance + 1 pipelines, there are as many as possible. layer_bytes: as in
    `reinstantiate`. bytes_per_second: at which one node sends or receives.
    """

    templates: Mapping[int, Template]
    fault_tolerance: int
    num_microbatches: int
    layer_bytes: Sequence[int] | None = None
    bytes_per_second: float = float("inf")

    def choose(self, running: Sequence[RunningPipeline], others: Mapping[int, LayerSpan]) -> NextPipelines:
        """Return pipelines that use all nodes. running: pipelines whose nodes are all present. others: the other nodes
        → the layers that each holds, (0, 0) for a new node.

        A running pipeline is kept unless another choice's faster steps save more time than its copies take. The largest
        running pipelines are broken up first. Raises PlanError if the nodes cannot hold the model.
        """
        if not self.templates:
            raise PlanError("there are no pipeline templates to choose from")
        order = sorted(range(len(running)), key=lambda number: (len(running[number].nodes), number))
        counts = {len(order), 0, *(len(order) - (1 << power) for power in range(len(order).bit_length()))}
        found: list[NextPipelines] = []
        failure = PlanError("there are no nodes to train on")
        for count in sorted((count for count in counts if count >= 0), reverse=True):
            try:
                found.append(self._keeping(order[:count], running, others))
            except PlanError as error:
                failure = error
        if not found:
            raise failure
        fastest = min(one.seconds for one in found)

        def cost(one: NextPipelines) -> tuple[int, float]:
            slower = one.seconds / fastest if fastest > 0.0 else 1.0
            return -one.tolerance, one.moved_bytes / self.bytes_per_second + STABLE_SECONDS * slower

        return min(found, key=cost)

    def _keeping(
        self, kept: Sequence[int], running: Sequence[RunningPipeline], others: Mapping[int, LayerSpan]
    ) -> NextPipelines:
        """Return the best pipelines if exactly the `kept` ones continue unchanged."""
        instances, holders, busy = [], dict(others), 0
        for number, one in enumerate(running):
            template = self.templates.get(len(one.nodes))
            if number in kept:
                busy += len(one.nodes)
            elif template is not None and one.spans == node_layers(template, len(one.nodes)):
                instances.append(one.nodes)
            else:
                holders |= zip(one.nodes, one.spans)
        free = len(holders) + sum(map(len, instances))
        templates, made, total = [running[number].times for number in kept], None, self.num_microbatches
        if free:
            share = max(1, round(total * free / (free + busy)))
            made = self._made(instances, holders, len(kept), share)
            templates += [self.templates[len(nodes)] for nodes in made.pipelines]
        counts, seconds = share_microbatches(templates, max(total, len(templates)))
        tolerance = min(self.fault_tolerance, len(templates) - 1)
        return NextPipelines(tuple(kept), made, counts, seconds, tolerance)

    def _made(
        self, instances: Sequence[tuple[int, ...]], holders: Mapping[int, LayerSpan], kept: int, share: int
    ) -> Reinstantiation:
        """Reinstantiate with as many pipelines as the fault tolerance requires, or else as many as possible."""
        others = max(0, self.fault_tolerance - kept)
        while True:
            try:
                return reinstantiate(self.templates, instances, holders, others, share, self.layer_bytes)
            except BatchError as error:  # smaller microbatches are always possible
                share = error.nearest[0]
            except PlanError:
                if not others:
                    raise
                others -= 1

"""Next pipelines: which pipelines continue after a change of membership, and which are made of the other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilatant.plan.errors import BatchError, PlanError
from dilatant.plan.templates.compose import share_microbatches
from dilatant.plan.templates.reinstantiate import LayerSpan, Reinstantiation, node_layers, reinstantiate
from dilatant.plan.templates.templates import Template

STABLE_SECONDS = 600.0
"""Assumed time until the next change of membership, about the mean of public spot traces: moving state pays if the
faster steps gain more than that within this time."""


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """A running pipeline: its nodes in order, the layers of each, and the times of its steps, as a template has them.

    It need not be an instance of a template. A node that holds several spans of layers is known by its largest."""

    nodes: tuple[int, ...]
    spans: tuple[LayerSpan, ...]
    times: Template


@dataclass(frozen=True, slots=True)
class NextPipelines:
    """Pipelines of a new membership: those of the running ones, by number, that are `kept` as they are, and the `made`
    ones of all other nodes. microbatches: of each, kept ones first. tolerance: nodes that may be lost at once."""

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

    With too few nodes for fault_tolerance + 1 pipelines, as many as possible are chosen. layer_bytes: as of
    `reinstantiate`. bytes_per_second: of one node.
    """

    templates: Mapping[int, Template]
    fault_tolerance: int
    num_microbatches: int
    layer_bytes: Sequence[int] | None = None
    bytes_per_second: float = float("inf")

    def choose(self, running: Sequence[RunningPipeline], others: Mapping[int, LayerSpan]) -> NextPipelines:
        """Return the pipelines of all nodes: of the running ones, all of whose nodes are there, and of `others`, which
        are in none and hold these layers, (0, 0) if they are new.

        A pipeline is kept unless the faster steps of another composition gain more than its copies take. Nodes that are
        needed elsewhere are taken from the largest pipelines. Raises PlanError if the nodes cannot hold the model.
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
        """Return the best pipelines if just these continue as they are."""
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
        """Reinstantiate with as many pipelines as the fault tolerance asks for, or as are possible."""
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

"""Limits of other training frameworks: the search leaves out layouts that they cannot run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Shard
from dilatant.cost.analytic import AUTOMODEL, FSDP, MEGATRON, TORCHTITAN, Runner
from dilatant.cost.memory import Zero
from dilatant.plan.errors import PlanError
from dilatant.plan.layouts.option import PlanCandidate
from dilatant.plan.layouts.space import Space
from dilatant.plan.search.shapes import equal_pipelines


@dataclass(frozen=True, slots=True)
class Framework:
    """Limits of a framework. All have equal pipelines on all devices, one set of degrees for all units, encoders in the
    first stage, and microbatches of equally many samples.

    runner: how its kernels run. sharing: what replicas can share. axes: degrees that it has; `beside_encoders`, if the
    model has encoders. chunks: stages of a group of devices; none: it has no pipelines. ends: blocks that the
    embedding, and the head, count for when it cuts stages. even: all stages must have equally many blocks. by_heads:
    context-parallel ranks divide heads, not tokens. experts_if_shared: replicas divide experts only where they share
    optimizer state. experts_beside_tp: a model with experts can have tensor-parallel groups.
    """

    runner: Runner
    sharing: tuple[tuple[Zero, Shard], ...]
    axes: frozenset[str] = frozenset(Degrees._fields)
    beside_encoders: frozenset[str] = frozenset(Degrees._fields)
    chunks: tuple[int, ...] = ()
    ends: int = 0
    even: bool = False
    by_heads: bool = False
    experts_if_shared: bool = False
    experts_beside_tp: bool = True

    def cuts(self, layers: int, stages: int) -> tuple[int, ...] | None:
        """Return the first layer of each stage of a language model as the framework cuts it; None if it cannot have so
        many stages. The model's first layer is the embedding, its last the head."""
        each, more = divmod(layers - 2 + 2 * self.ends, stages)
        if stages > 1 and (each <= self.ends or (more and self.even)):
            return None
        ends = itertools.accumulate(each + (stage < more) for stage in range(stages - 1))
        return (0, *(end - self.ends + 1 for end in ends))

    def candidates(self, space: Space, sizes: Collection[int] = ()) -> list[PlanCandidate]:
        """Return all candidates that it can run, lowest estimate first. sizes: samples that a microbatch may have in
        each of the replicas that divide experts; empty for any. Raises PlanError if there are none."""
        found = sorted(self._candidates(space, sizes), key=lambda one: one.estimate)
        if not found:
            raise PlanError(
                f"none of its layouts fits {space.cluster.num_devices} devices, their memory and a global batch of "
                f"{space.global_batch}"
            )
        return found

    def _candidates(self, space: Space, sizes: Collection[int]) -> Iterator[PlanCandidate]:
        roles, units = space.roles, space.table.units
        language, known = space.model.unit(roles.language), {*units.degrees([roles.language])}
        axes = self.axes & self.beside_encoders if roles.encoders else self.axes
        for degrees in units.all_degrees([*roles.encoders, roles.language]):
            if degrees.groups > 1 and self.experts_if_shared and units.rules.zero == "none":
                continue
            if not self.experts_beside_tp and degrees.tp > 1 and any(layer.experts for layer in language.layers):
                continue
            if any(degree > 1 for name, degree in degrees._asdict().items() if name not in axes):
                continue
            if self.by_heads and Degrees(tp=degrees.cp) not in known:
                continue
            groups = range(1, (language.most_stages if self.chunks else 1) + 1)
            for count, chunks in itertools.product(groups, self.chunks or (1,)):
                cuts = self.cuts(len(language.layers), count * chunks)
                if cuts is None or chunks not in space.settings.chunks or (count == 1 < chunks):
                    continue
                for one in equal_pipelines(space, degrees, count * chunks, chunks, cuts):
                    size, rest = divmod(one.microbatch_size, degrees.groups)
                    if (chunks == 1 or one.num_microbatches % count == 0) and not rest and size in (sizes or (size,)):
                        yield one


_MEGATRON = Framework(MEGATRON, (("all", "none"), ("none", "none")), chunks=(1, 2, 4), even=True)
FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "ms-swift": _MEGATRON,
    "torchtitan": Framework(
        TORCHTITAN,
        (("all", "weights"), ("none", "none")),
        beside_encoders=frozenset({"tp", "ep"}),
        chunks=(1, 2),
        ends=1,
        experts_if_shared=True,
    ),
    "automodel": Framework(AUTOMODEL, (("all", "weights"),), chunks=(1,), experts_beside_tp=False),
    "veomni": Framework(FSDP, (("all", "weights"),), axes=frozenset({"cp", "ep"}), by_heads=True),
}
"""Limits by name. Sources: assertions and stage cutting in the wheels of
megatron-core 0.16.1, torchtitan 0.3.0 (interleaved stages default to two a rank, its vision-language models refuse
context parallelism), nemo-automodel 0.7.0 (it has no tensor-parallel plan for its models with experts) and veomni
0.1.12 (tp_size and pp_size must be 1), read on 2026-11-28."""

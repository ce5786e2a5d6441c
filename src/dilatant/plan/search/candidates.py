"""Candidates: pipeline shapes with closed-form step times, before simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dilatant.plan.layouts.option import Option
from dilatant.plan.rank_mapping import Chain
from dilatant.plan.roles import EncoderPosition


@dataclass(frozen=True, slots=True, eq=False)
class PlanCandidate:
    """Chains of stages with their numbers of replicas; `replicas` is the language model's.

    `estimate`: seconds of a step from fill time, slowest stage and exposed gradient sync; `bound`: a lower bound for
    any schedule of this candidate, from the work of its slowest stage. `groups`: for each option, the device group it
    uses, if groups differ; several options may then hold one unit, each some of its replicas. Empty on a homogeneous
    cluster.
    `row_tokens`: maximum language-model tokens per microbatch, if microbatches are cut by tokens; `num_microbatches` is
    then the minimum of a step and `microbatch_size` the mean.
    """

    encoders_at: EncoderPosition
    replicas: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[Option, ...]
    counts: tuple[int, ...]
    estimate: float
    bound: float
    groups: tuple[int, ...] = ()
    row_tokens: int | None = None
    gpus: int = field(init=False)

    def __post_init__(self) -> None:
        taken = 0
        for count, option in zip(self.counts, self.options):
            taken += count * option.gpus
        object.__setattr__(self, "gpus", taken)  # computed once: sorting reads it often

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(
            replace(option.chain, replicas=count) for count, option in zip(self.counts, self.options)
        )

    def in_group(self, group: int) -> PlanCandidate:
        """Return this candidate, found for one group alone, as a candidate for the whole cluster."""
        return replace(self, groups=(group,) * len(self.options))

    @property
    def is_uniform(self) -> bool:
        """True if all units have equally many replicas, without interleaved chunks."""
        return len(set(self.counts)) == 1 and all(option.chain.chunks == 1 for option in self.options)

    def gpus_in(self, group: int) -> int:
        """Return the number of devices of one group that the candidate uses."""
        chains = zip(self.options, self.counts, self.groups)
        return sum(count * option.gpus for option, count, there in chains if there == group)

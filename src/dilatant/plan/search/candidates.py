"""A shape that pipelines can take, with what is known of its step before it is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dilatant.plan.layouts.option import Option
from dilatant.plan.modes import EncoderPosition
from dilatant.plan.rank_mapping import Chain


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Chains of stages with their numbers of replicas; `replicas` is the language model's.

    `estimate` is the seconds of a step by fill time, slowest stage and exposed gradient sync; `bound` what no schedule
    of this candidate beats: the work of its slowest stage. `disaggregated`: the seconds by which DistTrain's search
    found it, 0 for others. `groups`: by option, the group of unlike devices that it takes its devices of; then several
    options may hold the same unit, each some of its replicas. Of a cluster of equal devices nothing. `row_tokens`: most
    tokens of the language model in a microbatch, where it is cut by these; `num_microbatches` are then the least that a
    step has, and `microbatch_size` is the mean.
    """

    encoders_at: EncoderPosition
    replicas: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[Option, ...]
    counts: tuple[int, ...]
    estimate: float
    bound: float
    disaggregated: float = 0.0
    groups: tuple[int, ...] = ()
    row_tokens: int | None = None
    gpus: int = field(init=False)

    def __post_init__(self) -> None:
        taken = 0
        for count, option in zip(self.counts, self.options):
            taken += count * option.gpus
        object.__setattr__(self, "gpus", taken)  # which sorting asks for again and again

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(
            Chain(
                count,
                option.tp,
                option.cp,
                option.cuts,
                option.chunks,
                option.recompute,
                {[*option.cuts][-1]: option.ep},
                option.degrees,
            )
            for count, option in zip(self.counts, self.options)
        )

    def in_group(self, group: int) -> Candidate:
        """This candidate of a group alone as one of the whole cluster."""
        return replace(self, groups=(group,) * len(self.options))

    def gpus_in(self, group: int) -> int:
        """The devices of a group that it takes."""
        chains = zip(self.options, self.counts, self.groups)
        return sum(count * option.gpus for option, count, there in chains if there == group)

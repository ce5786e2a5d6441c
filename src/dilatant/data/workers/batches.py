"""Global batches: the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.data.order.sampler import SamplerState
from dilatant.data.sample import EncodedSample


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one step.

    samples: in the sampler's order. position: the sampler's state after this batch, which a checkpoint written after
    this step must hold. epoch: passes over the data at that position. problems: the errors of the skipped samples.
    wait_seconds: seconds that the trainer waited for this batch. slowest: the samples that took longest to read and
    decode, slowest first, with their seconds; only samples that this process uses.
    """

    samples: tuple[EncodedSample, ...]
    position: SamplerState
    epoch: float
    problems: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    slowest: tuple[tuple[str, float], ...] = ()

    @property
    def skipped(self) -> int:
        """Return the number of corrupt samples that were skipped."""
        return len(self.problems)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def target_tokens(self) -> int:
        """Return the number of tokens that carry loss in the whole batch: the divisor of the loss."""
        return sum(sample.target_tokens for sample in self.samples)

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens that each unit processes in this step, by unit."""
        total: dict[str, int] = {}
        for sample in self.samples:
            for unit, tokens in sample.sizes.items():
                total[unit] = total.get(unit, 0) + tokens
        return total

"""Losses of pairs: a function of the log-probabilities of a chosen and a rejected answer to one prompt.

DPO (Rafailov et al. 2023, arXiv 2305.18290), IPO of means over tokens (Azar et al. 2023, arXiv 2310.12036), SimPO
(Meng et al. 2024, arXiv 2405.14734) and ORPO (Hong et al. 2024, arXiv 2403.07691).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.config.errors import UserError
from dilatant.config.train import PreferencesConfig
from dilatant.data.sample import EncodedSample
from dilatant.models.language.packed_row import PackedRow

REWARDS = "rewards/"
"""Begins the names of what is measured of pairs, in the manner of TRL."""
MEASURES = tuple(f"{REWARDS}{name}" for name in ("chosen", "rejected", "accuracies", "margins"))
"""Means over pairs: rewards of both answers, share of pairs in the right order, and difference of the rewards."""
_LEAST = 1e-12
"""Least probability that an answer is another one, so that the odds of a certain answer are finite."""


def measure_pairs(rewards: Tensor) -> dict[str, Tensor]:
    """Return the sums of `MEASURES` over pairs. rewards: [pairs, 2], of the chosen and the rejected answer."""
    chosen, rejected = rewards.unbind(1)
    measured = (chosen, rejected, (chosen > rejected).to(rewards.dtype), chosen - rejected)
    return {name: each.sum() for name, each in zip(MEASURES, measured, strict=True)}


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The loss of `train.preferences`, summed over pairs; the count of the global batch divides it."""

    how: PreferencesConfig

    def judge(self, sums: Tensor, counts: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the losses of pairs, [pairs], and the rewards of their answers, [pairs, 2]. sums: float64 [pairs, 2],
        log-probabilities of the chosen and the rejected answer; counts: their tokens; reference: `sums` by the
        reference model, if the method has one."""
        how, means = self.how, sums / counts
        beta = how.beta or (2.0 if how.method == "simpo" else 0.1)
        scores = means if reference is None else sums - reference
        compared = scores / counts if how.method == "ipo" else scores
        margins = compared[:, 0] - compared[:, 1]
        if how.method == "ipo":
            losses = (margins - 1 / (2 * beta)).square()
        elif how.method == "orpo":
            odds = means - (-torch.expm1(means)).clamp_min(_LEAST).log()
            losses = -beta * logsigmoid(odds[:, 0] - odds[:, 1])
        else:
            gamma = 1.0 if how.gamma is None else how.gamma
            logits = beta * margins - (gamma if how.method == "simpo" else 0.0)
            smooth = how.label_smoothing
            losses = -(1 - smooth) * logsigmoid(logits) - smooth * logsigmoid(-logits)
        sft = how.sft_weight if how.sft_weight is not None else float(how.method == "orpo")
        return losses - sft * means[:, 0] if sft else losses, beta * scores

    def reference_of(self, samples: Sequence[EncodedSample]) -> Tensor | None:
        """Return the samples' references, float64 [pairs, 2]; None for a method without. Raises UserError."""
        if not self.how.has_reference:
            return None
        for sample in samples:
            if sample.reference is None or not np.isfinite(sample.reference).all():
                why = "begin the run anew, or go on with its batch size"
                raise UserError(f"{sample.id}: its log-probabilities by the start model are unknown; {why}")
        return torch.tensor([sample.reference for sample in samples], dtype=torch.float64)

    def __call__(
        self, losses: Tensor, row: PackedRow, at: Tensor, samples: Sequence[EncodedSample]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of the samples' pairs, and the sums of `MEASURES`, on a row or a rank's share of it.

        losses: fp32 [positions], cross entropy of the rank's targets; at: the places of these among the rank's tokens.
        Under context parallelism, each rank's results are its summands.
        """
        answer = to_device(row.answer_of(samples)[at], losses.device)
        own = losses.new_zeros(2 * len(samples), dtype=torch.float64)
        own = own.index_add(0, answer, -losses.double())
        share = row.share
        whole = own.detach() if share is None else share.sum(own.detach())
        counts = torch.tensor([_target_counts(sample) for sample in samples], dtype=torch.float64)
        if (reference := self.reference_of(samples)) is not None:
            reference = to_device(reference, losses.device)
        with torch.enable_grad():
            sums = whole.unflatten(0, (-1, 2)).clone().requires_grad_()
            judged, rewards = self.judge(sums, to_device(counts, losses.device), reference)
            (slope,) = torch.autograd.grad(judged.sum(), sums)
        # The slope of a pair times this rank's part of its sums; the first rank has the value.
        is_first = share is None or share.group.index == 0
        loss = judged.detach().sum() * is_first + (slope.flatten() * (own - own.detach())).sum()
        measured = measure_pairs(rewards.detach() * is_first)
        return loss.float(), {name: each.float() for name, each in measured.items()}


def _target_counts(sample: EncodedSample) -> tuple[int, int]:
    """Return the number of tokens with loss of both answers. Raises UserError for a sample that is no pair."""
    if sample.branch is None:
        raise UserError(f"{sample.id}: has one answer, and a loss of pairs needs a chosen and a rejected one")
    carries, second = sample.labels[1:] != -100, sample.branch[1]
    return max(1, int(carries[: second - 1].sum())), max(1, int(carries[second - 1 :].sum()))

"""Losses of pairs: a function of the log-probabilities of a chosen and a rejected answer to one prompt.

DPO (Rafailov et al. 2023, arXiv 2305.18290), IPO of means over tokens (Azar et al. 2023, arXiv 2310.12036), SimPO
(Meng et al. 2024, arXiv 2405.14734) and ORPO (Hong et al. 2024, arXiv 2403.07691). Of answers that are marked as good
or bad: KTO (Ethayarajh et al. 2024, arXiv 2402.01306).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

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


def count_one(sample: EncodedSample) -> float:
    """Count every sample alike."""
    return 1.0


def with_margins(means: Mapping[str, float]) -> dict[str, float]:
    """Return measures in the order of MEASURES, others last, with the difference of the mean rewards of both kinds of
    answers also where answers are no pairs."""
    chosen, rejected, _, margins = MEASURES
    is_known = chosen in means and rejected in means
    known = {margins: means[chosen] - means[rejected], **means} if is_known else means
    return {name: known[name] for name in sorted(known, key=[*MEASURES, *known].index)}


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The loss of `train.preferences`, summed over pairs; the count of the global batch divides it.

    measures: what is measured → a sample's part in the number that divides the sum over the global batch.
    scores_first: `complete` needs the log-probabilities of a global batch before its step.
    """

    how: PreferencesConfig
    measures: ClassVar[Mapping[str, Callable[[EncodedSample], float]]] = dict.fromkeys(MEASURES, count_one)
    scores_first: ClassVar[bool] = False

    def complete(self, samples: Sequence[EncodedSample], sums: Tensor) -> Sequence[EncodedSample]:
        """Return the samples of a global batch with what the loss needs to know of all of them. sums: see `judge`."""
        return samples

    def measure(self, rewards: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        """Return `measures` of each pair, [pairs], from what `judge` returned; NaN where one is not defined."""
        chosen, rejected = rewards.unbind(1)
        measured = (chosen, rejected, (chosen > rejected).to(rewards.dtype), chosen - rejected)
        return dict(zip(MEASURES, measured, strict=True))

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
        measured = self.measure(rewards.detach(), reference)
        return loss.float(), {name: each.nansum().float() * is_first for name, each in measured.items()}


@dataclass(frozen=True, slots=True)
class MarkedLoss(PairLoss):
    """The loss of KTO. A sample's first answer is marked as desired or not; the second one is another record's.

    The second answers tell how far the model has moved from the reference: the mean of their log-ratios over the global
    batch, at least 0 (z0 of the paper), is a number without gradient that all rewards are compared with.
    """

    measures: ClassVar[Mapping[str, Callable[[EncodedSample], float]]] = {
        f"{REWARDS}chosen": lambda sample: float(bool(sample.desired)),
        f"{REWARDS}rejected": lambda sample: float(not sample.desired),
        f"{REWARDS}accuracies": count_one,
        f"{REWARDS}kl": count_one,
    }
    scores_first: ClassVar[bool] = True

    def complete(self, samples: Sequence[EncodedSample], sums: Tensor) -> Sequence[EncodedSample]:
        known = PairLoss.reference_of(self, samples)
        assert known is not None
        divergence = max(0.0, float((sums - known)[:, 1].mean()))
        return [replace(sample, divergence=divergence) for sample in samples]

    def reference_of(self, samples: Sequence[EncodedSample]) -> Tensor:
        """Return, float64 [samples, 3], the first answer's log-probability by the reference, the divergence of the
        global batch, and 1 for a desired answer or -1. Raises UserError."""
        known = PairLoss.reference_of(self, samples)
        assert known is not None
        for sample in samples:
            if sample.desired is None or sample.divergence is None:
                raise UserError(f"{sample.id}: its mark or divergence is unknown; give `desired`, and call `complete`")
        facts = [[sample.divergence, 1.0 if sample.desired else -1.0] for sample in samples]
        return torch.cat([known[:, :1], torch.tensor(facts, dtype=torch.float64)], dim=1)

    def judge(self, sums: Tensor, counts: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the losses, [samples], and the first answers' rewards beside what they are compared with."""
        assert reference is not None
        how, (known, divergence, sign) = self.how, reference.unbind(1)
        good, bad = (1.0 if each is None else each for each in (how.desirable_weight, how.undesirable_weight))
        beta, weights = how.beta or 0.1, good * (1 + sign) / 2 + bad * (1 - sign) / 2
        rewards, origin = beta * (sums[:, 0] - known), beta * divergence
        return weights * torch.sigmoid(sign * (origin - rewards)), torch.stack([rewards, origin], dim=1)

    def measure(self, rewards: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        assert reference is not None
        reward, origin = rewards.unbind(1)
        is_desired, nothing = reference[:, 2] > 0, torch.full_like(reward, torch.nan)
        is_right = ((reward > origin) == is_desired).to(reward.dtype)
        chosen, rejected = torch.where(is_desired, reward, nothing), torch.where(is_desired, nothing, reward)
        return dict(zip(self.measures, (chosen, rejected, is_right, reference[:, 1]), strict=True))


def _target_counts(sample: EncodedSample) -> tuple[int, int]:
    """Return the number of tokens with loss of both answers. Raises UserError for a sample that is no pair."""
    if sample.branch is None:
        raise UserError(f"{sample.id}: has one answer, and a loss of pairs needs a chosen and a rejected one")
    carries, second = sample.labels[1:] != -100, sample.branch[1]
    return max(1, int(carries[: second - 1].sum())), max(1, int(carries[second - 1 :].sum()))

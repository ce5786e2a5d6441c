"""Loss of the user's own, in place of the cross entropy: a function of logits, or hidden states, and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilatant.config.errors import UserError, own_code
from dilatant.data.sample import EncodedSample

PROBED = 7
"""Positions on which a loss is tried before the run."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetPlaces:
    """The places of the targets that a loss is called with. samples: all samples of the row, with their tokens; their
    media may be absent. sample_of: int64 [positions], the sample of each target. index: int64 [positions], the target's
    index in `input_ids` of its sample."""

    samples: Sequence[EncodedSample]
    sample_of: Tensor
    index: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """A loss function, as `dilatant.loss` describes it. name: in messages. count: a sample's part of the divisor.
    arguments: the number of arguments that the function takes, from 2 to 4. is_per_token: it returns the loss of each
    position, and the divisor is the number of target tokens. is_of_hidden: it takes hidden states, not logits."""

    function: Callable[..., Any]
    name: str
    count: Callable[[EncodedSample], float]
    arguments: int = 2
    is_per_token: bool = False
    is_of_hidden: bool = False

    def __deepcopy__(self, memo: Any) -> TokenLoss:
        return self

    def __call__(
        self, whole: Callable[[Tensor], Tensor], samples: Sequence[EncodedSample], logits: Tensor, about: Tensor
    ) -> Tensor:
        """Return the loss of each position, or their sum, [1]: fp32. whole: makes the logits of the whole vocabulary of
        a shard of them. logits: or whole hidden states. samples: those of the row. about: int64 [positions, 4], the
        targets, the target tokens of each position's sample, and the columns of `TargetPlaces`."""
        targets, of_sample, *places = about.unbind(1)
        taken = logits if self.is_of_hidden else whole(logits)
        arguments = (taken, targets, of_sample, TargetPlaces(samples, *places))
        with own_code(f"{self.name} ended the run", SystemExit, KeyboardInterrupt):  # other errors have a traceback
            found = self.function(*arguments[: self.arguments])
        if not isinstance(found, Tensor) or found.dim() > 1 or (found.dim() and len(found) != len(targets)):
            shown = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise UserError(
                f"{self.name} returned {shown} for {len(targets)} positions; return the loss of each position "
                f"[{len(targets)}], or their sum []"
            )
        return found.float().reshape(-1)

    def check(self, width: int) -> bool:
        """Return True if the function returns the loss of each position. width: of the logits, or hidden states, that
        it takes. Raises UserError if it fails, does not depend on these, or is no sum over positions: its value would
        depend on how the batch is divided. A function that takes places is not tried, since it may know only the
        samples of the run."""
        if self.arguments == 4:
            return False
        random = torch.Generator().manual_seed(0)
        logits = torch.randn(PROBED, width, generator=random, requires_grad=True)
        about = torch.randint(1, width, (PROBED, 4), generator=random)
        taken = "hidden states" if self.is_of_hidden else "logits"

        def total(first: int, end: int) -> Tensor:
            return self(lambda own: own, (), logits[first:end], about[first:end]).sum().detach()

        with own_code(f"{self.name} failed on random {taken}"):
            each = self(lambda own: own, (), logits, about)
            both = float(each.sum().detach()), float(total(0, 3) + total(3, PROBED))
        if not each.requires_grad:
            raise UserError(f"{self.name} does not depend on the {taken}, so nothing would be learned")
        if abs(both[0] - both[1]) > 1e-4 * max(1.0, abs(both[0])):  # sums in fp32 of a few numbers
            raise UserError(
                f"{self.name} is {both[0]:.6g} on {PROBED} positions, and {both[1]:.6g} as the sum of 3 and "
                f"{PROBED - 3} of them; return a sum over positions, without a mean or randomness: the run divides it "
                "by the count of the global batch (@dilatant.loss(count=...))"
            )
        return len(each) == PROBED

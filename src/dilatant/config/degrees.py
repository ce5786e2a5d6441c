"""Parallel degrees of the ranks that hold a layer: what these ranks divide, and what they hold several times."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

AXES = {"tp": "tensor_parallel", "cp": "context_parallel"}
"""First fields of `Degrees`, at which layers have costs of their own → key that lists them in the config's `plan`."""


class Degrees(NamedTuple):
    """Tensor-, context- and expert-parallel degrees. A stage has `tp * cp` ranks (tp varies fastest); every `ep`
    consecutive ones divide the experts, and with `ep` 1 each rank has all experts, or its tp-th part of each.

    With `ep` above `tp * cp`, a stage has `ep` ranks: groups of `tp * cp`, which divide the samples of a microbatch as
    replicas divide a batch, and share nothing but experts."""

    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of a stage."""
        return max(self.tp * self.cp, self.ep)

    @property
    def groups(self) -> int:
        """Number of groups of ranks among which the samples of a microbatch are divided."""
        return self.ranks // max(1, self.tp * self.cp)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same weights, without experts; they sum their gradients."""
        return self.ranks // self.tp

    @property
    def divides_weights(self) -> bool:
        return max(self.tp, self.ep) > 1

    @property
    def row_parts(self) -> int:
        """Number of parts into which a stage's ranks divide the tokens, or the items, of a microbatch."""
        return self.cp * self.groups

    def dealt(self, items_per_token: float) -> tuple[float, int]:
        """Return indivisible items per token (0: whole samples), and among how many ranks they are dealt. Groups are
        dealt samples, whatever the unit's `items_per_token` among context-parallel ranks."""
        return (items_per_token, self.row_parts) if self.groups == 1 else (0.0, self.groups)

    def row_part(self, place: int) -> int:
        """Return the part of a microbatch that the stage's rank at index `place` has."""
        return place // self.tp

    def ranks_of(self, ranks: tuple[int, ...], part: int) -> tuple[int, ...]:
        """Return the tensor-parallel ranks, of a stage's `ranks`, that have this part of a microbatch."""
        return ranks[part * self.tp : (part + 1) * self.tp]

    def ranks_with(self, ranks: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Return the ranks, of a stage's `ranks`, that share a row with that at index `place` and hold its weights."""
        first = place // (self.tp * self.cp) * self.tp * self.cp
        return ranks[first + place % self.tp : first + self.tp * self.cp : self.tp]

    def expert_degrees(self, most: int) -> tuple[int, ...]:
        """Return the values of `ep` up to `most`: 1, multiples of tp that divide tp x cp, and multiples of tp x cp."""
        within = self.tp * self.cp
        wide = range(self.tp, most + 1, self.tp) if within > 0 else ()
        return tuple(dict.fromkeys((1, *(ep for ep in wide if within % ep == 0 or ep % within == 0))))

    @property
    def axes(self) -> tuple[int, ...]:
        """The degrees of `AXES`."""
        return self[: len(AXES)]

    @property
    def without_experts(self) -> Degrees:
        """The degrees that divide all layers. At these a cost model has a layer's costs, and they decide which rows a
        rank has."""
        return Degrees(*self.axes)

    @property
    def of_guests(self) -> Degrees:
        """The degrees of units without experts on the same ranks: groups divide their items as cp does."""
        return Degrees(self.tp, self.row_parts)

    def problems(self, ranks: Sequence[int]) -> list[str]:
        """Return why a stage with these ranks cannot have these degrees."""
        found = []
        if min(self) < 1 or len(ranks) != self.ranks:
            needed = self.grid(" times ") if self.groups == 1 else f"ep {self.ep}"
            found.append(f"has ranks {list(ranks)}, but {needed} ranks are needed")
        if self.ep not in self.expert_degrees(self.ep):
            takes = ", ".join(map(str, self.expert_degrees(self.tp * self.cp)))
            found.append(f"has ep {self.ep}; with {self.grid(' and ')} it takes ep {takes}, or a multiple of tp x cp")
        return found

    def text(self, separator: str = " ", always: Collection[str] = ()) -> str:
        """Return `tp 2 cp 4` with this separator, without degrees of 1 that are not `always` named."""
        named = self._asdict().items()
        return separator.join(f"{name} {degree}" for name, degree in named if degree != 1 or name in always)

    def grid(self, separator: str) -> str:
        """Return `tp 2 cp 1` with this separator: what the number of ranks follows from."""
        return self.without_experts.text(separator, AXES)

    def __str__(self) -> str:
        """Return `tp 2, cp 2`; an expert-parallel degree of 1 is left out."""
        return self.text(", ", AXES)

    def to_key(self) -> str:
        """Return the key of these degrees in cost files, such as `tp2 cp1`."""
        return " ".join(f"{name}{degree}" for name, degree in zip(AXES, self.axes, strict=True))

    @classmethod
    def from_key(cls, text: str) -> Self:
        """Read a key of `to_key`. Raises ValueError, saying what is wrong, for any other text."""
        found = re.fullmatch(" ".join(rf"{name}([1-9]\d*)" for name in AXES), text)
        if found is None:
            raise ValueError(f"{text!r} is not of the form {ONE.to_key()!r}")
        return cls(*map(int, found.groups()))


ONE = Degrees()
"""A rank alone."""

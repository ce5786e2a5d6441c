"""Parallel degrees of the ranks that hold a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """Tensor-, context- and expert-parallel degrees. A stage has `tp * cp` ranks; experts are spread over `ep` of
    them."""

    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    def __str__(self) -> str:
        """Return `tp 2, cp 2`; an expert-parallel degree of 1 is left out."""
        return f"tp {self.tp}, cp {self.cp}" + (f", ep {self.ep}" if self.ep > 1 else "")


ONE = Degrees()
"""A rank alone."""

"""What was found out about a language model before it trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proof:
    """What holds of a language model; each None, or why not in a few words.

    packed: samples of a packed row train as each alone. cut: any cut into stages trains as the whole. unproven: the
    copy could not be made or run in transformers alone, so nothing is known. differences: the largest relative ones of
    the loss and of a gradient that were seen. seconds: what it took to find out. is_kept: it was known from before.
    """

    packed: str | None
    cut: str | None
    unproven: str | None = None
    differences: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    is_kept: bool = False

    def __str__(self) -> str:
        """What was proven, in half a line."""
        when = "known from before" if self.is_kept else f"{self.seconds:.1f} s"
        if self.unproven is not None:
            return f"packed rows and stages could not be proven on a small copy ({self.unproven}; {when})"
        held = [name for name, why in (("packed rows", self.packed), ("stages", self.cut)) if why is None]
        failed = [
            f"{name} do not ({why})"
            for name, why in (("packed rows", self.packed), ("stages", self.cut))
            if why
        ]
        said = [f"{' and '.join(held)} train a small copy as transformers does"] if held else []
        return f"{'; '.join([*said, *failed])} ({when})"

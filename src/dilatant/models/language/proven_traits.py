"""Properties of a language model that were proven before training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proof:
    """Proven properties of a language model; each is None, or a short reason why it does not hold.

    packed: a packed row trains like its samples run one by one. cut: any cut into stages trains like the whole model.
    alone: samples run one by one, uncut, train as in transformers' own forward; if not, the model is not trained.
    unproven: the small copy could not be built or run in transformers, so nothing is known. differences: the largest
    relative ones of the loss and of a gradient. seconds: duration of the proof. is_kept: it was read from a cache.
    """

    packed: str | None
    cut: str | None
    alone: str | None
    unproven: str | None = None
    differences: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    is_kept: bool = False

    def __str__(self) -> str:
        """Summarise the proof in half a line."""
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

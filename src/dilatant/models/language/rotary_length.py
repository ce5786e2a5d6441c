"""Rotary frequencies by length: LongRoPE and dynamic NTK choose them by the largest position in a forward.

A sample that is longer than the first training's context changes the frequencies of all samples in its row, and a
context-parallel rank that holds only the beginning of such a sample would not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dilatant.config.errors import UserError
from dilatant.models.language.extension import Extension, LanguageForward


@dataclass(frozen=True)
class RotaryLength(Extension):
    """Refuses rows whose frequencies would not be those of each sample alone. steady: up to this number of tokens, the
    frequencies do not depend on a sample's length. keeps: they stay as the longest sample before left them."""

    unit: str
    steady: int
    keeps: bool

    @classmethod
    def of(cls, unit: str, config: Any) -> RotaryLength | None:
        """Read a text model's config; None if no frequencies depend on lengths."""
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = [each for each in (rope, *rope.values()) if isinstance(each, Mapping)]
        found = [each for each in kinds if each.get("rope_type") in ("longrope", "dynamic")]
        if not found:
            return None
        lengths = [each.get("original_max_position_embeddings") or config.max_position_embeddings for each in found]
        return cls(unit, min(lengths), any(each["rope_type"] == "dynamic" for each in found))

    def begin(self, forward: LanguageForward) -> None:
        row = forward.packed
        longest = max(row.lengths)
        if longest <= self.steady:
            return
        if self.keeps or row.share is not None or min(row.lengths) <= self.steady:
            raise UserError(
                f"{self.unit}: a sample of {longest:,} tokens changes the rotary frequencies of this model, which "
                f"depend on the longest sample beyond {self.steady:,} tokens, for others; set data.max_length to "
                f"{self.steady}" + ("" if self.keeps else ", or run such samples alone, without context parallelism")
            )

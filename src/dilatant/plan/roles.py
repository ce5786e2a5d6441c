"""Roles of a model's units (encoder, language model, generator), and the positions of encoders in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dilatant.plan.errors import PlanError
from dilatant.plan.model_spec import ModelSpec


class EncoderPosition(StrEnum):
    """Placement of the encoders. mixed: different in different pipelines, on groups of different devices."""

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    IN_LANGUAGE = "in-language"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Roles:
    """Units by role: encoders feed the language model, which feeds generators."""

    encoders: tuple[str, ...]
    language: str
    generators: tuple[str, ...]

    @property
    def units(self) -> tuple[str, ...]:
        return (*self.encoders, self.language, *self.generators)


def roles_of(model: ModelSpec) -> Roles:
    """Assign roles to a model's units. Of two units, the second is the language model, unless the first is called that.

    Raises PlanError for graphs other than encoders, one language model, generators.
    """
    feeds = {unit.name: set(unit.feeds) for unit in model.units}
    for language in sorted(feeds, key=lambda name: (name != "language", bool(feeds[name]))):
        encoders = tuple(name for name in feeds if feeds[name] == {language})
        generators = tuple(name for name in feeds if name in feeds[language])
        ends = all(not feeds[name] for name in generators)
        if ends and {*encoders, language, *generators} == feeds.keys():
            return Roles(encoders, language, generators)
    raise PlanError(
        "plans are searched for encoders that feed one language model, which may feed generators; "
        f"this model is { ({name: sorted(targets) for name, targets in feeds.items()}) }"
    )

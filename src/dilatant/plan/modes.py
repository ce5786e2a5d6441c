"""Whose search it is, and where encoders run."""

from __future__ import annotations

from enum import StrEnum


class EncoderPosition(StrEnum):
    """Where the encoders run. mixed: not at the same place in all pipelines, of which groups of unlike devices have
    different ones."""

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    IN_LANGUAGE = "in-language"
    MIXED = "mixed"


class Mode(StrEnum):
    """Whose search: all that is known here, or one of the published systems' for comparison.

    cornstarch: encoders parallel or colocated, aware of freezing (v3 4.1). entrain: encoders as one, devices handed
    out in proportion to the data's mean work, then the best factors (thesis 4.4.3). megatron: encoders in one stage
    before the language model with its degrees, layers spread as if everything trained.
    """

    BEST = "best"
    CORNSTARCH = "cornstarch"
    ENTRAIN = "entrain"
    DISTTRAIN = "disttrain"
    MEGATRON = "megatron"

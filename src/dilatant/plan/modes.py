"""Search modes (which published system's plans to consider), and the positions of encoders."""

from __future__ import annotations

from enum import StrEnum


class EncoderPosition(StrEnum):
    """Placement of the encoders. mixed: different in different pipelines, on groups of different devices."""

    PARALLEL = "parallel"
    COLOCATED = "colocated"
    IN_LANGUAGE = "in-language"
    MIXED = "mixed"


class Mode(StrEnum):
    """Search space: everything this planner knows (best), or that of one published system, for comparison.
    cornstarch: encoders parallel or colocated, freezing-aware cuts (Cornstarch v3 4.1). entrain: encoders colocated,
    devices in proportion to the data's mean work, then the best degrees (Entrain, the thesis, 4.4.3). disttrain:
    DistTrain's optimum. megatron: encoders in one stage before the language model, with its degrees; cuts as if
    everything trained."""

    BEST = "best"
    CORNSTARCH = "cornstarch"
    ENTRAIN = "entrain"
    DISTTRAIN = "disttrain"
    MEGATRON = "megatron"

"""Packing encoders: common base of units that pack items of different sizes in one row."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dilatant.models.core.random_draws import SampleLayout
from dilatant.models.core.stage import StageOutput, StepData
from dilatant.models.encoders.encoder import EncoderStage, EncoderUnit
from dilatant.models.parallel.shared_samples import SampleParallel


class PackedEncoderUnit(SampleParallel, EncoderUnit):
    """A packing encoder unit; it runs as the stage that holds all layers."""

    packs = True

    def whole_stage(self) -> EncoderStage:
        """Return the stage of all layers."""
        return self.stage(0, len(self.layers))

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        return self.whole_stage().run(data, samples, inbound)

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        return self.whole_stage().spread(data, samples)

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        return self.whole_stage()(inputs, hidden)

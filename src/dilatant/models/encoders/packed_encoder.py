"""Packing encoders: common bases of stages and units that pack items of different sizes in one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dilatant.models.core.random_draws import SampleLayout
from dilatant.models.core.stage import StageOutput, StepData, media_of
from dilatant.models.encoders.encoder import EncoderStage, EncoderUnit
from dilatant.models.parallel.shared_samples import SampleParallel


class PackedEncoderStage(SampleParallel, EncoderStage):
    """Layers of a packing encoder and its projector, run on all items of the samples in one row. sizes_name: the input
    with the items' sizes, which every stage needs."""

    sizes_name: str

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        samples = self.chosen(data, samples)
        if not samples:
            return StageOutput()
        if self.is_first:
            return StageOutput(self(media_of(data, samples, self)))
        return StageOutput(self(media_of(data, samples, self, names=(self.sizes_name,)), inbound[self.unit]))

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        return SampleLayout(True, tuple(data.samples[sample].sizes.get(self.unit, 0) for sample in samples))

    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        return self({self.geometry.input_name: value, **given}) if self.is_first else self(given, value)


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

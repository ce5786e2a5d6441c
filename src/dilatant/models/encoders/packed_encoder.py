"""Packing encoders: common bases of stages and units that pack items of different sizes in one row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import grid_part
from dilatant.models.core.random_draws import SampleLayout
from dilatant.models.core.slicing import Placeholder
from dilatant.models.core.stage import StageOutput, StepData, in_dtype_of, media_of
from dilatant.models.encoders.encoder import EncoderStage, EncoderUnit
from dilatant.models.parallel.shared_samples import SampleParallel


class TowerProjector(nn.Module):
    """Base of projectors that come from a pretrained model."""

    def __init__(self, tower: PreTrainedModel) -> None:
        super().__init__()
        self._tower = (tower,)  # not registered: the encoder is another part of the unit

    @property
    def drawn_by(self) -> PreTrainedModel:
        """The model that initialises the weights."""
        return self._tower[0]


class NamedModule(TowerProjector):
    """Holds a module under its name in the whole model, because adapters need a parent of the linear layer."""

    def __init__(self, name: str, module: nn.Module, tower: PreTrainedModel) -> None:
        super().__init__(tower)
        self._name = name
        self.add_module(name, module)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.get_submodule(self._name)(hidden)


class StagedEncoderUnit(EncoderUnit):
    """An encoder unit that runs as the stage of all its layers, because `stage_type` overrides how stages run."""

    stand_in = Placeholder  # stages after the first run the forward on hidden states

    def whole_stage(self) -> EncoderStage:
        """Return the stage of all layers."""
        return self.stage(0, len(self.layers))

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        return self.whole_stage().run(data, samples, inbound)

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        return self.whole_stage().spread(data, samples)

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        return self.whole_stage()(inputs, hidden)


class PackedEncoderStage(SampleParallel, EncoderStage):
    """Layers of a packing encoder and its projector, run on all items of the samples in one row. Every stage needs the
    items' sizes."""

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        samples = self.chosen(data, samples)
        if not samples:
            return StageOutput()
        if self.is_first:
            return StageOutput(self(media_of(data, samples, self)))
        return StageOutput(self(media_of(data, samples, self, names=(self.sizes_name,)), inbound[self.unit]))

    def forward(self, inputs: Mapping[str, Tensor] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Encode a row of items. inputs: `sizes_name` int64 [items, ...], and for the first stage patches or frames
        [rows, ...]. hidden: [rows, width]. Returns hidden states in the form of `hidden`; after the projector, rows of
        the text."""
        inputs = inputs or {}
        sizes = inputs[self.sizes_name].cpu()
        if self.model is not None:
            fed = inputs[self.geometry.input_name].flatten(1) if hidden is None else hidden
            with self.recording(self.model, [fed]):
                hidden = self.encode_items(self.model, fed, sizes, hidden is not None)
        assert hidden is not None
        return hidden if self.projector is None else self.project(in_dtype_of(self.projector, hidden), sizes)

    @abstractmethod
    def encode_items(self, model: nn.Module, fed: Tensor, sizes: Tensor, is_hidden: bool) -> Tensor:
        """Run the stage's part of the encoder. fed: its input or, if `is_hidden`, hidden states. sizes: on the host."""

    def project(self, hidden: Tensor, sizes: Tensor) -> Tensor:
        """Return rows of the text, [rows, width]."""
        assert self.projector is not None
        return self.projector(hidden)


class PackedEncoderUnit(SampleParallel, StagedEncoderUnit):
    """A packing encoder unit; stages after the first read the items' sizes alone."""

    packs = True

    def _unused(self, model: nn.Module) -> frozenset[str]:
        return frozenset()

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({self.unit if first == 0 else grid_part(self.unit)})


class OwnItemsStage(SampleParallel, EncoderStage):
    """Layers of a user's own module for items of different sizes, and its projector, run on all items of samples."""

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        samples = self.chosen(data, samples)
        if not samples:
            return StageOutput()
        rows = self(media_of(data, samples, self) if self.is_first else None, inbound.get(self.unit))
        expected = sum(data.samples[sample].sizes[self.unit] for sample in samples)
        if rows.shape[:-1] != (expected,):
            raise UserError(f"{self.unit}: it gives {list(rows.shape)} for items of {expected} tokens")
        return StageOutput(rows)


class OwnItemsUnit(SampleParallel, StagedEncoderUnit):
    """Unit of a user's own module for items of different sizes; its geometry is that of the example."""

    stage_type = OwnItemsStage
    packs = True


def rows_of_items(
    unit: str, placeholder_id: int, count: Callable[[Mapping[str, Any]], int], sample: EncodedSample
) -> int:
    """Count a sample's rows, if items have unlike numbers of them: by `count` of its inputs if they are loaded,
    otherwise from the text's placeholders."""
    if not sample.sizes.get(unit, 0):
        return 0
    media = sample.media.get(unit)
    return count(media) if media else int((sample.input_ids == placeholder_id).sum())

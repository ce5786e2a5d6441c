"""One way to run any stage: rows of samples in, rows of samples (or a loss) out.

The executor and the transport know only rows, `[rows, width]`; what a unit makes of them is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from dilatant.attention.attention_plan import to_device
from dilatant.config.errors import UserError
from dilatant.data.sample import EncodedSample
from dilatant.models.geometry import EncoderGeometry, encoder_geometry
from dilatant.models.loss import positions_with_targets, shift_labels
from dilatant.models.merge import find_places
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.stage import EncoderStage, LanguageStage, Stage
from dilatant.models.unit import EncoderUnit, LanguageUnit, Unit
from dilatant.runtime.precision import Precision


@dataclass(frozen=True, slots=True)
class StepData:
    """The global batch of one step.

    Every rank knows sizes, ids and labels of all samples; media only those that its first encoder stages run.
    target_tokens: of the whole batch, what the loss is divided by. predicts: nothing is learnt; the last stage says
    which token it finds likeliest in the place of every target.
    """

    samples: tuple[EncodedSample, ...]
    target_tokens: int
    predicts: bool = False

    @classmethod
    def of(cls, samples: Sequence[EncodedSample], predicts: bool = False) -> StepData:
        targets = sum(int((sample.labels != -100).sum()) for sample in samples)
        return cls(tuple(samples), targets, predicts)


@dataclass(frozen=True, slots=True)
class StageOutput:
    """rows: [rows, width] of the samples in order, for the stages after it. loss: scalar, this stage's share.
    predicted: int64 [targets], the likeliest token for every target of the samples in order, instead of a loss."""

    rows: Tensor | None
    loss: Tensor | None
    predicted: Tensor | None = None


class Boundary(Protocol):
    """The rows that leave a stage, known from sizes alone, hence at both ends."""

    @property
    def width(self) -> int:
        """Numbers in a row."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What rows travel as."""
        ...

    def rows_of(self, sample: EncodedSample) -> int:
        """How many rows `sample` has here; 0 when it has nothing for this unit."""
        ...


class StageRunner(Protocol):
    """A stage as the executor sees it."""

    @property
    def module(self) -> Stage:
        """The module that holds the stage's weights."""
        ...

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Forward of `samples`. inbound: unit → [rows, width], the stage's own unit for hidden states."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderBoundary:
    """Behind an encoder's stage; `is_output` behind the projector."""

    unit: str
    geometry: EncoderGeometry
    is_output: bool
    width: int
    dtype: torch.dtype

    def rows_of(self, sample: EncodedSample) -> int:
        items = sample.sizes.get(self.unit, 0) // self.geometry.encoder_tokens
        return items * (self.geometry.tokens_per_row if self.is_output else self.geometry.encoder_tokens)


@dataclass(frozen=True, slots=True)
class LanguageBoundary:
    """Behind a language model's stage: one row a token."""

    unit: str
    width: int
    dtype: torch.dtype

    def rows_of(self, sample: EncodedSample) -> int:
        return sample.sizes[self.unit]


def boundary_after(model: MultimodalModel, unit_name: str, end: int) -> Boundary:
    """The boundary behind layer `end - 1` of a unit."""
    unit: Unit = model.units[unit_name]
    embedding = cast(nn.Embedding, model.language.model.get_input_embeddings())
    dtype = next(unit.parameters()).dtype
    if isinstance(unit, EncoderUnit):
        geometry = _geometry(unit)
        is_output = end == len(unit.layers)
        width = embedding.embedding_dim if is_output else geometry.width
        return EncoderBoundary(unit_name, geometry, is_output, width, dtype)
    if isinstance(unit, LanguageUnit):
        return LanguageBoundary(unit_name, embedding.embedding_dim, dtype)
    raise TypeError(f"unit {unit_name!r} is a {type(unit).__name__}; give it a boundary and a runner here")


def runner_for(
    unit: Unit, stage: Stage, width_out: int, device: torch.device, precision: Precision
) -> StageRunner:
    """What runs `stage`, a slice of `unit` that makes rows of `width_out`, on `device`."""
    if isinstance(stage, EncoderStage) and isinstance(unit, EncoderUnit):
        return EncoderRunner(stage, _geometry(unit), width_out, device, precision)
    if isinstance(stage, LanguageStage) and isinstance(unit, LanguageUnit):
        return LanguageRunner(stage, unit, device, precision)
    raise TypeError(f"unit {unit.unit!r} is a {type(unit).__name__}; give it a boundary and a runner here")


class EncoderRunner:
    """Runs an encoder's stage on all items of its samples in one batch."""

    def __init__(
        self,
        module: EncoderStage,
        geometry: EncoderGeometry,
        width_out: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.module = module
        self._geometry = geometry
        self._width_out = width_out
        self._device = device
        self._precision = precision

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        unit = self.module.unit
        hidden = inputs = None
        if not any(data.samples[sample].sizes.get(unit, 0) for sample in samples):
            return StageOutput(torch.zeros(0, self._width_out, device=self._device), None)
        if self.module.is_first:
            inputs = self._inputs(data, samples)
        else:
            hidden = inbound[unit].unflatten(0, (-1, self._geometry.encoder_tokens))
        with self._precision.autocast(self._device):
            output = self.module(inputs, hidden)
        return StageOutput(output.flatten(0, -2), None)

    def _inputs(self, data: StepData, samples: tuple[int, ...]) -> dict[str, Tensor]:
        unit = self.module.unit
        having = [data.samples[sample] for sample in samples if data.samples[sample].sizes.get(unit, 0)]
        missing = [repr(sample.id) for sample in having if not sample.media.get(unit)]
        if missing:
            raise UserError(
                f"the {unit} inputs of sample {', '.join(missing[:8])} were not loaded on the rank that encodes them"
            )
        return {
            name: torch.cat([torch.as_tensor(sample.media[unit][name]) for sample in having]).to(
                self._device, non_blocking=True
            )
            for name in having[0].media[unit]
        }


class LanguageRunner:
    """Runs a language model's stage on its samples packed in one row."""

    def __init__(
        self, module: LanguageStage, unit: LanguageUnit, device: torch.device, precision: Precision
    ) -> None:
        self.module = module
        self._unit = unit
        self._device = device
        self._precision = precision

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        unit, module = self.module.unit, self.module
        packed = [data.samples[sample] for sample in samples]
        lengths = [sample.sizes[unit] for sample in packed]
        hidden = inbound[unit][None] if not module.is_first else None
        rows = {name: tensor for name, tensor in inbound.items() if name != unit and tensor.shape[0]}
        position_ids = torch.cat([torch.arange(n, device=self._device) for n in lengths])[None]
        # Labels and placeholders are looked through on the host, which would wait for the device to tell it.
        labels = torch.as_tensor(np.concatenate([s.labels for s in packed]))[None] if module.is_last else None
        wanted = places = None
        if labels is not None and data.predicts:
            wanted = positions_with_targets(shift_labels(labels, position_ids, None, lengths))
            wanted, labels = to_device(wanted, self._device), None
        if module.is_first:
            places = find_places([s.input_ids for s in packed], module.placeholder_ids, self._device)
        with self._precision.autocast(self._device):
            output = module(
                self._row([sample.input_ids for sample in packed]) if module.is_first else None,
                rows,
                hidden,
                position_ids=position_ids,
                labels=labels,
                loss_denominator=max(1, data.target_tokens),
                return_logits=False,
                lengths=lengths,
                sample_ids=[sample.id for sample in packed],
                places=places,
                **self._unit.attention_of([sample.input_ids for sample in packed]),
                logits_at=wanted,
            )
        if isinstance(output, Tensor):
            return StageOutput(output[0], None)
        if wanted is not None:
            return StageOutput(None, None, output.logits[0].argmax(dim=-1))
        return StageOutput(None, output.loss)

    def _row(self, parts: list) -> Tensor:
        return to_device(torch.as_tensor(np.concatenate(parts))[None], self._device)


def _geometry(unit: EncoderUnit) -> EncoderGeometry:
    return encoder_geometry(unit.model.config, "patch" if unit.skip_tokens else "all")

"""Whether a family can be cut into stages and packed: asked of the model itself, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dilatant.models.core.geometry import encoder_geometry
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.language_stage import MultimodalOutput

_TOKENS = (5, 3)


@torch.no_grad()
def find_problems(unit: EncoderUnit | LanguageUnit) -> tuple[str, ...]:
    """What is wrong with a unit's layers, empty when nothing is. The unit's weights are used as they are.

    Checked: one stage for every layer, chained, gives what the whole unit gives; and, for a language model, two
    samples in one packed row give what they give alone.
    """
    was_training = unit.training
    unit.eval()
    try:
        if isinstance(unit, EncoderUnit):
            return _compare("cut into stages", lambda: _chained_encoder(unit))
        problems = _compare("cut into stages", lambda: _chained_language(unit))
        return problems + _compare("packed with other samples", lambda: _packed_language(unit))
    finally:
        unit.train(was_training)


def _compare(what: str, run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[str, ...]:
    try:
        expected, given = run()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return (f"it cannot be {what}: {type(error).__name__}: {reason}",)
    # Packing changes the order of sums, no more: some roundings, relative to the largest output. A wrong position,
    # mask or layer changes outputs by parts of their size.
    tolerance = max(1e-3, 8 * torch.finfo(expected.dtype).eps)
    difference = ((expected - given).abs().max() / expected.abs().max()).item()
    if difference <= tolerance:
        return ()
    return (f"when it is {what}, its outputs change by {difference:.2g} of the largest",)


def _chained_encoder(unit: EncoderUnit) -> tuple[Tensor, Tensor]:
    weight = next(unit.model.parameters())
    geometry = encoder_geometry(unit.model.config)
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, *geometry.row_shape, generator=generator).to(weight)
    hidden: Tensor | None = None
    for index in range(len(unit.layers)):
        hidden = unit.stage(index, index + 1)({geometry.input_name: row} if index == 0 else None, hidden)
    assert hidden is not None
    return unit({geometry.input_name: row}), hidden


def _chained_language(unit: LanguageUnit) -> tuple[Tensor, Tensor]:
    ids, positions = _tokens(unit)
    attention = unit.attention_of(_numpy(ids.split(_TOKENS, 1)))
    hidden = None
    for index in range(len(unit.layers)):
        hidden = unit.stage(index, index + 1)(
            ids if index == 0 else None, None, hidden, position_ids=positions, **attention
        )
    return _logits(unit(ids, position_ids=positions, **attention)), _logits(hidden)


def _packed_language(unit: LanguageUnit) -> tuple[Tensor, Tensor]:
    ids, positions = _tokens(unit)
    parts = ids.split(_TOKENS, 1)
    alone = [
        _logits(unit(part, position_ids=where, **unit.attention_of(_numpy([part]))))
        for part, where in zip(parts, positions.split(_TOKENS, 1), strict=True)
    ]
    packed = unit(ids, position_ids=positions, **unit.attention_of(_numpy(parts)))
    return torch.cat(alone, dim=1), _logits(packed)


def _numpy(parts: Sequence[Tensor]) -> list[Any]:
    return [part[0].cpu().numpy() for part in parts]


def _tokens(unit: LanguageUnit) -> tuple[Tensor, Tensor]:
    """Two samples in a row: ids and positions [1, tokens]."""
    weight = next(unit.model.parameters())
    vocabulary = cast(nn.Embedding, unit.model.get_input_embeddings()).num_embeddings
    ids = torch.randint(0, vocabulary, (1, sum(_TOKENS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in _TOKENS])[None]
    return ids.to(weight.device), positions.to(weight.device)


def _logits(output: Tensor | MultimodalOutput | None) -> Tensor:
    assert isinstance(output, MultimodalOutput)
    assert output.logits is not None
    return output.logits

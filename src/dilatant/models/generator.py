"""Units behind the language model: a connector and a module that makes losses of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.config.errors import UserError, list_problems
from dilatant.data.sample import EncodedSample
from dilatant.models.diffusion import Diffusion
from dilatant.models.projector import build_projector
from dilatant.models.random_draws import Spread
from dilatant.models.stage import Boundary, Loss, Stage, StageOutput, StepData, in_dtype_of, media_of
from dilatant.models.unit import Unit
from dilatant.models.weights import Weight, name_module_weights


@dataclass(frozen=True, slots=True)
class Generator:
    """What a user says about a unit behind the language model.

    model: a module, `model(rows, **targets)` → losses [items]; rows: [items, tokens_per_item, width], targets: the
    samples' media under the unit's name, keyword → [items, ...]. One that draws random numbers says `takes_keys = True`
    and is also given `seed`, `keys` (one for each item, whatever the layout) and `place` (its unit). token_id: the
    token of the text at whose places the language model's last hidden states are taken, `tokens_per_item` of them for
    an item; None: learned queries stand there, a weight of the language model's embedding layer, and the id is one
    beyond the vocabulary. connector: "linear", "mlp",
    "identity" or a module from the language model's width to `width`. The loss is the sum over all items of the global
    batch over their number, and counts `loss_weight` times.
    """

    model: nn.Module
    token_id: int | None
    width: int
    connector: str | nn.Module = "linear"
    tokens_per_item: int = 1
    loss_weight: float = 1.0


class GeneratorStage(Stage):
    """connector: None after the first stage. model: None before the last. source: the unit that gives rows. token_id,
    tokens_per_item: see `Generator`."""

    def __init__(
        self,
        unit: str,
        layers: tuple[str, ...],
        weights: tuple[Weight, ...],
        connector: nn.Module | None,
        model: nn.Module | None,
        source: str,
        token_id: int,
        tokens_per_item: int,
    ) -> None:
        super().__init__(unit, layers, weights)
        self.connector = connector
        self.model = model
        self.source = source
        self.token_id = token_id
        self.tokens_per_item = tokens_per_item

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """All items of the samples in one batch; nothing where none of them has any."""
        rows = inbound[self.unit if self.connector is None else self.source]
        if data.predicts or not rows.shape[0]:
            return StageOutput()
        if self.connector is not None:
            rows = self.connector(in_dtype_of(self.connector, rows))
        if self.model is None:
            return StageOutput(rows)
        own = self.own(data, samples)
        loaded = [data.samples[s] for s in samples if own is None or data.samples[s].media.get(self.unit)]
        self._check_items(loaded)
        targets: dict[str, Any] = dict(media_of(data, samples, self, own))
        if getattr(self.model, "takes_keys", False):
            targets |= self._keys(data, samples, own)
        total = self(rows, **targets).float().sum()
        return StageOutput(losses={self.unit: total / data.counts[self.unit]})

    def _keys(
        self, data: StepData, samples: tuple[int, ...], own: NDArray[np.int64] | None
    ) -> dict[str, Any]:
        """What random numbers of the items follow from."""
        items = zip(samples, self.spread(data, samples).lengths)
        keys = [f"{data.draws[sample]} item {item}" for sample, count in items for item in range(count)]
        return {
            "seed": data.seed,
            "keys": keys if own is None else [keys[item] for item in own],
            "place": self.unit,
        }

    def _check_items(self, samples: Sequence[EncodedSample]) -> None:
        """Raise UserError for samples whose places in the text are not those of their targets."""
        problems = []
        for sample in samples:
            places = _rows(self.unit, sample)
            given = {len(array) for array in sample.media.get(self.unit, {}).values()} if places else {0}
            if given != {places / self.tokens_per_item}:
                listed = " and ".join(str(count) for count in sorted(given))
                problems.append(
                    f"sample {sample.id!r} has {places} places in its text, {self.tokens_per_item} for an item, but "
                    f"targets of {listed} items"
                )
        if problems:
            raise list_problems(f"the targets of {self.unit} do not fit:", problems[:8])

    def spread(self, data: StepData, samples: tuple[int, ...]) -> Spread:
        return Spread(False, tuple(self.items(data.samples[sample].sizes) for sample in samples))

    def items(self, sizes: Mapping[str, int]) -> int:
        return sizes.get(self.unit, 0) // self.tokens_per_item

    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        return self(value, **given).sum() if self.connector is None else self.connector(value)

    def forward(self, rows: Tensor, **targets: Any) -> Tensor:
        """The losses of items: [items]. rows: [items * tokens_per_item, width], behind the connector.

        Raises UserError where the module does not return one loss for each item.
        """
        assert self.model is not None
        given = in_dtype_of(self.model, rows).unflatten(0, (-1, self.tokens_per_item))
        losses = self.model(given, **targets)
        if losses.shape != given.shape[:1]:
            raise UserError(
                f"{self.unit}: the module returns losses of shape {[*losses.shape]} for {given.shape[0]} items; "
                "return one number for each item"
            )
        return losses


class GeneratorUnit(Unit, GeneratorStage):
    """A connector and a module: layers `connector` and `generator`."""

    parts = ("connector", "model")
    model: nn.Module
    connector: nn.Module
    structure = None

    def __init__(self, name: str, generator: Generator, source: str, width_in: int) -> None:
        connector = generator.connector
        if isinstance(connector, str):
            with torch.device("meta"):
                connector = build_projector(
                    connector, width_in, generator.width, f"generator {name!r}: connector"
                )
        assert generator.token_id is not None
        super().__init__(
            unit=name,
            layers=(f"{name}.connector", f"{name}.generator"),
            weights=name_module_weights(
                name, {"connector": ("connector", connector), "generator": ("model", generator.model)}
            ),
            connector=connector,
            model=generator.model,
            source=source,
            token_id=generator.token_id,
            tokens_per_item=generator.tokens_per_item,
        )
        self.inputs = (source,)
        self.width = generator.width
        self.width_in = width_in
        items = partial(_items, name, self.tokens_per_item)
        self.losses = {name: Loss(items, generator.loss_weight)}
        self._freeze_at_start()

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        if not layer:
            return torch.randn(tokens, self.width_in, device=device), {}
        if not isinstance(self.model, Diffusion):
            raise UserError(
                f"{self.unit}: its module cannot be measured alone, for its targets are not known"
            )
        items = max(1, tokens // self.tokens_per_item)
        rows = torch.randn(items * self.tokens_per_item, self.width, device=device)
        return rows, self.model.example(items, device)

    def part_name(self, part: str) -> str:
        return f"{self.unit}.connector" if part == "connector" else f"{self.unit}.generator"

    def pieces(self) -> Iterator[tuple[str, str]]:
        yield self.layers[0], "connector"
        yield self.layers[1], "model"

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({self.unit} if end == len(self.layers) else ())

    def boundary(self, end: int, consumer: str) -> Boundary:
        return Boundary(
            self.width,
            self.row_dtype,
            partial(_rows, self.unit),
        )

    def element_of_row(self, other: str, sample: EncodedSample) -> NDArray[np.int64]:
        return np.arange(_rows(self.unit, sample)) // self.tokens_per_item

    def stage(self, first: int, end: int) -> GeneratorStage:
        self._check_stage(first, end)
        return GeneratorStage(
            unit=self.unit,
            layers=self.layers[first:end],
            weights=self._weights_between(first, end),
            connector=self.connector if first == 0 else None,
            model=self.model if end == len(self.layers) else None,
            source=self.source,
            token_id=self.token_id,
            tokens_per_item=self.tokens_per_item,
        )


def _rows(unit: str, sample: EncodedSample) -> int:
    return sample.sizes.get(unit, 0)


def _items(unit: str, tokens_per_item: int, sample: EncodedSample) -> float:
    return _rows(unit, sample) / tokens_per_item

"""Generator units: a connector, which maps the language model's rows, and a module that computes losses from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dilatant.config.errors import UserError, list_problems
from dilatant.config.model import LANGUAGE
from dilatant.data.sample import EncodedSample
from dilatant.models.core.stage import Boundary, Loss, RowCount, Stage, StageOutput, StepData, in_dtype_of, media_of
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight, name_module_weights
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.encoders.projector import build_projector
from dilatant.models.generators.denoiser_families import BLOCKS, DenoiserCut, net_width
from dilatant.models.generators.denoisers import DenoiserSlice, rows_between
from dilatant.models.generators.diffusion import Diffusion

HEAD_SIZE = 64
"""Head size of a transformer connector's attention between an item's rows, if the width allows it."""


@dataclass(frozen=True, slots=True)
class Generator:
    """The user's specification of a generator.

    model: a module, `model(rows, **targets)` → losses [items]; rows: [items, tokens_per_item, width], targets: the
    samples' media under the unit's name, keyword → [items, ...]. A module that draws random numbers sets `takes_keys =
    True` and also receives `seed`, `keys` (one per item, independent of the layout) and `place` (its unit). token_id:
    the id of the tokens, `tokens_per_item` per item, whose last hidden states in the language model are the rows; with
    None, these tokens have an id outside the vocabulary, and learned queries, a weight of the language model's
    embedding layer, are their inputs. connector: "linear", "mlp", "identity", "transformer" of `connector_layers`
    blocks in which the rows of an item attend to each other, or a module from the language model's width to `width`.
    The loss is the sum over all items of the global batch divided by their number, with weight `loss_weight`.
    """

    model: nn.Module
    token_id: int | None
    width: int
    connector: str | nn.Module = "linear"
    tokens_per_item: int = 1
    loss_weight: float = 1.0
    connector_layers: int = 2


def check_specs(
    encoders: Mapping[str, Encoder],
    generators: Mapping[str, Generator],
    asked: Sequence[str],
    placeholder_ids: Mapping[str, int],
    vocabulary: int,
) -> None:
    """Check names, ids and sizes of a model's encoders and generators. asked: generators with learned queries, whose
    ids are outside the `vocabulary`. Raises UserError with all problems."""
    names = [*encoders, *generators]
    problems = [
        f"name {name!r} cannot be used; take a plain word such as 'vision'"
        for name in names
        if name == LANGUAGE or not name.isidentifier() or hasattr(nn.ModuleDict, name)
    ]
    problems += [f"{name!r} is an encoder and a generator" for name in generators if name in encoders]
    problems += [
        f"generator {name!r}: token_id {generator.token_id} is not in the vocabulary of {vocabulary}"
        for name, generator in generators.items()
        if generator.token_id is not None
        and (
            (name not in asked and not 0 <= generator.token_id < vocabulary)
            or generator.token_id in placeholder_ids.values()
        )
    ]
    problems += [
        f"generator {name!r}: {key} is {value}; it must be {wanted}"
        for name, generator in generators.items()
        for key, value, is_right, wanted in (
            ("width", generator.width, generator.width >= 1, "at least 1"),
            ("tokens_per_item", generator.tokens_per_item, generator.tokens_per_item >= 1, "at least 1"),
            ("loss_weight", generator.loss_weight, 0 <= generator.loss_weight < math.inf, "0 or more"),
        )
        if not is_right
    ]
    if len(set(placeholder_ids.values())) != len(placeholder_ids):
        problems.append(f"encoders share a placeholder id: {placeholder_ids}")
    taken = [generator.token_id for generator in generators.values()]
    if len(set(taken)) != len(taken):
        problems.append(f"generators share a token_id: {taken}")
    if problems:
        raise list_problems("these units do not fit together:", problems)


class GeneratorStage(Stage):
    """Layers of a generator, set up by its unit. connector: None after the first stage. model: None before the last.
    source: the unit that sends rows. token_id, tokens_per_item: see `Generator`."""

    connector: nn.Module | None
    model: nn.Module | None
    source: str
    token_id: int
    tokens_per_item: int

    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Run all items of the samples in one batch; the output is empty if no sample has any."""
        rows = inbound[self.unit if self.connector is None else self.source]
        if data.predicts or not rows.shape[0]:
            return StageOutput()
        if self.connector is not None:
            rows = self.connector(in_dtype_of(self.connector, rows))
        if self.model is None:
            return StageOutput(rows)
        items = self.own(data, samples)
        targets: dict[str, Any] = {}
        if self.enters:
            loaded = [data.samples[s] for s in samples if items is None or data.samples[s].media.get(self.unit)]
            self._check_items(loaded)
            targets |= media_of(data, samples, self, items)
            if getattr(self.model, "takes_keys", False):
                targets |= self._keys(data, samples, items)
        outputs = self(rows, **targets)
        if not self.leaves:
            return StageOutput(outputs)
        return StageOutput(losses={self.unit: outputs.float().sum() / data.counts[self.unit]})

    @property
    def enters(self) -> bool:
        """True for the stage at the denoiser's start, which receives the targets."""
        return self.model is not None and getattr(self.model, "enters", True)

    @property
    def leaves(self) -> bool:
        """True for the stage that returns losses."""
        return self.model is not None and getattr(self.model, "leaves", True)

    def _keys(self, data: StepData, samples: tuple[int, ...], chosen: NDArray[np.int64] | None) -> dict[str, Any]:
        """Return the seed and keys of the items' random numbers."""
        items = zip(samples, self.spread(data, samples).lengths)
        keys = [f"{data.draws[sample]} item {item}" for sample, count in items for item in range(count)]
        return {
            "seed": data.seed,
            "keys": keys if chosen is None else [keys[item] for item in chosen],
            "place": self.unit,
        }

    def _check_items(self, samples: Sequence[EncodedSample]) -> None:
        """Raise UserError for samples whose placeholders in the text do not match their targets."""
        problems = []
        for sample in samples:
            places = sample.sizes.get(self.unit, 0)
            counts = {len(array) for array in sample.media.get(self.unit, {}).values()} if places else {0}
            if counts != {places / self.tokens_per_item}:
                listed = " and ".join(str(count) for count in sorted(counts))
                problems.append(
                    f"sample {sample.id!r} has {places} places in its text, {self.tokens_per_item} for an item, but "
                    f"targets of {listed} items"
                )
        if problems:
            raise list_problems(f"the targets of {self.unit} do not fit:", problems[:8])

    def items(self, sizes: Mapping[str, int]) -> int:
        return sizes.get(self.unit, 0) // self.tokens_per_item

    def one_layer(self, value: Tensor, **targets: Any) -> Tensor:
        if self.connector is not None:
            return self.connector(value)
        outputs = self(value, **targets)
        return outputs.sum() if self.leaves else outputs

    def forward(self, rows: Tensor, **targets: Any) -> Tensor:
        """Return the losses, [items]; a denoiser slice before the last returns rows for the next. rows: the items'
        rows, concatenated, after the connector. Raises UserError if the module does not return one loss per item."""
        assert self.model is not None
        each = self.tokens_per_item if self.enters else cast(DenoiserSlice, self.model).rows
        by_item = in_dtype_of(self.model, rows).unflatten(0, (-1, each))
        outputs = self.model(by_item, **targets)
        if not self.leaves:
            return outputs.flatten(0, 1)
        if outputs.shape != by_item.shape[:1]:
            raise UserError(
                f"{self.unit}: the module returns losses of shape {[*outputs.shape]} for {by_item.shape[0]} items; "
                "return one number for each item"
            )
        return outputs


class GeneratorUnit(Unit, GeneratorStage):
    """A connector and a module: layers `connector` and `generator`; or, for a denoiser that can be cut, `connector`,
    `embedding`, `layers.0` and so on, and `head`."""

    parts = ("connector", "model")
    model: nn.Module
    connector: nn.Module
    structure = None

    def __init__(self, name: str, generator: Generator, source: str, width_in: int) -> None:
        connector = generator.connector
        if isinstance(connector, str):
            with torch.device("meta"):
                connector = build_connector(
                    connector,
                    width_in,
                    generator.width,
                    generator.tokens_per_item,
                    generator.connector_layers,
                    f"generator {name!r}: connector",
                )
        assert generator.token_id is not None
        cut: DenoiserCut | None = getattr(generator.model, "cut", None)
        connecting = name_module_weights(name, {"connector": ("connector", connector)})
        if cut is None:
            layers = ["connector", "generator"]
            drawing = name_module_weights(name, {"generator": ("model", generator.model)})
        else:
            count = len(denoiser_blocks(generator.model))
            layers = ["connector", "embedding", *(f"layers.{number}" for number in range(count)), "head"]
            drawing = _denoiser_weights(name, layers, generator.model, cut)
        super().__init__(name, tuple(f"{name}.{layer}" for layer in layers), (*connecting, *drawing))
        self.connector, self.model, self.source = connector, generator.model, source
        self.token_id, self.tokens_per_item = generator.token_id, generator.tokens_per_item
        self.cut = cut
        self.inputs = (source,)
        self.width = generator.width
        self.width_in = width_in
        self.losses = {name: Loss(RowCount(name, self.tokens_per_item), generator.loss_weight)}
        self._freeze_at_start()

    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        if not layer:
            whole = max(1, tokens // self.tokens_per_item) * self.tokens_per_item
            count = whole if self.rows_see_each_other else tokens
            return torch.randn(count, self.width_in, device=device), {}
        if not isinstance(self.model, Diffusion):
            raise UserError(f"{self.unit}: its module cannot be measured alone, for its targets are not known")
        items = max(1, tokens // self.tokens_per_item)
        if layer > 1:
            boundary = self.boundary(layer, self.unit)
            return torch.randn(items * self.rows_between, boundary.width, device=device), {}
        rows = torch.randn(items * self.tokens_per_item, self.width, device=device)
        return rows, self.model.example(items, device)

    @property
    def rows_see_each_other(self) -> bool:
        """True if the rows of an item attend to each other in the connector, so that a rank needs whole items."""
        return isinstance(self.connector, TransformerConnector)

    def part_name(self, part: str) -> str:
        return f"{self.unit}.connector" if part == "connector" else f"{self.unit}.generator"

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.model] if self.cut is None else denoiser_blocks(self.model)

    @property
    def first_block(self) -> int:
        return 1 if self.cut is None else 2

    def pieces(self) -> Iterator[tuple[str, str]]:
        yield self.layers[0], "connector"
        if self.cut is None:
            yield self.layers[1], "model"
            return
        for path, module in self.model.named_children():
            if path != "net":
                yield self.layers[1], f"model.{path}"
                continue
            for name, _ in module.named_children():
                if name == BLOCKS:
                    yield from (
                        (layer, f"model.net.{BLOCKS}.{number}") for number, layer in enumerate(self.layers[2:-1])
                    )
                else:
                    yield self.layers[-1 if name in self.cut.last else 1], f"model.net.{name}"

    def reads(self, first: int, end: int) -> frozenset[str]:
        return frozenset({self.unit} if first <= 1 < end else ())

    @property
    def rows_between(self) -> int:
        """Rows of an item that pass between denoiser slices."""
        if self.cut is None:
            return self.tokens_per_item
        return rows_between(cast(Diffusion, self.model), self.cut, self.tokens_per_item, self.row_dtype)

    def boundary(self, end: int, consumer: str) -> Boundary:
        if end == 1 or self.cut is None:
            return Boundary(self.width, self.row_dtype, RowCount(self.unit))
        net: Any = cast(Diffusion, self.model).net
        rows = RowCount(self.unit, self.tokens_per_item, self.rows_between)
        return Boundary(net_width(net.config), self.row_dtype, rows)

    def stage(self, first: int, end: int) -> GeneratorStage:
        self._check_stage(first, end)
        model: nn.Module | None = self.model if end > 1 else None
        if self.cut is not None and model is not None and (first > 1 or end < len(self.layers)):
            count = len(self.blocks)
            begin, stop = (min(max(place - 2, 0), count) for place in (first, end))
            model = DenoiserSlice(
                cast(Diffusion, self.model),
                self.cut,
                (self.tokens_per_item, self.rows_between),
                begin,
                stop,
                enters=first <= 1,
                leaves=end == len(self.layers),
            )
        stage = GeneratorStage(self.unit, self.layers[first:end], self._weights_between(first, end))
        stage.connector, stage.model, stage.source = self.connector if first == 0 else None, model, self.source
        stage.token_id, stage.tokens_per_item = self.token_id, self.tokens_per_item
        return stage


def denoiser_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a `Diffusion` whose denoiser can be cut."""
    return list(model.get_submodule(f"net.{BLOCKS}").children())


def _denoiser_weights(unit: str, layers: Sequence[str], model: nn.Module, cut: DenoiserCut) -> tuple[Weight, ...]:
    """Return every weight of a `Diffusion` whose denoiser is cut, in layer order."""
    found: dict[str, list[Weight]] = {layer: [] for layer in layers}
    for key in model.state_dict():
        part, name, *rest = key.split(".")
        if part == "net" and name == BLOCKS:
            layer, last = f"layers.{rest[0]}", ".".join(rest[1:])
        else:
            layer, last = ("head" if part == "net" and name in cut.last else "embedding"), key
        found[layer].append(Weight(f"{unit}.{layer}.{last}", f"{unit}.{layer}", "model", key))
    return tuple(weight for each in found.values() for weight in each)


class TransformerConnector(nn.Module):
    """Transformer connector from [..., width_in] to [..., width]. The rows of an item attend to each other in pre-norm
    blocks of the language model's width, then a linear layer projects (the order of MetaQueries: encoder, then
    projection).

    rows: number per item; the input holds the rows of whole items, concatenated.
    """

    def __init__(self, width_in: int, width: int, rows: int, layers: int) -> None:
        super().__init__()
        self.rows = rows
        self.blocks = nn.Sequential(*(_ConnectorBlock(width_in) for _ in range(layers)))
        self.norm = nn.LayerNorm(width_in)
        self.projection = nn.Linear(width_in, width)

    def forward(self, tokens: Tensor) -> Tensor:
        items = tokens.reshape(-1, self.rows, tokens.shape[-1])
        rows = self.projection(self.norm(self.blocks(items)))
        return rows.reshape(*tokens.shape[:-1], rows.shape[-1])


class _ConnectorBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // math.gcd(width, HEAD_SIZE)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, items: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(items)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        items = items + self.out(seen.transpose(1, 2).flatten(2))
        return items + self.fc2(functional.gelu(self.fc1(self.norm2(items))))


def build_connector(kind: str, width_in: int, width: int, rows: int, layers: int, where: str) -> nn.Module:
    """Build a connector from `width_in` to `width`: [..., width_in] → [..., width].

    kind: one of `build_projector`, which map each row independently, or "transformer" with `layers` blocks, in which
    the `rows` rows of an item attend to each other. Raises UserError.
    """
    if kind == "transformer":
        return TransformerConnector(width_in, width, rows, layers)
    return build_projector(kind, width_in, width, where)

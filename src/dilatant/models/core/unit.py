"""Units: stages that hold all layers of an encoder, a language model or a generator and can be cut; and their graph."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.config.memory_modes import Recompute
from dilatant.data.sample import EncodedSample
from dilatant.models.core.geometry import EncoderGeometry
from dilatant.models.core.host_inputs import HostInputs
from dilatant.models.core.recompute import recompute
from dilatant.models.core.stage import Boundary, Loss, Stage
from dilatant.models.core.structure import Structure
from dilatant.models.core.weights import Weight


class Unit(Stage):
    """A stage that holds every layer of its unit.

    model: a transformers model, or any module, which is one layer if `structure` is None. parts: the attributes that
    hold the unit's modules. inputs: the units whose rows this unit takes. losses: the unit's training losses by name;
    the main loss has the unit's name.
    """

    model: nn.Module
    structure: Structure | None
    parts: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    losses: Mapping[str, Loss] = MappingProxyType({})
    geometry: EncoderGeometry | None = None
    """The shapes of one item of an encoder."""
    packs: bool = False
    """True if items of different sizes are packed in one row."""
    width: int
    """Hidden size of the blocks."""
    shared_by: int = 1
    """Tensor-parallel degree of the layers, if this unit holds one rank's shard of them (`parallel.tensor_plan`)."""
    frozen: frozenset[str]
    """Logical names of the parameters that do not train (see `freeze`)."""
    unused: frozenset[str] = frozenset()
    """The frozen parameters that cannot influence any output."""
    uncut: str | None = None
    """The reason why the unit cannot be cut into stages; None if it can."""
    undivided: str | None = None
    """The reason why tensor-parallel ranks cannot share the unit; None if its family decides."""
    tensor_rules: Mapping[str, str] = MappingProxyType({})
    """Tensor-parallel rules of linear layers, if the family has none (see `parallel.tensor_rules`)."""
    four_bit: frozenset[str] = frozenset()
    """Logical names of the weights that stages hold in four bits (see `core.dtype`)."""
    fp8: frozenset[str] = frozenset()
    """Logical names of the weights by which stages multiply in FP8 (see `core.dtype`)."""
    orthogonal: frozenset[str] = frozenset()
    """Logical names of the matrices that Muon updates, of which no rank may hold only a part."""

    @abstractmethod
    def stage(self, first: int, end: int) -> Stage:
        """Return layers `first <= layer < end` as a module that shares this unit's weights. Raises ValueError."""

    @abstractmethod
    def boundary(self, end: int, consumer: str) -> Boundary:
        """Return the boundary after layer `end - 1` to `consumer`: this unit, or another one after the last layer."""

    def element_of_row(self, other: str, sample: EncodedSample, rows: int) -> NDArray[np.int64]:
        """Map each row of a sample on an edge to the token (language model) or item of this unit that it belongs to:
        int64 [rows]. The `rows` rows pass between two stages of this unit, or between this unit and `other`. By
        default, all items have equally many rows."""
        items = self.items(sample.sizes)
        return np.repeat(np.arange(items), rows // max(1, items))

    @abstractmethod
    def part_name(self, part: str) -> str:
        """Return the name of a part in the user's config: "vision.encoder", "vision.projector", "language"."""

    @abstractmethod
    def reads(self, first: int, end: int) -> frozenset[str]:
        """Return the parts of samples that the stage of these layers reads. They are "tokens" (ids and labels), the
        unit's name if the stage takes its media, and `grid_part` of the name if the sizes of the items suffice."""

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype in which rows are sent between stages: that of the weights."""
        weight = next(self.parameters(), None)
        return torch.float32 if weight is None else weight.dtype

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of a transformers model; a user's own module is a single block."""
        if self.structure is None:
            return [self.model]
        return list(self.model.get_submodule(self.structure.blocks).children())

    @property
    def first_block(self) -> int:
        """The index of the layer that holds the first of `blocks`."""
        return 0 if self.structure is None else 1

    @property
    def config(self) -> Any:
        """The transformers config with the sizes of the blocks; None for a user's own module."""
        if self.structure is None or not isinstance(self.model, PreTrainedModel):
            return None
        return self.model.config.get_text_config()

    @property
    def family(self) -> str:
        """The `model_type` of transformers, or the class name of a user's own module."""
        return type(self.model).__name__.lower() if self.config is None else self.config.model_type

    @property
    def tied(self) -> dict[str, str]:
        """Logical name of each further copy of a tied weight → the name that they share."""
        return {weight.name: weight.tied_to for weight in self.weights if weight.tied_to is not None}

    @property
    def trained_names(self) -> set[str]:
        """Logical names of the parameters that train; buffers do not."""
        return {name for name, _ in self.named_logical_parameters()} - self.frozen

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Yield (logical layer, module path) for every module that belongs to one layer, in layer order."""
        first, *_ = self.layers
        if self.structure is None:
            yield first, "model"
            return
        for path in self.structure.before:
            yield first, f"model.{path}"
        for index in range(self.structure.num_blocks):
            yield self.layers[1 + index], f"model.{self.structure.blocks}.{index}"
        for path in self.structure.after:
            yield self.layers[1 + self.structure.num_blocks], f"model.{path}"

    @abstractmethod
    def example(self, layer: int, tokens: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Make the input for measuring one layer: random data for about `tokens` tokens, as `Stage.one_layer` takes it.
        Raises UserError for a layer that cannot be run alone."""

    def recompute(self, how: Recompute | Sequence[Recompute] = "block", inputs: HostInputs | None = None) -> None:
        """Recompute the activations of blocks in the backward pass as `train.recompute` says, or keep them ("none"),
        also in stages that are already cut. how: for every block, or one value per layer in the order of `layers`.
        inputs: those in host memory; None: of copies that suit the device."""
        inputs = inputs or HostInputs()
        by_layer = (how,) * len(self.layers) if isinstance(how, str) else tuple(how)
        if len(by_layer) != len(self.layers):
            raise ValueError(f"the unit has {len(self.layers)} layers, not {len(by_layer)}")
        for number, (block, own) in enumerate(zip(self.blocks, by_layer[self.first_block :], strict=False)):
            recompute(block, own, (inputs, number))

    def freeze_names(self, names: frozenset[str]) -> None:
        """Freeze the parameters with these logical names, in addition to those that are frozen already."""
        own = frozenset(name for name, _ in self.named_logical_parameters())
        self.frozen |= names & own
        self.set_frozen(self.frozen)

    def thaw_names(self, names: frozenset[str]) -> None:
        """Let the parameters with these logical names train, except the `unused` ones."""
        self.frozen -= names - self.unused
        self.set_frozen(self.frozen)

    def freeze_parts(self, *parts: str) -> None:
        """Freeze all weights of the given parts."""
        self.freeze_names(frozenset(weight.canonical for weight in self.weights if weight.part in parts))

    def _blocks(self, first: int, end: int) -> tuple[int, int]:
        """Return the block range of layers [first, end): layer 0 is the embedding, blocks begin at layer 1."""
        self._check_stage(first, end)
        count = self.structure.num_blocks if self.structure is not None else 0
        return min(max(first - 1, 0), count), min(end - 1, count)

    def _check_stage(self, first: int, end: int) -> None:
        if not 0 <= first < end <= len(self.layers):
            raise ValueError(
                f"unit {self.unit!r} has layers 0 to {len(self.layers)}; [{first}, {end}) is not a stage of it"
            )

    def _weights_between(self, first: int, end: int) -> tuple[Weight, ...]:
        held = set(self.layers[first:end])
        return tuple(weight for weight in self.weights if weight.layer in held)

    def _freeze_at_start(self, names: frozenset[str] = frozenset()) -> None:
        """Freeze `names`, and keep frozen the parameters that the family never trains or the user froze before."""
        held = self.named_logical_parameters()
        self.frozen = frozenset(name for name, parameter in held if not parameter.requires_grad)
        if names:
            self.freeze_names(names)


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Units in topological order.

    feeds: unit → the units that take its rows. anchor: the unit whose microbatches order the step (the language model).
    losses: the losses of all units by name.
    """

    units: tuple[str, ...]
    feeds: Mapping[str, tuple[str, ...]]
    anchor: str
    losses: Mapping[str, Loss] = field(default_factory=dict)

    @classmethod
    def of(cls, units: Iterable[Unit], anchor: str) -> ModelGraph:
        """Build the graph from the units' `inputs`. Raises UserError if a unit takes rows of a unit that follows it."""
        units = tuple(units)
        names = tuple(unit.unit for unit in units)
        for index, unit in enumerate(units):
            for source in unit.inputs:
                if source not in names[:index]:
                    raise UserError(
                        f"unit {unit.unit!r} takes rows of {source!r}, which is not a unit before it; the units are "
                        + ", ".join(names)
                    )
        return cls(
            names,
            {name: tuple(unit.unit for unit in units if name in unit.inputs) for name in names},
            anchor,
            {name: loss for unit in units for name, loss in unit.losses.items()},
        )

    @property
    def behind_anchor(self) -> tuple[str, ...]:
        """The units that take rows of the anchor, directly or indirectly (generators)."""
        found: list[str] = []
        for name in self.units:
            if any(name in self.feeds[source] for source in (self.anchor, *found)):
                found.append(name)
        return tuple(found)

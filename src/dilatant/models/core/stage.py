"""Stages: consecutive layers of one unit as a module, and the values that go in and out of a stage.

A unit is the stage that holds all its layers. The caller of a stage sees only samples, rows and losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.config.errors import UserError
from dilatant.data.media.pixels import EncoderInput, Pixels, as_array, concatenate_inputs
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.four_bit import is_four_bit
from dilatant.models.core.random_draws import KeyedDraws, SampleLayout
from dilatant.models.core.running_statistics import hold_statistics
from dilatant.models.core.sequence_parallel import TokenShards
from dilatant.models.core.weights import Weight

StageInputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of a unit. count: a sample's contribution to the number by which the global batch's sum is divided (target
    tokens, pictures). weight: factor of this loss in the total loss."""

    count: Callable[[EncodedSample], float]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class StepData:
    """The global batch of one step.

    Every rank has the sizes of all samples, but ids, labels and media only where its own stages read them. counts:
    loss → its divisor over the whole global batch, at least 1. predicts: True in evaluation; the language model's last
    stage then returns the likeliest token for every target. device: that of the stages. seed (of the run) and draws
    (one per sample, all different): the keys of random numbers.
    """

    samples: tuple[EncodedSample, ...]
    counts: Mapping[str, float]
    predicts: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    draws: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        samples: Sequence[EncodedSample],
        losses: Mapping[str, Loss],
        device: torch.device | None = None,
        predicts: bool = False,
        seed: int = 0,
        draws: Sequence[str] = (),
    ) -> StepData:
        """Build the batch, and compute the divisor of each of `losses` (by name) from its samples."""
        counts = {name: max(1.0, float(sum(map(loss.count, samples)))) for name, loss in losses.items()}
        return cls(tuple(samples), counts, predicts, device or torch.device("cpu"), seed, tuple(draws))


@dataclass(frozen=True, slots=True)
class Predictions:
    """Greedy predictions for every target of the samples, in order. tokens: int64 [targets], the likeliest tokens.
    losses: fp32 [targets], cross entropy of each target."""

    tokens: Tensor
    losses: Tensor


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a stage for the samples of a microbatch.

    rows: [rows, width] of the samples in order; a tensor for all consumers, or a mapping by consumer (the stage's own
    unit stands for the next stage); None without rows. losses: name → these samples' sum divided by the global batch's
    count: a scalar or, for the router loss, [routers]. predicted: predictions instead of a loss. sample_losses: name →
    [samples], each sample's detached contribution to the undivided sum, if known.
    """

    rows: Tensor | Mapping[str, Tensor] | None = None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    predicted: Predictions | None = None
    sample_losses: Mapping[str, Tensor] = field(default_factory=dict)

    def rows_for(self, consumer: str) -> Tensor | None:
        """Return the rows that this stage sends to a unit."""
        return self.rows.get(consumer) if isinstance(self.rows, Mapping) else self.rows


@dataclass(frozen=True, slots=True)
class RowCount:
    """Counts the rows of a sample: each `tokens` of its tokens in `unit` become `rows`."""

    unit: str
    tokens: int = 1
    rows: int = 1

    def __call__(self, sample: EncodedSample) -> int:
        return sample.sizes.get(self.unit, 0) // self.tokens * self.rows


@dataclass(frozen=True, slots=True)
class Boundary:
    """The shape of the rows that leave a stage for one consumer. Both ends derive it from what they hold of a sample.

    width: numbers in a row. dtype: that in which rows are sent. rows_of: maps a sample to its number of rows (0 if it
    has nothing for this unit), by its sizes, its ids, or the item sizes of `MediaUnit.grid`. A rank that loads no
    media of the unit has the ids.
    """

    width: int
    dtype: torch.dtype
    rows_of: Callable[[EncodedSample], int]


@dataclass(frozen=True, slots=True)
class Context:
    """The place of a rank among the `size` parts of a stage's microbatches; each runs its own tokens or items. The
    parts are those of `groups`, which run whole samples, and of the context-parallel ranks in each."""

    index: int = 0
    size: int = 1
    groups: int = 1


class Stage(nn.Module, ABC):
    """Layers of one unit, named in `layers`. The weights are the unit's own tensors, not copies; `weights` lists those
    held here, with keys into this stage's own modules."""

    context = Context()
    """The part of every microbatch that this rank runs (context parallelism)."""
    runs_blocks_once = True
    """False if a forward may pass through the blocks several times, once for each group of alike items."""
    sizes_name = ""
    """The input with the sizes of items, which stays on the host, where shapes and tables are computed; or empty."""
    shards: TokenShards | None = None
    """Under tensor parallelism, the slice of the tokens that this rank holds between attention and feed-forward."""
    read_blocks: Collection[int] = ()
    """Those of the stage's blocks, counted from 0, whose outputs are read by more than the next block."""

    def __init__(self, unit: str, layers: tuple[str, ...], weights: tuple[Weight, ...]) -> None:
        super().__init__()
        self.unit = unit
        self.layers = layers
        self.weights = weights

    @abstractmethod
    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Run the forward of `samples`, indices into `data.samples`, in the stage's current mode (training or
        evaluation).

        inbound: unit → [rows, width] of the samples in order: hidden states of the stage's own unit, or on a first
        stage the rows of the units that feed it. Under context parallelism all rows are this rank's. Raises UserError
        for a sample that cannot be run.
        """

    def owners(self, data: StepData, samples: tuple[int, ...], size: int, groups: int = 1) -> list[NDArray[np.integer]]:
        """Return, by sample, the part (of `size`) that runs each item (for a language model: each token) of a
        microbatch. Items are equally long, so each part gets a contiguous run of equally many. groups: see
        `Context`."""
        return assign_items_evenly(self.spread(data, samples).lengths, size)

    def item_owners(self, sizes: Sequence[Mapping[str, int]], size: int) -> list[NDArray[np.integer]]:
        """Return the same for an encoder or a generator, from the sizes of the samples alone."""
        return assign_items_evenly([self.items(each) for each in sizes], size)

    def own(self, data: StepData, samples: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Return the indices of the items, or tokens, of a microbatch that this rank runs; None for all of them."""
        if self.context.size == 1:
            return None
        owners = np.concatenate(self.owners(data, samples, self.context.size, self.context.groups))
        return np.flatnonzero(owners == self.context.index)

    def chosen(self, data: StepData, samples: tuple[int, ...]) -> tuple[int, ...]:
        """Return the samples of a microbatch of which this rank runs anything, if it runs whole samples; else all."""
        return samples

    def items(self, sizes: Mapping[str, int]) -> int:
        """Return the number of (equally long) items of a sample with these sizes; by default every token is an item."""
        return sizes[self.unit]

    def spread(self, data: StepData, samples: tuple[int, ...]) -> SampleLayout:
        """Return where each of `samples` is in the tensors of a forward; by default, its items in a batch."""
        return SampleLayout(False, tuple(self.items(data.samples[sample].sizes) for sample in samples))

    def draws(self, data: StepData, samples: tuple[int, ...], shards: TokenShards | None = None) -> KeyedDraws:
        """Return the random numbers of a microbatch. shards: if tensors may be one tensor-parallel rank's slice."""
        keys = [data.draws[sample] for sample in samples]
        return KeyedDraws(data.seed, keys, self.spread(data, samples), self.own(data, samples), shards)

    @abstractmethod
    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        """Run a one-layer stage: hidden states (or the unit's first input) in, hidden states or the loss out."""

    @property
    def undeferred(self) -> tuple[nn.Module, ...]:
        """Linear layers whose weight gradient is computed in I even when backward is split into I and W."""
        return ()

    def named_logical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (logical name, parameter) for each parameter held here, every tensor once. A tied weight has the name
        from the first layer that holds it, even if that layer is on another stage."""
        parameters = {
            part: dict(getattr(self, part).named_parameters(remove_duplicate=False))
            for part in {weight.part for weight in self.weights}
        }
        seen: set[str] = set()
        for weight in self.weights:
            parameter = parameters[weight.part].get(weight.key)
            if parameter is not None and weight.canonical not in seen:
                seen.add(weight.canonical)
                yield weight.canonical, parameter

    def set_frozen(self, frozen: frozenset[str]) -> None:
        """Set `requires_grad` of every parameter by its logical name, and the modes that follow from it."""
        for name, parameter in self.named_logical_parameters():
            parameter.requires_grad_(name not in frozen)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode like `nn.Module.train`, but leave modules whose weights are all frozen, and those with running
        statistics, in evaluation mode."""
        super().train(mode)
        if mode:
            _quiet_frozen(self)
            hold_statistics(self)
        return self


def _quiet_frozen(module: nn.Module) -> None:
    """Put every module whose weights are all frozen into evaluation mode: no dropout, no dropped layers."""
    flags: dict[int, frozenset[bool]] = {}

    def read(module: nn.Module) -> frozenset[bool]:
        """Return the values of `requires_grad` among all parameters of a module."""
        if id(module) not in flags:
            own = {parameter.requires_grad for parameter in module.parameters(recurse=False)}
            flags[id(module)] = frozenset(own).union(*map(read, module.children()))
        return flags[id(module)]

    def quiet(module: nn.Module) -> None:
        if True in read(module):
            for child in module.children():
                quiet(child)
        elif read(module):
            module.eval()

    quiet(module)


def assign_items_evenly(counts: Sequence[int], size: int) -> list[NDArray[np.integer]]:
    """Return, by sample, the rank (of `size`) of each of its items: contiguous and equally many per rank."""
    total = sum(counts)
    return np.split(np.arange(total) * size // max(1, total), np.cumsum(counts)[:-1])


def media_of(
    data: StepData,
    samples: Sequence[int],
    stage: Stage,
    items: NDArray[np.int64] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Load the media of the stage's unit onto the step's device: keyword → tensor [items, ...] over the samples that
    have any. The sizes of items (`Stage.sizes_name`) stay on the host.

    items: indices among all items of the samples; None for all. Samples without any of these items need no media
    loaded. names: the wanted keywords; None for all. Raises UserError for needed media that were not loaded on this
    rank.
    """
    unit, chosen = stage.unit, samples
    if items is not None:
        counts = [stage.items(data.samples[sample].sizes) for sample in samples]
        of_sample = np.repeat(np.arange(len(samples)), counts)
        wanted = np.unique(of_sample[items])
        chosen = [samples[number] for number in wanted]
        items = np.flatnonzero(np.isin(np.arange(len(of_sample)), items)[np.isin(of_sample, wanted)])
    having = [data.samples[sample] for sample in chosen if data.samples[sample].sizes.get(unit, 0)]
    missing = [repr(sample.id) for sample in having if not sample.media.get(unit)]
    if missing:
        raise UserError(
            f"the {unit} inputs of sample {', '.join(missing[:8])} were not loaded on the rank that runs them"
        )
    return {
        name: on_device(
            [sample.media[unit][name] for sample in having],
            torch.device("cpu") if name == stage.sizes_name else data.device,
            items,
        )
        for name in (having[0].media[unit] if having else ())
        if names is None or name in names
    }


def on_device(inputs: Sequence[EncoderInput], device: torch.device, items: NDArray[np.int64] | None = None) -> Tensor:
    """Return the chosen items of all inputs as encoder input on `device`; images are copied as bytes and normalised
    there. The host does not wait for the copies.

    The result equals `Pixels.normalized` bit for bit on a device that rounds according to IEEE 754.
    """
    together = concatenate_inputs(inputs) if all(isinstance(each, Pixels) for each in inputs) else None
    if not isinstance(together, Pixels):
        arrays = [torch.as_tensor(as_array(each)) for each in inputs]
        return to_device(_some(torch.cat(arrays), items), device)
    # Tensors, not Python numbers: a GPU would multiply by the reciprocal of the deviation.
    mean, std = (
        to_device(torch.tensor(each, dtype=torch.float32)[:, None, None], device)
        for each in (together.mean, together.std)
    )
    pixels = to_device(_some(torch.as_tensor(together.values), items), device)
    return pixels.to(torch.float32).mul_(together.rescale).sub_(mean).div_(std)


def _some(tensor: Tensor, items: NDArray[np.int64] | None) -> Tensor:
    return tensor if items is None else tensor[torch.from_numpy(items)]


def in_dtype_of(module: nn.Module, tensor: Tensor) -> Tensor:
    """Cast a floating tensor to the dtype of the module's first weight; return other tensors unchanged."""
    weight = next(module.parameters(), None)
    return tensor.to(weight.dtype) if weight is not None and tensor.is_floating_point() else tensor


def stage_tensors(stage: Stage) -> dict[str, Tensor]:
    """Return every weight and persistent buffer of a stage, uncopied, by logical name; tied ones once, four-bit ones
    never."""
    parts = {weight.part for weight in stage.weights}
    held = {part: getattr(stage, part).state_dict() for part in parts}
    tensors: dict[str, Tensor] = {}
    for weight in stage.weights:
        if not is_four_bit(getattr(stage, weight.part), weight.key):
            tensors.setdefault(weight.canonical, held[weight.part][weight.key])
    return tensors

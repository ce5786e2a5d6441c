"""Stages: consecutive layers of a unit as one module, and the values that go through them.

A unit is the stage that holds all its layers. Whoever runs a stage knows only samples, rows and losses; what a unit
makes of them is known to the unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dilatant.attention.context_parallel import Ranks
from dilatant.config.errors import UserError
from dilatant.data.media.pixels import EncoderInput, Pixels, as_array, joined
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.four_bit import is_four_bit
from dilatant.models.core.random_draws import Spread
from dilatant.models.core.sequence_parallel import TokenShards
from dilatant.models.core.weights import Weight

Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of a unit. count: what a sample adds to the number that the global batch's sum is divided by (target
    tokens, pictures). weight: of this loss in the sum of all."""

    count: Callable[[EncodedSample], float]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class StepData:
    """The global batch of one step.

    Every rank knows sizes, ids and labels of all samples; media only those that its own stages read. counts: loss →
    what it is divided by, over the whole batch, at least 1. predicts: nothing is learnt; the language model's
    last stage says which token it finds likeliest in the place of every target. device: where the stages are. seed:
    of the run, and draws: of each sample, all different: the keys of what is drawn at random.
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
        """The batch with what `losses`, by name, count in it."""
        counts = {name: float(sum(loss.count(sample) for sample in samples)) for name, loss in losses.items()}
        return cls(
            tuple(samples),
            {name: max(1.0, count) for name, count in counts.items()},
            predicts,
            device or torch.device("cpu"),
            seed,
            tuple(draws),
        )


@dataclass(frozen=True, slots=True)
class Predictions:
    """For every target of samples in order: tokens, int64 [targets], the likeliest ones in its place; losses, fp32
    [targets], cross entropies of the target."""

    tokens: Tensor
    losses: Tensor


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage makes of samples.

    rows: [rows, width] of the samples in order, for every consumer alike or by consumer (the stage's own unit for the
    next stage); None where there are none. losses: name → these samples' sum over the count of the global batch, a
    scalar, or parts of it of which each stage has some, [routers]. predicted: of the samples' targets, instead of a
    loss. sample_losses: name → [samples], what each adds to that sum before it is divided, where that is known; they
    cannot be differentiated.
    """

    rows: Tensor | Mapping[str, Tensor] | None = None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    predicted: Predictions | None = None
    sample_losses: Mapping[str, Tensor] = field(default_factory=dict)

    def rows_for(self, consumer: str) -> Tensor | None:
        """The rows that a unit takes from here."""
        return self.rows.get(consumer) if isinstance(self.rows, Mapping) else self.rows


@dataclass(frozen=True, slots=True)
class Boundary:
    """The rows that leave a stage for one consumer, known from sizes and ids alone, hence at both ends.

    width: numbers in a row. dtype: what rows travel as. rows_of: how many rows a sample has here, 0 when it has
    nothing for this unit.
    """

    width: int
    dtype: torch.dtype
    rows_of: Callable[[EncodedSample], int]


@dataclass(frozen=True, slots=True)
class Context:
    """Which of `size` context-parallel ranks of a stage one is: each runs its own tokens or items of every microbatch.
    ranks: all of them, where they attend together."""

    index: int = 0
    size: int = 1
    ranks: Ranks | None = None


class Stage(nn.Module, ABC):
    """Layers of one unit, named in `layers`. Its weights are those of the unit, not copies.

    `weights` lists what is held here, with keys into this stage's own modules.
    """

    context = Context()
    """Which part of every microbatch it runs."""
    shards: TokenShards | None = None
    """Where ranks share blocks: which part of the tokens this rank has between their regions."""

    def __init__(self, unit: str, layers: tuple[str, ...], weights: tuple[Weight, ...]) -> None:
        super().__init__()
        self.unit = unit
        self.layers = layers
        self.weights = weights

    @property
    def behind_blocks(self) -> nn.Module | None:
        """The module before which ranks that share blocks have all tokens again; None where that is right behind the
        last block."""
        return None

    @abstractmethod
    def run(self, data: StepData, samples: tuple[int, ...], inbound: Mapping[str, Tensor]) -> StageOutput:
        """Forward of `samples`, numbers in `data.samples`, in evaluation or training mode as the stage is.

        inbound: unit → [rows, width] of the samples in order: hidden states of the stage's own unit, or on a first
        stage the rows of the units that feed it. Under context parallelism all rows are this rank's. Raises UserError
        for a sample that cannot be run.
        """

    def owners(self, data: StepData, samples: tuple[int, ...], size: int) -> list[NDArray[np.integer]]:
        """Which of `size` context-parallel ranks runs each item (of a language model: each token) of a microbatch, by
        sample. Items are equally long, so each rank gets as many of them, one after the other."""
        return share_evenly(self.spread(data, samples).lengths, size)

    def item_owners(self, sizes: Sequence[Mapping[str, int]], size: int) -> list[NDArray[np.integer]]:
        """The same of an encoder or a generator, told from the sizes of samples alone."""
        return share_evenly([self.items(each) for each in sizes], size)

    def own(self, data: StepData, samples: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Those items, or tokens, of a microbatch that this rank runs; None for all of them."""
        if self.context.size == 1:
            return None
        owners = np.concatenate(self.owners(data, samples, self.context.size))
        return np.flatnonzero(owners == self.context.index)

    def items(self, sizes: Mapping[str, int]) -> int:
        """How many items, of equal length, a sample of these sizes has: its tokens, unless several make an item."""
        return sizes[self.unit]

    @abstractmethod
    def spread(self, data: StepData, samples: tuple[int, ...]) -> Spread:
        """How `samples` lie in the tensors of a forward."""

    @abstractmethod
    def one_layer(self, value: Tensor, **given: Any) -> Tensor:
        """Hidden states, or the loss, of `value`: hidden states, or what the unit's first layer takes."""

    @property
    def undeferred(self) -> tuple[nn.Module, ...]:
        """Linear layers whose weight gradients a split backward does not put off."""
        return ()

    def named_logical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(logical name, parameter) for each parameter held here, every tensor once.

        A tied weight goes by the name it has in the first layer that holds it, also where that layer is elsewhere.
        """
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
        """As in torch, except that modules whose weights are all frozen stay in evaluation mode."""
        super().train(mode)
        if mode:
            _quiet_frozen(self)
        return self


def _quiet_frozen(module: nn.Module) -> None:
    """Put every module whose weights are all frozen into evaluation mode: no dropout, no dropped layers."""
    flags: dict[int, frozenset[bool]] = {}

    def read(module: nn.Module) -> frozenset[bool]:
        """Whether its weights train, of all of them."""
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


def share_evenly(counts: Sequence[int], size: int) -> list[NDArray[np.integer]]:
    """Which of `size` ranks has each item of samples with so many, by sample. Each rank has equally many, one after
    the other."""
    total = sum(counts)
    return np.split(np.arange(total) * size // max(1, total), np.cumsum(counts)[:-1])


def media_of(
    data: StepData,
    samples: Sequence[int],
    stage: Stage,
    items: NDArray[np.int64] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The media of the stage's unit of the samples that have any: keyword → tensor [items, ...], on the step's device.

    items: which of all items of the samples; None for all. Media of samples without any of these need not be there.
    names: the keywords that are wanted, if not all.

    Raises UserError where others were not loaded here.
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
        name: on_device([sample.media[unit][name] for sample in having], data.device, items)
        for name in (having[0].media[unit] if having else ())
        if names is None or name in names
    }


def on_device(
    inputs: Sequence[EncoderInput], device: torch.device, items: NDArray[np.int64] | None = None
) -> Tensor:
    """The items of all inputs, or some of them, as an encoder sees them; images cross to the device as bytes.

    To the bit as `Pixels.normalized` has it where the device rounds as IEEE 754 says.
    """
    together = joined(inputs) if all(isinstance(each, Pixels) for each in inputs) else None
    if not isinstance(together, Pixels):
        arrays = [torch.as_tensor(as_array(each)) for each in inputs]
        return _some(torch.cat(arrays), items).to(device, non_blocking=True)
    # Not as numbers: a GPU would multiply by the reciprocal of the deviation.
    mean, std = (
        torch.tensor(each, dtype=torch.float32, device=device)[:, None, None]
        for each in (together.mean, together.std)
    )
    pixels = _some(torch.as_tensor(together.values), items).to(device, non_blocking=True)
    return pixels.to(torch.float32).mul_(together.rescale).sub_(mean).div_(std)


def _some(tensor: Tensor, items: NDArray[np.int64] | None) -> Tensor:
    return tensor if items is None else tensor[torch.from_numpy(items)]


def in_dtype_of(module: nn.Module, tensor: Tensor) -> Tensor:
    """A floating tensor in the dtype of the module's first weight; other tensors unchanged."""
    weight = next(module.parameters(), None)
    return tensor.to(weight.dtype) if weight is not None and tensor.is_floating_point() else tensor


def stage_tensors(stage: Stage) -> dict[str, Tensor]:
    """Every weight and persistent buffer of a stage by logical name, tied ones once; the tensors themselves. Weights in
    four bits are none."""
    parts = {weight.part for weight in stage.weights}
    held = {part: getattr(stage, part).state_dict() for part in parts}
    tensors: dict[str, Tensor] = {}
    for weight in stage.weights:
        if not is_four_bit(getattr(stage, weight.part), weight.key):
            tensors.setdefault(weight.canonical, held[weight.part][weight.key])
    return tensors

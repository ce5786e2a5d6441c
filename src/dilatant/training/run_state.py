"""State of a run on one rank: what checkpoints store, and what the next generation of ranks inherits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from dilatant.config import Config, UserError
from dilatant.config.train import EvaluationConfig
from dilatant.data.index.data_identity import DataIdentity
from dilatant.data.order.sampler import SamplerState
from dilatant.hf.stored_moments import find_moments
from dilatant.plan.boxes import Box, parse_key
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.training.checkpoints.checkpoint import Tensors, load, stored_shapes
from dilatant.training.feeding.step_data import count_steps
from dilatant.training.optimizers.master_weights import AVERAGE, Averages, WithMasters
from dilatant.training.optimizers.optimizer import allocate_moments, optimizer_tensors


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """Best evaluation so far, the same on all ranks and stored with the run's position. step, value: of its figure;
    None before any evaluation. since: evaluations after it. counted: step of the last evaluation."""

    step: int | None = None
    value: float | None = None
    since: int = 0
    counted: int | None = None

    def after(self, step: int, figures: Mapping[str, float], how: EvaluationConfig) -> BestEvaluation:
        """Return the record after the evaluation at `step`, which counts once even if it is repeated by another
        generation. A figure that is not finite is never better."""
        if self.counted == step or how.keep_best is None:
            return replace(self, counted=step)
        value, sign = figures[how.keep_best], -1.0 if how.smaller_is_better else 1.0
        gain = math.inf if self.value is None else sign * (value - self.value)
        if math.isfinite(value) and gain > how.min_delta:
            return BestEvaluation(step, value, counted=step)
        return replace(self, since=self.since + 1, counted=step)

    def ends(self, how: EvaluationConfig) -> bool:
        """Return True if training stops early."""
        return how.patience is not None and self.since >= how.patience

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Any) -> BestEvaluation:
        """Read what `to_json` returned. Raises UserError for anything else."""
        try:
            return msgspec.convert({} if tree is None else tree, cls)
        except msgspec.ValidationError:
            raise UserError("the checkpoint's value 'best' is no evaluation; resume from another one") from None


class RunState:
    """The tensors that this rank holds and owns, and the progress of the run, which is the same on all ranks.
    is_on_host: see `to_host`.

    averages: EMA weights, if the run keeps them. step: optimizer steps done, of `total_steps`. position: in the order
    of `sampler`. left_out: samples that proved bad, with the reason. best: the best evaluation so far. rate_factor: of
    the learning rates, as callbacks set it. stopped: callbacks ended the run. shapes: weight or buffer held here → its
    full, unsharded shape.
    """

    def __init__(
        self, config: Config, samples: Samples, runtime: Runtime, optimizer: WithMasters, averages: Averages | None
    ) -> None:
        self.runtime = runtime
        self.optimizer = optimizer
        self.averages = averages
        self.step = 0
        self.total_steps = count_steps(config, samples)
        self.sampler = samples.train.sampler(config.seed, config.train.global_batch_size)
        self.position = self.sampler.start()
        self.left_out: Mapping[int, str] = {}
        self.best = BestEvaluation()
        self.rate_factor, self.stopped = 1.0, False
        self.is_on_host = False
        self.shapes = {name: box.whole for name, box in runtime.boxes.items()}
        self._config = config
        self._samples = samples
        self._data = DataIdentity(samples.train, samples.train_sizes, samples.encoding)

    @property
    def stays(self) -> bool:
        """True if all of this is what this rank held in the previous generation."""
        return self.runtime.owned.stays and self.runtime.fixed.stays

    def tensors(self) -> Tensors:
        """Return the masters of the parts of weights that this rank owns, with their moments and averages, frozen
        weights and buffers, by key; not copies. Parts that other ranks own come from them, with
        `OwnedWeights.gather`."""
        fixed = {self.runtime.boxes[name].key: tensor for name, tensor in self._fixed()}
        fixed |= self.runtime.fixed.parameters
        return {"model": {**fixed, **self._masters()}, "optimizer": self.beside_masters()}

    @torch.no_grad()
    def to_host(self, move: Callable[[Tensor], Tensor] = Tensor.cpu) -> None:
        """Move weights, masters, moments and averages to host memory, where the next generation reads them. A device
        may not hold them beside its part of that one. Gradients stay, and no step can follow. move: copies a tensor."""
        owned, optimizer = self.runtime.owned, self.optimizer
        owned.forget_views()
        held: list[Tensor] = [*owned.parameters.values(), *self.runtime.fixed.parameters.values()]
        held += optimizer.masters.values()
        for module in self.runtime.modules.values():
            held += [*module.parameters(), *module.buffers()]
        for tensor in {id(each): each for each in held}.values():
            # A released weight (see `ShardedStage`) has no values.
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.untyped_storage().nbytes():
                tensor.data = move(tensor.data)
        for state in optimizer.state.values():
            state |= {name: move(each) for name, each in state.items() if isinstance(each, Tensor)}
        if self.averages is not None:
            self.averages.tensors = {key: move(each) for key, each in self.averages.tensors.items()}
        self.is_on_host = True

    def written(self, cells: Mapping[str, tuple[Box, ...]]) -> Tensors:
        """Return the part of `tensors` that this rank writes; over all ranks every number is written once. cells:
        logical name → the boxes of frozen weights and buffers that this rank writes."""
        owned, boxes = self.runtime.owned, self.runtime.boxes
        model = {
            cell.key: tensor if cell == boxes[name] else tensor[boxes[name].place(cell)]
            for name, tensor in self._fixed()
            for cell in cells[name]
        }
        model |= {box.key: part for box, part in self.runtime.fixed.primary_parts(self.runtime.fixed.parameters)}
        model |= {box.key: part for box, part in owned.primary_parts(self._masters())}
        state = self.beside_masters()
        moments: Tensors = {}
        for kind in dict.fromkeys(kind for kinds in state.values() for kind in kinds):
            if kind in self.optimizer.scalars:
                continue
            of_kind = {key: tensors[kind] for key, tensors in state.items() if kind in tensors}
            for box, part in owned.primary_parts(of_kind):
                moments.setdefault(box.key, {})[kind] = part
        for key, parts in owned.primary_cells.items():
            for cell in parts:
                own = state.get(key, {})
                for kind in sorted(self.optimizer.scalars & own.keys()) if cell.has_origin else ():
                    moments.setdefault(cell.key, {})[kind] = own[kind]
        return {"model": model, "optimizer": moments}

    def beside_masters(self) -> dict[str, dict[str, Tensor]]:
        """Return key → kind → what is kept beside a master: moments, once it was updated, and its average, if any."""
        state = optimizer_tensors(self.optimizer)
        for key, average in () if self.averages is None else self.averages.tensors.items():
            state[key] = {**state.get(key, {}), AVERAGE: average}
        return state

    def names_with_moments(self) -> set[str]:
        """Return the names of the weights owned by this rank that were updated at least once."""
        state = optimizer_tensors(self.optimizer)
        return {parse_key(key)[0] for key in state}

    def values(self) -> dict[str, Any]:
        """Return the progress of the run as JSON, the same on all ranks."""
        return {
            "step": self.step,
            "position": self.position.to_json(),
            "data": self._data.by_source,
            "left_out": dict(self.left_out),
            "costs": self.runtime.costs.to_json(),
            "best": self.best.to_json(),
            "rate_factor": self.rate_factor,
            "stopped": self.stopped,
            "template_date": self._config.data.template_date,
            "learns_from": self._config.train.learns_from,
        }

    def restore(self, checkpoint: Path) -> None:
        """Read `checkpoint`, written under any layout: weights, moments and data position. Raises UserError."""
        kinds = [name.rpartition(".") for name in stored_shapes(checkpoint, "optimizer")]
        tensors = self.allocate({name for name, _, kind in kinds if kind != AVERAGE})
        averaged = {name for name, _, kind in kinds if kind == AVERAGE}
        boxes = self.runtime.owned.boxes
        begins = {key for key in tensors["optimizer"] if boxes[key].name not in averaged}
        for key in begins:
            tensors["optimizer"][key].pop(AVERAGE, None)
        known = {weight.canonical for unit in self.runtime.model.units.values() for weight in unit.weights}
        values = load(checkpoint, tensors, known=known, shapes=self.shapes)
        if not isinstance(values.get("step"), int) or "position" not in values:
            raise UserError(f"checkpoint {str(checkpoint)!r} does not say at which step and sample it was written")
        try:
            self._data.require(values.get("data", ()))
            self.go_on_from(values)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"checkpoint {str(checkpoint)!r}: its value 'costs' is {error}") from None
        self.stopped = False  # whoever resumes wants more steps
        if self.averages is not None:
            self.averages.begin(self.optimizer.masters, begins)

    def begin_moments(self) -> None:
        """Fill in the moments that are stored beside the weights from which the run starts. Raises UserError."""
        stored = find_moments(self.runtime.model, self._config)
        if stored.files:
            moments = self.allocate({*stored.keys["step"]})["optimizer"]
            for kind, found in stored.read(self.runtime.owned.boxes):
                for key, tensor in found.items():
                    moments[key][kind].copy_(tensor.reshape(moments[key][kind].shape))
            self.optimizer.loaded()

    def allocate(self, moments: Set[str]) -> Tensors:
        """Return `tensors` with moments allocated for the weights named in `moments`; fill it, then `go_on_from`."""
        boxes = self.runtime.owned.boxes
        allocate_moments(self.optimizer, {key for key, box in boxes.items() if box.name in moments})
        return self.tensors()

    def go_on_from(self, values: Mapping[str, Any], stays: bool = False) -> None:
        """Continue with the state that was filled in, at the step and data position in `values`; called by all ranks.
        stays: no rank filled anything in. Raises ValueError for malformed costs, UserError where replicas differ."""
        self.optimizer.loaded()
        self.runtime.owned.gather()
        if not stays:
            self.runtime.require_equal(self.optimizer.masters, self.beside_masters())
        self.step = values["step"]
        self.position = self.sampler.resume(SamplerState.from_json(values["position"]))
        # A run in epochs may have come this far with another batch size.
        self.total_steps = count_steps(self._config, self._samples, self.step, self.position.samples)
        self.left_out = {int(index): why for index, why in values.get("left_out", {}).items()}
        self.best = BestEvaluation.from_json(values.get("best"))
        self.rate_factor, self.stopped = values.get("rate_factor", 1.0), values.get("stopped") is True
        if not isinstance(self.rate_factor, float):
            raise UserError("the checkpoint's value 'rate_factor' is no number; resume from another one")
        if "costs" in values:
            self.runtime.costs.from_json(values["costs"])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model compute with the averages, if there are any, inside this context."""
        if self.averages is None:
            yield
            return
        with self.averages.in_place_of(self.optimizer.masters):
            self._write_weights()
            yield
        # Not after an error: other ranks may be elsewhere, and checkpoints store masters.
        self._write_weights()

    def _write_weights(self) -> None:
        self.optimizer.write_weights()
        self.runtime.owned.gather()

    def _masters(self) -> dict[str, Tensor]:
        return {key: master.detach() for key, master in self.optimizer.masters.items()}

    def _fixed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen weights and buffers held whole here by logical name."""
        others = self.runtime.owned.weights.keys() | self.runtime.fixed.weights.keys()
        yield from ((name, tensor) for name, tensor in self.runtime.tensors().items() if name not in others)

"""Keyed dropout: a layer's dropout mask for a sample depends on the run's seed, the sample's draw and the layer's name.

The mask is thus independent of layout and microbatch, and no random state is saved. While a stage trains, its
`nn.Dropout` modules are replaced by `KeyedDropout`. Random numbers drawn elsewhere belong to no sample and are refused.
CPUs and GPUs draw different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dilatant.attention.hook import ATTENTION_DROPOUTS, WHY_NOT_COMPILED
from dilatant.config.errors import UserError, list_problems
from dilatant.models.core.random_draws import DoesNotFit, KeyedDraws
from dilatant.models.core.recompute import add_contexts, remove_contexts
from dilatant.models.core.running_statistics import changes_of, require_unchanged, training_modules
from dilatant.models.core.stage import Stage, StepData
from dilatant.models.core.unit import Unit

_LAYERDROP = ("layerdrop", "encoder_layerdrop")
_UNKEYED = (*_LAYERDROP, "drop_path_rate", *ATTENTION_DROPOUTS)
"""Settings of transformers configs that draw by layer or batch, or inside an attention function."""
_VARIANTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LIBRARIES = ("torch", "transformers", "peft", "dilatant")
"""Packages whose modules draw in every training forward or in none."""


def unkeyed_dropout(units: Iterable[Unit]) -> UserError | None:
    """Return an error that lists the dropout and the stochastic depth of training units that no key reaches, or None
    if there is none. For training: in evaluation mode nothing is dropped."""
    problems = list(dict.fromkeys(problem for unit in units for problem in _problems(unit)))
    return list_problems("what is dropped would change with the layout:", problems) if problems else None


def _problems(unit: Unit) -> Iterator[str]:
    remedy = f"set it to 0 in the model's config, or freeze the {unit.unit} model"
    settings: dict[str, Any] = {} if unit.config is None else vars(unit.config)
    if any(parameter.requires_grad for parameter in unit.model.parameters()):
        for name in _UNKEYED:
            if (rate := settings.get(name) or 0.0) > 0:
                yield f"{unit.unit}: {name} is {rate}; {remedy}"
    for path, module in training_modules("", unit):
        for name, rate in _functional_rates(module):
            kind = type(module).__name__
            keys = [key for key, value in settings.items() if "drop" in key and value == rate]
            if "Attention" in kind:  # attention's own key, if others have the same rate
                keys = [key for key in keys if "att" in key] or keys
            yield from (f"{unit.unit}: {key} is {rate}; {remedy}" for key in keys)
            if not keys:
                yield (f"{unit.unit}: {name} of module {path!r} ({kind}) is {rate}; set it to 0, or drop by nn.Dropout")


def _functional_rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield (attribute, rate) for dropout that a module of a library or the user applies by a function."""
    if isinstance(module, _VARIANTS) and module.p > 0:
        yield "p", module.p
    if type(module) is nn.Dropout or type(module).__module__.startswith("dilatant."):
        return
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            yield name, value


class KeyedDropout(nn.Dropout):
    """Dropout with keyed random numbers, if a training forward runs under `stage`; plain dropout otherwise. layer: the
    layer's name in keys, or None if nothing there trains, so that nothing is dropped."""

    def __init__(self, plain: nn.Dropout, layer: str | None, stage: StageDropout) -> None:
        super().__init__(plain.p)
        self.training = plain.training
        self.layer = layer
        self.stage = stage

    @torch.compiler.disable(reason=WHY_NOT_COMPILED)
    def forward(self, input: Tensor) -> Tensor:
        draws = self.stage.draws
        if not self.training or draws is None:
            return super().forward(input)
        if self.layer is None:
            return input
        keep = draws.uniform(self.layer, input.shape, input.device) < 1 - self.p
        return _Masked.apply(input, keep, 1 / (1 - self.p) if self.p < 1 else 0.0)


class _Masked(torch.autograd.Function):
    """Dropout that saves one byte per element for backward, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return values.mul(keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return gradient.mul(keep).mul_(ctx.scale), None, None


@dataclass(slots=True)
class ForwardDraws:
    """The random numbers of one microbatch's forward through a stage. shapes: place → the shape per token or item seen
    there in any microbatch. calls: layer → index of its last draw."""

    draws: KeyedDraws
    shapes: dict[str, tuple[int, ...]]
    calls: dict[str, int] = field(default_factory=dict)

    def uniform(self, layer: str, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the numbers of a layer's next draw. Raises UserError if they cannot be assigned to samples."""
        call = self.calls[layer] = self.calls.get(layer, -1) + 1
        place, each = f"{layer}/{call}", None
        try:
            numbers, each = self.draws.uniform(place, shape, device)
        except DoesNotFit:
            numbers = torch.empty(0)
        # If a token or item had another shape here before, the numbers fit now by accident.
        if each is None or self.shapes.setdefault(place, each) != each:
            parts = f"{self.draws.total} {'tokens of a row' if self.draws.packed else 'items'}"
            raise UserError(
                f"{layer}: dropout of a tensor of shape {[*shape]}, in which {parts} cannot be told apart; what is "
                "dropped would change with the layout, so set it to 0"
            )
        return numbers


class StageDropout:
    """Keyed dropout of one stage: `running` surrounds its forwards; `close` restores plain dropout. unit: the stage's
    unit. Create it once the stage's modules are final."""

    def __init__(self, stage: Stage, unit: Unit) -> None:
        self.draws: ForwardDraws | None = None
        self._stage = stage
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._plain: dict[str, nn.Module] = {}
        trained = {name for name, p in unit.named_logical_parameters() if p.requires_grad}
        trains = {weight.layer for weight in unit.weights if weight.canonical in trained}
        layers = _paths_of_layers(unit)
        paths: set[str] = set()
        for path, module in list(stage.named_modules(remove_duplicate=False)):
            if type(module) is nn.Dropout and module.p > 0:
                # Dropout outside of blocks runs before them; without the embedding it gets zeros, which no loss sees.
                root = next((root for root in layers if f"{path}.".startswith(f"{root}.")), "")
                if not root and unit.geometry is not None and stage.layers[0] != unit.layers[0]:
                    # An encoder's later stages run its forward on hidden states, and would drop once more.
                    raise UserError(
                        f"{unit.unit}: {path} drops {module.p:g} outside of the encoder's blocks, which every stage "
                        "of it would do again; set it to 0, or keep the encoder in one stage"
                    )
                layer = layers.get(root, unit.layers[0])
                keyed = KeyedDropout(module, layer if layer in trains else None, self)
                stage.set_submodule(path, keyed)
                self._plain[path] = module
                paths |= {root} - {""}
        self._recomputed = [stage.get_submodule(path) for path in paths]
        for module in self._recomputed:
            add_contexts(module, self._recompute_contexts)
        # transformers draws for LayerDrop at rate 0, too, from torch's generator of the CPU.
        self._has_layerdrop = any(getattr(unit.config, name, None) is not None for name in _LAYERDROP)
        self._checks = True

    @contextmanager
    def running(self, data: StepData, samples: tuple[int, ...]) -> Iterator[None]:
        """Surround a training forward of `samples`. Raises UserError if it draws random numbers that belong to none, or
        changes a persistent buffer."""
        stage = self._stage
        if not stage.training or data.predicts:
            yield
            return
        if self._plain:
            draws = stage.draws(data, samples, stage.shards)
            self.draws = ForwardDraws(draws, self._shapes) if draws.total else None
        before = _generators(data.device, self._has_layerdrop) if self._checks else None
        changes = changes_of(stage) if self._checks else {}
        try:
            yield
        finally:
            self.draws = None
        if self._checks:
            require_unchanged(stage.unit, stage, changes)
        if before is not None and _generators(data.device, self._has_layerdrop) != before:
            raise UserError(
                f"{stage.unit}: its forward draws random numbers that belong to no sample (dropout by a function, "
                "noise, layers left out by chance), so they would change with the layout; switch this off in the "
                "model's config, drop by nn.Dropout modules, or draw from a generator of its own"
            )
        self._checks = self._checks and any(
            type(module).__module__.partition(".")[0] not in _LIBRARIES for module in stage.modules()
        )

    def close(self) -> None:
        """Restore plain dropout."""
        for path, module in self._plain.items():
            self._stage.set_submodule(path, module.train(self._stage.get_submodule(path).training))
        for module in self._recomputed:
            remove_contexts(module, self._recompute_contexts)
        self._plain, self._recomputed = {}, []

    def _recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts for a module's forward that runs now and for its recomputation (see `recompute`)."""
        if self.draws is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self._again(replace(self.draws, calls=dict(self.draws.calls)))

    @contextmanager
    def _again(self, draws: ForwardDraws) -> Iterator[None]:
        before, self.draws = self.draws, draws
        try:
            yield
        finally:
            self.draws = before


def _paths_of_layers(unit: Unit) -> dict[str, str]:
    """Map module path → layer for the modules that belong to one layer, except for those before the blocks."""
    before = {f"model.{path}" for path in (unit.structure.before if unit.structure is not None else ())}
    return {path: layer for layer, path in unit.pieces() if path not in before}


def _generators(device: torch.device, without_cpu: bool) -> tuple[bytes, ...]:
    """Return the states of the generators from which models draw, but for torch's of the CPU if `without_cpu`."""
    states = [] if without_cpu else [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    _, words, position, *_ = cast(Any, np.random.get_state())  # noqa: NPY002  # transformers draws from it
    return (*(state.numpy().tobytes() for state in states), words.tobytes(), bytes(str(position), "ascii"))

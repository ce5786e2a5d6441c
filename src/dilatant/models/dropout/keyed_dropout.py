"""Keyed dropout: a layer's dropout mask for a sample depends on the run's seed, the sample's draw and the layer's name.

The mask is thus independent of layout and microbatch, and no random state is saved. Any model is supported, because
`TorchFunctionMode` intercepts torch's functions while a stage runs. CPUs and GPUs draw different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from dilatant.config.errors import UserError, list_problems
from dilatant.models.core.random_draws import KeyedDraws
from dilatant.models.core.recompute import add_contexts, remove_contexts
from dilatant.models.core.stage import Stage, StepData
from dilatant.models.core.unit import Unit
from dilatant.models.dropout.dropout_functions import ForwardState, InterceptsDropout

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_INSIDE_TORCH = (nn.MultiheadAttention, nn.RNNBase)
"""Modules whose dropout happens inside one function of torch."""
_LAYERDROP = ("layerdrop", "encoder_layerdrop")
_LEFT_OUT_BY_CHANCE = (*_LAYERDROP, "drop_path_rate")
"""Settings of transformers configs that draw per layer or batch, not per sample."""


def refuse_random_depth(units: Iterable[Unit]) -> None:
    """Raise UserError that lists the stochastic-depth settings of training units."""
    problems = []
    for unit in units:
        if unit.structure is None or not any(p.requires_grad for p in unit.model.parameters()):
            continue
        config = cast(Any, unit.model).config
        problems += [
            f"{unit.unit}: {name} is {rate}; set it to 0 in the model's config, or freeze the {unit.unit} model"
            for name in _LEFT_OUT_BY_CHANCE
            if (rate := getattr(config, name, 0.0) or 0.0) > 0
        ]
    if problems:
        raise list_problems("layers left out by chance would be others in every layout:", problems)


class KeyedDropout:
    """Keyed dropout of one stage: `running` surrounds its forwards; `close` removes its hooks from the modules. unit:
    the stage's unit. Create it once the stage's modules are final."""

    def __init__(self, stage: Stage, unit: Unit) -> None:
        self._stage = stage
        self._trains = _training_layers(stage)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._running: ForwardState | None = None
        self._is_first = True
        config = None if unit.structure is None else cast(Any, unit.model).config
        rates = [getattr(config, name, None) for name in _LAYERDROP]
        self._keeps_layers = any(rate is not None for rate in rates) and not any(rates)
        self._hooks: list[Any] = []
        self._hooked: list[nn.Module] = []
        if unit.structure is None:
            for layer, path in unit.pieces():
                if layer in stage.layers:
                    self._hook(stage.get_submodule(path), layer, None)
            return
        model = cast(Any, stage).model
        if model is not None:
            self._hook_model(model, unit)
        projector = getattr(stage, "projector", None)
        if projector is not None:
            self._hook(projector, unit.layers[-1], None)

    def running(self, data: StepData, samples: tuple[int, ...]) -> AbstractContextManager[None]:
        """Return the context of a training forward of `samples`; it costs nothing after a forward that draws nothing.

        The forward raises UserError for random numbers that cannot be assigned to samples.
        """
        if not (self._hooks and self._stage.training) or data.predicts:
            return nullcontext()
        stage = self._stage
        keys = [data.draws[sample] for sample in samples]
        draws = KeyedDraws(
            data.seed, keys, stage.spread(data, samples), stage.own(data, samples), stage.shards
        )
        if not draws.total:
            return nullcontext()
        running = ForwardState(
            self._stage.unit, draws, self._trains, self._shapes, keeps_layers=self._keeps_layers
        )
        return self._around(running, data.device)

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        for module in self._hooked:
            remove_contexts(module, self._recompute_contexts)
        self._hooks, self._hooked = [], []

    @contextmanager
    def _around(self, running: ForwardState, device: torch.device) -> Iterator[None]:
        before = None
        if self._is_first:
            _refuse_inside_torch(self._stage)
            before = _generators(device)
        self._running = running
        try:
            with InterceptsDropout(running):
                yield
        finally:
            self._running = None
        if before is not None and _generators(device) != before:
            raise UserError(
                f"{self._stage.unit}: its forward draws random numbers that belong to no sample (dropout within an "
                "attention kernel, noise, layers left out by chance), so they would change with the layout; switch "
                "this off in the model's config"
            )
        self._is_first = False
        if not (running.has_drawn or _may_draw(self._stage)):
            self.close()

    def _hook_model(self, model: nn.Module, unit: Unit) -> None:
        """Hook the blocks of a transformers model and its containers. The containers' code around the blocks runs in
        every slice, but dropout there applies only on the stage that holds the embedding or the tail."""
        structure = unit.structure
        assert structure is not None
        own = self._stage.layers
        names = unit.layers[1 : 1 + structure.num_blocks]
        last = None if structure.after else names[-1]
        for name, block in zip(
            [name for name in names if name in own], model.get_submodule(structure.blocks).children()
        ):
            self._hook(block, name, last if name == last else None)
        tail = unit.layers[1 + structure.num_blocks] if structure.after else ""
        for path in structure.after:
            self._hooks.append(
                model.get_submodule(path).register_forward_pre_hook(
                    self._entering(tail if tail in own else "")
                )
            )
        head = unit.layers[0] if unit.layers[0] in own else ""
        for path in structure.containers:
            self._hook_container(model.get_submodule(path), head)

    def _hook(self, module: nn.Module, layer: str, behind: str | None) -> None:
        """Set the running layer to `layer` inside the module, and to `behind` after it."""
        self._hooks.append(module.register_forward_pre_hook(self._entering(layer)))
        self._hooks.append(module.register_forward_hook(self._entering(behind)))
        self._hooked.append(module)
        add_contexts(module, self._recompute_contexts)

    def _entering(self, layer: str | None) -> Any:
        def enter(*_: Any) -> None:
            if self._running is not None:
                self._running.layer = layer

        return enter

    def _hook_container(self, module: nn.Module, layer: str) -> None:
        def enter(module: nn.Module, given: Any) -> None:
            if self._running is not None and self._running.outermost is None:
                self._running.outermost, self._running.layer = module, layer

        def leave(module: nn.Module, given: Any, output: Any) -> None:
            if self._running is not None and self._running.outermost is module:
                self._running.outermost = self._running.layer = None

        self._hooks.append(module.register_forward_pre_hook(enter))
        self._hooks.append(module.register_forward_hook(leave))

    def _recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts for a module's forward that runs now and for its recomputation (see `recompute`)."""
        if self._running is None:
            return nullcontext(), nullcontext()
        return nullcontext(), InterceptsDropout(self._running.again())


def _training_layers(stage: Stage) -> frozenset[str]:
    trains = {
        (part, name)
        for part in {weight.part for weight in stage.weights}
        for name, parameter in getattr(stage, part).named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    return frozenset(weight.layer for weight in stage.weights if (weight.part, weight.key) in trains)


def _may_draw(stage: Stage) -> bool:
    """Return True if later forwards may draw although the first did not: dropout modules, or a user's own modules."""
    ours = ("torch", "transformers", "dilatant")
    return any(
        (isinstance(module, _DROPOUTS) and module.p > 0)
        or type(module).__module__.partition(".")[0] not in ours
        for module in stage.modules()
        if module.training
    )


def _refuse_inside_torch(stage: Stage) -> None:
    names = [
        f"{stage.unit}: module {name!r} ({type(module).__name__}) has dropout {module.dropout}"
        for name, module in stage.named_modules()
        if module.training and isinstance(module, _INSIDE_TORCH) and module.dropout > 0
    ]
    if names:
        raise list_problems("no key reaches dropout within these; set their `dropout` to 0:", names)


def _generators(device: torch.device) -> tuple[bytes, ...]:
    """Return the states of the generators from which models draw."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    _, words, position, *_ = cast(Any, np.random.get_state())  # noqa: NPY002  # transformers draws from it
    return (*(state.numpy().tobytes() for state in states), words.tobytes(), bytes(str(position), "ascii"))

"""Random initialisation of meta-device layers; it depends on seed and layer alone, not on the partition into ranks."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dilatant.config.errors import UserError
from dilatant.models.adapters.lora import reset_adapters
from dilatant.models.core.dtype import drop_four_bit
from dilatant.models.core.stage import stage_tensors
from dilatant.models.core.unit import Unit

AnyUnit = TypeVar("AnyUnit", bound=Unit)


@torch.no_grad()
def materialize(unit: Unit, first: int, end: int, seed: int | None, given: Collection[str] = ()) -> None:
    """Allocate layers `first <= layer < end` of `unit` in CPU memory and initialise them as their family does, once.

    Modules that have memory already keep their values; other layers stay on the meta device. Every layer draws from a
    generator seeded by `seed` and its logical name, and torch's global generator is restored; with seed None the global
    generator is used. given: logical names of weights that the caller sets afterwards, so they are not initialised. Cut
    stages only after this call, because parameters become new objects. Raises UserError.
    """
    model = cast(PreTrainedModel, unit.model)  # or a user's own module
    held = set(unit.layers[first:end])
    named = {weight.name: weight for weight in unit.weights}
    # A tied weight is drawn as part of the layer that names it; nothing else of that layer is drawn.
    tied = [named[weight.tied_to] for weight in unit.weights if weight.tied_to and weight.layer in held]
    tied_paths = tuple(f"{weight.part}.{weight.key}" for weight in tied)
    pieces = [(layer, path, unit.get_submodule(path)) for layer, path in unit.pieces()]
    inside = {id(module) for _, _, piece in pieces for module in piece.modules()}
    fresh = [
        (layer, path, piece)
        for layer, path, piece in pieces
        if any(tensor.is_meta for _, tensor in _tensors(piece))
        and (layer in held or any(place.startswith(f"{path}.") for place in tied_paths))
    ]
    own = _of_own_making(unit, held, pieces)
    if own:  # the model draws all its weights and computed buffers itself
        fresh = [entry for entry in fresh if entry[1].partition(".")[0] != "model"]
    here = {id(tensor) for _, _, piece in pieces for _, tensor in _tensors(piece) if not tensor.is_meta}
    for layer, _, piece in fresh:
        _allocate_meta_tensors(piece, layer)
    if own:
        _allocate_meta_tensors(model, unit.unit, own)
        with seeded(seed, f"{unit.unit}.generator/model"):
            cast(Any, model).draw_weights(own)
    if any(_family_of(unit, path) is model for _, path, _ in fresh):
        # Containers and modules of every stage, such as rotary embeddings. They come last, because a container may
        # overwrite values inside it (Whisper's encoder sets its positions).
        shared = [module for module in model.modules() if id(module) not in inside]
        for module in shared:
            module.to_empty(device="cpu", recurse=False)
        model.tie_weights()
    else:
        shared = []
    held_here = dict(model.named_parameters(remove_duplicate=False))
    skipping = [w.key for w in unit.weights if w.part == "model" and w.name in given and w.key in held_here]
    skipped = {id(held_here[key]): held_here[key] for key in skipping}  # a tied weight once
    marked = _mark_undrawn(fresh, {*here, *skipped})
    owners = cache(models_of)
    with excluded_from_init(skipped.values()):
        drawn = here  # a tied weight may have been drawn with another layer in an earlier call
        for layer, path, piece in fresh:
            with seeded(seed, f"{layer}/{path}"):
                family = _family_of(unit, path)
                if family is not None:
                    _draw(owners(family), piece, drawn)
                else:
                    _reset(piece, layer)
            with seeded(seed, f"{layer}/{path}/adapters"):
                reset_adapters(piece)
        with seeded(seed, unit.unit):
            for module in reversed(shared):
                owners(model)[id(module)]._init_weights(module)
    undrawn = {place: tensor for place, tensor in marked.items() if _is_undrawn(tensor)}
    with seeded(seed, f"{unit.unit}.constants"):
        constants = _constants(model) if undrawn and isinstance(model, PreTrainedModel) else {}
        is_known = all(f"{path}.{name}" in constants for _, path, name in undrawn)
        constants |= {} if is_known else _drawn_by_timm(unit)
    lacking = []
    for (layer, path, name), tensor in undrawn.items():
        if f"{path}.{name}" in constants:
            tensor.copy_(constants[f"{path}.{name}"])
        elif isinstance(tensor, nn.Parameter):
            lacking.append(f"{layer}: {name}")
    if lacking:
        raise UserError(
            f"{type(model).__name__} does not initialise {', '.join(lacking)}, so it cannot be trained from random "
            "weights; begin with pretrained ones"
        )


def allocate(units: Mapping[str, Unit], seed: int = 0) -> dict[str, Tensor]:
    """Allocate every layer of all units for weights that the caller sets: logical name → tensor, tied ones once.
    Four-bit weights are drawn at random instead."""
    tensors: dict[str, Tensor] = {}
    for unit in units.values():
        drop_four_bit(unit)
        materialize(unit, 0, len(unit.layers), seed, {weight.name for weight in unit.weights} - unit.four_bit)
        tensors |= stage_tensors(unit)
    return tensors


@contextmanager
def seeded(seed: int | None, name: str) -> Iterator[None]:
    """Seed torch's global generator by (seed, name) inside the context, and restore it afterwards."""
    if seed is None:
        yield
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # The CPU generator alone: `torch.manual_seed` takes milliseconds to record the seed for unused devices.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield


def allocate_meta_tensors(module: nn.Module, names: Collection[str] | None = None) -> bool:
    """Allocate a module's own meta-device tensors (or those in `names`) on the CPU; return True if there were any. A
    tied weight that has memory through another layer keeps it."""
    lacking = False
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta and (names is None or name in names):
            lacking = True
            memory = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(memory, parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta and (names is None or name in names):
            lacking = True
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return lacking


def _of_own_making(unit: Unit, held: Collection[str], pieces: Iterable[tuple[str, str, nn.Module]]) -> set[str]:
    """Return the names of meta-device tensors in the `held` layers of a model that has its own `draw_weights`."""
    if not hasattr(unit.model, "draw_weights"):
        return set()
    named = (*unit.model.named_parameters(), *unit.model.named_buffers())
    keys = {weight.key for weight in unit.weights if weight.part == "model" and weight.layer in held}
    inside = tuple(f"{path}." for layer, path, _ in pieces if layer in held)
    return {name for name, tensor in named if tensor.is_meta and (name in keys or f"model.{name}".startswith(inside))}


def _allocate_meta_tensors(piece: nn.Module, what: str, names: Collection[str] | None = None) -> None:
    """Allocate all meta-device tensors of `piece` (or those in `names`); a tied weight that has memory through another
    layer keeps it. Raises UserError if the machine is out of memory."""
    try:
        for path, module in piece.named_modules():
            before = f"{path}." if path else ""
            own = None if names is None else [n[len(before) :] for n in names if n.startswith(before)]
            allocate_meta_tensors(module, own)
    except RuntimeError as error:  # torch has no other exception for host memory
        if "allocate memory" not in str(error):
            raise
        size = sum(tensor.nbytes for tensor in piece.parameters() if tensor.is_meta)
        raise UserError(
            f"{what} needs another {size / 2**30:,.0f} GiB of this machine's memory, which has not so much left; "
            "check the sizes in its config, or spread the model over more machines"
        ) from None


def models_of(model: PreTrainedModel) -> dict[int, PreTrainedModel]:
    """Map the id of each module to the innermost PreTrainedModel around it, whose `_init_weights` initialises it: an
    outer model does not initialise modules of its text model."""
    owners: dict[int, PreTrainedModel] = defaultdict(lambda: model)
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel):
            owners |= dict.fromkeys(map(id, inner.modules()), inner)
    return owners


def _draw(models: Mapping[int, PreTrainedModel], module: nn.Module, drawn: set[int]) -> None:
    """Initialise the children of `module`, then itself, as transformers does; a tied weight is drawn once."""
    for name, child in module.named_children():
        if not name.startswith("lora_"):  # see `reset_adapters`
            _draw(models, child, drawn)
    own = list(module.parameters(recurse=False))
    again = [parameter for parameter in own if id(parameter) in drawn]  # e.g. of a tied head with a bias
    if not own or len(again) < len(own):
        with excluded_from_init(again):
            models[id(module)]._init_weights(module)
            if isinstance(module, Conv1D) and _is_undrawn(module.weight):  # some families leave it to its constructor
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        drawn |= {id(parameter) for parameter in own}


def hollow_copy(unit: AnyUnit) -> AnyUnit:
    """Return a copy of the unit on the meta device."""

    def on_meta(tensor: Tensor) -> Tensor:
        empty = torch.empty_like(tensor, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    held = {id(tensor): tensor for tensor in (*unit.parameters(), *unit.buffers())}
    memo: dict[int, Any] = {key: on_meta(tensor) for key, tensor in held.items()}
    return copy.deepcopy(unit, memo)


class _WithConstants(TorchFunctionMode):
    """Give the constants of constructors, such as `torch.tensor(0.8)`, values within `torch.device("meta")`. makers:
    functions whose results have values, too."""

    def __init__(self, makers: Collection[Any]) -> None:
        super().__init__()
        self._makers = makers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_constant = func is torch.tensor and isinstance(args[0] if args else None, float)
        is_constant = is_constant or func in self._makers
        return func(*args, **{**({"device": "cpu"} if is_constant else {}), **(kwargs or {})})


def _constants(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that the model's constructor computes from constants; none if it cannot. Modules of timm scale
    their outputs by a multiple of ones."""
    for makers in ((torch.ones, torch.zeros, torch.full), ()):
        with suppress(Exception), torch.device("meta"):
            usual = cast(Any, type(model))(copy.deepcopy(model.config))
            with _WithConstants(makers):
                valued = cast(Any, type(model))(copy.deepcopy(model.config))
            # What is never on the meta device may have no values.
            meta = {name for name, tensor in _tensors(usual) if tensor.is_meta}
            return {f"model.{name}": each for name, each in _tensors(valued) if name in meta and not each.is_meta}
    return {}


def _drawn_by_timm(unit: Unit) -> dict[str, Tensor]:
    """Return the tensors of models of timm by path, as their constructors draw them: transformers draws only some."""
    found: dict[str, Tensor] = {}
    for path, module in unit.named_modules():
        if isinstance(module, PreTrainedModel) and any("timm." in type(c).__module__[:5] for c in module.children()):
            drawn = cast(Any, type(module))(copy.deepcopy(module.config))
            found |= {f"{path}.{name}": tensor for name, tensor in _tensors(drawn)}
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _mark_undrawn(
    pieces: Iterable[tuple[str, str, nn.Module]], kept: Collection[int]
) -> dict[tuple[str, str, str], Tensor]:
    """Set the first number of each tensor that must be drawn to NaN, and return them. kept: ids of the others."""
    marked = {
        (layer, path, name): tensor
        for layer, path, piece in pieces
        for name, tensor in _tensors(piece)
        if id(tensor) not in kept and tensor.is_floating_point() and not tensor.is_meta
    }
    for tensor in marked.values():
        _first_number(tensor).fill_(torch.nan)
    return marked


def _is_undrawn(parameter: Tensor) -> bool:
    """Return True if a parameter still has the mark of `_mark_undrawn`; one that the caller sets has no values yet."""
    if getattr(parameter, "_is_hf_initialized", False):
        return False
    return bool(_first_number(parameter).float().isnan().any())


def _first_number(tensor: Tensor) -> Tensor:
    return tensor[(slice(0, 1),) * tensor.ndim]


@contextmanager
def excluded_from_init(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Exclude these parameters from transformers' initialisation within the context."""
    marked = [parameter for parameter in parameters if not hasattr(parameter, "_is_hf_initialized")]
    for parameter in marked:
        vars(parameter)["_is_hf_initialized"] = True
    try:
        yield
    finally:
        for parameter in marked:
            del vars(parameter)["_is_hf_initialized"]


def _family_of(unit: Unit, path: str) -> PreTrainedModel | None:
    """Return the model that initialises the weights of a module; None for torch's own initialisation."""
    part, *_ = path.split(".")
    holder = unit.model if part == "model" else getattr(getattr(unit, part), "drawn_by", None)
    return holder if isinstance(holder, PreTrainedModel) else None


def _reset(piece: nn.Module, layer: str) -> None:
    """Apply torch's own initialisation to modules outside any family. Raises UserError if a module has none."""
    for name, module in piece.named_modules():
        if hasattr(module, "reset_parameters"):
            cast(Any, module).reset_parameters()
        elif any(True for _ in module.parameters(recurse=False)):
            raise UserError(
                f"{layer}: {type(module).__name__} {name!r} has weights but no reset_parameters(), so they cannot be "
                "drawn; give it the method, or a module that is not on the meta device"
            )

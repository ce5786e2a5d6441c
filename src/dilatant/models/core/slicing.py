"""Slicing: a stage runs the model's own forward, in which blocks of other stages are placeholders that compute nothing.

Blocks before the stage are skipped, the stage's first block takes the hidden states that arrived as its first argument,
and the forward ends after the stage's last block. Nothing is renumbered: layer indices, kinds of layers and hooks keep
their meaning. A slice shares every parameter with the model. Only the modules on the path to the blocks are copied (as
shells), and placeholders without weights replace modules of other stages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from dilatant.config.errors import UserError
from dilatant.models.core.structure import Structure


class Placeholder(nn.Module):
    """Placeholder for a module that runs on another stage; it forwards attribute access (a dtype, a patch size).

    Models add the output of an embedding table to other embeddings, so the placeholder of an embedding returns 0; every
    other placeholder returns its first argument.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # not registered: the stage must not hold the original's weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self._original[0], nn.Embedding):
            return torch.zeros((), device=hidden_states.device)
        return hidden_states


class ShapePlaceholder(Placeholder):
    """Placeholder for a module before the blocks: it returns zeros in the shape of the module's output. It computes the
    shape without the module's weights, once for each combination of arguments that can decide it: shapes, numbers that
    are no tensors, and, if the module reads the values of its inputs, integer tensors. Outputs that are no floats
    (masks, lengths) have the module's values."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.register_buffer("here", torch.empty(0), persistent=False)  # moves with the stage
        self._known: dict[Any, Any] = {}
        self._reads_values = False

    def __getattr__(self, name: str) -> Any:
        if name == "here":
            if name in self._buffers:
                return self._buffers[name]
            raise AttributeError(name)
        value = super().__getattr__(name)
        is_tensor = isinstance(value, Tensor)
        return torch.zeros(value.shape, dtype=value.dtype, device=self.here.device) if is_tensor else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        key = _key_of((args, kwargs), self._reads_values)
        if key not in self._known:
            try:
                self._known[key] = self._run("meta", args, kwargs)
            except (RuntimeError, NotImplementedError):  # the module reads the values of its inputs
                self._reads_values = True
                key = _key_of((args, kwargs), self._reads_values)
                self._known[key] = self._run("cpu", args, kwargs)
        return _mapped(
            self._known[key],
            lambda each: torch.zeros_like(each, device=self.here.device) if each.is_meta else each.to(self.here.device),
        )

    @torch.no_grad()
    def _run(self, device: str, *given: Any) -> Any:
        """Run the module on `device` with zeros as weights; return its outputs (see `_without_floats`)."""
        (original,) = self._original
        named = (*original.named_parameters(), *original.named_buffers())
        weights = {name: torch.zeros_like(tensor, device=device) for name, tensor in named}
        args, kwargs = _mapped(given, lambda each: each.to(device))
        with torch.device(device):
            output = torch.func.functional_call(original, weights, args, kwargs)
        return _mapped(output, _without_floats)


def _without_floats(output: Tensor) -> Tensor:
    """Return the shape of an output, as a meta tensor, or the output itself if it has values other than floats. Raises
    NotImplementedError if those are unknown."""
    if output.is_floating_point():
        return output.to("meta")
    if output.is_meta:
        raise NotImplementedError
    return output


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)(**{name: _mapped(each, change) for name, each in value.items()})
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _key_of(value: Any, with_values: bool) -> Any:
    """Return what can decide the shape of a module's output in its arguments. with_values: include integer tensors."""
    if isinstance(value, Tensor):
        is_read = with_values and not value.is_floating_point()
        return value.shape, value.dtype, tuple(value.flatten().tolist()) if is_read else None
    if isinstance(value, dict):
        return tuple((name, _key_of(each, with_values)) for name, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(_key_of(each, with_values) for each in value)
    return type(value), value if isinstance(value, Hashable) else repr(value)


def capturing_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the forward hooks with which transformers records a module's hidden states or attention weights."""
    ours = output_capturing.__name__
    return {key: hook for key, hook in module._forward_hooks.items() if getattr(hook, "__module__", "") == ours}


class SkippedBlock(Placeholder):
    """Placeholder for a block of another stage. where: before this stage, the last block before it, or behind it.
    width: number of elements of the tuple that the family's blocks return; 0 if they return a tensor."""

    def __init__(self, original: nn.Module, number: int, where: Literal["before", "last before", "behind"]) -> None:
        super().__init__(original)
        self.number = number
        self.where = where
        self.width = 0
        self.passes = False  # True: the forward goes on through it, though it is behind the stage
        self._forward_hooks.update(capturing_hooks(original))
        self.passage: _Passage | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.passage is not None, "a slice runs by run_slice"
        hidden = self.passage.skip(self, _input_of(args, kwargs))
        return (hidden, *[None] * (self.width - 1)) if self.width else hidden


def shell_of(
    module: nn.Module,
    children: Mapping[str, nn.Module | None] | None = None,
    keeps: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """Return a shallow copy of `module` with its own registries. It shares the children, parameters and buffers whose
    names `keeps` accepts; `children` replace children of the same names."""
    shell = copy.copy(module)
    for registry in ("_modules", "_parameters", "_buffers"):
        entries = module.__dict__[registry].items()
        shell.__dict__[registry] = {name: entry for name, entry in entries if keeps(name)}
    shell._modules.update(children or {})
    return shell


def slice_model(
    model: PreTrainedModel,
    structure: Structure,
    first: int,
    end: int,
    keep_before: bool,
    keep_after: bool,
    stand_in: type[Placeholder] = Placeholder,
) -> PreTrainedModel:
    """Return a slice of `model` with blocks `first <= block < end`, of the same class and with the same weights.

    Without `keep_before` (`keep_after`) placeholders replace the modules before (after) the blocks; `stand_in` is the
    class of placeholders before the blocks.
    """
    blocks = [
        block
        if first <= number < end
        else SkippedBlock(
            block, number, "behind" if number >= end else "before" if number + 1 < first else "last before"
        )
        for number, block in enumerate(model.get_submodule(structure.blocks).children())
    ]
    return with_blocks(model, structure, blocks, keep_before, keep_after, stand_in)


def with_blocks(
    model: PreTrainedModel,
    structure: Structure,
    blocks: Iterable[nn.Module],
    keep_before: bool,
    keep_after: bool,
    stand_in: type[Placeholder] = Placeholder,
) -> PreTrainedModel:
    """Return a shell of `model` whose list of blocks is `blocks`; see `slice_model` for the other arguments."""
    root = shell = _shell_with_own_dropout(model)
    original: nn.Module = model
    *containers, name = structure.blocks.split(".")
    for part in containers:
        original = getattr(original, part)
        child = _shell_with_own_dropout(original)
        setattr(shell, part, child)
        shell = child
    is_chain = isinstance(getattr(original, name), nn.Sequential)
    setattr(shell, name, nn.Sequential(*blocks) if is_chain else nn.ModuleList(blocks))
    for paths, keep, kind in ((structure.before, keep_before, stand_in), (structure.after, keep_after, Placeholder)):
        for path in () if keep else paths:
            parent, _, child_name = path.rpartition(".")
            replaced = getattr(model.get_submodule(parent), child_name)
            if isinstance(replaced, nn.ModuleList):
                setattr(root.get_submodule(parent), child_name, nn.ModuleList(map(kind, replaced)))
            elif isinstance(replaced, nn.Module):
                setattr(root.get_submodule(parent), child_name, kind(replaced))
            else:
                del root.get_submodule(parent)._parameters[child_name]
    for path in () if keep_before else structure.containers:
        # Parameters registered on a container itself (class tokens, position tables) belong to the embedding.
        container = root.get_submodule(path)
        own, prefix = container._parameters, f"{path}." if path else ""
        container._parameters = {n: each for n, each in own.items() if each is None or prefix + n in structure.after}
        for name, each in own.items() if stand_in is ShapePlaceholder else ():
            if each is not None and name not in container._parameters:
                zeros = torch.zeros(each.shape, dtype=each.dtype)
                container.register_buffer(name, zeros, persistent=False)
    return cast(PreTrainedModel, root)


def held_blocks(blocks: nn.Module) -> list[nn.Module]:
    """Return the blocks in a slice's list that are not skipped."""
    return [block for block in blocks.children() if not isinstance(block, SkippedBlock)]


def run_slice(
    forward: Callable[[Tensor], Tensor],
    given: Tensor,
    blocks: nn.Module,
    *,
    enters: bool,
    ends: bool,
    taps: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Run the `forward` of a slice whose list of blocks is `blocks`. Return the hidden states after the stage's last
    block if the stage `ends` there, otherwise the output of `forward`.

    given: the input of `forward` or, if the stage `enters` after other stages, of its first block. taps: skipped block
    → its output on its own stage, if more than the next block reads it.
    """
    skipped = [block for block in blocks.children() if isinstance(block, SkippedBlock)]
    held = held_blocks(blocks)
    passage = _Passage(given if enters else None, taps)
    handles = []
    for block in skipped:
        block.passage = passage
    try:
        if enters:
            handles += [
                block.register_forward_pre_hook(passage.enter, with_kwargs=True, prepend=True) for block in held
            ]
        if ends and held and held[-1] is [*blocks.children()][-1]:
            handles.append(held[-1].register_forward_hook(passage.end_behind))
        # The forward runs on zeros without a graph, so that no gradient bypasses the first block.
        output = forward(torch.zeros_like(given) if enters else given)
        if passage.is_waiting:  # the family left out all blocks of the stage
            output = forward(given)
        return output
    except _StageEnd as end:
        return end.hidden
    except _ReturnsTuple:
        width = 1
    except (ValueError, TypeError) as error:
        # The family may unpack a tuple that skipped blocks did not return.
        expected = re.search(r"values to unpack \(expected (\d+)", str(error))
        width = int(expected[1]) if expected else 0
        if not passage.is_skipping or width <= max((block.width for block in skipped), default=0):
            raise
    finally:
        for handle in handles:
            handle.remove()
        for block in skipped:
            block.passage = None
    widths = [block.width for block in skipped]
    try:
        for block in skipped:
            block.width = width
        return run_slice(forward, given, blocks, enters=enters, ends=ends, taps=taps)
    except Exception as error:  # not because of the width
        for block, before in zip(skipped, widths, strict=True):
            block.width = before
        is_of_tuple = isinstance(error, ValueError | TypeError | AttributeError)  # which skipped blocks left out
        if is_of_tuple and not isinstance(error, UserError):
            raise UserError("its blocks pass more than hidden states on, and stages send only those") from error
        raise


def keep_output(seen: dict[int, Tensor], number: int, module: nn.Module, args: Any, output: Any) -> None:
    """Store the hidden states behind block `number` as [tokens, width] (a forward hook)."""
    seen[number] = _hidden_in(output).flatten(0, -2)


class _StageEnd(BaseException):
    """Exception that leaves a model's forward after the stage's last block, with the `hidden` states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _ReturnsTuple(BaseException):
    """Exception for a family that takes the first element of its blocks' output, which must then be a tuple."""


class _Passage:
    """State of one forward through the blocks of a slice. arrived: the first block's input, if it comes from another
    stage. taps: see `run_slice`."""

    def __init__(self, arrived: Tensor | None, taps: Mapping[int, Tensor]) -> None:
        self.arrived = arrived
        self._taps = taps
        self.is_waiting = arrived is not None
        self.is_skipping = False
        self._has_entered = arrived is None
        self._dimensions = 0

    def skip(self, block: SkippedBlock, hidden: Tensor) -> Tensor:
        """Return the output of a skipped block for the input `hidden`; end the forward at a block behind the stage."""
        self._look_at(hidden)
        if block.where == "behind" and not block.passes:
            raise _StageEnd(self.arrived if self.is_waiting and self.arrived is not None else hidden)
        if block.where == "last before" and self.arrived is not None:
            hidden, self.is_waiting = _in_shape_of(hidden, self.arrived), False
        if block.number in self._taps:
            hidden = _in_shape_of(hidden, self._taps[block.number])
        self._dimensions = 0 if block.width else hidden.ndim
        self.is_skipping = True
        return hidden

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the first argument of the first block that runs (a pre-hook)."""
        if self._has_entered:
            return None
        empty = _input_of(args, kwargs)
        self._look_at(empty)
        self._has_entered, self.is_waiting, self.is_skipping = True, False, False
        arrived = _in_shape_of(empty, cast(Tensor, self.arrived))
        if args:
            return (arrived, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": arrived}

    def end_behind(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the forward after a module (a forward hook)."""
        raise _StageEnd(_hidden_in(output))

    def _look_at(self, hidden: Tensor) -> None:
        if hidden.ndim < self._dimensions:
            raise _ReturnsTuple
        self._dimensions = 0


def _in_shape_of(empty: Tensor, arrived: Tensor) -> Tensor:
    """Return `arrived` in the shape that the family gives its hidden states before this block."""
    return arrived.reshape(empty.shape) if arrived.numel() == empty.numel() else arrived


def _hidden_in(output: Any) -> Tensor:
    """Return the hidden states in the output of a block."""
    return output[0] if isinstance(output, tuple) else output


def _input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block."""
    return args[0] if args else kwargs["hidden_states"]


def _shell_with_own_dropout(module: nn.Module) -> nn.Module:
    """Return a shell of `module` with copies of its children without weights: dropout between layers may be in training
    mode in one slice and not in another."""
    return shell_of(
        module,
        {
            name: copy.copy(child)
            for name, child in module._modules.items()
            if child is not None and not (any(True for _ in child.parameters()) or any(True for _ in child.buffers()))
        },
    )

"""Activation recomputation: modules save only their inputs (optionally attention, too) and rerun in backward.

transformers' own flag is not used: it works only in training mode, which would enable dropout in frozen blocks, and not
every family has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from dilatant.attention.recompute_cache import attention_cache_contexts
from dilatant.config.memory_modes import Recompute
from dilatant.models.core.host_inputs import HostInputs
from dilatant.models.mixed_class import mixed

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Factory of two contexts: one around the forward that runs now, one around its recomputation in backward."""

_ADDED = "recompute_contexts"
_INPUTS = "kept_inputs"
_CONTEXTS: dict[str, Contexts] = {
    "block": noop_context_fn,
    "block_keep_attention": attention_cache_contexts,
    "block_offload": noop_context_fn,
}


class Recomputed:
    """Mixin for the class of a module: `forward` runs under torch's checkpoint if it needs a backward. The contexts of
    `add_contexts` surround both the forward and the recomputation."""

    how: ClassVar[Recompute]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = cast(Any, super()).forward
        if not (torch.is_grad_enabled() and _records(cast(nn.Module, self), args, kwargs)):
            return run(*args, **kwargs)
        # The recomputation draws the same random numbers: in a step because they are keyed, elsewhere because
        # checkpoint restores torch's generators by default.
        with self._inputs_kept(args):
            return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _inputs_kept(self, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """Return the context in which inputs are saved. Hidden states come first, and are a block's own; others, such
        as rotary tables, are those of all blocks."""
        if self.how != "block_offload" or not args:
            return nullcontext()
        inputs, number = self.__dict__.setdefault(_INPUTS, (HostInputs(), 0))
        return cast(AbstractContextManager[Any], inputs.kept(args[0], number))

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        added = self.__dict__.get(_ADDED, ())
        first, again = zip(*(make() for make in (*added, _CONTEXTS[self.how])))
        return _all_of(*first), _all_of(*again)


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter the contexts in order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def add_contexts(module: nn.Module, contexts: Contexts) -> None:
    """Add `contexts` around the computations of a module under recomputation, inside those that were added before."""
    module.__dict__[_ADDED] = (*module.__dict__.get(_ADDED, ()), contexts)


def remove_contexts(module: nn.Module, contexts: Contexts) -> None:
    """Undo `add_contexts`, if it was done."""
    left = tuple(other for other in module.__dict__.pop(_ADDED, ()) if other != contexts)
    if left:
        module.__dict__[_ADDED] = left


def recompute(module: nn.Module, how: Recompute, inputs: tuple[HostInputs, int] | None = None) -> None:
    """Make `module` recompute its activations in backward as `train.recompute` says, or keep them ("none"). inputs: of
    all blocks with which it keeps its input in host memory, and its number among them.

    The module's class becomes a subclass of its own class, as in FSDP2: names, keys, hooks and `isinstance` stay as
    they are, and slices that share the module share the change.
    """
    if inputs is not None:
        module.__dict__[_INPUTS] = inputs
    own = type(module).__mro__[2] if isinstance(module, Recomputed) else type(module)
    module.__class__ = own if how == "none" else mixed(cast(Any, own), Recomputed, how=how)


def _records(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a forward of `module` saves anything for a backward."""
    given = (*args, *kwargs.values())
    return any(isinstance(value, Tensor) and value.requires_grad for value in given) or any(
        parameter.requires_grad for parameter in module.parameters()
    )

"""Recomputation: modules that keep only their inputs, and perhaps their attention, and run again in the backward pass.

The wrap is our own and not the flag of transformers, which works in training mode only and so would switch dropout on
in frozen blocks, and which not every family has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from dilatant.attention.recompute_cache import keep_attention
from dilatant.config.recompute import Recompute

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes what goes around a forward that runs now, and around the same again in its backward."""

_ADDED = "recompute_contexts"
_CONTEXTS: dict[str, Contexts] = {"block": noop_context_fn, "block_keep_attention": keep_attention}


class Recomputed:
    """Mixed into the class of a module: `forward` runs under torch's checkpoint where there will be a backward.

    Around both computations go the contexts of `add_contexts`.
    """

    how: ClassVar[Recompute]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = cast(Any, super()).forward
        if not (torch.is_grad_enabled() and _records(cast(nn.Module, self), args, kwargs)):
            return run(*args, **kwargs)
        # Random numbers are drawn alike the second time: by key within a step, elsewhere from torch's generators, which
        # it keeps the state of by default.
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        added = self.__dict__.get(_ADDED, ())
        first, again = zip(*(make() for make in (*added, _CONTEXTS[self.how])))
        return _all_of(*first), _all_of(*again)


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """The contexts, entered in their order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def add_contexts(module: nn.Module, contexts: Contexts) -> None:
    """Let `contexts` be around the computations of a module, if it is ever recomputed, within those added before."""
    module.__dict__[_ADDED] = (*module.__dict__.get(_ADDED, ()), contexts)


def remove_contexts(module: nn.Module, contexts: Contexts) -> None:
    """Undo `add_contexts`, if it was done."""
    left = tuple(other for other in module.__dict__.pop(_ADDED, ()) if other != contexts)
    if left:
        module.__dict__[_ADDED] = left


def recompute(module: nn.Module, how: Recompute) -> None:
    """Let `module` recompute its activations in the backward pass as `train.recompute` says, or with "none" keep them.

    The module becomes an instance of a class derived from its own, as in FSDP2: names, keys, hooks and `isinstance`
    stay as they are, and slices that share the module share this too.
    """
    own = type(module).__mro__[2] if isinstance(module, Recomputed) else type(module)
    module.__class__ = own if how == "none" else _recomputed(cast(Any, own), how)


@cache
def _recomputed(own: Any, how: Recompute) -> type[nn.Module]:
    named = {"__module__": own.__module__, "__doc__": own.__doc__, "how": how}
    return type(own.__name__, (Recomputed, own), named)


def _records(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward of `module` keeps anything for a backward."""
    given = (*args, *kwargs.values())
    return any(isinstance(value, Tensor) and value.requires_grad for value in given) or any(
        parameter.requires_grad for parameter in module.parameters()
    )

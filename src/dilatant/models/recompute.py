"""Gradient checkpointing: modules that keep only their inputs, and run again in the backward pass.

The wrap is our own and not the flag of transformers, which works in training mode only and so would switch dropout on
in frozen blocks, and which not every family has.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn


class Recomputed:
    """Mixed into the class of a module: `forward` runs under torch's checkpoint where there will be a backward.

    An attribute `recompute_contexts` makes contexts for both computations, as torch's `context_fn`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = cast(Any, super()).forward
        if not (torch.is_grad_enabled() and _records(cast(nn.Module, self), args, kwargs)):
            return run(*args, **kwargs)
        # Random numbers are drawn alike the second time: by key within a step, elsewhere from torch's generators, which
        # it keeps the state of by default.
        contexts = self.__dict__.get("recompute_contexts", noop_context_fn)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def recompute(module: nn.Module, enabled: bool = True) -> None:
    """Let `module` recompute its activations in the backward pass, or keep them again.

    The module becomes an instance of a class derived from its own, as in FSDP2: names, keys, hooks and `isinstance`
    stay as they are, and slices that share the module share this too.
    """
    if enabled != isinstance(module, Recomputed):
        module.__class__ = _recomputed(cast(Any, type(module))) if enabled else type(module).__mro__[2]


@cache
def _recomputed(own: Any) -> type[nn.Module]:
    return type(own.__name__, (Recomputed, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _records(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward of `module` keeps anything for a backward."""
    given = (*args, *kwargs.values())
    return any(isinstance(value, Tensor) and value.requires_grad for value in given) or any(
        parameter.requires_grad for parameter in module.parameters()
    )

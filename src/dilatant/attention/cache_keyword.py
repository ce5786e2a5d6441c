"""KV cache keyword: the name of the cache argument in the forward of a transformers model."""

import inspect
from collections.abc import Callable
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params")
"""Since transformers 5.24 the name is `cache`; the older names are still accepted, but not together with it."""


def cache_keyword(forward: Callable[..., Any]) -> str:
    """Return the keyword by which `forward` takes the cache (keys, values and states of earlier tokens). Raises
    TypeError if `forward` takes none."""
    parameters = inspect.signature(forward).parameters
    for name in _NAMES:
        if name in parameters:
            return name
    raise TypeError(f"{getattr(forward, '__qualname__', forward)} takes no cache: {', '.join(parameters)}")

"""What a forward of transformers calls its cache."""

import inspect
from collections.abc import Callable
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params")
"""`cache` since transformers 5.24, which takes the others for it but not beside it."""


def cache_keyword(forward: Callable[..., Any]) -> str:
    """The keyword by which `forward` takes keys, values and states of the tokens before.

    Raises TypeError: if it takes none.
    """
    parameters = inspect.signature(forward).parameters
    for name in _NAMES:
        if name in parameters:
            return name
    raise TypeError(f"{getattr(forward, '__qualname__', forward)} takes no cache: {', '.join(parameters)}")

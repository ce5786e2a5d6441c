"""A subclass of a library's class with the methods of a mixin, for one module instead of all of its class."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


@cache
def mixed(own: Any, mixin: type[Any], **values: str) -> type[nn.Module]:
    """Return the subclass of `own` that has the methods of `mixin` first; its name and text are those of `own`."""
    named = {"__module__": own.__module__, "__doc__": own.__doc__, **values}
    return type(own.__name__, (mixin, own), named)

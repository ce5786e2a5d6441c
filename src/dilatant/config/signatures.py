"""User functions: the `metric` decorator, and checks of the arguments with which they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from dilatant.config.errors import UserError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DECLARED = "__dilatant_metric__"


def metric(function: _Function) -> _Function:
    """Declare a function (or an object with `__call__`) as a metric, which `evaluation.metrics` may name as
    `module:function`. It is called with two lists of texts, expected and generated answers, and returns a number."""
    setattr(function, _DECLARED, True)
    return function


def is_metric(function: object) -> bool:
    """Return True for a function declared by `metric`. A config can cause no other function to be called."""
    return callable(function) and getattr(function, _DECLARED, None) is True


def require_call(where: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise UserError if `function` cannot be called with these positional arguments. arguments: descriptions of them.
    Functions whose signature Python does not know, such as those written in C, pass."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise UserError(
            f"{where} is called as ({', '.join(arguments)}), but takes {signature}; let it take these"
        ) from None

"""Functions that a user brings: which of them may be called by name, and with which arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from dilatant.config.errors import UserError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DECLARED = "__dilatant_metric__"


def metric(function: _Function) -> _Function:
    """Decorator that declares a function (or an object with `__call__`) as a metric, which `evaluation.metrics` may
    name as `module:function`. It is called with two lists of texts, expected and written, and returns a number."""
    setattr(function, _DECLARED, True)
    return function


def is_metric(function: object) -> bool:
    """Return True for what `metric` declared. Nothing else is called because a config names it."""
    return callable(function) and getattr(function, _DECLARED, None) is True


def require_call(where: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raises UserError where `function` does not take that many arguments by place. arguments: what each of them is.
    What Python cannot tell the arguments of, such as functions in C, passes."""
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

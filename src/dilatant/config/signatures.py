"""Whether a function of the user's can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dilatant.config.errors import UserError


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

"""User functions: the decorators that declare them, their import by name, and checks of their arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from dilatant.config.errors import UserError, own_code

_Function = TypeVar("_Function")
Declared = Literal["metric", "callback", "loss", "optimizer", "rate_schedule"]
_COUNT = "__dilatant_loss_count__"
_TAKEN = "__dilatant_loss_takes__"
Count = Literal["tokens", "samples"] | Callable[[Any], float]
Taken = Literal["logits", "hidden_states"]


def metric(function: _Function) -> _Function:
    """Declare a function (or an object with `__call__`) as a metric, which `evaluation.metrics` may name as
    `module:function`. It is called with two lists of texts, expected and generated answers, and returns a number."""
    return _declared(function, "metric")


def callback(part: _Function) -> _Function:
    """Declare a class that needs no arguments, or an object, as a callback, which `train.callbacks` may name as
    `package.module.name`. Its methods are on_step, on_evaluation, on_checkpoint and on_end, or some of these."""
    return _declared(part, "callback")


def optimizer(factory: _Function) -> _Function:
    """Declare a function, or a class, that makes a torch.optim.Optimizer of a list of weights (or of weights and their
    names) as an optimizer, which `train.optimizer` may name as `package.module.name`."""
    return _declared(factory, "optimizer")


def rate_schedule(function: _Function) -> _Function:
    """Declare a function of the step, counted from 0, or of the step and the run's steps as a schedule, which
    `train.schedule` may name as `package.module.name`. It returns a factor of the optimizer's learning rates."""
    return _declared(function, "rate_schedule")


def _declared(part: _Function, kind: Declared) -> _Function:
    setattr(part, f"__dilatant_{kind}__", True)
    return part


def loss(function: Any = None, *, count: Count = "tokens", of: Taken = "logits") -> Any:
    """Declare a function as a training loss, which `train.loss` may name as `package.module.function`:
    `@dilatant.loss`, or `@dilatant.loss(count="samples")`.

    It is called as loss(logits [positions, vocabulary], targets int64 [positions]), with the positions of some samples
    that have a target, and returns the loss of each position, or their sum. With of="hidden_states" it gets the
    head's inputs [positions, width] in place of logits, and the head does not run. A third argument, if the function
    takes it, is the number of target tokens of each position's sample, int64 [positions]; a fourth one says where
    targets are: `samples`, and int64 [positions] `sample_of` and `index`, each target's sample and its index in
    `input_ids` there.
    The sum over the global batch is divided by its number of target `tokens` or `samples`, or by the sum of
    count(sample) over its `EncodedSample`s, of which ranks may know only sizes and `target_tokens`.
    """
    if function is None:
        return partial(loss, count=count, of=of)
    if count not in ("tokens", "samples") and not callable(count):
        raise UserError(f"count is {count!r}; give 'tokens', 'samples', or a function of an EncodedSample")
    if of not in get_args(Taken):
        raise UserError(f"of is {of!r}; give one of {', '.join(get_args(Taken))}")
    setattr(function, _COUNT, count)
    setattr(function, _TAKEN, of)
    return _declared(function, "loss")


def count_of_loss(function: object) -> Count | None:
    """Return the divisor that `loss` declared; None for a function that it did not declare."""
    return getattr(function, _COUNT, None) if callable(function) else None


def takes_hidden_states(function: object) -> bool:
    """Return True for a loss that `loss` declared to take hidden states, not logits."""
    return getattr(function, _TAKEN, "logits") == "hidden_states"


def import_declared(key: str, name: str, decorator: Declared) -> Any:
    """Import the function, or callback, that `module:function` or `module.function` names, of a module that Python
    finds or that is in the working directory. Only what is declared is returned, so that a config cannot name just any
    function of any package; modules of the standard library are not even imported.

    Raises UserError with a text of one line, whatever the module does.
    """
    module, _, function = name.replace(":", ".").rpartition(".")
    kind = {"optimizer": "an optimizer", "rate_schedule": "a schedule"}.get(decorator, f"a {decorator}")
    undeclared = UserError(f"{key}: {name!r} is not declared as {kind}; put @dilatant.{decorator} above it")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise undeclared
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        with own_code(f"{key}: {name!r} cannot be imported"):
            found = getattr(importlib.import_module(module), function)
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
    is_called = callable(found) or decorator == "callback"
    if not is_called or getattr(found, f"__dilatant_{decorator}__", None) is not True:
        raise undeclared
    return found


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


def takes(function: Callable[..., Any], arguments: int) -> bool:
    """Return True if `function` can be called with so many positional arguments, all of which it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in named and each.default is each.empty for each in parameters) == arguments

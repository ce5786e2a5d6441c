"""Oracle of an engine case: losses, gradients and updates in one process without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from cases.engine_case import (
    LANGUAGE,
    MORE_LANGUAGES,
    PLACES,
    VOCABULARY,
    Case,
    asks,
    build_model,
    build_samples,
    merged_tokens,
    token_id,
)
from dilatant.data.sample import EncodedSample
from oracles.dense_mask import Token, bidirectional_instances, document_causal, embedded, matrix
from oracles.fp8_linear import round_linears
from oracles.keyed_dropout import OneSampleDropout
from oracles.one_process import losses_of_batch

STEPS = 2
"""The second is computed with what the first updated, and updates with moments that are not zero any more."""


def expected(
    case: Case, steps: int = STEPS
) -> tuple[list[tuple[float, dict[str, float]]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return, computed in one process, the losses of `steps` steps (all weighted, then each unit's), the gradients of
    the first step and the parameters after the last."""
    model = build_model(case, plain=True)
    samples = build_samples(case)
    units = model.units
    encoders = {name: (units[name].model, units[name].projector, units[name].skip_tokens) for name, *_ in case.encoders}
    key = ""

    def net(name: str) -> Any:
        if name not in case.nets:
            return units[name].model

        def run(rows: torch.Tensor, **targets: torch.Tensor) -> torch.Tensor:
            keys = [f"{key} item {item}" for item in range(len(rows))]
            return units[name].model(rows, seed=case.seed, keys=keys, place=name, **targets)

        return run

    generators = {
        name: (units[name].connector, net(name), token_id(case, name), PLACES) for name, *_ in case.generators
    }
    queries = {
        token_id(case, name): units["language"].queries.get_parameter(name)
        for name, *_ in case.generators
        if asks(case, name)
    }
    router = (LANGUAGE | MORE_LANGUAGES)[case.language].get("router_aux_loss_coef", 0.0)
    weights = {"language": 1.0, "language.router": router, **{name: weight for name, _, _, weight in case.generators}}
    parameters = {name: p for unit in units.values() for name, p in unit.named_logical_parameters()}
    for parameter in parameters.values():
        parameter.data = parameter.data.to(case.dtype)
        parameter.grad_dtype = torch.float32
    for module in (each for unit in units.values() for each in unit.modules()):
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eval().to(case.dtype)  # the stored statistics, in the precision of the weights
    masters = {
        name: torch.nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for name, p in parameters.items()
    }
    optimizer = build_optimizer(masters)
    if case.fp8:
        round_linears(units["language"].model)
    losses, gradients = [], {}
    dropout = OneSampleDropout(case.seed, _layers(units)) if case.dropout else None
    for step in range(steps):

        def begin(number: int, step: int = step) -> None:
            nonlocal key
            key = f"draw {100 - number}" if case.numbered else f"step {step} place {number}"
            if dropout is not None:
                dropout.begin(key)

        seen_in = None if case.attention in (None, "causal") else partial(_seen_in, case)
        with dropout or nullcontext():
            parts = losses_of_batch(
                units["language"].model,
                encoders,
                model.placeholder_ids,
                samples,
                seen_in,
                generators,
                begin,
                queries,
                case.loss,
            )
        loss = sum((weights[name] * part for name, part in parts.items()), start=torch.zeros(()))
        if loss.requires_grad:
            loss.backward()
        losses.append((loss.item(), {name: part.item() for name, part in parts.items()}))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        for name, parameter in parameters.items():
            masters[name].grad, parameter.grad = parameter.grad, None
        optimizer.step()
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name])
    return losses, gradients, {name: p.detach().clone() for name, p in masters.items()}


def _layers(units: Any) -> Iterator[tuple[str, torch.nn.Module, bool, bool]]:
    """Return the layers in the form that `OneSampleDropout` takes."""
    for unit in units.values():
        trains = {name for name, p in unit.named_logical_parameters() if p.requires_grad}
        trains = {weight.layer for weight in unit.weights if weight.canonical in trains}
        whole = [(unit.layers[0], "model")] if unit.structure is not None else []
        for layer, path in (*whole, *unit.pieces()):
            yield layer, unit.get_submodule(path), layer in trains, unit.unit == "language"


def _seen_in(case: Case, sample: EncodedSample) -> np.ndarray:
    """Return which token of a sample sees which under the case's media attention. Items may be nested: each takes the
    next placeholders of its unit, as many as it has tokens."""
    tokens = []
    for place, token in enumerate(sample.input_ids.tolist()):
        if not 0 <= token - VOCABULARY < len(case.encoders):
            tokens.append(Token(0, "text", None, place, place))
        else:
            name, kind, _, _, features = case.encoders[token - VOCABULARY]
            before = sum(earlier.modality == name for earlier in tokens)
            tokens.append(Token(0, name, before // merged_tokens(kind, features), place, place))
    if callable(case.attention):  # `engine_case.frames`: items with nothing between them are one
        stretch = 0
        for place, token in enumerate(tokens):
            stretch += place > 0 and token.modality != tokens[place - 1].modality
            tokens[place] = replace(token, instance=stretch)
        return matrix(tokens, bidirectional_instances(True))
    kinds = case.attention if isinstance(case.attention, dict) else {}
    rules = {
        "causal": document_causal,
        "bidirectional": bidirectional_instances(True),
        "embedded": embedded(False),
        "modality": embedded(True),
    }
    usual = case.attention if isinstance(case.attention, str) else "causal"
    return matrix(tokens, lambda q, k: rules[kinds.get(q.modality, usual)](q, k))


def build_optimizer(parameters: dict[str, Any]) -> torch.optim.Optimizer:
    """Return AdamW with an eps far above rounding noise, so that noise of a cancelling gradient decides no sign.

    lr / eps bounds how far a gradient's error moves a parameter: a tenth, so that the tolerances of gradients imply
    those of parameters.
    """
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return torch.optim.AdamW(trainable or [torch.nn.Parameter(torch.zeros(1))], lr=1e-2, eps=1e-1)

"""Rank trial: two ranks share the layers of a model's small copy, or the tokens of its rows, and must compute what one
rank computes.

Ranks are threads of this process, each with its own model, communicator and runtime: a trial starts no process and
leaves GPUs alone, so a planner can run it too. Trials are cached like proofs (see `training_proof`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import Store, connect
from dilatant.comm.store.token import fresh_token
from dilatant.config.errors import reason_of
from dilatant.config.model import LANGUAGE
from dilatant.data.sample import EncodedSample
from dilatant.models.core.materialize import seeded
from dilatant.models.encoders.generic_encoder import GenericEncoderUnit
from dilatant.models.families.media_proof import drawn, samples_with_media, small_copy, trained_parameters
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.shrink import shrink, special_ids
from dilatant.models.families.training_proof import (
    differ,
    loss_of,
    proof_path,
    read_proof,
    store_proof,
    text_samples,
    with_gradients,
)
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.parallel.tensor_plan import degree_problems, tensor_plan
from dilatant.models.row_attention import attend_by_default
from dilatant.models.sources import errors_alone
from dilatant.plan.boxes import Box
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import slice_of

RANKS = 2
SECONDS = 120.0
"""Time limit of a rank that waits for the other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial. units: those whose layers two ranks share without changing the loss or a gradient. problems:
    other unit → why not. context: why two ranks cannot share the tokens of the language model's rows; None if they
    can."""

    units: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    context: str | None = None


def divide_as_planned(model: MultimodalModel, plan: Plan) -> None:
    """Prove what `plan` asks for (see `divide_where_proven`), if it has tensor or context parallelism."""
    if any(placed.stage.tp > 1 or placed.stage.cp > 1 for placed in plan.stages()):
        divide_where_proven(model)


def divide_where_proven(model: MultimodalModel) -> None:
    """Let ranks share the units and the rows of a model whose family is not listed where a trial proves it, and no
    others."""
    if model.whole is None or not model.whole.family.narrow:
        return
    by_plan, trial = shared_units(model), trial_of(model)
    model.language.unsplit = trial.context
    for name in by_plan:
        why = trial.problems.get(name, "two ranks cannot share the small copy that would prove it")
        model.units[name].undivided = None if name in trial.units else why


def trial_of(model: MultimodalModel) -> Trial:
    """Try the small copy of a model, which may be on the meta device, or read the result of an earlier trial."""
    text, whole = model.language.model.config, model.whole
    small: Any = type(text).from_dict(shrink(text, has_encoders=False)) if whole is None else small_copy(whole)
    settings = (small if whole is None else small.config).to_dict()
    path = proof_path(["ranks, rows and read blocks", RANKS, json.dumps(settings, sort_keys=True, default=str)])
    trial = read_proof(path, Trial)
    if trial is None:
        with errors_alone(), seeded(0, "ranks"), torch.enable_grad():
            trial = _tried(small)
        store_proof(path, trial)
    return trial


def _tried(small: Any) -> Trial:
    """Try all units at once and, if that changes anything, each of them alone; then the rows."""
    try:
        model, samples = _drawn(small), _samples_for(small)
        units = shared_units(model)
    except Exception as error:
        why = reason_of(error, "its small copy does not run")
        return Trial(problems={LANGUAGE: why}, context=why)

    def problem_of(units: Sequence[str], **degrees: int) -> str | None:
        try:
            why = compare_ranks(partial(_drawn, small), samples, units, **degrees)
        except Exception as error:
            why = reason_of(error, "its small copy does not run")
        return None if why is None else f"on two ranks, {why}"

    # A model that attends without plans is refused by that reason, before its trial counts.
    split = None if model.language.row_attention is None else problem_of((LANGUAGE,), cp=RANKS)
    if not units or problem_of(units, tp=RANKS) is None:
        return Trial(units, context=split)
    found = {name: problem_of((name,), tp=RANKS) for name in units}
    problems = {name: why for name, why in found.items() if why is not None}
    return Trial(tuple(name for name in units if name not in problems), problems, split)


def _drawn(small: Any) -> MultimodalModel:
    with seeded(0, "ranks"):
        return drawn(small, attend_by_default)


def _samples_for(small: Any) -> list[EncodedSample]:
    if isinstance(small, PretrainedModel):
        return samples_with_media(small)
    return text_samples(small.get_text_config().vocab_size, [*special_ids(small.to_dict())])


def shared_units(model: MultimodalModel) -> tuple[str, ...]:
    """Return the units that two ranks can share by their plans. Encoders of families that are not listed get one from
    the names of their layers, which only a trial can prove."""
    found = []
    for name, unit in model.units.items():
        before, unit.undivided = unit.undivided, None if isinstance(unit, GenericEncoderUnit) else unit.undivided
        with suppress(Exception):  # layers under these names that are something else
            plan = tensor_plan(unit)
            found += [name] if plan.cuts and not degree_problems(unit, plan, RANKS) else []
        unit.undivided = before
    return tuple(found)


def compare_ranks(
    build: Callable[[], MultimodalModel], samples: Sequence[EncodedSample], units: Sequence[str], **degrees: int
) -> str | None:
    """Compare loss and every gradient of `samples` on two ranks, which share `units`, with those on one; return what
    differs. build: returns equal models at each call. degrees: how they share them, `tp=2` or `cp=2`."""
    models = [build() for _ in range(RANKS)]
    for model in models:
        for name in units:
            model.units[name].undivided = None
    trained = trained_parameters(models[0])
    everything = tuple(range(len(samples)))
    rows = [everything] if models[0].language.packs_rows else [(number,) for number in everything]
    loss, gradients = with_gradients(loss_of(models[0].units, samples, rows, is_cut=False), trained.values())
    wanted = dict(zip(trained, gradients, strict=True))
    outcomes = _on_ranks(partial(_step, samples=samples, units=units, degrees=degrees), models)
    held = [entry for _, parts in outcomes for entry in parts]
    if missing := wanted.keys() - {box.name for box, _ in held}:
        return f"no rank holds {min(missing)}"
    theirs = [None if (whole := wanted.get(box.name)) is None else slice_of(whole, box) for box, _ in held]
    ours = [None if part is None else part.reshape(box.shape) for box, part in held]
    problems = (differ((loss, theirs), (torch.tensor(found), ours))[0] for found, _ in outcomes)
    return next(filter(None, problems), None)


_Parts = list[tuple[Box, Tensor | None]]
"""The parts of weights that a rank holds, and their gradients."""


def _step(
    rank: int, store: Store, model: MultimodalModel, samples: Any, units: Sequence[str], degrees: Mapping[str, int]
) -> tuple[float, _Parts]:
    """Run one step as a rank. Returns the loss and this rank's parts of the gradients."""
    comm = Comm(store, rank, RANKS, timeout_seconds=SECONDS)
    try:
        runtime = Runtime(model, _plan(model, units, degrees), comm)
        result, owned = runtime.execute(samples), runtime.owned
        parts = [(owned.boxes[key], parameter.grad) for key, parameter in owned.parameters.items()]
        runtime.close()
        return result.loss, parts
    except BaseException as error:
        comm.abort(f"rank {rank} failed: {error}")
        raise
    finally:
        comm.close()


def _on_ranks(step: Callable[..., tuple[float, _Parts]], models: Sequence[MultimodalModel]) -> list[Any]:
    """Run `step(rank, store, model)` as each rank, and return the results by rank. Raises the error of the rank that
    failed first."""
    token = fresh_token()
    server = StoreServer("127.0.0.1", 0, token)
    try:
        with ThreadPoolExecutor(len(models)) as pool:
            running = [
                pool.submit(step, rank, connect("127.0.0.1", server.port, token, on_one_machine=True), model)
                for rank, model in enumerate(models)
            ]
        errors = [error for each in running if (error := each.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, CommAborted))
        return [each.result() for each in running]
    finally:
        server.close()


def _plan(model: MultimodalModel, units: Sequence[str], degrees: Mapping[str, int]) -> Plan:
    """Return a plan of one stage per unit: of `units` on all ranks with these degrees, of others on the first."""
    feeds: Mapping[str, tuple[str, ...]] = model.graph.feeds
    stages = {
        name: Stage(0, len(unit.layers), tuple(range(RANKS)), **degrees)
        if name in units
        else Stage(0, len(unit.layers), (0,))
        for name, unit in model.units.items()
    }
    return Plan(tuple(UnitPlan(name, (Replica((stage,)),), feeds[name]) for name, stage in stages.items()))

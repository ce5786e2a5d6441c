"""Rank trial: two ranks share the layers of a model's small copy, and must compute what one rank computes.

Ranks are threads of this process, each with its own model, communicator and runtime: a trial starts no process and
leaves GPUs alone, so a planner can run it too. Trials are cached like proofs (see `training_proof`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    """Result of a trial. units: those whose layers two ranks can share by their plans. problem: the difference from one
    rank; None for none."""

    units: tuple[str, ...] = ()
    problem: str | None = None


def trial_of(model: MultimodalModel) -> Trial:
    """Try the small copy of a model, which may be on the meta device, or read the result of an earlier trial."""
    if not _shared_units(model):
        return Trial()
    text, whole = model.language.model.config, model.whole
    small: Any = type(text).from_dict(shrink(text, has_encoders=False)) if whole is None else small_copy(whole)
    settings = (small if whole is None else small.config).to_dict()
    path = proof_path(["ranks", RANKS, json.dumps(settings, sort_keys=True, default=str)])
    kept = read_proof(path, Trial)
    if kept is None:
        try:
            with errors_alone(), torch.enable_grad():
                kept = compare_ranks(partial(_drawn, small), _samples_for(small))
        except Exception as error:
            kept = Trial(_shared_units(model), reason_of(error, "two ranks do not run its small copy"))
        store_proof(path, kept)
    return kept


def divide_where_proven(model: MultimodalModel) -> None:
    """Store in the language model's `undivided` why ranks cannot share its layers, if its family is not listed and two
    ranks do not compute what one computes."""
    if model.whole is None or not model.whole.family.narrow:
        return
    trial = trial_of(model)
    model.language.undivided = trial.problem
    if trial.problem is None and LANGUAGE in _shared_units(model) and LANGUAGE not in trial.units:
        model.language.undivided = "two ranks cannot share the small copy that would prove it"


def compare_ranks(build: Callable[[], MultimodalModel], samples: Sequence[EncodedSample]) -> Trial:
    """Compare loss and every gradient of `samples` on two ranks, which share the layers of all units whose plans allow
    that, with those on one. build: returns equal models at each call."""
    models = [build() for _ in range(RANKS)]
    units, trained = _shared_units(models[0]), trained_parameters(models[0])
    if not units:
        return Trial()
    everything = tuple(range(len(samples)))
    rows = [everything] if models[0].language.packs_rows else [(number,) for number in everything]
    loss, gradients = with_gradients(loss_of(models[0].units, samples, rows, is_cut=False), trained.values())
    wanted = dict(zip(trained, gradients, strict=True))
    outcomes = _on_ranks(partial(_step, samples=samples, units=units), models)
    held = [entry for _, parts in outcomes for entry in parts]
    if missing := wanted.keys() - {box.name for box, _ in held}:
        return Trial(units, f"no rank holds {min(missing)}")
    theirs = [None if (whole := wanted.get(box.name)) is None else slice_of(whole, box) for box, _ in held]
    ours = [None if part is None else part.reshape(box.shape) for box, part in held]
    problems = (differ((loss, theirs), (torch.tensor(found), ours))[0] for found, _ in outcomes)
    return Trial(units, next(filter(None, problems), None))


_Parts = list[tuple[Box, Tensor | None]]
"""The parts of weights that a rank holds, and their gradients."""


def _step(rank: int, store: Store, model: MultimodalModel, samples: Any, units: Sequence[str]) -> tuple[float, _Parts]:
    """Run one step as a rank. Returns the loss and this rank's parts of the gradients."""
    comm = Comm(store, rank, RANKS, timeout_seconds=SECONDS)
    try:
        runtime = Runtime(model, _plan(model, units), comm)
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


def _plan(model: MultimodalModel, units: Sequence[str]) -> Plan:
    """Return a plan of one stage per unit: of `units` on all ranks, of others on the first."""
    feeds: Mapping[str, tuple[str, ...]] = model.graph.feeds
    ranks = {name: tuple(range(RANKS)) if name in units else (0,) for name in model.units}
    stages = {name: Stage(0, len(unit.layers), ranks[name], tp=len(ranks[name])) for name, unit in model.units.items()}
    return Plan(tuple(UnitPlan(name, (Replica((stage,)),), feeds[name]) for name, stage in stages.items()))


def _drawn(small: Any) -> MultimodalModel:
    with seeded(0, "ranks"):
        return drawn(small, attend_by_default)


def _samples_for(small: Any) -> list[EncodedSample]:
    with seeded(0, "samples of ranks"):
        if isinstance(small, PretrainedModel):
            return samples_with_media(small)
        return text_samples(small.get_text_config().vocab_size, [*special_ids(small.to_dict())])


def _shared_units(model: MultimodalModel) -> tuple[str, ...]:
    """Return the units that two ranks can share by their plans."""
    plans = {name: tensor_plan(unit) for name, unit in model.units.items()}
    return tuple(
        name for name, plan in plans.items() if plan.cuts and not degree_problems(model.units[name], plan, RANKS)
    )

"""This rank of a pipeline as the trainer sees it: global batches in, loss and gradients out."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.gather import exchange
from dilatant.comm.launch import Worker
from dilatant.config import Config, ParallelConfig, UserError, list_problems
from dilatant.config.environment import place_from
from dilatant.data.loader import GlobalBatch, Loader
from dilatant.models.multimodal import LANGUAGE, MultimodalModel
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.plan.validate import plan_problems
from dilatant.profiling.assemble import Samples
from dilatant.runtime.holders import trainable_layers
from dilatant.runtime.parallelize import Parallel
from dilatant.runtime.precision import Precision
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step import StepOutput, stage_tensors
from dilatant.schedule import FAMILIES, trainability_of, validate
from dilatant.schedule.distribute import assign
from dilatant.training.evaluate import Evaluation
from dilatant.training.held_out import evaluate_pipeline
from dilatant.training.shared_batches import SharedBatches
from dilatant.training.stored_weights import read_pretrained


class Pipeline:
    """An `Engine` (see `step`) over the stages that a plan gives to `worker.rank`."""

    def __init__(
        self, model: MultimodalModel, plan: Plan, config: Config, worker: Worker, precision: Precision
    ) -> None:
        assert config.parallel is not None
        self.rank = worker.rank
        self.size = worker.size
        self.device = worker.device
        self._comm = Comm(
            worker.store,
            worker.rank,
            worker.size,
            device=worker.device,
            timeout_seconds=config.parallel.timeout_seconds,
        )
        self.session = exchange(self._comm, secrets.token_hex(8))[0]
        self._runtime = Runtime(
            model,
            plan,
            self._comm,
            seed=config.seed,
            weights=read_pretrained(model, config.model, _held(model, plan, worker.rank), config.seed),
            precision=precision,
            check_transport=config.parallel.check_transport,
        )
        family = FAMILIES[config.parallel.schedule]
        self.parallel = Parallel(
            self._runtime,
            config.parallel.microbatches,
            family,
            self._comm,
            config.plan.assignment,
            config.seed,
        )
        self.parameters = self._runtime.parameters
        self._saved_by = _lowest_holder(model, plan)
        self._grad_norm = math.nan
        self._batches = SharedBatches(
            self._comm, bool(units_decoded_on(plan, worker.rank) & {*model.encoders})
        )

    def batches(self, open_loader: Callable[[bool], Loader]) -> AbstractContextManager[Iterator[GlobalBatch]]:
        return self._batches.open(lambda: open_loader(False))

    def execute(self, batch: GlobalBatch, should_stop: Callable[[], bool]) -> StepOutput:
        result = self.parallel.execute(batch.samples, should_stop)
        self._grad_norm = result.grad_norm
        return StepOutput(result.loss, result.target_tokens, result.wish, result.shares)

    def clip_gradients(self, limit: float) -> float:
        return self.parallel.clip_grad_norm_(limit, self._grad_norm)

    def tensors(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for module in self._runtime.modules.values():
            held |= stage_tensors(module)
        return held

    def saves(self, name: str) -> bool:
        return self._saved_by[name] == self.rank

    def agree(self, wish: bool) -> bool:
        flag = torch.tensor([float(wish)])
        self._comm.world.max_(flag, "the agreement to go on").wait()
        return bool(flag.item())

    def train(self) -> None:
        self._runtime.train()

    def evaluate(self, config: Config, samples: Samples) -> Evaluation | None:
        """Exact match on the held-out data, through the stages; the same on all ranks, which all call. None without
        such data."""
        if samples.held_out is None:
            return None
        self._runtime.train(False)
        try:
            return evaluate_pipeline(
                self.parallel.predict,
                self._comm,
                samples.tokenizer,
                samples.held_out,
                samples.encoding,
                batch_size=config.evaluation.batch_size,
                max_new_tokens=config.evaluation.max_new_tokens,
                limit=config.evaluation.limit,
                skip_errors=config.data.on_error == "skip",
            )
        finally:
            self._runtime.train()

    def fail(self, error: BaseException) -> None:
        self._comm.abort(f"rank {self.rank} failed: {error}")

    def close(self) -> None:
        self.parallel.close()


def plan_from_config(config: ParallelConfig, model: MultimodalModel) -> Plan:
    """The plan that the config asks for, proven to be one that can train `model`; the model may be on the meta device.

    Raises UserError that lists every problem.
    """
    layers = {name: len(unit.layers) for name, unit in model.units.items()}
    feeds = {name: (LANGUAGE,) for name in layers if name != LANGUAGE}
    if config.plan is None:
        specs = {name: ParallelSpec(**dict(unit)) for name, unit in (config.units or {}).items()}
        plan = plan_from_specs(layers, specs, feeds, config.colocated)
    else:
        try:
            plan = Plan.from_json(Path(config.plan).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"parallel.plan: {config.plan!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"parallel.plan: {config.plan!r}: {error}") from None
    trains = trainable_layers(model.units)
    spec = ModelSpec(
        tuple(
            UnitSpec(
                name,
                tuple(LayerSpec(layer, name, 0, flag) for layer, flag in zip(unit.layers, trains[name])),
                feeds.get(name, ()),
            )
            for name, unit in model.units.items()
        )
    )
    link = Link(bandwidth=1.0)
    everywhere = Cluster(1, max(plan.ranks, default=0) + 1, float("inf"), link, link)
    problems = plan_problems(plan, spec, everywhere, split_layers=False)
    devices = torch.cuda.device_count()
    if devices and len(plan.ranks) > devices and place_from(os.environ) is None:
        problems.append(
            f"the plan needs {len(plan.ranks)} devices, and this machine has {devices} GPUs; start it on more machines "
            "with torchrun or Slurm, or let it run on the CPU (train.device: cpu)"
        )
    if problems:
        raise list_problems("this plan cannot train:", problems)
    return plan


def prove_schedule(config: ParallelConfig, plan: Plan, model: MultimodalModel) -> None:
    """Prove that the steps of this layout cannot deadlock, on a batch in which every sample has work everywhere.

    It also compiles what every rank needs to order its messages, once and for all of them.
    """
    count = config.microbatches * max(len(unit.replicas) for unit in plan.units)
    assignment = assign(plan, {unit.name: [1] * count for unit in plan.units}, config.microbatches)
    trainability = trainability_of(plan, trainable_layers(model.units))
    validate(plan, assignment, FAMILIES[config.schedule](plan, assignment, trainability), trainability)


def units_decoded_on(plan: Plan, rank: int) -> frozenset[str]:
    """The units whose media `rank` feeds: those of which it holds a first stage."""
    return frozenset(p.unit for p in plan.stages() if p.is_first and rank in p.stage.ranks)


def _held(model: MultimodalModel, plan: Plan, rank: int) -> set[str]:
    """Logical names of the weights and buffers that `rank` holds."""
    layers = {
        layer
        for placed in plan.stages()
        if rank in placed.stage.ranks
        for layer in model.units[placed.unit].layers[placed.stage.first : placed.stage.end]
    }
    return {w.canonical for unit in model.units.values() for w in unit.weights if w.layer in layers}


def _lowest_holder(model: MultimodalModel, plan: Plan) -> dict[str, int]:
    """Logical name of every weight and buffer → the lowest rank that holds the layer it is named after."""
    lowest: dict[str, int] = {}
    for placed in plan.stages():
        for layer in model.units[placed.unit].layers[placed.stage.first : placed.stage.end]:
            lowest[layer] = min(lowest.get(layer, placed.stage.ranks[0]), *placed.stage.ranks)
    return {
        weight.name: lowest[weight.layer]
        for unit in model.units.values()
        for weight in unit.weights
        if weight.tied_to is None
    }

"""The planner's memory model against real stages: what ranks hold while they run drawn steps in the schedule's order.

The oracle counts living storages and shares no formula with the planner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from cases.host_memory import Elsewhere
from dilatant import Encoder, MultimodalModel
from dilatant.comm.comm import Comm
from dilatant.config import OptimizerConfig
from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import SHARDS, Recompute, Shard
from dilatant.cost.memory import BF16, FP32
from dilatant.cost.profile import profile_layers
from dilatant.data.sample import EncodedSample
from dilatant.models.core.host_inputs import HostInputs
from dilatant.models.row_attention import use_row_attention
from dilatant.models.sources import parse_config
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.plan.sharding import shard_by_unit
from dilatant.planning.measuring.layer_costs import costs_in_use
from dilatant.planning.measuring.layer_probes import layer_probe
from dilatant.planning.problem.describe_model import describe_model
from dilatant.planning.problem.searched_settings import tensor_shard
from dilatant.runtime.precision import pick_device
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.schedule.assignment.step_assignment import Microbatching, assign
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.simulator.predict import predict
from dilatant.schedule.trainability import trainability_of
from dilatant.training.optimizers.optimizer import build_optimizer
from harness.worker_pool import Worker, WorkerPool
from oracles.live_storages import LiveStorages

RULES = {torch.float32: FP32, torch.bfloat16: BF16}
IMAGE_TOKENS = 64
CASES = 14


@dataclass(frozen=True)
class Drawn:
    """A random step. images: of each sample. colocated: the encoder is on the language model's first ranks. word: what
    units are sharded that can be. experts: of each block of a mixture; 0: none."""

    dtype: torch.dtype
    width: int
    blocks: int
    vocabulary: int
    texts: tuple[int, ...]
    images: tuple[int, ...]
    recompute: Recompute
    frozen: tuple[str, ...]
    language: ParallelSpec
    vision: ParallelSpec
    colocated: bool
    family: str
    microbatches: int
    loss_chunk: int | None
    word: Shard = "none"
    experts: int = 0

    def model(self) -> MultimodalModel:
        heads = {"num_attention_heads": 4, "hidden_size": self.width, "intermediate_size": 3 * self.width}
        language = {
            "model_type": "llama", "vocab_size": self.vocabulary, "num_hidden_layers": self.blocks,
            "num_key_value_heads": 4, "max_position_embeddings": 4096, **heads,
        }  # fmt: skip
        if self.experts:
            language |= {"model_type": "mixtral", "num_local_experts": self.experts, "num_experts_per_tok": 2}
        vision = {
            "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 4, "num_hidden_layers": 3,
            "vision_use_head": False, **heads,
        }  # fmt: skip
        model = MultimodalModel(
            {"vision": Encoder(parse_config(vision, "vision"), projector="mlp")},
            parse_config(language, "language"),
            seed=0,
            device="meta",
        )
        use_row_attention(model)
        model.freeze(self.frozen)
        model.language.loss_chunk = self.loss_chunk
        for unit in model.units.values():
            unit.recompute(self.recompute, HostInputs(Elsewhere()))
        model.train()
        return model

    def plan(self) -> Plan:
        model = self.model()
        return plan_from_specs(
            {name: len(unit.layers) for name, unit in model.units.items()},
            {"vision": self.vision, "language": self.language},
            model.graph.feeds,
            {"vision": "language"} if self.colocated else {},
        )

    def shard(self) -> dict[str, Shard]:
        trains = {name: any(flags) for name, flags in trainable_layers(self.model().units).items()}
        return shard_by_unit(self.plan(), trains, self.word)

    def samples(self) -> list[EncodedSample]:
        found = []
        for number, (text, images) in enumerate(zip(self.texts, self.images)):
            draw = np.random.default_rng(number)
            ids = np.concatenate(
                [np.full(images * IMAGE_TOKENS, self.vocabulary), draw.integers(3, self.vocabulary, text)]
            )
            labels = np.where(ids < self.vocabulary, ids, -100)
            pixels = draw.standard_normal((images, 3, 32, 32)).astype(np.float32)
            sizes = {"language": len(ids), "vision": images * IMAGE_TOKENS}
            media = {"vision": {"pixel_values": pixels}} if images else {}
            found.append(EncodedSample(f"sample-{number}", ids, labels, media=media, sizes=sizes))
        return found

    def tokens(self) -> dict[str, list[int]]:
        return {name: [one.sizes[name] for one in self.samples()] for name in ("vision", "language")}

    def step(self) -> tuple[Assignment, Schedule]:
        plan, model = self.plan(), self.model()
        assignment = assign(plan, self.tokens(), Microbatching(self.microbatches), anchor="language")
        trainability = trainability_of(plan, trainable_layers(model.units))
        return assignment, FAMILIES[self.family](plan, assignment, trainability)


IN_GROUPS: dict[str, Any] = {
    "experts": 4, "language": ParallelSpec(pp=2, ep=2), "vision": ParallelSpec(), "colocated": False, "frozen": (),
    "recompute": "none", "family": "1f1b", "microbatches": 2, "texts": (400, 380, 420, 410), "images": (1, 1, 1, 1),
}  # fmt: skip
"""Two groups of ranks, in each a sample of every microbatch, that divide experts."""
MANY_EXPERTS = {
    **IN_GROUPS, "experts": 24, "microbatches": 1,
    "language": ParallelSpec(2, pp=1, ep=2), "vision": ParallelSpec(2),
}  # fmt: skip
"""The largest weights are those of experts, of which a rank sums half with the other replica."""


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    replicas = draw.choice([1, 1, 2])
    tp = draw.choice([1, 1, 2]) if replicas == 1 else 1
    stages = draw.choice([1, 2]) if tp * replicas > 1 else draw.choice([1, 2, 3])
    chunks = draw.choice([1, 1, 2]) if stages == 2 else 1
    colocated = draw.random() < 0.4
    microbatches = draw.choice([2, 4])
    # One sample a microbatch: of several, attention on a CPU keeps queries, keys and values once more, reordered,
    # which layers measured on one sample do not tell; kernels on GPUs need no copies.
    count = replicas * microbatches
    dtype = draw.choice([torch.float32, torch.bfloat16])
    frozen = draw.choice([(), (), ("vision.encoder",), ("vision.encoder", "language")])
    # Without a row that asks for a gradient a frozen language model keeps nothing, which the planner does not know.
    fewest = 1 if "language" in frozen else 0
    families = ["interleaved"] if chunks > 1 else ["1f1b", "eager", "gpipe", "zb-h1"]
    return Drawn(
        dtype=dtype,
        width=draw.choice([64, 96]),
        blocks=draw.choice([4, 5, 6]),
        vocabulary=draw.choice([200, 1500]),
        texts=tuple(draw.randint(200, 700) for _ in range(count)),
        images=tuple(max(fewest, draw.choice([0, 1, 1, 2, 3])) for _ in range(count)),
        recompute=draw.choice(["none", "none", "block", "block_keep_attention"]),
        frozen=frozen,
        language=ParallelSpec(replicas, tp, pp=stages, chunks=chunks),
        vision=ParallelSpec(replicas, tp if colocated else 1, pp=1),
        colocated=colocated,
        family=draw.choice(families),
        microbatches=microbatches,
        loss_chunk=draw.choice([None, None, 128]),
        word=draw.choice(SHARDS) if replicas > 1 else "none",
    )


def _held(worker: Worker, case: Drawn) -> int:
    """Return the peak bytes of a rank in its second step."""
    torch.set_num_threads(1)
    comm = Comm(worker.store, worker.rank, worker.size)
    samples, (assignment, schedule) = case.samples(), case.step()
    with LiveStorages(resizing=bool(case.shard())) as live:
        runtime = Runtime(
            case.model(),
            case.plan(),
            comm,
            layout=StateLayout("node", bucket_bytes=1 << 16, shard=case.shard()),
            execution=Execution(precision=case.dtype),
        )
        optimizer = build_optimizer(runtime.owned.parameters, OptimizerConfig(), lambda pattern: frozenset())
        step = runtime.prepare(samples, assignment, schedule)
        runtime.execute(samples, step)
        optimizer.step()
        runtime.owned.gather()
        optimizer.zero_grad()
        live.reset_peak()
        runtime.execute(samples, step)
        peak = live.peak
    runtime.close()
    comm.close()
    return peak


def predicted(case: Drawn) -> np.ndarray:
    model, plan = case.model(), case.plan()
    found = describe_model(model, dict.fromkeys(model.units, case.recompute))
    degrees = sorted({(stage.stage.tp, 1) for stage in plan.stages()})
    probes = [
        replace(
            layer_probe(
                replace(entry, unit=tensor_shard(entry.unit, tp)) if entry.is_divided else entry,
                pick_device(),
                case.dtype,
            ),
            degrees=Degrees(tp),
        )
        for entry in found.types
        for tp, _ in degrees
    ]
    tokens, samples = case.tokens(), case.samples()
    counts = [count for count in (128, 256, 512, 1024) if count < 2 * max(tokens["language"])]
    measured = profile_layers(probes, "here", str(case.dtype)[6:], counts, repeats=1)
    targets = sum((one.labels >= 0).sum() for one in samples) / sum(tokens["language"])
    costs = costs_in_use(measured, found, targets, max(tokens["language"]) * 4, case.loss_chunk)
    assignment, schedule = case.step()
    rules = replace(RULES[case.dtype], zero="node", host_link=1e30, shard=tuple(case.shard().items()))
    stages = stage_costs(plan, found.spec, costs, rules)
    squares = {"vision": np.array(tokens["vision"]) * float(IMAGE_TOKENS)}
    timeline = predict(plan, assignment, schedule, stages, tokens, squares=squares)
    assert timeline.peak_bytes is not None
    return timeline.peak_bytes


def uncounted(case: Drawn) -> int:
    """Return the bytes that the planner does not count: rows of one more message, received early or sent and not yet
    freed; and fp32 copies for products of bf16 weight gradients on a CPU, at least of hidden states."""
    numbers = max(case.tokens()["language"]) * case.width
    return numbers * (case.dtype.itemsize + (4 if case.dtype == torch.bfloat16 else 0))


def check(workers: WorkerPool, seed: int, **instead: Any) -> np.ndarray:
    """Check that predicted peaks are within 5 % of measured ones, apart from `uncounted`; return relative errors.
    instead: of what was drawn."""
    case = replace(drawn(seed), **instead)
    said = predicted(case)
    held = np.array(workers.run(_held, len(case.plan().ranks), case))
    print(f"seed {seed}: {np.round(said / held - 1, 3).tolist()} of {held.tolist()} bytes, {case}")
    assert (np.abs(said - held) <= 0.05 * held + uncounted(case)).all()
    return np.asarray(np.abs(said / held - 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "instead"),
    [
        (7, {}),
        (7, {"recompute": "block_offload"}),
        (5, {"recompute": "block_offload"}),
        (5, {"word": "weights"}),
        (6, {"word": "weights"}),
        (7, IN_GROUPS),
        (7, MANY_EXPERTS),
        (5, {"word": "weights", "frozen": ("vision.encoder",)}),
        (6, {"word": "weights", "frozen": ("vision.encoder", "language")}),
        (5, {"word": "weights_by_step", "frozen": ("vision.encoder", "language")}),
    ],
)
def test_peak_memory_of_random_step_matches_planner_on_each_rank(
    workers: WorkerPool, seed: int, instead: dict[str, Any]
) -> None:
    check(workers, seed, **instead)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_peaks_of_drawn_steps_are_within_five_percent_on_average(workers: WorkerPool) -> None:
    assert np.mean([check(workers, seed).mean() for seed in range(CASES)]) <= 0.05

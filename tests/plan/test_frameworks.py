"""Plans for other frameworks: every plan that the search looks at is one that they can run, and its flags say it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cases.model_cases import cluster, cost_model, model, unit
from cases.search_cases import RULES, closed_form, open_space, search
from dilatant.plan import Workload
from dilatant.plan.framework_flags import framework_flags
from dilatant.plan.rank_mapping import RankOrder, map_ranks
from dilatant.plan.search.framework_models import FRAMEWORK_MODELS
from dilatant.plan.search.frameworks import FRAMEWORKS

DEVICES, BATCH, BLOCKS = 16, 16, 16
MEGATRONS = ("megatron", "megatron-bridge", "ms-swift")


def case(encoders):
    """A model, costs, two nodes of eight and their samples."""
    units = [unit("vision", 3, ("language",))] if encoders else []
    kinds = {"language": 1e-3, "vision": 1e-4}
    costs = cost_model(kinds, degrees=((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)))
    workload = Workload({kind: np.full(BATCH, 4.0) for kind in kinds})
    return model(*units, unit("language", BLOCKS + 2)), costs, cluster(2, 8), workload


def looked_at(name, encoders):
    """All plans that a framework's search may simulate, with their microbatches."""
    spec, costs, machine, workload = case(encoders)
    space = open_space(spec, costs, machine, workload, BATCH, RULES, chunks=(1, 2, 4), microbatch_sizes=(1, 2))
    layers = {one.name: len(one.layers) for one in spec.units}
    feeds = {one.name: one.feeds for one in spec.units}
    return [
        (map_ranks(one.chains, layers, feeds, machine, RankOrder.REPLICAS), one.num_microbatches)
        for one in FRAMEWORKS[name].candidates(space)
    ]


def test_a_search_keeps_the_order_of_ranks():
    spec, costs, machine, workload = case(encoders=False)
    score, seen = closed_form(spec, costs, {"language": 4.0}, BATCH), []

    def recorded(plan, microbatches, *_):
        seen.append(plan)
        return score(plan, microbatches)

    def only(space):
        return [one for one in FRAMEWORKS["megatron"].candidates(space) if one.options[0].stages > 1]

    search(spec, costs, machine, workload, BATCH, recorded, only=only, orders=(RankOrder.REPLICAS,))
    assert seen
    for plan in seen:  # the replicas of a stage are neighbours
        first, second, *_ = plan.unit("language").replicas[0].stages
        assert second.ranks[0] - first.ranks[0] == DEVICES // shape_of(plan)[0]


def shape_of(plan):
    stages = plan.unit("language").replicas[0].stages
    groups = len({stage.ranks for stage in stages})
    return groups, len(stages) // groups, *stages[0].degrees.axes


def blocks_of(plan):
    counts = [stage.end - stage.first for stage in plan.unit("language").replicas[0].stages]
    counts[0] -= 1  # the embedding
    counts[-1] -= 1  # the head
    return counts


def all_equal(values):
    return len({*values}) == 1


@pytest.mark.parametrize("encoders", [False, True])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_plans_stay_within_a_frameworks_limits(name, encoders):
    found = looked_at(name, encoders)
    for plan, microbatches in found:
        pp, chunks, tp, cp = shape_of(plan)
        replicas, blocks = plan.unit("language").replicas, blocks_of(plan)
        assert len(replicas) * pp * tp * cp == DEVICES == len(plan.ranks)
        assert BATCH % (len(replicas) * microbatches) == 0
        assert all_equal(stage.degrees for one in plan.units for each in one.replicas for stage in each.stages)
        assert all_equal(tuple((stage.first, stage.end) for stage in each.stages) for each in replicas)
        for own, host in zip(plan.unit("vision").replicas if encoders else (), replicas):
            assert [stage.ranks for stage in own.stages] == [host.stages[0].ranks]
        if name in MEGATRONS:
            assert all_equal(blocks)
            assert chunks == 1 or microbatches % pp == 0
        if name == "torchtitan":
            weighed = [*blocks]
            weighed[0] += 1
            weighed[-1] += 1
            assert len(weighed) == 1 or max(weighed) - min(weighed) <= 1
            assert chunks in (1, 2)
            assert not encoders or cp == 1
        if name == "automodel":
            assert max(blocks) - min(blocks) <= 1
            assert chunks == 1
        if name == "veomni":
            assert (pp, chunks, tp) == (1, 1, 1)
    widest = [max(values) for values in zip(*(shape_of(plan) for plan, _ in found), strict=True)]
    expected = {"torchtitan": [4, 2, 4, 1 if encoders else 4], "automodel": [4, 1, 4, 4], "veomni": [1, 1, 1, 4]}
    assert all(most >= least for most, least in zip(widest, expected.get(name, [4, 2, 4, 4]), strict=True))


def test_automodel_has_no_tensor_parallel_groups_beside_experts():
    spec, costs, machine, workload = case(encoders=False)
    (language,) = spec.units
    layers = tuple(replace(one, experts=4, expert_parameters=900) for one in language.layers)
    space = open_space(model(replace(language, layers=layers)), costs, machine, workload, BATCH, RULES)
    widest = {
        name: max(max(one.options[0].chain.degrees.tp for one in FRAMEWORKS[name].candidates(space)), 1)
        for name in ("automodel", "megatron")
    }
    assert widest == {"automodel": 1, "megatron": 4}


SWITCH, WORD = {"true", "false"}, {"full", "uniform", "1F1B", "Interleaved1F1B"}
FACTS = {
    "megatron": (
        "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size "
        "expert-tensor-parallel-size micro-batch-size global-batch-size num-virtual-stages-per-pipeline-rank "
        "recompute-num-layers",
        "recompute-granularity recompute-method sequence-parallel use-distributed-optimizer",
    ),
    "ms-swift": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size micro_batch_size global_batch_size virtual_pipeline_model_parallel_size "
        "recompute_num_layers",
        "recompute_granularity recompute_method sequence_parallel use_distributed_optimizer",
    ),
    "megatron-bridge": (
        "model.tensor_model_parallel_size model.pipeline_model_parallel_size model.context_parallel_size "
        "model.expert_model_parallel_size model.expert_tensor_parallel_size "
        "model.virtual_pipeline_model_parallel_size model.recompute_num_layers train.micro_batch_size "
        "train.global_batch_size",
        "model.recompute_granularity model.recompute_method model.sequence_parallel ddp.use_distributed_optimizer",
    ),
    "torchtitan": (
        "training.local_batch_size training.global_batch_size parallelism.data_parallel_replicate_degree "
        "parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree "
        "parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_microbatch_size "
        "parallelism.context_parallel_degree parallelism.expert_parallel_degree",
        "parallelism.pipeline_parallel_schedule",
    ),
    "automodel": (
        "distributed.tp_size distributed.pp_size distributed.cp_size distributed.ep_size "
        "distributed.dp_replicate_size distributed.pipeline.pp_microbatch_size step_scheduler.local_batch_size "
        "step_scheduler.global_batch_size",
        "distributed.activation_checkpointing",
    ),
    "veomni": (
        "train.accelerator.dp_replicate_size train.accelerator.dp_shard_size train.accelerator.ep_size "
        "train.accelerator.ulysses_size train.micro_batch_size train.global_batch_size",
        "train.gradient_checkpointing.enable",
    ),
}
"""Arguments of whole numbers, and those of words and switches: fields of the config classes in the wheels of
megatron-core 0.16.1, ms-swift 4.6.0, megatron-bridge 0.3.1, torchtitan 0.3.0, nemo-automodel 0.7.0 and veomni 0.1.12,
read on 2026-11-27."""
DIVIDES = {
    "torchtitan": "replicate_degree shard_degree tensor_parallel pipeline_parallel_degree context_parallel",
    "veomni": "replicate_size shard_size ulysses",
}
"""Words in the arguments whose product is the number of devices."""


def parsed(name, command):
    """The arguments of a command line by these facts."""
    numbers, words = (own.split() for own in FACTS[name])
    found, texts = {}, command.replace("=", " ").split()
    while texts:
        key = texts.pop(0).removeprefix("--")
        value = texts.pop(0) if texts and not texts[0].startswith("--") else "true"
        assert key in (*numbers, *words)
        if key in words:
            assert value in SWITCH | WORD
        found[key] = value if key in words else int(value)
    return found


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_flags_parse_and_say_the_plan(name, recompute):
    for plan, microbatches in looked_at(name, encoders=True):
        zero = FRAMEWORKS[name].sharing[0][0]
        written = framework_flags(plan, name, "language", BATCH, microbatches, zero, recompute)
        assert all("activation_checkpoint" in lost for lost in written.lost)
        found = parsed(name, written.command())
        if words := DIVIDES.get(name):
            chosen = [value for key, value in found.items() if any(word in key for word in words.split())]
            assert math.prod(chosen) == DEVICES
        size = BATCH // (len(plan.unit("language").replicas) * microbatches)
        assert size in [value for key, value in found.items() if "micro" in key or "local" in key]
        if name != "torchtitan":
            assert (recompute == "block") == any(
                value in ("full", "true") for key, value in found.items() if "recompute" in key or "checkpoint" in key
            )


@pytest.mark.parametrize(
    ("name", "stages", "blocks"),
    [("torchtitan", 4, [8, 9, 8, 7]), ("torchtitan", 3, [11, 11, 10]), ("automodel", 3, [11, 11, 10]),
     ("megatron", 4, [8, 8, 8, 8]), ("megatron", 3, None)],
)  # fmt: skip
def test_stages_are_cut_as_the_framework_cuts(name, stages, blocks):
    """Of 32 blocks; torchtitan's and AutoModel's numbers are what their own functions return."""
    cuts = FRAMEWORKS[name].cuts(34, stages)
    if blocks is None:
        assert cuts is None
        return
    counts = np.diff([*cuts, 34])
    counts[0] -= 1
    counts[-1] -= 1
    assert counts.tolist() == blocks


SOUND = {"audio": "audio"}


@pytest.mark.parametrize(
    ("name", "family", "encoders", "generators", "is_whole", "says"),
    [
        ("torchtitan", "llama", {}, 0, False, ""),
        ("torchtitan", "mistral", {}, 0, False, "torchtitan 0.3.0 runs mistral by its experiment"),
        ("torchtitan", "qwen2_5_vl", {}, 0, True, "torchtitan 0.3.0 has no model like this, qwen2_5_vl: the flags"),
        ("torchtitan", "qwen3", SOUND, 0, False, "no model like this, audio encoders joined to a language model"),
        ("veomni", "qwen2_5_omni_thinker", {}, 0, True, ""),
        ("ms-swift", "qwen2_5_omni_thinker", {}, 0, True, ""),
        ("megatron-bridge", "qwen2_5_omni_thinker", {}, 0, True, "has no model like this, qwen2_5_omni: "),
        ("megatron", "llama", {"vision": "image"}, 0, False, "by its GPTModel, whose own flags"),
        ("megatron", "llama", {"vision": "image", **SOUND}, 1, False, "image encoders, audio encoders, generators"),
        ("megatron", "qwen3_vl", {}, 0, True, "has no model like this, qwen3_vl: "),
        ("automodel", "idefics3", {}, 0, True, ""),
        ("automodel", "qwen3", {"vision": "image"}, 0, False, "has no model like this, image encoders joined"),
    ],
)  # fmt: skip
def test_what_of_a_model_a_framework_lacks_is_said(name, family, encoders, generators, is_whole, says):
    note = FRAMEWORK_MODELS[name].note(family, encoders, generators, is_whole)
    assert says in note
    assert bool(says) == bool(note)


def test_every_framework_has_its_models():
    assert FRAMEWORK_MODELS.keys() == FRAMEWORKS.keys()

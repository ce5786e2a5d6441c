"""A plan's layout as the flags of other frameworks: Megatron-Core's `pretrain_*.py`, Megatron-Bridge's overrides,
ms-swift's `megatron sft`, torchtitan, NeMo AutoModel and VeOmni."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.config.memory_modes import Recompute
from dilatant.plan.plan import Plan, Stage, UnitPlan
from dilatant.plan.search.frameworks import FRAMEWORKS

_CORE = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "whole",
    "micro-batch-size": "size",
    "global-batch-size": "batch",
    "seq-length": "length",
    "num-virtual-stages-per-pipeline-rank": "chunks",
    "sequence-parallel": "sequence",
    "use-distributed-optimizer": "distributed",
    "recompute-granularity": "granularity",
    "recompute-method": "method",
    "recompute-num-layers": "each",
}
_TITAN, _AUTO, _VEOMNI = "--parallelism.", "--distributed.", "--train.accelerator."
_FLAGS = {
    "megatron": {f"--{flag}": name for flag, name in _CORE.items()},
    "megatron-bridge": {
        f"{'train' if 'batch' in flag else 'ddp' if 'optimizer' in flag else 'model'}.{flag.replace('-', '_')}": name
        for flag, name in _CORE.items()
        if name != "chunks"
    }
    | {"model.virtual_pipeline_model_parallel_size": "chunks"},
    "ms-swift": {
        f"--{flag.replace('-', '_')}": name for flag, name in _CORE.items() if name not in ("chunks", "length")
    }
    | {"--virtual_pipeline_model_parallel_size": "chunks", "--max_length": "length"},
    "torchtitan": {
        f"{_TITAN}tensor_parallel_degree": "tp",
        f"{_TITAN}pipeline_parallel_degree": "pp",
        f"{_TITAN}pipeline_parallel_schedule": "schedule",
        f"{_TITAN}pipeline_parallel_microbatch_size": "size",
        f"{_TITAN}context_parallel_degree": "cp",
        f"{_TITAN}expert_parallel_degree": "ep",
        f"{_TITAN}data_parallel_shard_degree": "shard",
        f"{_TITAN}data_parallel_replicate_degree": "replicate",
        "--training.local_batch_size": "local",
        "--training.global_batch_size": "batch",
        "--training.seq_len": "length",
    },
    "automodel": {
        f"{_AUTO}tp_size": "tp",
        f"{_AUTO}pp_size": "pp",
        f"{_AUTO}cp_size": "cp",
        f"{_AUTO}ep_size": "ep",
        f"{_AUTO}dp_replicate_size": "replicate",
        f"{_AUTO}activation_checkpointing": "again",
        f"{_AUTO}pipeline.pp_microbatch_size": "in_pipeline",
        "--step_scheduler.local_batch_size": "local",
        "--step_scheduler.global_batch_size": "batch",
    },
    "veomni": {
        f"{_VEOMNI}ulysses_size": "cp",
        f"{_VEOMNI}ep_size": "ep",
        f"{_VEOMNI}dp_shard_size": "shard",
        f"{_VEOMNI}dp_replicate_size": "replicate",
        "--train.gradient_checkpointing.enable": "again",
        "--train.micro_batch_size": "size",
        "--train.global_batch_size": "batch",
        "--data.max_seq_len": "length",
    },
}
"""By framework: its flags, and which value of `framework_flags` each takes; without a value a flag is left out."""


@dataclass(frozen=True, slots=True)
class FrameworkFlags:
    """`flags` with values, "" for those that have none. `lost`: what of the plan the framework cannot run."""

    flags: dict[str, str | int]
    lost: tuple[str, ...]

    def command(self) -> str:
        """Return the flags as one line of a shell."""
        pairs = ((flag, " " if flag.startswith("-") else "=", value) for flag, value in self.flags.items())
        return " ".join(f"{flag}{between}{value}".strip() for flag, between, value in pairs)


def framework_flags(
    plan: Plan,
    framework: str,
    unit: str,
    batch: int,
    microbatches: int,
    zero: str = "none",
    recompute: Recompute = "none",
    length: int | None = None,
) -> FrameworkFlags:
    """Return the flags for the layout of the language model `unit`, which all units share there. batch: samples of a
    step; microbatches: of a replica. framework: a key of `FRAMEWORKS`. recompute: of all blocks, if the plan leaves it
    to the config. length: tokens of the longest sample."""
    chosen = plan.unit(unit)
    stages, replicas = chosen.replicas[0].stages, len(chosen.replicas)
    groups = len({stage.ranks for stage in stages})
    degrees, names = max(stage.degrees for stage in stages), {*_FLAGS[framework].values()}
    replicas *= degrees.groups
    chunks, size = len(stages) // groups, max(1, batch // (replicas * microbatches))
    again = chosen.recompute or (recompute,)
    kinds = {"block" if how == "block_offload" else how for how in again} - {"none"}
    others = [other.name for other in plan.units if other.name != unit and not _is_in_first_stage(other, chosen)]
    lost = [f"stages, replicas or degrees of their own: {other!r} runs in the first stage" for other in others]
    if len({replica.shape for replica in chosen.replicas}) > 1 or len({one.degrees for one in stages}) > 1:
        lost.append("replicas or stages of unlike shape: all are as the first replica's largest")
    firsts = tuple(stage.first for stage in stages)
    if framework != "veomni" and firsts != FRAMEWORKS[framework].cuts(stages[-1].end, len(stages)):
        lost.append("cuts by what layers take: stages get equal numbers of blocks")
    if "block_offload" in again:
        lost.append("inputs of blocks in host memory: they stay on the device")
    if kinds and "none" in again:
        lost.append("recomputation of some blocks only: all are recomputed")
    of_core = framework in ("megatron", "megatron-bridge", "ms-swift")
    if of_core and kinds and "block" not in kinds:
        lost.append("keeping attention alone: its selective recomputation keeps the rest")
    if framework == "torchtitan" and kinds:
        lost.append(
            "recomputation by a flag: name FullAC or SelectiveAC as activation_checkpoint in the config function"
        )
    if framework == "veomni" and (others_of := degrees.tp * groups) > 1:
        lost.append(f"tensor parallelism and pipelines: {others_of} times as many ranks share the batch")
        replicas, names = replicas * others_of, {*names, "tp"}
    lost += [f"{name} {n}: it has no flag" for name, n in degrees._asdict().items() if n > 1 and name not in names]
    shared = (replicas * degrees.cp if zero == "all" else 1) > 1
    on, full = "" if framework == "megatron" else "true", of_core and "block" in kinds
    values: dict[str, str | int | None] = {
        **degrees._asdict(),
        "pp": groups,
        "size": size,
        "batch": batch,
        "length": length,
        "whole": 1 if degrees.ep > 1 else None,  # else each expert is divided by tp
        "chunks": chunks if chunks > 1 else None,
        "sequence": on if degrees.tp > 1 else None,
        "distributed": on if zero != "none" else None,
        "granularity": "full" if full else None,
        "method": "uniform" if full else None,
        "each": 1 if full else None,
        "schedule": "Interleaved1F1B" if chunks > 1 else "1F1B",
        "shard": replicas if shared else 1,
        "replicate": 1 if shared else replicas,
        "local": size if groups == 1 else batch // replicas,
        "in_pipeline": size if groups > 1 else None,
        "again": "true" if kinds else "false",
    }
    flags = {flag: values[name] for flag, name in _FLAGS[framework].items()}
    return FrameworkFlags({flag: value for flag, value in flags.items() if value is not None}, tuple(lost))


def _is_in_first_stage(other: UnitPlan, host: UnitPlan) -> bool:
    """Return True if each replica of a unit is one stage, on the ranks of the host's first stage, as its guest."""

    def places(stages: tuple[Stage, ...]) -> list[object]:
        return [(stage.ranks, stage.degrees.of_guests) for stage in stages]

    return [places(own.stages) for own in other.replicas] == [places(own.stages[:1]) for own in host.replicas]

"""A plan's layout as the flags of other frameworks: Megatron-Core's `pretrain_*.py` (Megatron-Bridge's recipes have
the same names as keys), ms-swift's `megatron sft`, and torchtitan."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.plan.plan import Plan

FRAMEWORKS = ("megatron", "ms-swift", "torchtitan")
MEGATRON = {"tp": "--tensor-model-parallel-size", "cp": "--context-parallel-size", "ep": "--expert-model-parallel-size"}
TORCHTITAN = {
    "tp": "--parallelism.tensor_parallel_degree",
    "cp": "--parallelism.context_parallel_degree",
    "ep": "--parallelism.expert_parallel_degree",
}
"""Field of `Degrees` → its flag."""


@dataclass(frozen=True, slots=True)
class FrameworkFlags:
    """`flags` with values, "" for those that have none. `lost`: what of the plan the framework cannot run."""

    flags: dict[str, str | int]
    lost: tuple[str, ...]

    def command(self) -> str:
        """Return the flags as one line of a shell."""
        return " ".join(f"{flag} {value}".strip() for flag, value in self.flags.items())


def framework_flags(
    plan: Plan, framework: str, unit: str, batch: int, microbatches: int, zero: str = "none"
) -> FrameworkFlags:
    """Return the flags for the layout of the language model `unit`, which all units share there. batch: samples of a
    step; microbatches: of a replica. framework: one of `FRAMEWORKS`."""
    chosen = plan.unit(unit)
    stages, replicas = chosen.replicas[0].stages, len(chosen.replicas)
    groups = len({stage.ranks for stage in stages})
    degrees, names = max(stage.degrees for stage in stages), TORCHTITAN if framework == "torchtitan" else MEGATRON
    flags: dict[str, str | int] = {flag: getattr(degrees, name) for name, flag in names.items()}
    chunks, size = len(stages) // groups, max(1, batch // (replicas * microbatches))
    kinds = {"block" if how == "block_offload" else how for how in chosen.recompute} - {"none"}
    others = [other.name for other in plan.units if other.name != unit]
    lost = [f"stages and replicas of their own: {other!r} runs in the first stage" for other in others]
    if len({replica.shape for replica in chosen.replicas}) > 1 or len({one.degrees for one in stages}) > 1:
        lost.append("replicas or stages of unlike shape: all are as the first replica's largest")
    if len({stage.end - stage.first for stage in stages[1:-1]}) > 1:
        lost.append("cuts by what layers take: stages get equal numbers of blocks")
    if "block_offload" in chosen.recompute:
        lost.append("inputs of blocks in host memory: they stay on the device")
    if kinds and "none" in chosen.recompute:
        lost.append("recomputation of some blocks only: all are recomputed")
    lost += [f"{name} {n}: it has no flag" for name, n in degrees._asdict().items() if n > 1 and name not in names]
    if framework == "torchtitan":
        shared = replicas * degrees.cp if zero == "all" else 1
        flags |= {
            "--parallelism.pipeline_parallel_degree": groups,
            "--parallelism.pipeline_parallel_schedule": "Interleaved1F1B" if chunks > 1 else "1F1B",
            "--parallelism.pipeline_parallel_microbatch_size": size,
            "--parallelism.data_parallel_shard_degree": replicas if shared > 1 else 1,
            "--parallelism.data_parallel_replicate_degree": 1 if shared > 1 else replicas,
            "--training.local_batch_size": size if groups == 1 else batch // replicas,
            "--training.global_batch_size": batch,
            "--activation_checkpoint.mode": "full" if "block" in kinds else "selective" if kinds else "none",
        }
        return FrameworkFlags(flags, tuple(lost))
    flags |= {"--pipeline-model-parallel-size": groups, "--micro-batch-size": size, "--global-batch-size": batch}
    flags |= {"--num-virtual-stages-per-pipeline-rank": chunks} if chunks > 1 else {}
    flags |= {"--sequence-parallel": ""} if degrees.tp > 1 else {}
    flags |= {"--use-distributed-optimizer": ""} if zero != "none" else {}
    if "block" in kinds:
        flags |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    elif kinds:
        lost.append("keeping attention alone: its selective recomputation keeps the rest")
    if framework == "ms-swift":
        flags = {
            flag[:2] + flag[2:].replace("-", "_"): "true" if value == "" else value for flag, value in flags.items()
        }
    return FrameworkFlags(flags, tuple(lost))

"""Other frameworks divide experts among replicas: such layouts are searched for them, and their flags say them."""

from __future__ import annotations

from pathlib import Path

from cases.planning.planned_project import text_config
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.other_frameworks import plan_for
from dilatant.planning.planning import PlannedRun, plan_run, planning_problem

GPUS, BATCH = 8, 32
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 4}
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, **SIZES}


def mixture(folder: Path) -> PlannedRun:
    """A model whose experts have nine tenths of its weights, planned on eight GPUs."""
    asked = text_config(folder, MIXTRAL, BATCH, (1500, 400), cluster={"hardware": "H100", "gpus_per_node": GPUS})
    return plan_run(planning_problem(asked, assemble_samples(asked)))


def test_replicas_divide_experts_whose_sums_take_long(tmp_path: Path) -> None:
    """Whole replicas would sum all experts' gradients over eight GPUs; divided among them, nothing is to be summed."""
    planned = mixture(tmp_path)
    found = plan_for(planned, "megatron-bridge")
    assert found.flags["model.expert_model_parallel_size"] == GPUS
    assert found.flags["model.expert_tensor_parallel_size"] == 1
    assert found.flags["model.context_parallel_size"] == found.flags["model.tensor_model_parallel_size"] == 1
    assert found.flags["train.micro_batch_size"] in (1, 2)
    assert found.flags["train.global_batch_size"] == BATCH
    assert any(line.startswith("Its experts are divided among 8 replicas") for line in found.sentences)

"""A run whose ranks share layers is the run of one process, and goes on under any other layout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from cases.tiny_project import Dilatant, tiny_config

SHARED = {
    "units": {"vision": {"tp": 2}, "language": {"tp": 2, "pp": 2}},
    "colocated": {"vision": "language"},
    "microbatches": 2,
}
ITEMS = {**SHARED, "units": {"vision": {"cp": 2}, "language": {"tp": 2, "pp": 2}}}
CONTEXT = {"units": {"vision": {}, "language": {"replicas": 2, "cp": 2}}, "microbatches": 2}
EXPERTS = {"units": {"vision": {}, "language": {"tp": 2, "cp": 2, "ep": 4}}, "microbatches": 2}
GROUPS = {"units": {"language": {"replicas": 2, "ep": 2}}, "colocated": {"vision": "language"}, "microbatches": 2}
UNLIKE = {"units": {"vision": {}, "language": {"tp": 2, "replicas": 2}}, "microbatches": 2}


@pytest.fixture
def project(project: Path) -> Path:
    """A frozen encoder, so that there are boxes that no optimizer owns."""
    tree = tiny_config(save_steps=2, keep_checkpoints=3)
    tree["model"]["freeze"] = ["vision.encoder"]
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project


def layout(parallel: dict) -> tuple[str, str]:
    return "--set", f"parallel={json.dumps(parallel)}"


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def go_back(run: Path, number: int) -> None:
    """To the checkpoint of step `number`."""
    for later in range(number + 2, 7, 2):
        shutil.rmtree(run / "checkpoints" / f"step-{later:08d}")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [SHARED, ITEMS], ids=["layers", "items"])
def test_tensor_parallel_runs_resume_under_other_layouts(project: Path, dilatant: Dilatant, shared: dict) -> None:
    config, one, run = project / "config.yaml", project / "one", project / "run"
    dilatant("train", config, "--set", "output_dir=one")
    code, _, err = dilatant("train", config, *layout(shared))
    assert code == 0, err
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    exported, expected = (load_file(of / "export/language/model.safetensors") for of in (run, one))
    code, out, err = dilatant("simulate", run)
    assert code == 0, err
    assert "A measured step took" in out
    assert {key: tensor.shape for key, tensor in exported.items()} == {
        key: tensor.shape for key, tensor in expected.items()
    }
    for step, parallel in ((2, layout(CONTEXT)), (4, ("--set", "parallel=single"))):
        go_back(run, step)
        code, _, err = dilatant("resume", run, *parallel)
        assert code == 0, err
        assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    go_back(run, 4)  # and from one process to replicas of ranks that share layers
    code, _, err = dilatant("resume", run, *layout(UNLIKE))
    assert code == 0, err
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.slow
def test_expert_parallel_runs_resume_under_other_layouts(project: Path, dilatant: Dilatant) -> None:
    tree = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))
    tree["model"]["language_model"]["config"] |= {
        "model_type": "mixtral", "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.1,
    }  # fmt: skip
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    config, one, run = project / "config.yaml", project / "one", project / "run"
    dilatant("train", config, "--set", "output_dir=one")
    code, _, err = dilatant("train", config, *layout(EXPERTS))
    assert code == 0, err
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    exported, expected = (load_file(of / "export/language/model.safetensors") for of in (run, one))
    assert {key: tensor.shape for key, tensor in exported.items()} == {
        key: tensor.shape for key, tensor in expected.items()
    }
    for step, parallel in ((2, layout(UNLIKE)), (2, layout(GROUPS)), (4, ("--set", "parallel=single"))):
        go_back(run, step)
        code, _, err = dilatant("resume", run, *parallel)
        assert code == 0, err
        assert losses(run) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cp": 2, "ep": 2}, "ep is 2, but it has no experts that ranks could divide; leave ep out"),
        ({"tp": 3}, "2 attention heads cannot be shared by 3 ranks; it takes tp 1, 2"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_are_refused_with_those_that_do(
    project: Path, dilatant: Dilatant, changes: dict[str, int], said: str
) -> None:
    parallel = {"units": {"vision": {}, "language": changes}}
    code, _, err = dilatant("train", project / "config.yaml", *layout(parallel))
    assert code == 2
    assert re.search(said, " ".join(err.split())), err
    assert not (project / "run" / "metrics.jsonl").exists()

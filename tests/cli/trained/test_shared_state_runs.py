"""A run whose ranks share the optimizer's state is the run of one process, and goes on under any other layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from cases.tiny_project import Dilatant, tiny_config
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.report.plan_report import PlanReport


def layout(replicas: int) -> tuple[str, str]:
    units = {"units": {"vision": {}, "language": {"replicas": replicas}}, "colocated": {"vision": "language"}}
    return "--set", f"parallel={json.dumps(units)}"


@pytest.fixture
def project(project: Path) -> Path:
    tree = tiny_config(save_steps=2, keep_checkpoints=3)
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def stored(checkpoint: Path, kind: str) -> dict[str, torch.Tensor]:
    """Tensors by key; a key with `@` is a box."""
    tensors = {}
    for file in checkpoint.glob(f"part-*/{kind}.safetensors"):
        with safe_open(file, framework="pt") as reader:
            tensors |= {f"{file.parent.name}/{key}": reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    return tensors


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def go_back(run: Path, number: int) -> None:
    """To the checkpoint of step `number`."""
    for later in range(number + 2, 7, 2):
        shutil.rmtree(step(run, later))


@pytest.mark.slow
def test_state_of_three_ranks_resumes_in_one_and_two_ranks(project: Path, dilatant: Dilatant) -> None:
    config, one, run = project / "config.yaml", project / "one", project / "run"
    dilatant("train", config, "--set", "output_dir=one")
    # The vision unit has one replica, the language model three.
    shared = {"units": {"vision": {}, "language": {"replicas": 3}}, "microbatches": 2}
    code, _, err = dilatant("train", config, "--set", f"parallel={json.dumps(shared)}", "--set", "train.zero=all")
    assert code == 0, err
    whole, boxes = stored(step(one, 6), "optimizer"), stored(step(run, 6), "optimizer")
    assert any("@" in key for key in boxes)
    assert not any("@" in key for key in whole)
    moments = [sum(t.numel() for k, t in held.items() if "exp_avg" in k) for held in (whole, boxes)]
    assert moments[0] == moments[1]  # every number once
    by_rank = [sum(t.numel() for k, t in boxes.items() if f"part-0000{rank}/" in k) for rank in (1, 2, 3)]
    assert max(by_rank) <= 1.1 * min(by_rank)
    go_back(run, 2)
    code, _, err = dilatant("resume", run, "--set", "parallel=null", "--set", "train.zero=null")
    assert code == 0, err
    go_back(run, 4)  # which one process wrote
    code, _, err = dilatant("resume", run, *layout(2), "--set", "train.zero=node")
    assert code == 0, err
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    weights = stored(step(run, 6), "model")
    assert any("@" in key for key in weights)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4, "train": ["vision.projector"]}], ids=["all", "adapters"])
def test_checkpoints_of_sharded_weights_load_under_any_setting(
    project: Path, dilatant: Dilatant, lora: dict[str, Any] | None
) -> None:
    """With adapters on a pretrained base, a rank reads its parts of frozen weights, which are stored once for all."""
    config, one, run = project / "config.yaml", project / "one", project / "run"
    tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    if lora is not None:
        tokenizer, shape = load_tokenizer("bytes"), tree["model"]["language_model"]["config"]
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=len(tokenizer), **shape))
        for part in (base, tokenizer):
            part.save_pretrained(str(project / "base"))
        tree["model"] |= {"language_model": {"id": "base"}, "lora": lora}
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    dilatant("train", config, "--set", "output_dir=one")
    code, out, err = dilatant("train", config, *layout(3), "--set", "train.zero=all", "--set", "train.shard=weights")
    assert code == 0, err
    assert "they also share gradients and weights" in " ".join(out.split())
    assert json.loads((run / "plan.json").read_text())["step"]["shard"] == {"language": "weights"}
    assert any("@" in key for key in stored(step(run, 6), "model"))
    if lora is not None:
        stores = [safe_open(file, framework="pt") for file in (run / "checkpoints").glob("frozen/*")]
        assert any("@" in key for store in stores for key in store.keys())  # noqa: SIM118
    go_back(run, 2)
    code, _, err = dilatant(
        "resume", run, "--set", "parallel=null", "--set", "train.zero=null", "--set", "train.shard=null"
    )
    assert code == 0, err
    go_back(run, 4)  # which one process wrote
    code, _, err = dilatant(
        "resume", run, *layout(2), "--set", "train.zero=node", "--set", "train.shard={language: gradients}"
    )
    assert code == 0, err
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    code, _, err = dilatant("export", run)
    assert code == 0, err
    code, _, err = dilatant("train", config, "--set", "output_dir=refused", "--set", "train.shard=weights")
    assert code == 2
    assert "train.shard" in err
    assert "held by one rank" in err


@pytest.mark.slow
def test_tight_memory_plans_state_sharing_across_nodes(project: Path, dilatant: Dilatant) -> None:
    config, file = project / "config.yaml", project / "run" / "plan" / "plan.json"
    nodes = [f"cluster.{setting}" for setting in ("hardware=H100", "nodes=2", "gpus_per_node=1")]

    def planned(*more: str) -> PlanReport:
        settings = [word for setting in (*nodes, *more) for word in ("--set", setting)]
        code, out, err = dilatant("plan", config, *settings, "--json")
        assert code == 0, err
        return PlanReport.from_json(out)

    def peak(report: PlanReport) -> float:
        return max(one.peak_bytes - one.bytes_by_use.get("reserve", 0) for one in report.memory)

    inside, across = planned("train.zero=node"), planned("train.zero=all")
    assert peak(inside) > 1.2 * peak(across)
    roomy, tight = planned(), planned(f"cluster.memory_gib={1.1 * peak(across) / 2**30}")
    assert (roomy.zero, tight.zero) == ("node", "all")
    assert "zero none, node or all" in tight.searched
    assert any("shared by all ranks" in reason and "zero node" in reason for reason in tight.reasons)
    assert json.loads(file.read_text())["step"]["zero"] == "all"

    def simulated(*more: str) -> PlanReport:
        code, out, err = dilatant("simulate", file.parent, "--json", *more)
        assert code == 0, err
        return PlanReport.from_json(json.dumps(json.loads(out)["report"]))

    assert peak(simulated()) == peak(tight)
    assert peak(simulated("--set", "train.zero=node")) > 1.2 * peak(tight)

    def trained(folder: str, says: str) -> tuple[list[float], set[bool]]:
        """Losses, and whether there are keys of boxes."""
        sets = [f"parallel={{plan: {file}}}", f"output_dir={folder}", "train.device=cpu"]
        code, out, err = dilatant("train", config, *(word for one in sets for word in ("--set", one)))
        assert code == 0, err
        assert says in " ".join(out.split())
        assert json.loads((project / folder / "plan.json").read_text())["step"]["zero"] == folder
        return losses(project / folder), {"@" in key for key in stored(step(project / folder, 6), "optimizer")}

    dilatant("train", config, "--set", "output_dir=one")
    for zero, says, is_divided in (
        ("all", "all ranks that train the same weight share", True),
        ("none", "every rank keeps the optimizer state", False),
    ):
        document = json.loads(file.read_text())
        file.write_text(json.dumps({**document, "step": {**document["step"], "zero": zero}}))
        found, boxes = trained(zero, says)
        # fp32 sums in another order, which six optimizer steps amplify.
        assert found == pytest.approx(losses(project / "one"), rel=1e-4)
        assert (True in boxes) == is_divided


def test_requested_state_sharing_without_replicas_is_refused(project: Path, dilatant: Dilatant) -> None:
    code, _, err = dilatant("train", project / "config.yaml", "--set", "train.zero=node")
    assert code == 2
    assert "held by one rank" in err
    assert "replicas" in err
    assert not (project / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_muon_trains_alike_on_shared_state_and_resumes(project: Path, dilatant: Dilatant) -> None:
    """With whole-number sums of gradients, every layout has the same bits, so an update of part of a matrix shows."""
    config, one, run = project / "config.yaml", project / "one", project / "run"
    muon = ["--set", "train.optimizer.muon.weights=[language, vision]", "--set", "train.deterministic=true"]
    dilatant("train", config, "--set", "output_dir=one", *muon)
    code, _, err = dilatant("train", config, *layout(3), "--set", "train.zero=all", *muon)
    assert code == 0, err
    moments = stored(step(run, 6), "optimizer")
    matrices = [key for key in moments if key.endswith("momentum_buffer")]
    assert matrices
    assert not any("@" in key for key in matrices)
    assert losses(run) == losses(one)
    go_back(run, 2)
    code, _, err = dilatant("resume", run, "--set", "parallel=null", "--set", "train.zero=null")
    assert code == 0, err
    assert losses(run) == losses(one)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_muon_trains_alike_on_sharded_weights(project: Path, dilatant: Dilatant, shard: str) -> None:
    config = project / "config.yaml"
    muon = ["--set", "train.optimizer.muon.weights=[language]"]
    dilatant("train", config, "--set", "output_dir=one", *muon)
    code, _, err = dilatant("train", config, *layout(2), "--set", f"train.shard={shard}", *muon)
    assert code == 0, err
    # Gradients differ in their last bits, which the iteration in bf16 makes a part in 256 of few numbers of an update.
    assert losses(project / "run") == pytest.approx(losses(project / "one"), rel=2**-8)

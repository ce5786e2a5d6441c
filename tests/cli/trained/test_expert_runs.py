"""Runs whose replicas divide experts: adapters, shards, frozen experts and few samples, as one process trains them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cases.tiny_project import Dilatant, tiny_config

pytestmark = pytest.mark.slow

MIXTURE = {
    "model_type": "mixtral", "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip
LORA = {"r": 4, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def of(**language: int) -> dict[str, Any]:
    """The language model's layout; the encoder is on its ranks."""
    return {"units": {"language": language}, "colocated": {"vision": "language"}, "microbatches": 2}


def write(project: Path, **sections: dict[str, Any]) -> Path:
    tree = tiny_config(save_steps=2, keep_checkpoints=3)
    tree["model"]["language_model"]["config"] |= MIXTURE
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return project / "config.yaml"


def metrics(run: Path, key: str) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record[key] for record in records if key in record]


def trained(dilatant: Dilatant, config: Path, folder: str, parallel: dict[str, Any], **more: Any) -> Path:
    settings = {"output_dir": folder, "parallel": parallel, **more}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    code, _, err = dilatant("train", config, *given)
    assert code == 0, err
    return config.parent / folder


def resumed(dilatant: Dilatant, run: Path, parallel: dict[str, Any] | str) -> list[float]:
    """The losses of a run that goes on from its second step."""
    for later in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{later:08d}", ignore_errors=True)
    code, _, err = dilatant("resume", run, "--set", f"parallel={json.dumps(parallel)}")
    assert code == 0, err
    return metrics(run, "loss")


@pytest.mark.parametrize("layout", [of(replicas=2, ep=2), of(replicas=4, ep=4), of(tp=2)], ids=["2", "4", "tp 2"])
def test_adapters_of_experts(project: Path, dilatant: Dilatant, layout: dict[str, Any]) -> None:
    config = write(project, model={"lora": LORA})
    one, run = (trained(dilatant, config, name, how) for name, how in (("one", {}), ("run", layout)))
    # fp32 sums in another order; updates amplify what gradients differ by.
    for key in ("loss", "grad_norm"):
        assert metrics(run, key)[0] == pytest.approx(metrics(one, key)[0], rel=2e-6)
        assert metrics(run, key) == pytest.approx(metrics(one, key), rel=1e-4)
    files = [folder / "export/adapter/language/adapter_model.safetensors" for folder in (run, one)]
    found, expected = map(load_file, files)
    assert found.keys() == expected.keys()
    assert sum(".experts." in key for key in found) == 4  # of its only block
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-5)
    whole, wanted = (load_file(folder / "export/language/model.safetensors") for folder in (run, one))
    for key, tensor in whole.items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-3, atol=1e-5)
    assert resumed(dilatant, run, "single") == pytest.approx(metrics(one, "loss"), rel=1e-4)
    # It goes on from its own adapter: the first loss is that of the trained model.
    more = {"model.lora.adapter": str(run / "export/adapter")}
    again = [trained(dilatant, config, name, how, **more) for name, how in (("fresh", {}), ("spread", layout))]
    assert metrics(again[1], "loss") == pytest.approx(metrics(again[0], "loss"), rel=1e-4)
    assert metrics(again[0], "loss")[0] < metrics(one, "loss")[0]


KINDS = {
    "weights of four replicas are sharded": (of(replicas=4, ep=2), {"train.shard": "weights"}, 1e-6),
    "gradients are sharded": (of(replicas=2, ep=2), {"train.shard": "gradients"}, 1e-6),
    "blocks are compiled": (of(replicas=2, ep=2), {"train.compile": "blocks"}, 1e-6),
    # A token's rounding to 8 or 16 bits depends on the tokens beside it.
    "products are in FP8": (of(replicas=2, ep=2), {"train.precision": "fp8"}, 1e-3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_settings(project: Path, dilatant: Dilatant, kind: str) -> None:
    layout, settings, allowed = KINDS[kind]
    config, of_one = write(project), {key: value for key, value in settings.items() if key != "train.shard"}
    one, run = trained(dilatant, config, "one", {}, **of_one), trained(dilatant, config, "run", layout, **settings)
    assert metrics(run, "loss") == pytest.approx(metrics(one, "loss"), rel=allowed)


def test_one_sample_leaves_ranks_without_tokens_and_runs_go_on_under_other_ep(
    project: Path, dilatant: Dilatant
) -> None:
    """Of four ranks three have no sample; those of a sample visit two of its four experts at most for a token."""
    config = write(project, train={**tiny_config()["train"], "global_batch_size": 1, "save_steps": 2})
    one = trained(dilatant, config, "one", {})
    run = trained(dilatant, config, "run", {**of(replicas=4, ep=4), "microbatches": 1})
    for parallel in (of(replicas=2, ep=2), "single", of(replicas=4, ep=4)):
        assert metrics(run, "loss") == pytest.approx(metrics(one, "loss"), rel=1e-4)
        resumed(dilatant, run, {**parallel, "microbatches": 1} if isinstance(parallel, dict) else parallel)
    assert metrics(run, "loss") == pytest.approx(metrics(one, "loss"), rel=1e-4)

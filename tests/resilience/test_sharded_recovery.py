"""With sharded gradients and weights, too, a run continues after losses with the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant.config import load_config
from dilatant.training.run import train
from harness.faults.chaos import Fault, losses, run_with_faults

STEPS = 10
TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""


def project(folder: Path, replicas: int = 0, pp: int = 1, devices: int = 2, **train_: Any) -> Path:
    """Write a project with `replicas` of the model on nodes of `devices` ranks, or for one process."""
    folder.mkdir(parents=True, exist_ok=True)
    write_images(folder, 24)
    tree = tiny_config(steps=STEPS, global_batch_size=8, save_steps=None, schedule={"kind": "constant"}, **train_)
    tree["model"]["language_model"]["config"] |= {"num_hidden_layers": 4, "tie_word_embeddings": False}
    if replicas:
        units = {"language": {"replicas": replicas, "pp": pp}}
        tree["parallel"] = {"units": units, "colocated": {"vision": "language"}, "microbatches": 2}
        tree["resilience"] = {"enabled": True, "ranks_per_node": devices, "lease_seconds": 10.0, "fence_seconds": 60.0}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = project(tmp_path_factory.mktemp("alone"))
    train(load_config(folder / "config.yaml"))
    return losses(folder / "run")


@pytest.mark.parametrize("shard", ["weights", "gradients"])
def test_a_lost_node_of_sharded_replicas_is_replaced(tmp_path: Path, alone: list[float], shard: str) -> None:
    ended = run_with_faults(project(tmp_path, 4, shard=shard), Fault(4, "agent:0"))
    assert ended.exit_code == 0, ended.output
    print(ended.output)
    for line in (tmp_path / "run/resilience/rebuilds.jsonl").read_text().splitlines():
        print(line)
    assert ended.losses == pytest.approx(alone, rel=TOLERANCE)
    assert ended.events[-1]["members"] == ["node1"]

"""A run on an H100 of which some figures are changed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant.config import load_config
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.planning import PlanningProblem, planning_problem

FAST = {"bandwidth": 1e15, "latency": 0.0}
SLOW = {"bandwidth": 1e6, "latency": 0.0}


def problem_on(folder: Path, nodes: int, per_node: int, **changes: Any) -> PlanningProblem:
    """Eight images and a model of two blocks on an H100 with these changes; links that are not among them are fast."""
    write_images(folder, 8)
    shipped = yaml.safe_load((files("dilatant.cost") / "hardware.yaml").read_text(encoding="utf-8"))
    entry = shipped["H100"] | {"inside": FAST, "between": FAST} | changes
    (folder / "hardware.yaml").write_text(yaml.safe_dump({"drawn": entry}), encoding="utf-8")
    tree = tiny_config()
    tree["model"]["language_model"]["config"] |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
    cluster = {"hardware": "drawn", "hardware_file": "hardware.yaml", "nodes": nodes, "gpus_per_node": per_node}
    tree |= {"cluster": cluster, "debug": {"planned_steps": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_config(folder / "config.yaml")
    return planning_problem(config, assemble_samples(config))

"""The plan says which link limits its step, and which messages: those of the one link that was made slow."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant.config import load_config
from dilatant.plan.search.why_not import parse_asked_layout
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.limiting_links import link_reasons
from dilatant.planning.planning import plan_like, planning_problem

FAST = {"bandwidth": 1e15, "latency": 0.0}
SLOW = {"bandwidth": 1e6, "latency": 0.0}


def said_of(folder: Path, layout: str, nodes: int = 2, per_node: int = 1, **links: Any) -> str:
    """What is said of the fastest plan like `layout` on H100 with these links, the others being fast."""
    write_images(folder, 8)
    shipped = yaml.safe_load((files("dilatant.cost") / "hardware.yaml").read_text(encoding="utf-8"))
    entry = shipped["H100"] | {"inside": FAST, "between": FAST} | links
    (folder / "hardware.yaml").write_text(yaml.safe_dump({"drawn": entry}), encoding="utf-8")
    tree = tiny_config()
    tree["model"]["language_model"]["config"] |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
    cluster = {"hardware": "drawn", "hardware_file": "hardware.yaml", "nodes": nodes, "gpus_per_node": per_node}
    tree |= {"cluster": cluster, "debug": {"planned_steps": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_config(folder / "config.yaml")
    problem = planning_problem(config, assemble_samples(config))
    (sentence,) = link_reasons(plan_like(problem, parse_asked_layout(layout, ["vision", "language"])))
    return sentence


@pytest.mark.parametrize(
    ("layout", "shape", "slow", "name", "message"),
    [
        ("language: {replicas: 2, pp: 1}", (2, 1), "between", "the network between nodes", "gradients"),
        ("language: {replicas: 2, pp: 1}", (1, 2), "inside", "NVLink inside nodes", "gradients"),
        ("language: {replicas: 1, pp: 2}", (2, 1), "between", "the network between nodes", "rows between stages"),
        ("language: {replicas: 1, tp: 2}", (1, 2), "inside", "NVLink inside nodes", "collectives inside stages"),
    ],
)
def test_the_slow_link_and_its_messages_are_named(tmp_path, layout, shape, slow, name, message) -> None:
    said = said_of(tmp_path, layout, *shape, **{slow: SLOW})
    assert said.startswith(f"Links make the step longer: {name} by ")
    assert said.partition("(")[2].startswith(message)
    assert said.count(" by ") == 1  # the fast link is not named


def test_links_that_are_equally_slow_are_named_together(tmp_path) -> None:
    # One ring through four ranks on two nodes: what passes inside a node passes through its two ports together, too.
    links = {"inside": SLOW, "between": SLOW, "ports": 2}
    said = said_of(tmp_path, "{vision: {replicas: 4}, language: {replicas: 4, pp: 1}, zero: none}", 2, 2, **links)
    assert said.startswith("The links inside nodes and those between nodes make the step longer by ")


def test_fast_links_limit_nothing(tmp_path) -> None:
    assert said_of(tmp_path, "language: {replicas: 2, pp: 1}").startswith("No link limits the step")

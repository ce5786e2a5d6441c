"""Plans are looked for under every way to share optimizer state that a run permits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilatant.config.config import parse_config
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.planning.problem.searched_settings import zero_variants

TWO_NODES = {"hardware": "H100", "nodes": 2, "gpus_per_node": 4}
GROUPS = {"groups": [{"name": name, "hardware": name, "nodes": 1, "gpus_per_node": 4} for name in ("H100", "A40")]}
MANY = {**TWO_NODES, "nodes": 5}
MANY_GROUPS = {"groups": [{**group, "nodes": 3} for group in GROUPS["groups"]]}
ALL = ("node", "none", "all")


@pytest.mark.parametrize(
    ("cluster", "sections", "searched", "rescored"),
    [
        (TWO_NODES, {}, ALL, ()),
        ({**TWO_NODES, "nodes": 1}, {}, ("node", "none"), ()),
        ({"hardware": "H100", "gpus_per_node": 1}, {}, ("node",), ()),
        (TWO_NODES, {"train": {"zero": "all"}}, ("all",), ()),
        (MANY, {"train": {"zero": "none"}}, ("none",), ()),
        (TWO_NODES, {"train": {"shard": {"language": "weights"}}}, ("node", "all"), ()),
        (TWO_NODES, {"resilience": {"enabled": True}}, ("node", "none"), ()),
        (TWO_NODES, {"train": {"optimizer": {"offload": True}}}, ("node", "all"), ()),
        (MANY, {}, ("node", "all"), ("none",)),
        (GROUPS, {}, ALL, ()),
        (MANY_GROUPS, {}, ("node", "all"), ("none",)),
    ],
)
def test_ways_that_are_searched(
    tmp_path: Path, cluster: Any, sections: Any, searched: tuple[str, ...], rescored: tuple[str, ...]
) -> None:
    tree = {
        "model": {"encoders": {"vision": {"kind": "image", "id": "a"}}, "language_model": {"id": "b"}},
        "data": {"train": [{"path": "x.jsonl"}]},
        "cluster": cluster,
        **sections,
    }
    config = parse_config(tree, tmp_path)
    target = plan_target(config.cluster, config.train)
    assert zero_variants(config, target) == (searched, rescored)
    if "zero" not in sections.get("train", {}):
        found = zero_variants(config, target, fault_tolerance=1)
        assert "all" not in (*found[0], *found[1])

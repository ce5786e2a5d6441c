"""Plans are looked for under every way to share optimizer state that a run permits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilatant.config import ClusterConfig, TrainConfig, UserError
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


@pytest.mark.parametrize(
    ("hardware", "precision", "expected"),
    [
        ("H100", "auto", "bfloat16"), ("V100", "auto", "float32"), ("T4", "fp32", "float32"),
        ("CPU", "bf16", "bfloat16"),
        ("MI300X", "auto", "bfloat16"), ("H100", "fp8", "float8"), ("CPU", "auto", "float32"),
        ("V100", "bf16", "bf16, which V100 does not have; use fp32"), ("T4", "bf16", "bf16, which T4 does not have"),
        ("MI325X", "fp8", "fp8, which trains on NVIDIA GPUs, not on MI325X"), ("A100", "fp8", "does not multiply in"),
    ],
)  # fmt: skip
def test_plans_are_in_the_precision_that_training_would_choose(hardware: str, precision: str, expected: str) -> None:
    asked = ClusterConfig(hardware=hardware, gpus_per_node=2), TrainConfig(precision=precision)
    if " " not in expected:
        assert plan_target(*asked).dtype == expected
        return
    with pytest.raises(UserError, match=expected):
        plan_target(*asked)

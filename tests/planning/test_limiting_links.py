"""The plan says what limits its step: the one link, with its messages, or the part of a device that was made slow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cases.planning.drawn_hardware import SLOW, problem_on
from dilatant.plan.search.why_not import parse_asked_layout
from dilatant.planning.limiting_links import device_reasons, link_reasons
from dilatant.planning.planning import PlannedRun, plan_like


def planned_on(folder: Path, layout: str, nodes: int = 2, per_node: int = 1, **changes: Any) -> PlannedRun:
    """The fastest plan like `layout`."""
    return plan_like(problem_on(folder, nodes, per_node, **changes), parse_asked_layout(layout, ["vision", "language"]))


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
    (said,) = link_reasons(planned_on(tmp_path, layout, *shape, **{slow: SLOW}))
    assert said.startswith(f"Links make the step longer: {name} by ")
    assert said.partition("(")[2].startswith(message)
    assert said.count(" by ") == 1  # the fast link is not named


def test_links_that_are_equally_slow_are_named_together(tmp_path) -> None:
    # One ring through four ranks on two nodes: what passes inside a node passes through its two ports together, too.
    links = {"inside": SLOW, "between": SLOW, "ports": 2}
    layout = "{vision: {replicas: 4}, language: {replicas: 4, pp: 1}, zero: none}"
    (said,) = link_reasons(planned_on(tmp_path, layout, 2, 2, **links))
    assert said.startswith("The links inside nodes and those between nodes make the step longer by ")


def test_fast_links_limit_nothing(tmp_path) -> None:
    (said,) = link_reasons(planned_on(tmp_path, "language: {replicas: 2, pp: 1}"))
    assert said.startswith("No link limits the step")


@pytest.mark.parametrize(
    ("slow", "slowest"),
    [
        ({"bandwidth": 1e6}, "memory bandwidth"),
        ({"matmul_efficiency": 1e-6, "attention": {}}, "arithmetic"),
        ({}, "kernel launches"),  # nearly all that layers of a few weights take
    ],
)
def test_the_slow_part_of_a_device_is_named_first(tmp_path, slow, slowest) -> None:
    (said,) = device_reasons(planned_on(tmp_path, "language: {replicas: 2, pp: 1}", **slow))
    parts = re.findall(r"(memory bandwidth|arithmetic|kernel launches) ([0-9.]+) %", said)
    assert {name for name, _ in parts} == {"memory bandwidth", "arithmetic", "kernel launches"}
    assert parts[0][0] == slowest
    assert float(parts[0][1]) > 90

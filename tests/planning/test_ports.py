"""Ports of a node, from what pairs of ranks reach together and one of them alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilatant.config.degrees import Degrees
from dilatant.cost.hardware import Link, load_hardware
from dilatant.plan.cluster import cluster_of
from dilatant.planning.problem import link_probe
from dilatant.planning.problem.link_probe import MeasuredLink, MeasuredLinks
from dilatant.planning.problem.planned_hardware import with_links


def measured(bandwidth: float, pairs: int) -> MeasuredLink:
    return MeasuredLink(Link(bandwidth, 1e-5), 0.01, pairs)


@pytest.mark.parametrize(("together", "ports"), [(385e9, 8), (51e9, 1), (30e9, 1), (110e9, 2)])
def test_node_ports_are_total_over_single_pair_bandwidth(together: float, ports: int) -> None:
    found = MeasuredLinks(None, measured(together, 8), measured(49e9, 1))
    assert with_links(load_hardware("A40"), found).ports == ports


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_takes_half_of_what_there_and_back_do(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """On a clock that only transfers move."""
    now = [0.0]
    order: list[str] = []
    monkeypatch.setattr(link_probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def seconds(size: float) -> float:
        return 1e-3 + size / 1e6

    def transfer(which: str) -> Any:
        def begin(message: torch.Tensor, other: int) -> Any:
            assert other == 1 - rank
            order.append(which)
            return SimpleNamespace(wait=lambda: now.__setitem__(0, now[0] + seconds(message.nbytes)))

        return begin

    comm: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    group: Any = SimpleNamespace(send=transfer("send"), receive=transfer("receive"))
    for size in link_probe.SIZES:
        assert link_probe._seconds(comm, group, (0, 1), size) == pytest.approx(seconds(size))
    assert order[:2] == (["send", "receive"] if rank == 0 else ["receive", "send"])


def test_ports_that_were_not_measured_stay_as_they_were() -> None:
    hardware = replace(load_hardware("H100"), ports=4)
    assert with_links(hardware, MeasuredLinks(measured(4e11, 1), None)).ports == 4


def test_pairs_of_a_mesh_measure_one_of_its_wires() -> None:
    hardware = load_hardware("MI300X")
    assert with_links(hardware, MeasuredLinks(measured(5e10, 4), None)).inside == Link(35e10, 1e-5, 8)


def test_tensor_groups_of_a_mesh_have_the_wires_to_each_other() -> None:
    mesh, switch = load_hardware("MI300X"), load_hardware("H100")
    for tp, wires in ((2, 1), (4, 3), (8, 7)):
        assert mesh.group_links(Degrees(tp)).tensor.bandwidth == pytest.approx(mesh.inside.bandwidth * wires / 7)
        assert switch.group_links(Degrees(tp)).tensor == switch.inside
    cluster = cluster_of(mesh, 1, 8)
    assert cluster.link(0, 1).bandwidth == pytest.approx(mesh.inside.bandwidth / 7)

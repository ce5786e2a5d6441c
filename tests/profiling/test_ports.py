"""Ports of a node, from what pairs of ranks reach together and one of them alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilatant.cost.hardware import Link, load_hardware
from dilatant.profiling.link_probe import MeasuredLink, MeasuredLinks
from dilatant.profiling.planned_hardware import with_links


def measured(bandwidth: float, pairs: int) -> MeasuredLink:
    return MeasuredLink(Link(bandwidth, 1e-5), 0.01, pairs)


@pytest.mark.parametrize(("together", "ports"), [(385e9, 8), (51e9, 1), (30e9, 1), (110e9, 2)])
def test_ports_are_how_often_one_pair_alone_goes_into_all_of_them(together: float, ports: int) -> None:
    found = MeasuredLinks(None, measured(together, 8), measured(49e9, 1))
    assert with_links(load_hardware("A40"), found).ports == ports


def test_ports_that_were_not_measured_stay_as_they_were() -> None:
    hardware = replace(load_hardware("H100"), ports=4)
    assert with_links(hardware, MeasuredLinks(measured(4e11, 1), None)).ports == 4

"""A step waits for the slowest of its devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cases.planning.drawn_hardware import problem_on
from dilatant.config.degrees import ONE
from dilatant.cost.analytic import analytic_cost, block_shape
from dilatant.cost.hardware import load_hardware


@pytest.mark.parametrize("devices", [64, 1024])
def test_products_run_as_on_the_slowest_of_drawn_devices(devices):
    hardware = replace(load_hardware("H100"), spread=0.01)
    speeds = np.random.default_rng(0).normal(1.0, hardware.spread, (2000, devices))
    # The shares of peak in the hardware file are those of eight devices.
    expected = speeds.min(axis=1).mean() / speeds[:, :8].min(axis=1).mean()
    slowest = hardware.among(devices)
    for found in (
        slowest.flops("bfloat16") / hardware.flops("bfloat16"),
        slowest.attention_flops("flash", "bfloat16")[1] / hardware.attention_flops("flash", "bfloat16")[1],
    ):
        # The mean of the smallest of n normal numbers is sqrt(2 ln n) deviations below theirs only for n without end.
        assert 1.0 - found == pytest.approx(1.0 - expected, rel=0.16)
    assert slowest.bandwidth * slowest.memory_efficiency == hardware.bandwidth * hardware.memory_efficiency


def test_a_block_among_many_devices_takes_longer_than_alone():
    hardware, shape = load_hardware("A100"), block_shape(4096, 11_008, 32)
    alone, few, many = (analytic_cost(shape, hardware.among(devices)).forward(4096) for devices in (1, 8, 4096))
    assert alone == few == analytic_cost(shape, hardware).forward(4096)
    assert 1.01 < many / alone < 1.03  # two deviations of 0.012, of what is no traffic


def test_hardware_of_a_kind_shares_the_spread_of_its_speeds():
    assert load_hardware("A800").spread == load_hardware("A100").spread > 0.0
    assert load_hardware("CPU").among(64) == load_hardware("CPU")


def test_plans_for_many_devices_are_modelled_on_the_slowest(tmp_path):
    of_a_pair = []
    for nodes in (1, 64):
        (folder := tmp_path / str(nodes)).mkdir()
        layers = problem_on(folder, nodes, 8, spread=0.5).measured.layers
        of_a_pair.append(layers["llama block 16"][ONE].forward.a)
    # The slowest of 512 is 1.49 deviations below that of 8; only attention grows with the square of the tokens.
    assert of_a_pair[1] / of_a_pair[0] == pytest.approx(1 + 0.5 * 1.49, abs=0.005)


def test_products_in_eight_bits_reach_a_share_of_their_own_at_every_clock():
    # Of the largest products on an H200, in bf16 and FP8: 0.803 and 0.734 of its peaks (hardware.yaml).
    hardware = load_hardware("H200")
    for device in (hardware, hardware.clocked(0.5), hardware.among(1024)):
        share = (device.flops("float8") / 1978.9e12) / (device.flops("bfloat16") / 989.4e12)
        assert share == pytest.approx(0.734 / 0.803, rel=0.005)  # two digits are written down
    assert load_hardware("A100").flops("float16") == 0.8 * 312e12  # a device without such shares
    assert load_hardware("H20").efficiency == {}  # its power does not limit products in any dtype

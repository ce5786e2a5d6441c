"""Measuring layers: what is measured is what it is called."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dilatant.config.degrees import Degrees
from dilatant.config.errors import UserError
from dilatant.cost import clock as clock_module
from dilatant.cost import profile as profile_module
from dilatant.cost.clock import Clock
from dilatant.cost.layer import LayerCost, frozen_work
from dilatant.cost.model import CostModel
from dilatant.cost.profile import LayerProbe, fit_layer, measure, profile_layers
from dilatant.cost.quadratic import Quadratic

WIDTH = 64


class Counted(nn.Module):
    """A linear layer whose forward, input gradient and weight gradient move a clock of their own by given seconds."""

    def __init__(self, clock: list[float], forward: float, input_gradient: float, weight_gradient: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.clock, self.seconds = clock, (forward, input_gradient, weight_gradient)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Count.apply(hidden, self.weight, self.clock, self.seconds)


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, clock, seconds):
        clock[0] += seconds[0]
        ctx.save_for_backward(hidden)
        ctx.clock, ctx.seconds = clock, seconds
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        to_input = to_weight = None
        if ctx.needs_input_grad[0]:
            ctx.clock[0] += ctx.seconds[1]
            to_input = gradient
        if ctx.needs_input_grad[1]:
            ctx.clock[0] += ctx.seconds[2]
            to_weight = hidden.T @ gradient
        return to_input, to_weight, None, None


def rows(tokens: int) -> tuple[tuple[torch.Tensor], dict]:
    return (torch.randn(tokens, WIDTH),), {}


def test_forward_and_both_gradients_are_timed_separately(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    probe = LayerProbe("counted", lambda: Counted(clock, 1.0, 4.0, 16.0), rows)
    found = measure(probe.build(), probe, row=(8,), repeats=3)
    assert (found["forward"], found["input_gradient"], found["weight_gradient"]) == (1.0, 4.0, 16.0)
    assert found["first_trainable"] == 16.0
    assert found["recompute"] == 1.0


def test_kept_bytes_are_what_autograd_saves_without_parameters():
    probe = LayerProbe("mlp", lambda: nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)), rows)
    found = measure(probe.build(), probe, row=(100,), repeats=1)
    # The input, the first linear's output and the activation's; four bytes each.
    assert found["activation_bytes"] == 4 * 100 * (WIDTH + 256 + 256)
    assert found["checkpoint_bytes"] == found["output_bytes"] == 4 * 100 * WIDTH
    assert 0 < found["weight_bytes"] <= found["activation_bytes"]


class Masked(nn.Module):
    """A block that takes longer under a mask, in a layer that takes a while to make one."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock, self.block = clock, MaskedBlock(clock)

    def forward(self, hidden: torch.Tensor, samples: int) -> torch.Tensor:
        self.clock[0] += 100.0 * samples
        return self.block(hidden, mask=None if samples == 1 else torch.ones(len(hidden)))


class MaskedBlock(nn.Module):
    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.clock = clock

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        times = len(hidden) * (1.0 if mask is None else 3.0)
        return _Count.apply(hidden, self.weight, self.clock, (times, 2 * times, 50.0))


def test_a_dense_row_costs_the_extra_time_of_several_samples(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    layer = Masked(clock)
    probe = LayerProbe(
        "block",
        lambda: layer,
        lambda tokens: ((torch.randn(tokens, WIDTH),), {"samples": 1}),
        blocks=lambda layer: [layer.block],
        packed=lambda lengths: ((torch.randn(sum(lengths), WIDTH),), {"samples": len(lengths)}),
        dense=(8, 32),
    )
    costs = profile_layers([probe], "CPU", "float32", tokens=(4, 16), repeats=2)
    # Forward and backward, in a row of two samples 9 a token instead of 3; without masks and weight gradients.
    assert costs.layers["block"][Degrees()].dense_seconds == ((8, 6.0 * 8), (32, 6.0 * 32))
    assert layer.block.weight.requires_grad


class _Experts(nn.Module):
    """Two products with weights that lie together, as those of fused experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(1, WIDTH, 256))
        self.down = nn.Parameter(torch.randn(1, 256, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(hidden @ self.up[0]) @ self.down[0]


def test_expert_weight_halves_keep_as_much_as_linear_ones():
    linear = nn.Sequential(nn.Linear(WIDTH, 256, bias=False), nn.GELU(), nn.Linear(256, WIDTH, bias=False))
    kept = [
        measure(probe.build(), probe, row=(100,), repeats=1)["weight_bytes"]
        for part in (linear, _Experts())
        for probe in [LayerProbe("layer", lambda part=part: nn.Sequential(nn.LayerNorm(WIDTH), part), rows)]
    ]
    # Two inputs and two outputs.
    assert kept == [4 * 100 * 2 * (WIDTH + 256)] * 2


def test_a_layer_of_integers_has_no_input_gradient():
    probe = LayerProbe(
        "embedding", lambda: nn.Embedding(10, WIDTH), lambda n: ((torch.zeros(n, dtype=torch.long),), {})
    )
    found = measure(probe.build(), probe, row=(50,), repeats=3)
    assert found["input_gradient"] == 0
    assert found["weight_gradient"] > 0
    cost = fit_layer([found], parameters=640)
    assert cost.input_gradient(50) == 0
    assert cost.parameters == 640


def test_parameters_are_trainable_again_after_measuring():
    layer = nn.Linear(WIDTH, WIDTH)
    measure(layer, LayerProbe("linear", lambda: layer, rows), row=(4,), repeats=1)
    assert all(parameter.requires_grad for parameter in layer.parameters())
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_profile_is_a_cost_model_with_its_fit_error():
    heard: list[str] = []
    probes = [
        LayerProbe("linear", lambda: nn.Linear(WIDTH, WIDTH), rows),
        LayerProbe("linear", lambda: nn.Linear(WIDTH, WIDTH // 2), rows, degrees=Degrees(2)),
    ]
    costs = profile_layers(probes, "CPU", "float32", tokens=(32, 128), repeats=2, progress=heard.append)
    assert heard == [f"measuring layers: {number} of 2, linear at tp {number}, cp 1" for number in (1, 2)]
    assert costs.origin == "measured"
    assert costs.layer("linear").fit_error is not None
    assert costs.layer("linear", Degrees(2)).parameters == WIDTH // 2 * (WIDTH + 1)
    assert CostModel.from_yaml(costs.to_yaml()) == costs


TIMES = ("forward", "input_gradient", "weight_gradient", "first_trainable")


def test_the_fit_error_is_the_worst_of_the_timed_parts():
    def entry(tokens: int, forward: float, gradient: float) -> dict[str, float]:
        return {**dict.fromkeys(TIMES, 1.0 * tokens), "tokens": tokens, "forward": forward, "input_gradient": gradient}

    exact = [entry(n, 1.0 * n, 2.0 * n) for n in (10, 20, 40, 80)]
    assert fit_layer(exact, 0).fit_error == pytest.approx(0, abs=1e-4)
    bent = [entry(n, 1.0 * n, 2.0 * n * (3 if n == 20 else 1)) for n in (10, 20, 40, 80)]
    assert (fit_layer(bent, 0).fit_error or 0) > 0.2


def test_bad_probes_are_refused():
    probe = LayerProbe("linear", lambda: nn.Linear(WIDTH, WIDTH), rows)
    with pytest.raises(UserError, match="measured twice"):
        profile_layers([probe, probe], "CPU", "float32", tokens=(4,), repeats=1)

    class Text(nn.Module):
        def forward(self, hidden):
            return ["no tensor"]

    with pytest.raises(UserError, match="returns no floating-point tensor"):
        profile_layers([LayerProbe("text", Text, rows)], "CPU", "float32", tokens=(4,), repeats=1)


def test_cost_plan_and_schedule_import_without_torch_and_numba():
    code = (
        "import sys, dilatant.cost, dilatant.cost.profile, dilatant.plan, dilatant.schedule\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_images_without_mutual_attention_fit_no_square():
    bent = [{**dict.fromkeys(TIMES, x**1.3), "tokens": x} for x in (4, 8, 16, 32)]
    assert fit_layer(bent, 0).forward.a > 0
    assert fit_layer(bent, 0, square=False).forward.a == 0


def test_weight_gradients_have_no_square_however_the_times_bend():
    bent = [{**dict.fromkeys(TIMES, x**1.3), "tokens": x} for x in (4, 8, 16, 32)]
    assert fit_layer(bent, 0).input_gradient.a > 0
    assert fit_layer(bent, 0).weight_gradient.a == 0


def test_a_probe_may_have_token_counts_of_its_own():
    seen = []
    probe = LayerProbe(
        "linear", lambda: nn.Linear(WIDTH, WIDTH), lambda tokens: seen.append(tokens) or rows(tokens), tokens=(3, 6)
    )
    profile_layers([probe], "here", "float32", tokens=(64, 128), repeats=1)
    assert set(seen) == {3, 6}


def counted_probe(kind: str, clock: list[float], seconds: float, builds: list[str], times: float = 100.0) -> LayerProbe:
    """A probe of which every part takes `seconds`, and by its model so many times less."""

    def build() -> nn.Module:
        builds.append(kind)
        return Counted(clock, seconds, seconds, seconds)

    part = Quadratic(c=seconds / times)
    return LayerProbe(kind, build, rows, modelled=LayerCost(part, part, part, part))


def test_a_time_budget_holds_and_scales_unmeasured_layers(monkeypatch):
    clock, builds, heard = [0.0], [], []
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    probes = [
        counted_probe("whole", clock, 1.0, builds),
        counted_probe("partly", clock, 2.0, builds, times=1000.0),
        counted_probe("not at all", clock, 1.0, builds),
    ]
    costs = profile_layers(probes, "CPU", "float32", (10, 20), 7, heard.append, seconds=200.0)
    assert clock[0] <= 200.0
    assert heard[0] == "measuring layers for 200 s at most: 1 of 3, whole at tp 1, cp 1"
    assert costs.origin == "measured"
    assert costs.unmeasured == ["partly", "not at all"]
    assert costs.layer("whole").forward(20) == pytest.approx(1.0)
    assert costs.layer("partly").forward(20) == pytest.approx(2.0)
    # Two passes of three seconds and one of six, which the models said to take 0.066 s.
    assert costs.layer("not at all").forward(20) == pytest.approx(0.01 * 12 / 0.066, rel=1e-3)
    assert CostModel.from_yaml(costs.to_yaml()) == costs


def test_without_seconds_nothing_is_measured_or_built(monkeypatch):
    clock, builds, heard = [0.0], [], []
    probes = [counted_probe("a", clock, 1.0, builds)]
    costs = profile_layers(probes, "CPU", "float32", (10, 20), 7, heard.append, seconds=0.0)
    assert (builds, heard, costs.origin, costs.unmeasured) == ([], [], "analytic", [])
    assert costs.layer("a") == probes[0].modelled


def test_fewer_repeats_before_fewer_layer_types(monkeypatch):
    clock, builds = [0.0], []
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    probes = [counted_probe(name, clock, 1.0, builds) for name in "abc"]
    profile_layers(probes, "CPU", "float32", (10, 20), 7)
    everything, clock[0] = clock[0], 0.0
    costs = profile_layers(probes, "CPU", "float32", (10, 20), 7, seconds=everything / 2)
    assert clock[0] <= everything / 2
    assert costs.unmeasured == []


class Device:
    """A GPU and its host: the host takes `ISSUE` seconds for each of a pass's operations and then runs ahead; the
    device works on them in order, and waits where the host is late. Times are of one clock of its own."""

    def __init__(self) -> None:
        self.host = self.free = 0.0

    def run(self, operations: int, seconds: float) -> None:
        for _ in range(operations):
            self.host += ISSUE
            self.free = max(self.free, self.host) + seconds / operations

    def synchronize(self, _: object = None) -> None:
        self.host = self.free = max(self.host, self.free)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace()

        def record() -> None:
            event.at = self.free = max(self.free, self.host)

        event.record = record
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event


ISSUE = 13e-6
OPERATIONS = 100
PER_TOKEN, PER_SQUARE = 1e-7, 4e-12


class Launched(nn.Module):
    """A block of so many operations on `device`; short rows are computed faster than the host issues them."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.device = device

    def forward(self, hidden: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        return _Launch.apply(hidden, self.weight, self.device, lengths)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, device, lengths):
        linear, square = PER_TOKEN * sum(lengths), PER_SQUARE * sum(one**2 for one in lengths)
        device.run(OPERATIONS, linear + square)
        ctx.device, ctx.halves = device, (linear + 2 * square, linear)
        return hidden * 1.0

    @staticmethod
    def backward(ctx, gradient):
        for wanted, seconds in zip(ctx.needs_input_grad, ctx.halves):
            if wanted:
                ctx.device.run(OPERATIONS // 2, seconds)
        return gradient, gradient.new_zeros(4, 4), None, None


@pytest.mark.parametrize("samples", [(700,) * 23, (64, 100)], ids=["device bound", "host bound"])
def test_blocks_measured_alone_add_up_to_a_stage_on_a_gpu(monkeypatch, samples):
    """A stage runs without waiting between its blocks, so that the host is hidden, or hides the device."""
    device = Device()

    class OnDevice(Clock):
        def __init__(self, _: torch.device) -> None:
            super().__init__(torch.device("cuda"))

        def occupy(self, seconds: float) -> None:
            device.run(1, seconds)

    monkeypatch.setattr(profile_module, "Clock", OnDevice)
    monkeypatch.setattr(profile_module, "_most_bytes", lambda _, run: float(run() is not None))
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: device.host))
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    probe = LayerProbe(
        "block",
        lambda: Launched(device),
        lambda tokens: ((torch.randn(tokens, 4),), {"lengths": (tokens,)}),
        packed=lambda lengths: ((torch.randn(sum(lengths), 4),), {"lengths": lengths}),
        row=(2048,) * 4,
    )
    cost = profile_layers([probe], "GPU", "bfloat16", (256, 512, 1024, 2048), 3).layer("block")
    work = frozen_work(cost, trainable=True, before=True)
    blocks = 24
    squares, tokens = sum(one**2 for one in samples), sum(samples)
    predicted = [
        blocks * max(kind.a * squares + kind.b * tokens + kind.c, host)
        for kind, host in zip((work.forward, work.backward), (work.host[0], sum(work.host[1:])), strict=True)
    ]

    hidden, measured = torch.randn(tokens, 4, requires_grad=True), list[float]()
    device.synchronize()
    began = device.host
    for _ in range(blocks):
        hidden = Launched(device)(hidden, samples)
    device.synchronize()
    measured.append(device.host - began)
    hidden.sum().backward()
    device.synchronize()
    measured.append(device.host - began - measured[0])
    # The device begins with the first operation, 13 µs late; costs have six digits.
    assert predicted == pytest.approx(measured, rel=1e-3)
